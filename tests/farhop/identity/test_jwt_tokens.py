"""Tokens of identity providers: every forged, foreign or expired one is refused, and nothing is raised."""

from __future__ import annotations

import functools
import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import example, given
from hypothesis import strategies as st

from farhop.balance.outcome import KEY_NOT_VALID, MISSING_KEY, UNKNOWN_KEY
from farhop.identity import jwt_tokens
from farhop.identity.api_keys import TOO_LONG, Keyring, NotIdentified, Principal
from farhop.identity.jwt_tokens import Issuer, KeysError, TokenVerifier, read_keys

ISS, AUD, NOW_S = "https://idp.example/", "farhop", 1_800_000_000.0


@functools.cache
def private(kind: str) -> Any:
    made = {
        "RS256": lambda: rsa.generate_private_key(65537, 2048),
        "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
        "ES384": lambda: ec.generate_private_key(ec.SECP384R1()), "EdDSA": ed25519.Ed25519PrivateKey.generate,
    }  # fmt: skip
    return made[kind]()


def jwk(kind: str, kid: str | None = None, **more: Any) -> dict[str, Any]:
    public = json.loads(jwt.algorithms.get_default_algorithms()[kind].to_jwk(private(kind).public_key()))
    return {**public, "kid": kid or kind, "use": "sig", **more}


def document(*keys: Any) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()


def signed(kind: str = "ES256", headers: dict[str, Any] | None = None, **claims: Any) -> str:
    fields = {"iss": ISS, "aud": AUD, "sub": "ann", "iat": NOW_S, "exp": NOW_S + 300, "tenant": "acme", **claims}
    fields = {name: value for name, value in fields.items() if value is not None}
    return jwt.encode(fields, private(kind), kind, headers={"kid": kind, **(headers or {})})


def issuer(**more: Any) -> Issuer:
    fields = {"algorithms": frozenset(("RS256", "ES256", "EdDSA")), "tenants": frozenset(("acme", "globex")),
            "tenant_claim": "tenant", **more}  # fmt: skip
    return Issuer("corp", ISS, frozenset((AUD,)), **fields)


class JwtKeyring:
    """A keyring over a verifier, whose clock is set by hand."""

    def __init__(self, salt: bytes = b"", **more: Any) -> None:
        self.now_s, self.wanted = NOW_S, list[str]()
        self.tokens = TokenVerifier({"corp": issuer(**more)}, salt, lambda: self.now_s)
        self.tokens.wanted = self.wanted.append
        self.tokens.publish("corp", read_keys(document(*map(jwk, ("RS256", "ES256", "ES384", "EdDSA")))))
        self.ring = Keyring(lambda _: None, tokens=self.tokens)

    def __call__(self, token: str) -> Any:
        return self.ring.identify(b"Bearer " + token.encode())

    def why(self, token: str) -> tuple[Any, str]:
        found = self(token)
        assert isinstance(found, NotIdentified)
        assert token[:20] not in found.detail
        return found.outcome, found.detail


def b64(data: Any) -> str:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return urlsafe_b64encode(text).rstrip(b"=").decode()


@pytest.mark.parametrize("kind", ["RS256", "ES256", "EdDSA"])
def test_a_genuine_token_is_its_tenants(kind: str) -> None:
    assert JwtKeyring()(signed(kind)) == Principal("acme", "", key_id="jwt:corp")


def test_claims_are_read_by_their_configured_names() -> None:
    keyring = JwtKeyring(b"salt" * 4, user_claim="email", priority_claim="prio", places_claim="where")
    fields = {"email": "ann@example", "prio": 3, "where": ["eu", "jp"]}
    found = keyring(signed(**fields))
    assert (found.within, found.priority_max, len(found.user)) == (("eu", "jp"), 3, 32)
    assert "ann" not in found.user
    assert keyring(signed(**{**fields, "where": "eu jp"})) == found
    assert keyring(signed(**{**fields, "email": "bob@example"})).user != found.user
    for name, value in (
        ("email", ""), ("email", None), ("email", 7), ("prio", True), ("prio", 10), ("prio", -1), ("prio", "3"),
        ("prio", None), ("where", None), ("where", []), ("where", ["eu", 3]), ("where", ["e u"]), ("where", {}),
        ("where", ["eu"] * 33),
    ):  # fmt: skip
        reason, detail = keyring.why(signed(**{**fields, name: value}))
        assert reason is KEY_NOT_VALID, (name, value)
        assert f"claim `{name}` is not there, or not " in detail


