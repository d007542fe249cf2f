"""Authentication by a JSON Web Token of an identity provider (RFC 7519, 8725; OpenID Connect).

An issuer's configuration says which algorithms are allowed, for which audience its tokens must be, and for which
tenants it may speak; none of that is ever taken from a token. A valid token is verified once and remembered by its
header's whole SHA-256, for a minute at most, never beyond its expiry, and not beyond a change of its issuer's keys.
Invariants: before the signature is verified nothing of a token is used except which issuer and key to check with; a
signed content has one text (an ECDSA signature may have two); a token of another kind (`typ`), or bound to a key that
its bearer would have to prove (`cnf`), authenticates nobody; any input is answered, never raised on, and no answer
quotes it. Never fetches: keys are handed in (farhop.service.authentication.issuer_keys).
"""

from __future__ import annotations

import hmac
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm, get_default_algorithms
from jwt.exceptions import PyJWTError

from farhop.balance.outcome import KEY_NOT_VALID, MISSING_KEY, UNKNOWN_KEY
from farhop.identity.api_keys import PRIORITY_MAX, NotIdentified, Principal

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey
Keys = Mapping[str, tuple[PublicKey, frozenset[str]]]
"""An issuer's keys by their id, each with its algorithms; under "" its only one, if that has no id."""

TOKEN_BYTES_MAX = 8192
MEMO_MAX = 16_384
MEMO_S = 60.0
KEYS_MAX = 64
LEEWAY_S_MAX = 30.0
PLACES_MAX = 32
ANY_TENANT = "*"
_USER_BYTES = 16
_RSA_BITS = range(2048, 8193)  # a larger key costs a verifier more than any issuer needs
_RSA_EXPONENT_BITS_MAX = 33  # 65537 is usual; one as long as the modulus would make a forgery cost us 50 times as much
_KID_CHARS_MAX = 256
_TIME_MAX = 1e11  # epoch seconds, some 3,000 years: later times are refused
_CLAIM_CHARS_MAX = 256

