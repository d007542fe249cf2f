"""API keys: strict headers, positive answers remembered within a bound, and no key outlives its topology."""

import hashlib
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.outcome import MISSING_KEY, UNKNOWN_KEY
from farhop.identity import api_keys
from farhop.identity.api_keys import TOO_LONG, TWO_CALLERS, Keyring, Principal, bearer, digest


class CountingLookup:
    """A lookup that counts how often it is asked."""

    def __init__(self, *plain: str) -> None:
        self.known = {digest(key): key for key in plain}
        self.asked = 0

    def __call__(self, sha256: str):
        self.asked += 1
        key = self.known.get(sha256)
        if key is None:
            return None
        return SimpleNamespace(name="acme"), SimpleNamespace(name=f"of-{key}", within=("eu",))


def test_digest_is_sha256_in_hex():
    assert digest("sk-farhop-anywhere") == hashlib.sha256(b"sk-farhop-anywhere").hexdigest()


@pytest.mark.parametrize("header", [b"Bearer abc", b"bearer abc", b"BEARER abc", b"Bearer   abc"])
def test_the_scheme_is_case_insensitive(header):
    assert bearer(header) == "abc"


@pytest.mark.parametrize(
    "header",
    [
        None, b"", b"Bearer", b"Bearer ", b"abc", b"Basic abc", b"Bearerabc", b"Bearer\tabc", b" Bearer abc",
        b"Bearer abc ", b"Bearer a bc", b"Bearer abc\n", b"Bearer a,b", b"Bearer \xc3\xa9", b"Bearer a=b",
        b"Bearer " + b"a" * 513, b"Bearer " + b"a" * 511 + b"==",
    ],
)  # fmt: skip
def test_a_header_that_rfc_6750_does_not_allow_is_no_key(header):
    assert bearer(header) is None


def test_the_longest_key_is_512_characters():
    assert bearer(b"Bearer " + b"a" * 512) == "a" * 512
    assert bearer(b"Bearer " + b"a" * 510 + b"==") == "a" * 510 + "=="


def test_a_known_key_is_looked_up_once():
    lookup = CountingLookup("sk-1")
    ring = Keyring(lookup)
    assert ring.identify(b"Bearer sk-1") == Principal("acme", "of-sk-1", ("eu",))
    assert ring.identify(b"Bearer sk-1") == Principal("acme", "of-sk-1", ("eu",))
    assert lookup.asked == 1


def test_a_missing_key_and_an_unknown_key_are_distinguished():
    ring = Keyring(CountingLookup("sk-1"))
    assert ring.identify(None) is MISSING_KEY
    assert ring.identify(b"Basic c2s6MQ==") is MISSING_KEY
    assert ring.identify(b"Bearer sk-2") is UNKNOWN_KEY


def test_two_keys_must_be_of_one_caller_and_a_placeholder_is_none():
    ring = Keyring(CountingLookup("sk-1", "sk-2"))
    first = ring.identify(b"Bearer sk-1")
    assert ring.identify(b"Bearer sk-1", b"sk-1") == first
    assert ring.identify(b"Bearer sk-1", b"no_issued_key") == first
    assert ring.identify(b"Bearer sk-1", b"sk-2") is TWO_CALLERS
    assert ring.identify(b"Bearer no_issued_key", b"sk-2") is UNKNOWN_KEY
    assert ring.identify(b"Bearer " + b"a" * 7000) is TOO_LONG


def test_a_refusal_is_not_remembered():
    lookup = CountingLookup()
    ring = Keyring(lookup)
    assert ring.identify(b"Bearer sk-1") is UNKNOWN_KEY
    lookup.known[digest("sk-1")] = "sk-1"
    assert ring.identify(b"Bearer sk-1") == Principal("acme", "of-sk-1", ("eu",))


def test_a_revoked_key_is_unknown_at_once():
    ring = Keyring(CountingLookup("sk-1"))
    assert isinstance(ring.identify(b"Bearer sk-1"), Principal)
    ring.replace(CountingLookup("sk-2"))
    assert ring.identify(b"Bearer sk-1") is UNKNOWN_KEY


def test_the_memo_is_bounded_and_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(api_keys, "MEMO_MAX", 2)
    lookup = CountingLookup("a", "b", "c")
    ring = Keyring(lookup)
    for key in (b"a", b"b", b"c", b"c", b"b"):
        ring.identify(b"Bearer " + key)
    assert lookup.asked == 3
    ring.identify(b"Bearer a")
    assert lookup.asked == 4


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=600))
def test_no_header_raises(header):
    assert Keyring(CountingLookup()).identify(header) in (MISSING_KEY, UNKNOWN_KEY)


@given(st.text(api_keys.BASE62, min_size=30, max_size=30), st.integers(3, 38), st.sampled_from(api_keys.BASE62))
def test_one_wrong_character_of_an_issued_key_is_seen_offline(chance, place, letter):
    key = api_keys.with_checksum(chance)
    assert len(key) == 39
    assert not api_keys.mistyped(key)
    wrong = key[:place] + letter + key[place + 1 :]
    assert api_keys.mistyped(wrong) == (wrong != key)
    assert api_keys.mistyped(key[:-1])
    assert api_keys.mistyped(key + "0")
    assert not api_keys.mistyped("sk-" + key)


def test_an_issued_key_ends_by_the_clock_and_a_clock_set_back_does_not_bring_it_to_life():
    wall = [150.0]
    issued = api_keys.Issued(Principal("acme", "", key_id="k1"), not_before_s=100.0, expires_s=200.0)
    keyring = Keyring(lambda _: None, {digest("abc"): issued}.get, lambda: wall[0])
    assert keyring.identify(b"Bearer abc") is issued.principal
    wall[0] = 200.0
    assert keyring.identify(b"Bearer abc") is api_keys.KEY_NOT_VALID
    wall[0] = 150.0
    assert keyring.identify(b"Bearer abc") is api_keys.KEY_NOT_VALID


def test_an_endless_issued_key_is_verified_once_and_forgotten_when_it_is_revoked():
    known = {digest("abc"): api_keys.Issued(Principal("acme", "", key_id="k1"))}
    asked = []
    keyring = Keyring(lambda _: None, lambda sha256: asked.append(sha256) or known.get(sha256), lambda: 1.0)
    for _ in range(3):
        assert keyring.identify(b"Bearer abc").key_id == "k1"
    assert len(asked) == 1
    known[digest("abc")] = api_keys.Issued(Principal("acme", "", key_id="k1"), revoked=True)
    keyring.forget()
    assert keyring.identify(b"Bearer abc") is api_keys.KEY_NOT_VALID