def test_a_token_is_refused_for_a_tenant_its_issuer_may_not_name() -> None:
    keyring = JwtKeyring()
    assert keyring(signed(tenant="globex")).tenant == "globex"
    for tenant in ("other", "", "*", None, 7, ["acme"], "x" * 300):
        assert keyring.why(signed(tenant=tenant))[0] is UNKNOWN_KEY
    assert JwtKeyring(tenants=frozenset("*"))(signed(tenant="other")).tenant == "other"
    assert JwtKeyring(tenants=frozenset("*")).why(signed(tenant="*"))[0] is UNKNOWN_KEY
    assert JwtKeyring(tenants=frozenset(("one",)), tenant_claim="")(signed(tenant="other")).tenant == "one"


def test_without_a_salt_no_user_is_kept() -> None:
    assert JwtKeyring()(signed()).user == ""


def public_pem() -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return private("RS256").public_key().public_bytes(encoding, form)


def by_hmac(key: bytes, alg: str = "HS256") -> str:
    head = b64({"alg": alg, "kid": "RS256"})
    body = b64({"iss": ISS, "aud": AUD, "sub": "ann", "iat": NOW_S, "exp": NOW_S + 300, "tenant": "acme"})
    return f"{head}.{body}." + b64(hmac.digest(key, f"{head}.{body}".encode(), "sha256"))


def with_header(**header: Any) -> str:
    _, body, signature = signed("RS256").split(".")
    return f"{b64({'kid': 'RS256', **header})}.{body}.{signature}"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: with_header(alg="none"), "alg"),
        (lambda: with_header(alg="none").rpartition(".")[0] + ".", "alg"),
        (lambda: with_header(alg="NoNe"), "alg"),
        (lambda: by_hmac(public_pem()), "alg"),
        (lambda: by_hmac(public_pem(), "RS256"), "signature"),
        (lambda: with_header(alg="ES256"), "alg"),  # signed by a key that belongs to another issuer
        (lambda: with_header(alg="RS512"), "alg"),
        (lambda: signed("ES384"), "alg"),  # published, but not configured
        (lambda: signed("ES256", {"kid": "RS256"}), "alg"),
        (lambda: signed("ES256", {"kid": "new"}), "kid"),
        (lambda: signed("ES256", {"kid": ""}), "kid"),
        (lambda: signed("ES256", {"crit": ["exp"], "exp": 1}), "crit"),
        (lambda: with_header(alg="RS256", crit=[]), "crit"),
        (lambda: with_header(alg="RS256", b64=False), "crit"),
        (lambda: with_header(alg="RS256", jwk=jwk("RS256"), jku="https://evil.example"), "signature"),
        (lambda: signed("ES256", {"typ": "logout+jwt"}), "typ"),  # for a sign-out, with issuer and audience like others
        (lambda: signed("ES256", {"typ": "application/SecEvent+JWT"}), "typ"),
        (lambda: with_header(alg="RS256", typ=["JWT"]), "JSON Web Token"),
        (lambda: with_header(alg=7), "JSON Web Token"),
        (lambda: with_header(alg="RS256", kid=["RS256"]), "JSON Web Token"),
        (lambda: signed(iss="https://evil.example/"), "iss"),
        (lambda: signed(iss=None), "iss"),
        (lambda: f"{b64(b'[' * 3000)}.{b64({})}.x", "JSON Web Token"),
        (lambda: f"{b64({'alg': 'ES256'})}.{b64(b'{' + b'[' * 3000)}.xx", "JSON Web Token"),
        (lambda: f"{b64({'alg': 'ES256'})}.{b64([])}.xx", "JSON Web Token"),
        (lambda: "a.b.c", "JSON Web Token"),
    ],
)  # fmt: skip
def test_each_algorithm_and_key_confusion_is_refused(make: Any, says: str) -> None:
    reason, detail = JwtKeyring().why(make())
    assert reason is UNKNOWN_KEY
    assert says in detail


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({"aud": "other"}, "aud"), ({"aud": None}, "aud"), ({"aud": ["a", 7]}, "aud"), ({"aud": {"farhop": 1}}, "aud"),
        ({"exp": None}, "exp"), ({"iat": None}, "exp"), ({"sub": None}, "sub"), ({"sub": ""}, "sub"),
        ({"exp": True}, "exp"), ({"exp": -1}, "exp"), ({"exp": 10**400}, "exp"), ({"nbf": "soon"}, "exp"),
        ({"exp": NOW_S - 10}, "expired"), ({"nbf": NOW_S + 11}, "not valid yet"),
        ({"iat": NOW_S + 11}, "clock is behind"),
        ({"exp": NOW_S + 86_401}, "longer"),
        ({"cnf": {"x5t#S256": "x"}}, "cnf"), ({"cnf": False}, "cnf"),
    ],
)  # fmt: skip
def test_each_invalid_claim_is_named(claims: dict[str, Any], says: str) -> None:
    reason, detail = JwtKeyring().why(signed(**claims))
    assert reason is KEY_NOT_VALID
    assert says in detail