_JWT = re.compile(rb"(?i:bearer) {1,4}(([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]*))")
_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FROM_URL, _TO_URL = bytes.maketrans(b"-_", b"+/"), bytes.maketrans(b"+/", b"-_")
_RSA = frozenset(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"))
_BY_CURVE = {
    "secp256r1": frozenset(("ES256",)),
    "secp384r1": frozenset(("ES384",)),
    "secp521r1": frozenset(("ES512",)),
}
_ALGORITHMS = get_default_algorithms()

_TOO_LONG = NotIdentified(MISSING_KEY, f"this token is too long: at most {TOKEN_BYTES_MAX} bytes are read")
_MALFORMED = NotIdentified(
    UNKNOWN_KEY, "this token is no JSON Web Token that can be read: ask your identity provider for one"
)
_CRITICAL = NotIdentified(UNKNOWN_KEY, "this token demands extensions (`crit`) that are not understood here")
_KIND = NotIdentified(UNKNOWN_KEY, "this is a token of another kind (`typ`), and no access token")
_BOUND = NotIdentified(KEY_NOT_VALID, "this token is bound to a key of its client's (`cnf`): ask for one without")
_ISSUER = NotIdentified(UNKNOWN_KEY, "this token's issuer (`iss`) is not known here")
_ALGORITHM = NotIdentified(UNKNOWN_KEY, "this token's algorithm (`alg`) is not one that its issuer signs with")
_NO_KEYS = NotIdentified(KEY_NOT_VALID, "the keys of this token's issuer could not be fetched: ask again later")
_KEY = NotIdentified(
    UNKNOWN_KEY, "this token's key (`kid`) is not one that its issuer publishes: if it is new, ask again"
)
_FORGED = NotIdentified(UNKNOWN_KEY, "this token is not genuine: its signature does not hold")
_AUDIENCE = NotIdentified(KEY_NOT_VALID, "this token is not for this service (`aud`): ask for one that is")
_INCOMPLETE = NotIdentified(KEY_NOT_VALID, "this token lacks one of `exp`, `iat` and `sub`, or it is of the wrong type")
_EXPIRED = NotIdentified(KEY_NOT_VALID, "this token has expired: ask for another")
_EARLY = NotIdentified(KEY_NOT_VALID, "this token is not valid yet (`nbf`, `iat`), or this balancer's clock is behind")
_LIVES_LONG = NotIdentified(KEY_NOT_VALID, "this token lives longer than is allowed here: ask for a shorter one")
_TENANT = NotIdentified(UNKNOWN_KEY, "this token does not name a tenant that its issuer may speak for")
_CLAIM_FORMS = {
    "user": "a text", "places": f"a list, or text with spaces, of 1 to {PLACES_MAX} places",
    "priority": f"a whole number, 0 to {PRIORITY_MAX}",
}  # fmt: skip


class Issuer(msgspec.Struct, frozen=True):
    """An identity provider, by its `name` here and by `issuer` in its tokens.

    It may speak for `tenants`, `*` for all of the law. `*_claim` name the claims with further information; "": not
    used; without `tenant_claim` there is one tenant. Claims that are named must be in each token. Seconds.
    """

    name: str
    issuer: str
    audiences: frozenset[str]
    algorithms: frozenset[str]
    tenants: frozenset[str]
    tenant_claim: str = ""
    user_claim: str = "sub"
    priority_claim: str = ""
    places_claim: str = ""
    leeway_s: float = 10.0
    life_s_max: float = 86_400.0


class KeysError(ValueError):
    """A document without usable keys; the text is one line."""


class _Header(msgspec.Struct):
    alg: str
    kid: str = ""
    typ: str = ""
    crit: Any = msgspec.UNSET
    b64: Any = msgspec.UNSET


_header = msgspec.json.Decoder(_Header).decode
_claims = msgspec.json.Decoder(dict[str, Any]).decode


def read_keys(document: bytes) -> dict[str, tuple[PublicKey, frozenset[str]]]:
    """The keys of a JWK Set (RFC 7517 §5) that can verify signatures. Raises KeysError.

    Ignored are keys for encryption, without a `kid` unless there is only one key, with a `kid` that is too long,
    symmetric, weak, too expensive to verify with, or of an unknown kind; of two with one `kid` both are ignored. If a
    key comes with its private half, it is compromised, and the whole set is refused.
    """
    try:
        given = msgspec.json.decode(document)
    except (ValueError, RecursionError):
        raise KeysError("is not JSON") from None
    listed = given.get("keys") if isinstance(given, dict) else None
    if not isinstance(listed, list) or len(listed) > KEYS_MAX:
        raise KeysError(f"is no JWK Set of at most {KEYS_MAX} keys")
    known: dict[str, tuple[PublicKey, frozenset[str]]] = {}
    twice: set[str] = set()
    for jwk in listed:
        if not isinstance(jwk, dict):
            continue
        if jwk.get("kty") != "oct" and "d" in jwk:
            raise KeysError("publishes a private key: whoever reads it can sign; replace it at the issuer")
        kid = jwk.get("kid")
        alone = kid is None and len(listed) == 1
        if (
            not (alone or (isinstance(kid, str) and 0 < len(kid) <= _KID_CHARS_MAX))
            or (read := _verifying(jwk)) is None
        ):
            continue
        kid = kid or ""
        if kid in known:
            twice.add(kid)
        known[kid] = read
    for kid in twice:
        del known[kid]
    if not known:
        raise KeysError("holds no key that verifies signatures here (RSA from 2048 bits, P-256, P-384, P-521, Ed25519)")
    return known


def _verifying(jwk: dict[str, Any]) -> tuple[PublicKey, frozenset[str]] | None:
    operations = jwk.get("key_ops", ["verify"])
    if jwk.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
        return None
    good: frozenset[str]
    key: Any
    try:
        match jwk.get("kty"):
            case "RSA":
                key = RSAAlgorithm.from_jwk(jwk)
                short = isinstance(key, RSAPublicKey) and key.public_numbers().e.bit_length() <= _RSA_EXPONENT_BITS_MAX
                good = _RSA if short and key.key_size in _RSA_BITS else frozenset()
            case "EC":
                key = ECAlgorithm.from_jwk(jwk)
                good = _BY_CURVE.get(key.curve.name, frozenset())
            case "OKP":
                key = OKPAlgorithm.from_jwk(jwk)
                good = frozenset(("EdDSA",)) if isinstance(key, Ed25519PublicKey) else frozenset()
            case _:
                return None
    except (PyJWTError, UnsupportedAlgorithm, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    if "alg" in jwk:
        good = frozenset(one for one in good if one == jwk["alg"])
    return (key, good) if good and isinstance(key, PublicKey) else None


class TokenVerifier:
    """The tokens of some issuers. `salt` hides users' names, without it none is kept; `wall_s` is in epoch seconds.

    `wanted` is called with the name of an issuer whose token names an unknown key.
    """

    def __init__(self, issuers: Mapping[str, Issuer], salt: bytes, wall_s: Callable[[], float]) -> None:
        self._by_iss = {one.issuer: one for one in issuers.values()}
        self._salt, self._wall_s, self._latest_s = salt, wall_s, 0.0
        self._keys: dict[str, Keys] = {}
        # By the header's SHA-256: the principal, the end of validity, the issuer.
        self.memo: dict[bytes, tuple[Principal, float, str]] = {}
        self.wanted: Callable[[str], None] = lambda _name: None

    def publish(self, name: str, keys: Keys | None) -> bool:
        """Set an issuer's keys; None: they are too old. Returns whether they changed."""
        before = self._keys.get(name)
        if keys is None:
            self._keys.pop(name, None)
        else:
            self._keys[name] = keys
        if before == keys:
            return False
        self.memo = {credential: known for credential, known in self.memo.items() if known[2] != name}
        return True

    def known(self, credential: bytes) -> Principal | None:
        """The principal of a token that was verified before, by its header's SHA-256."""
        known = self.memo.get(credential)
        if known is None:
            return None
        if self._now_s() < known[1]:
            return known[0]
        del self.memo[credential]
        return None

    def identify(self, authorization: bytes, credential: bytes) -> Principal | NotIdentified | None:
        """The principal of the token in an `Authorization` header, or why it authenticates nobody; None: the header
        holds no token.
        """
        if len(authorization) > TOKEN_BYTES_MAX:
            return _TOO_LONG if b"." in authorization else None
        parts = _JWT.fullmatch(authorization)
        if parts is None:
            return None
        found = self._verified(parts)
        if isinstance(found, NotIdentified):
            return found
        if len(self.memo) >= MEMO_MAX:
            del self.memo[next(iter(self.memo))]
        self.memo[credential] = found
        return found[0]

    def _now_s(self) -> float:
        """A clock that was set back is not followed: what has expired stays expired."""
        self._latest_s = now_s = max(self._latest_s, self._wall_s())
        return now_s

    def _verified(self, parts: re.Match[bytes]) -> tuple[Principal, float, str] | NotIdentified:
        decoded = [_decoded(part) for part in parts.groups()[1:]]
        head, body, signature = decoded
        if head is None or body is None or signature is None:
            return _MALFORMED
        try:
            header, claims = _header(head), _claims(body)
        except (ValueError, RecursionError):
            return _MALFORMED
        if header.crit is not msgspec.UNSET or header.b64 is not msgspec.UNSET:
            return _CRITICAL
        kind = header.typ.lower().removeprefix("application/")
        if kind.endswith("+jwt") and kind != "at+jwt":  # RFC 8725, 3.11: a logout token has issuer and audience, too
            return _KIND
        iss = claims.get("iss")
        issuer = self._by_iss.get(iss) if isinstance(iss, str) else None
        if issuer is None:
            return _ISSUER
        if header.alg not in issuer.algorithms:
            return _ALGORITHM
        keys = self._keys.get(issuer.name)
        if keys is None:
            return _NO_KEYS
        # A token need not name the key if its issuer has only one (OpenID Connect Core, 10.1).
        kid = header.kid or next(iter(keys)) if len(keys) == 1 else header.kid
        key, good = keys.get(kid, (None, frozenset()))
        if key is None:
            self.wanted(issuer.name)
            return _KEY
        if header.alg not in good:
            return _ALGORITHM
        if not signature_holds(header.alg, key, parts[1].rpartition(b".")[0], signature):
            if not header.kid:  # its issuer may sign with another one by now
                self.wanted(issuer.name)
            return _FORGED
        return self._read(issuer, claims)

    def _read(self, issuer: Issuer, claims: dict[str, Any]) -> tuple[Principal, float, str] | NotIdentified:
        """The principal in the claims of a verified token, its expiry and its key; or why it authenticates nobody."""
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        if not any(isinstance(one, str) and one in issuer.audiences for one in audiences):
            return _AUDIENCE
        required: list[Any] = [claims.get("exp"), claims.get("nbf", 0), claims.get("iat"), claims.get("sub")]
        ends, begins, made, sub = required
        if not (_is_time(ends) and _is_time(begins) and _is_time(made) and isinstance(sub, str) and sub):
            return _INCOMPLETE
        now_s = self._now_s()
        if now_s >= ends + issuer.leeway_s:
            return _EXPIRED
        if now_s < max(begins, made) - issuer.leeway_s:
            return _EARLY
        if ends - made > issuer.life_s_max:
            return _LIVES_LONG
        if "cnf" in claims:  # RFC 7800: without the proof, anyone who found it could use it
            return _BOUND
        principal = self._principal(issuer, claims)
        if isinstance(principal, NotIdentified):
            return principal
        return principal, min(ends + issuer.leeway_s, now_s + MEMO_S), issuer.name

    def _principal(self, issuer: Issuer, claims: dict[str, Any]) -> Principal | NotIdentified:
        if issuer.tenant_claim:
            tenant = claims.get(issuer.tenant_claim)
            if not isinstance(tenant, str) or len(tenant) > _CLAIM_CHARS_MAX or tenant == ANY_TENANT:
                return _TENANT
            if tenant not in issuer.tenants and ANY_TENANT not in issuer.tenants:
                return _TENANT
        else:
            (tenant,) = issuer.tenants
        user = claims.get(issuer.user_claim, "") if issuer.user_claim else ""
        if not isinstance(user, str) or (issuer.user_claim and not user):
            return _claim_missing("user", issuer.user_claim)
        places = _places(claims.get(issuer.places_claim)) if issuer.places_claim else ()
        if places is None:
            return _claim_missing("places", issuer.places_claim)
        priority = claims.get(issuer.priority_claim) if issuer.priority_claim else PRIORITY_MAX
        if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
            return _claim_missing("priority", issuer.priority_claim)
        hidden = ""
        if user and self._salt:
            hidden = hidden_user(self._salt, issuer.issuer, user)
        return Principal(
            tenant, "", places, key_id=f"jwt:{issuer.name}", user=hidden, priority_max=priority,
        )  # fmt: skip


def _claim_missing(what: str, claim: str) -> NotIdentified:
    """Names the claim as configured, and never quotes its value."""
    return NotIdentified(KEY_NOT_VALID, f"this token's claim `{claim}` is not there, or not {_CLAIM_FORMS[what]}")


def hidden_user(salt: bytes, whose: str, name: str) -> str:
    """A user's pseudonym in records: 32 hexadecimal characters. `whose`: the issuer or tenant that the name belongs
    to.
    """
    named = f"{whose}\n{name}".encode("utf-8", "surrogatepass")
    return hmac.digest(salt, named, "sha256")[:_USER_BYTES].hex()


def _decoded(part: bytes) -> bytes | None:
    """Decodes unpadded base64url; None if another text would decode to the same bytes (RFC 7515 §2)."""
    if len(part) % 4 == 1:
        return None
    data = a2b_base64(part.translate(_FROM_URL) + b"=" * (-len(part) % 4))
    return data if b2a_base64(data, newline=False).translate(_TO_URL, b"=") == part else None


def signature_holds(algorithm: str, key: PublicKey, signed: bytes, signature: bytes) -> bool:
    verify: Any = _ALGORITHMS[algorithm].verify
    try:
        return bool(verify(signed, key, signature))
    except (PyJWTError, UnsupportedAlgorithm, ValueError, TypeError):
        return False


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _TIME_MAX


def _places(value: Any) -> tuple[str, ...] | None:
    """The places that a claim names: one, several divided by spaces, or a list. None: it names none."""
    places = value.split() if isinstance(value, str) else value
    if not isinstance(places, list) or not 0 < len(places) <= PLACES_MAX:
        return None
    fits = all(isinstance(place, str) and _PLACE.fullmatch(place) for place in places)
    return tuple(places) if fits else None