def test_leeway_is_granted_and_no_more() -> None:
    assert JwtKeyring()(signed(exp=NOW_S - 9.5)).tenant == "acme"
    assert JwtKeyring()(signed(nbf=NOW_S + 10, iat=NOW_S + 10)).tenant == "acme"
    assert JwtKeyring()(signed(aud=["other", AUD])).tenant == "acme"


@pytest.mark.parametrize("typ", ["JWT", "jwt", "at+jwt", "application/AT+JWT", "JOSE", ""])
def test_an_access_token_may_say_what_it_is(typ: str) -> None:
    assert JwtKeyring()(signed(headers={"typ": typ})).tenant == "acme"


P256 = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # the order of its group


def resigned(change: Callable[[int, int], tuple[int, int]]) -> str:
    """An ES256 token whose signature is another pair of numbers."""
    found, _, signature = signed().rpartition(".")
    pair = urlsafe_b64decode(signature + "==")
    r, s = change(int.from_bytes(pair[:32], "big"), int.from_bytes(pair[32:], "big"))
    return f"{found}.{b64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


@pytest.mark.parametrize(
    "change",
    [lambda r, s: (0, 0), lambda r, s: (P256, P256), lambda r, s: (1, 1), lambda r, s: (r, 0), lambda r, s: (s, r)],
)  # fmt: skip
def test_degenerate_signatures_are_refused(change: Any) -> None:
    assert JwtKeyring().why(resigned(change))[0] is UNKNOWN_KEY


def test_the_other_form_of_an_ecdsa_signature_says_the_same_and_nothing_else() -> None:
    """(r, -s) holds wherever (r, s) does; whoever refused it would refuse half of what providers sign."""
    keyring = JwtKeyring()
    other = keyring(resigned(lambda r, s: (r, P256 - s)))
    assert other == keyring(signed())


def test_a_token_that_is_too_long_is_refused_unread() -> None:
    assert JwtKeyring().why(signed(pad="x" * 8192))[0] is MISSING_KEY


def test_plain_api_keys_are_still_handled_beside_jwt_tokens() -> None:
    keyring = JwtKeyring()
    assert keyring("sk-nobody") is UNKNOWN_KEY
    assert keyring("x" * 600) is TOO_LONG
    assert keyring.ring.identify(b"Basic " + signed().encode()) is MISSING_KEY


def test_a_token_is_verified_once_and_ends_by_its_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    keyring, token, verified = JwtKeyring(), signed(exp=NOW_S + 20), list[str]()
    holds = jwt_tokens.signature_holds
    monkeypatch.setattr(jwt_tokens, "signature_holds", lambda *given: verified.append("") or holds(*given))
    for later_s in (0, 1, 29):
        keyring.now_s = NOW_S + later_s
        assert keyring(token).tenant == "acme"
    assert len(verified) == 1
    keyring.now_s = NOW_S + 30  # its leeway included
    assert keyring.why(token)[0] is KEY_NOT_VALID
    keyring.now_s = NOW_S  # the clock is set back: the session stays ended
    assert keyring.why(token)[0] is KEY_NOT_VALID


def test_a_long_token_is_verified_again_each_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    keyring, verified = JwtKeyring(), list[str]()
    holds = jwt_tokens.signature_holds
    monkeypatch.setattr(jwt_tokens, "signature_holds", lambda *given: verified.append("") or holds(*given))
    token = signed()
    for later_s in (0, 59, 60, 61):
        keyring.now_s = NOW_S + later_s
        assert keyring(token).tenant == "acme"
    assert len(verified) == 2


def test_a_removed_signing_key_ends_the_cached_tokens_it_signed() -> None:
    keyring, token = JwtKeyring(), signed()
    assert keyring(token).tenant == "acme"
    assert not keyring.tokens.publish("corp", read_keys(document(*map(jwk, ("RS256", "ES256", "ES384", "EdDSA")))))
    assert keyring(token).tenant == "acme"
    assert keyring.tokens.publish("corp", read_keys(document(jwk("RS256"))))
    assert keyring.why(token)[0] is UNKNOWN_KEY
    assert keyring.wanted == ["corp"]
    keyring.tokens.publish("corp", None)
    assert keyring.why(signed("RS256"))[0] is KEY_NOT_VALID


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_tokens, "MEMO_MAX", 3)
    keyring = JwtKeyring()
    for number in range(5):
        assert keyring(signed(jti=str(number))).tenant == "acme"
    assert len(keyring.tokens.memo) == 3
    for number in range(5):
        keyring.why(signed(jti=str(number), aud="other"))
    assert len(keyring.tokens.memo) == 3


TOKENS = {kind: signed(kind) for kind in ("RS256", "ES256", "EdDSA")}


@given(st.sampled_from(sorted(TOKENS)), st.integers(0, 10_000), st.integers(0, 255))
@example("RS256", len(TOKENS["RS256"]) - 1, ord("A"))
def test_a_token_with_any_byte_changed_identifies_nobody(kind: str, at: int, byte: int) -> None:
    """Nor the spare bits of base64's last character: two texts of one token would be remembered twice."""
    token = bytearray(TOKENS[kind].encode())
    at %= len(token)
    if token[at] == byte:
        return
    token[at] = byte
    keyring = JwtKeyring()
    assert not isinstance(keyring.ring.identify(b"Bearer " + token), Principal)


@pytest.mark.parametrize("kind", sorted(TOKENS))
def test_only_one_spelling_of_the_last_base64_character_is_accepted(kind: str) -> None:
    token, keyring = TOKENS[kind], JwtKeyring()
    for last in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=+/":
        assert isinstance(keyring(token[:-1] + last), Principal) == (last == token[-1])
    assert not isinstance(keyring(token + "="), Principal)
    assert not isinstance(keyring(token + "A"), Principal)


@given(st.binary(max_size=300))
def test_any_text_as_a_token_is_answered_without_an_exception(some: bytes) -> None:
    keyring = JwtKeyring()
    for header in (some, b"Bearer " + some, b"Bearer " + b".".join([urlsafe_b64encode(some).rstrip(b"=")] * 3)):
        assert not isinstance(keyring.ring.identify(header), Principal)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda some: (
    st.lists(some) | st.dictionaries(st.sampled_from(["keys", "kty", "kid", "n", "e", "crv", "x", "y", "alg"]), some)
)))  # fmt: skip
def test_any_key_document_is_read_or_refused(some: Any) -> None:
    rsa_jwk = {"kty": "RSA", "kid": "a", "n": some, "e": "AQAB"}
    for published in (some, {"keys": some}, {"keys": [some]}, {"keys": [rsa_jwk]}):
        with pytest.raises(KeysError):
            read_keys(json.dumps(published).encode())


def test_keys_that_are_not_for_this_are_passed_over() -> None:
    weak = rsa.generate_private_key(65537, 1024).public_key()
    weak_jwk = {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(weak)), "kid": "weak"}
    oct_ = {"kty": "oct", "kid": "oct", "k": "c2VjcmV0", "alg": "HS256"}
    others = [weak_jwk, oct_, jwk("ES256", "enc", use="enc"), jwk("RS256", "ops", key_ops=["encrypt"]),
              jwk("ES256", "twice"), jwk("RS256", "twice"), jwk("RS256", "alg", alg="HS256"),
              {**jwk("ES256"), "kid": None}]  # fmt: skip
    with pytest.raises(KeysError, match="holds no key"):
        read_keys(document(*others))
    good = read_keys(document(*others, jwk("RS256", alg="RS256")))
    assert {kid: sorted(algorithms) for kid, (_, algorithms) in good.items()} == {"RS256": ["RS256"]}
    with pytest.raises(KeysError, match="at most 64"):
        read_keys(document(*[jwk("ES256", str(number)) for number in range(65)]))
    secret = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(private("ES256")))
    with pytest.raises(KeysError, match="private key"):
        read_keys(document(jwk("RS256"), {**secret, "kid": "x"}))


@pytest.mark.parametrize("bits", [34, 2047])
def test_a_key_that_makes_forgeries_expensive_is_skipped(bits: int) -> None:
    """By an exponent as long as its modulus a signature takes 1.6 ms to refuse instead of 25 us."""
    dear = {**jwk("RS256", "dear"), "e": b64(((1 << (bits - 1)) + 1).to_bytes((bits + 7) // 8, "big"))}
    assert read_keys(document(dear, jwk("ES256"))).keys() == {"ES256"}
    with pytest.raises(KeysError, match="no key"):
        read_keys(document(dear))


def test_a_key_with_an_overlong_key_id_is_ignored() -> None:
    assert read_keys(document(jwk("RS256", "k" * 257), jwk("ES256"))).keys() == {"ES256"}


def test_a_token_need_not_name_the_only_key_of_its_issuer() -> None:
    keyring = JwtKeyring()
    unnamed = signed("ES256", {"kid": ""})
    for published in (jwk("ES256"), {name: value for name, value in jwk("ES256").items() if name != "kid"}):
        keyring.tokens.publish("corp", read_keys(document(published)))
        assert keyring(unnamed).tenant == "acme"
        assert keyring.why(with_header(alg="RS256", kid=""))[0] is UNKNOWN_KEY
        assert "signature" in keyring.why(unnamed[:-4] + "AAAA")[1]
        assert keyring.wanted, "another key may be in use by now"
        keyring.wanted.clear()
    assert "kid" in keyring.why(signed("ES256", {"kid": "other"}))[1]
    two = read_keys(document(jwk("ES256"), {name: value for name, value in jwk("RS256").items() if name != "kid"}))
    assert list(two) == ["ES256"], "which key would it be?"
    keyring.tokens.publish("corp", read_keys(document(jwk("ES256"), jwk("RS256"))))
    assert "kid" in keyring.why(unnamed)[1]


def test_two_spellings_of_the_authorization_header_are_cached_separately() -> None:
    keyring, token = JwtKeyring(), signed()
    for scheme in (b"Bearer ", b"bearer  "):
        header = scheme + token.encode()
        assert keyring.tokens.known(sha256(header).digest()) is None
        assert isinstance(keyring.ring.identify(header), Principal)
        assert keyring.tokens.known(sha256(header).digest()) is not None
