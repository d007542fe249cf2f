"""Hop tokens: what was signed comes back, and nothing else gets in."""

import hmac
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farhop.balance.outcome import HOP_EXPIRED, HOP_FORGED, HOP_MISADDRESSED, HOP_MISSING, HOP_USED, NO_BUFFER
from farhop.identity import hop_token
from farhop.identity.hop_keys import key_from, key_to
from farhop.identity.hop_token import (
    LAWFUL_MAX,
    LIFE_MAX_MS,
    LIFE_MS,
    NONCE_BYTES,
    READ,
    TAG_BYTES,
    TOKEN_BYTES_MAX,
    HopClaims,
    HopError,
    HopSigner,
    HopVerifier,
    ReplayCache,
    is_of,
    request_line,
)

OLD, NEW = b"o" * 32, b"n" * 32
NOW_MS = 50_000.0
HEAD = b"v2.2026a.virginia~frankfurt."
CLAIMS = HopClaims(
    audience="frankfurt",
    entry_region="virginia",
    issuer="glb-1",
    tenant="eu-only",
    lawful=("frankfurt", "paris"),
    epoch=7,
    priority=3,
    deadline_ms=29_500.5,
    expires_ms=NOW_MS + 5_000.0,
    decision_id="d-01",
    promised_ttft_ms=412.5,
    narrow=(("eu", "jp"), ("de",)),
)

names = st.text(max_size=24)
amounts = st.floats(min_value=0, max_value=86_400_000.0)
claims = st.builds(
    HopClaims,
    audience=st.just("frankfurt"),
    entry_region=st.just("virginia"),
    issuer=names,
    tenant=names,
    lawful=st.lists(names, max_size=8).map(tuple),
    epoch=st.integers(0, 2**53),
    priority=st.integers(0, 9),
    deadline_ms=amounts,
    expires_ms=st.floats(min_value=NOW_MS + 1, max_value=NOW_MS + LIFE_MAX_MS),
    decision_id=names,
    promised_ttft_ms=st.none() | amounts,
    waited_ms=amounts,
    ttft_ms=st.none() | amounts,
    narrow=st.lists(st.lists(names, max_size=4).map(tuple), max_size=4).map(tuple),
)


def signer(kid: str = "2026a", key: bytes = NEW) -> HopSigner:
    return HopSigner({kid: key}, kid, "virginia")


def verifier(**keys: bytes) -> HopVerifier:
    return HopVerifier(keys or {"2026a": NEW}, "frankfurt")


def forged_with_the_key(payload: bytes, head: bytes = b"v2.2026a.virginia~frankfurt.") -> bytes:
    """A token whose mac holds over any payload: what a key-holder of another build might send."""
    signed = head + urlsafe_b64encode(bytes(12) + payload).rstrip(b"=")
    return signed + b"." + urlsafe_b64encode(hmac.digest(pair_key(), signed, "sha256")).rstrip(b"=")


def pair_key(root: bytes = NEW, issuer: str = "virginia", audience: str = "frankfurt") -> bytes:
    """RFC 5869 by hand: an empty salt is 32 zeros, and one block is enough."""
    for role, region in (("to", audience), ("from", issuer)):
        extracted = hmac.digest(bytes(32), root, "sha256")
        root = hmac.digest(extracted, f"farhop hop v2 {role} {region}".encode() + b"\x01", "sha256")
    return root


@settings(max_examples=200, deadline=None, derandomize=True)
@given(claims)
def test_signed_claims_are_verified_unchanged(some):
    assert verifier().verify(signer().sign(some), NOW_MS) == some


def test_the_mac_is_hmac_sha256_over_all_before_it():
    head, _, mac = signer().sign(CLAIMS).rpartition(b".")
    assert urlsafe_b64decode(mac + b"=") == hmac.digest(pair_key(), head, "sha256")


def test_every_single_byte_changed_is_refused():
    token = signer().sign(CLAIMS)
    keys = verifier(**{"2026a": NEW, "2026b": OLD})
    assert keys.verify(token, NOW_MS) == CLAIMS
    for position in range(len(token)):
        for flip in range(1, 256):
            changed = token[:position] + bytes([token[position] ^ flip]) + token[position + 1 :]
            assert keys.verify(changed, NOW_MS) in (HOP_FORGED, HOP_MISADDRESSED)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=200).map(lambda tail: HEAD + b"".join(tail.split(b"."))))
def test_garbage_to_this_region_is_forged_and_never_raises(token):
    assert verifier().verify(token, NOW_MS) is HOP_FORGED


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(min_size=1, max_size=300) | st.binary(max_size=200).map(lambda tail: HEAD + tail))
@example(b"v2.2026a.\x00~\x00..")
@example(HEAD + b"..")
def test_garbage_is_forged_and_never_raises(token):
    """The address stands in the clear: garbage may name another region, behind a known version and key alone."""
    refused = verifier().verify(token, NOW_MS)
    head = token.rsplit(b".", 2)[0] if token.count(b".") >= 2 else b""  # before payload and mac, dots and all
    audience = head.removeprefix(b"v2.2026a.").partition(b"~")[2]
    elsewhere = head.startswith(b"v2.2026a.") and audience not in (b"", b"frankfurt")
    assert refused in ((HOP_FORGED, HOP_MISADDRESSED) if elsewhere else (HOP_FORGED,))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=120))
def test_a_genuine_mac_over_garbage_is_forged_and_never_raises(payload):
    assert verifier().verify(forged_with_the_key(payload), NOW_MS) is HOP_FORGED


@pytest.mark.parametrize("other", [{"entry_region": "tokyo"}, {"audience": "tokyo"}])
def test_claims_that_say_other_regions_than_the_key_is_for_are_forged(other):
    """Who holds the key of one pair speaks for no other entry, and for no other region."""
    found = msgspec.msgpack.encode(msgspec.structs.replace(CLAIMS, **other))
    assert verifier().verify(forged_with_the_key(found), NOW_MS) is HOP_FORGED


@pytest.mark.parametrize("token", [None, b""])
def test_no_token_is_missing(token):
    assert verifier().verify(token, NOW_MS) is HOP_MISSING


def test_a_truncated_or_extended_token_is_refused():
    token = signer().sign(CLAIMS)
    for cut in (1, 10, 44, len(token) - 3):
        assert verifier().verify(token[:-cut], NOW_MS) in (HOP_FORGED, HOP_MISADDRESSED)
    for longer in (token + b"=", token + b".", token + b" ", b" " + token, token + b"A", token + b".v2"):
        assert verifier().verify(longer, NOW_MS) in (HOP_FORGED, HOP_MISADDRESSED)


def test_a_token_of_another_key_or_key_id_is_forged():
    assert verifier().verify(signer(key=OLD).sign(CLAIMS), NOW_MS) is HOP_FORGED
    assert verifier().verify(signer(kid="gone").sign(CLAIMS), NOW_MS) is HOP_FORGED


def test_keys_rotate_without_a_gap():
    before, after = signer("2026a", OLD), signer("2026b", NEW)
    both, later = verifier(**{"2026a": OLD, "2026b": NEW}), verifier(**{"2026b": NEW})
    assert both.verify(before.sign(CLAIMS), NOW_MS) == CLAIMS
    assert both.verify(after.sign(CLAIMS), NOW_MS) == CLAIMS
    assert later.verify(after.sign(CLAIMS), NOW_MS) == CLAIMS
    assert later.verify(before.sign(CLAIMS), NOW_MS) is HOP_FORGED


def test_a_token_for_another_region_is_misaddressed():
    token = signer().sign(msgspec.structs.replace(CLAIMS, audience="tokyo"))
    assert verifier().verify(token, NOW_MS) is HOP_MISADDRESSED


@pytest.mark.parametrize("ahead_ms", [0.0, -0.001, -1e9, LIFE_MAX_MS + 1, math.inf, -math.inf, math.nan])
def test_a_token_past_its_time_or_stamped_in_another_clock_is_expired(ahead_ms):
    token = signer().sign(msgspec.structs.replace(CLAIMS, expires_ms=NOW_MS + ahead_ms))
    assert verifier().verify(token, NOW_MS) is HOP_EXPIRED


@pytest.mark.parametrize("field", ["deadline_ms", "promised_ttft_ms", "waited_ms", "ttft_ms"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e12])
def test_claims_out_of_range_are_refused(field, value):
    token = signer().sign(msgspec.structs.replace(CLAIMS, **{field: value}))
    assert verifier().verify(token, NOW_MS) is HOP_FORGED


def test_a_later_build_may_append_fields():
    longer = [*msgspec.structs.astuple(CLAIMS), "something new"]
    assert verifier().verify(forged_with_the_key(msgspec.msgpack.encode(longer)), NOW_MS) == CLAIMS


def test_sets_past_their_bound_are_refused_on_both_sides():
    wide = msgspec.structs.replace(CLAIMS, lawful=("r",) * (LAWFUL_MAX + 1))
    with pytest.raises(HopError, match="lawful"):
        signer().sign(wide)
    assert verifier().verify(forged_with_the_key(msgspec.msgpack.encode(wide)), NOW_MS) is HOP_FORGED
    for narrow in ((("eu",),) * 9, (("eu",) * 65,)):
        deep = msgspec.structs.replace(CLAIMS, narrow=narrow)
        with pytest.raises(HopError, match="narrow"):
            signer().sign(deep)
        assert verifier().verify(forged_with_the_key(msgspec.msgpack.encode(deep)), NOW_MS) is HOP_FORGED


@pytest.mark.parametrize(
    ("field", "widest", "wider"),
    [
        ("lawful", ("r",) * 256, ("r",) * 257),
        ("narrow", (("eu",),) * 8, (("eu",),) * 9),
        ("narrow", (("eu",) * 64,), (("eu",) * 65,)),
        ("key", "k" * 64, "k" * 65),
        ("attempt", "a" * 64, "a" * 65),
        ("body", b"b" * 32, b"b" * 33),
        ("priority", 9, 10),
        ("priority", 0, -1),
        ("priority", 9, 2**62),
        ("deadline_ms", 86_400_000.0, 86_400_000.5),
        ("promised_ttft_ms", 86_400_000.0, 86_400_000.5),
        ("promised_ttft_ms", 0.0, -0.5),
        ("waited_ms", 86_400_000.0, 86_400_000.5),
        ("ttft_ms", 86_400_000.0, 86_400_000.5),
    ],
)
def test_every_bound_of_the_wire_is_read_to_its_end_and_no_further(field, widest, wider):
    """In figures: two builds must agree on them, whatever their constants are called."""
    allowed, refused = (msgspec.structs.replace(CLAIMS, **{field: value}) for value in (widest, wider))
    assert verifier().verify(forged_with_the_key(msgspec.msgpack.encode(allowed)), NOW_MS) == allowed
    assert verifier().verify(signer().sign(allowed), NOW_MS) == allowed
    assert verifier().verify(forged_with_the_key(msgspec.msgpack.encode(refused)), NOW_MS) is HOP_FORGED


def test_a_token_is_valid_for_ten_seconds_and_refused_if_it_expires_after_more_than_thirty():
    assert LIFE_MS == 10_000.0
    for ahead_ms, verdict in ((30_000.0, None), (30_000.5, HOP_EXPIRED)):
        claims = msgspec.structs.replace(CLAIMS, expires_ms=NOW_MS + ahead_ms)
        assert verifier().verify(signer().sign(claims), NOW_MS) == (verdict or claims)


def test_claims_that_an_older_build_does_not_send_mean_nothing_special():
    sent = msgspec.structs.astuple(CLAIMS)[:10]
    claims = verifier().verify(forged_with_the_key(msgspec.msgpack.encode(sent)), NOW_MS)
    assert msgspec.structs.astuple(claims) == (*sent, None, (), "", b"", 0.0, "", None)


def test_a_token_is_bound_to_method_target_and_length():
    lines = {
        request_line(method, target, body_bytes)
        for method in (b"GET", b"POST")
        for target in (b"/v1/models", b"/v1/chat/completions")
        for body_bytes in (None, 0, 1, 2)
    }
    assert len(lines) == 16
    assert request_line(b"POST", b"/v1/chat/completions", 12) == b"\nPOST /v1/chat/completions 12"
    assert request_line(b"GET", b"/v1/models", None) == b"\nGET /v1/models -1"
    token = signer().sign(CLAIMS, request_line(b"POST", b"/a", 1))
    assert verifier().verify(token, NOW_MS, request_line(b"POST", b"/a", 1)) == CLAIMS
    assert verifier().verify(token, NOW_MS, request_line(b"POST", b"/a", 2)) is HOP_FORGED


def test_a_token_too_long_is_neither_made_nor_read():
    long = msgspec.structs.replace(CLAIMS, decision_id="d" * TOKEN_BYTES_MAX)
    with pytest.raises(HopError, match="4096"):
        signer().sign(long)
    assert verifier().verify(forged_with_the_key(msgspec.msgpack.encode(long)), NOW_MS) is HOP_FORGED


@pytest.mark.parametrize(
    ("keys", "active", "says"),
    [
        ({}, "a", "none given"),
        ({"a": b"short"}, "a", "at least 16"),
        ({"a.b": NEW}, "a.b", "rename"),
        ({"": NEW}, "", "rename"),
        ({"a": NEW}, "b", "not among a"),
    ],
)
def test_unusable_keys_are_refused_with_the_remedy(keys, active, says):
    with pytest.raises(HopError, match=says):
        HopSigner(keys, active, "virginia")


def test_a_refused_key_is_not_in_the_message():
    with pytest.raises(HopError) as refused:
        HopVerifier({"a": b"tooshortsecret"}, "frankfurt")
    assert "tooshortsecret" not in str(refused.value)


def test_a_full_replay_cache_is_not_scanned_for_every_token() -> None:
    uses = ReplayCache(3)
    for mac, until_ms in ((b"a", 9_000.0), (b"b", 1_050.0), (b"c", 9_000.0)):
        assert uses.take(mac, until_ms, 0.0, HOP_USED) is None
    assert uses.take(b"d", 9_000.0, 1_000.0, HOP_USED) is NO_BUFFER
    looked = uses.until_ms
    for clock_ms in (1_001.0, 1_060.0, 1_099.0):
        assert uses.take(b"d", 9_000.0, clock_ms, HOP_USED) is NO_BUFFER
        assert uses.until_ms is looked
    assert uses.take(b"d", 9_000.0, 1_100.0, HOP_USED) is None
    assert uses.take(b"a", 9_000.0, 1_100.0, HOP_USED) is HOP_USED


def test_a_genuine_token_is_good_for_one_use_and_what_is_not_genuine_uses_nothing_up() -> None:
    known, token = verifier(), signer().sign(CLAIMS)
    assert known.admit(None, NOW_MS) is HOP_MISSING
    assert known.admit(token[:-1], NOW_MS) is HOP_FORGED
    assert known.admit(token, NOW_MS) == (CLAIMS, None)
    assert known.admit(token, NOW_MS) is HOP_USED
    assert known.admit(signer().sign(CLAIMS), NOW_MS) == (CLAIMS, None), "two tokens of the same claims are two tokens"
    full = HopVerifier({"2026a": NEW}, "frankfurt", uses_max=1)
    assert full.admit(token, NOW_MS) == (CLAIMS, None)
    assert full.admit(signer().sign(CLAIMS), NOW_MS) is NO_BUFFER


def test_a_use_is_forgotten_at_the_moment_at_which_its_token_expires() -> None:
    uses = ReplayCache(2)
    assert uses.take(b"a", 100.0, 0.0, HOP_USED) is None
    assert uses.take(b"b", 200.0, 99.9, HOP_USED) is None
    assert len(uses) == 2
    assert uses.take(b"c", 300.0, 99.9, HOP_USED) is NO_BUFFER
    assert uses.take(b"c", 300.0, 100.0, HOP_USED) is None
    assert len(uses) == 2
    behind = ReplayCache(2)  # the first used expires last: those that expired behind it go when there is no room
    assert behind.take(b"a", 900.0, 0.0, HOP_USED) is None
    assert behind.take(b"b", 200.0, 0.0, HOP_USED) is None
    assert behind.take(b"c", 300.0, 200.0, HOP_USED) is None
    assert behind.take(b"a", 900.0, 200.0, HOP_USED) is HOP_USED


def test_derived_keys_sign_and_check_for_their_regions_alone() -> None:
    sends, reads = key_from(NEW, "virginia", ["frankfurt"]).encode(), key_to(NEW, "frankfurt").encode()
    signing, checking = HopSigner({"k": sends}, "k", "virginia"), HopVerifier({"k": reads}, "frankfurt")
    assert checking.verify(signing.sign(CLAIMS), NOW_MS) == CLAIMS
    assert (signing.reaches("frankfurt"), signing.reaches("tokyo")) == (True, False)
    with pytest.raises(HopError, match="tokyo"):
        signing.sign(msgspec.structs.replace(CLAIMS, audience="tokyo"))
    with pytest.raises(HopError, match="does not sign"):
        HopSigner({"k": sends}, "k", "tokyo")
    with pytest.raises(HopError, match="does not check"):
        HopVerifier({"k": reads}, "tokyo")


def test_the_longest_token_that_is_made_is_read() -> None:
    def padded(chars: int) -> HopClaims:
        return msgspec.structs.replace(CLAIMS, decision_id="d" * chars)

    longest = 0
    with pytest.raises(HopError, match="4096"):
        for chars in range(2500, 4096):
            token = signer().sign(padded(chars))
            longest = max(longest, len(token))
            assert verifier().verify(token, NOW_MS) == padded(chars)
    assert longest == 4096


def test_more_audiences_and_issuers_than_are_remembered_are_served_all_the_same(monkeypatch) -> None:
    monkeypatch.setattr(hop_token, "_ISSUERS_MAX", 2)
    one, known = signer(), verifier()
    for n in (0, 1, 2, 3, 0):
        token = one.sign(msgspec.structs.replace(CLAIMS, audience=f"r{n}"))
        assert HopVerifier({"2026a": NEW}, f"r{n}").verify(token, NOW_MS).audience == f"r{n}"
        assert len(one.by_audience) <= 2
        other = HopSigner({"2026a": NEW}, "2026a", f"r{n}")
        token = other.sign(msgspec.structs.replace(CLAIMS, entry_region=f"r{n}"))
        assert known.verify(token, NOW_MS).entry_region == f"r{n}"
        assert len(known.by_head) <= 2
    assert (len(one.by_audience), len(known.by_head)) == (1, 1)


# -- bound to a body


def hkdf(key: bytes, info: bytes) -> bytes:
    return hmac.digest(hmac.digest(bytes(32), key, "sha256"), info + b"\x01", "sha256")


def admitted(token: bytes, known: HopVerifier | None = None):
    found = (known or verifier()).admit(token, NOW_MS)
    assert isinstance(found, tuple), found
    claims, mac = found
    assert mac is not None
    return claims, mac


BODIES = (b"", b"{}", bytes(range(256)) * 5, b"a" * 200_000, b"x" * 15, b"x" * 16, b"x" * 17)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(claims, st.binary(max_size=600) | st.sampled_from(BODIES), st.binary(max_size=600))
def test_a_token_with_a_body_lets_in_that_body_alone(some, body, other):
    found, mac = admitted(signer().sign(some, b"", body))
    assert found == some
    assert is_of(mac, body)
    assert is_of(mac, other) == (other == body)


def test_the_mac_of_a_body_is_gmac_by_a_key_of_its_own_with_the_tokens_nonce():
    for body in BODIES:
        text = signer().sign(CLAIMS, b"", body)
        assert text.startswith(b"v3.2026a.virginia~frankfurt.")
        payload = urlsafe_b64decode(text.split(b".")[3] + b"==")
        nonce, tag = payload[:NONCE_BYTES], payload[NONCE_BYTES : NONCE_BYTES + TAG_BYTES]
        key = hkdf(pair_key(), b"farhop hop v3 body")
        assert tag == AESGCM(key).encrypt(nonce, b"", body)
        assert payload[NONCE_BYTES + TAG_BYTES :] == msgspec.msgpack.encode(CLAIMS)
        assert key != pair_key()


def test_every_bit_of_a_body_counts_and_where_it_ends():
    body = bytes(range(40))
    _, mac = admitted(signer().sign(CLAIMS, b"", body))
    for position in range(len(body)):
        for bit in range(8):
            assert not is_of(mac, body[:position] + bytes([body[position] ^ 1 << bit]) + body[position + 1 :])
    for other in (b"", body[:-1], body[1:], body + b"\0", b"\0" + body, body[16:] + body[:16], body * 2):
        assert not is_of(mac, other)
    long = b"a" * 200_000
    _, mac = admitted(signer().sign(CLAIMS, b"", long))
    for position in (0, 1, 65_535, 65_536, 100_000, 199_999):
        assert not is_of(mac, long[:position] + b"b" + long[position + 1 :])


def test_every_single_byte_changed_of_a_token_with_a_body_is_refused():
    """Version, key id, regions, nonce, the body's mac, claims, the token's mac: all of it is under that."""
    token, known = signer().sign(CLAIMS, b"", b"{}"), verifier(**{"2026a": NEW, "2026b": OLD})
    assert known.verify(token, NOW_MS) == CLAIMS
    for position in range(len(token)):
        for flip in range(1, 256):
            changed = token[:position] + bytes([token[position] ^ flip]) + token[position + 1 :]
            assert known.verify(changed, NOW_MS) in (HOP_FORGED, HOP_MISADDRESSED)


def test_a_token_does_not_pass_for_one_of_the_other_version():
    """One that is bound to a body must not be read as one that is bound to none, nor the other way round."""
    without, bound = signer().sign(CLAIMS), signer().sign(CLAIMS, b"", b"{}")
    assert verifier().verify(b"v3" + without[2:], NOW_MS) is HOP_FORGED
    assert verifier().verify(b"v2" + bound[2:], NOW_MS) is HOP_FORGED
    for version in (b"v1", b"v4", b"", b"r2"):
        assert verifier().verify(version + bound[2:], NOW_MS) is HOP_FORGED
    assert int(HopVerifier.WITH_BODY[1:]) == READ


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=120))
def test_a_genuine_mac_over_garbage_with_a_body_is_forged_and_never_raises(payload):
    head = b"v3.2026a.virginia~frankfurt."
    assert verifier().verify(forged_with_the_key(payload, head), NOW_MS) is HOP_FORGED


@pytest.mark.parametrize("payload_bytes", range(NONCE_BYTES + TAG_BYTES + 2))
def test_a_payload_cut_short_is_forged(payload_bytes):
    signed = b"v3.2026a.virginia~frankfurt." + urlsafe_b64encode(bytes(payload_bytes)).rstrip(b"=")
    token = signed + b"." + urlsafe_b64encode(hmac.digest(pair_key(), signed, "sha256")).rstrip(b"=")
    assert verifier().verify(token, NOW_MS) is HOP_FORGED


def test_the_mac_of_one_token_is_invalid_for_another_token_of_the_same_body():
    """Its nonce is in it; and of two processes, or two pairs of regions, none has the other's."""
    body, one = b"{}", signer()
    made = [one.sign(CLAIMS, b"", body), one.sign(CLAIMS, b"", body), signer().sign(CLAIMS, b"", body)]
    seals = [admitted(token)[1][1] for token in made]
    assert len({seal[:NONCE_BYTES] for seal in seals}) == len({seal[NONCE_BYTES:] for seal in seals}) == 3
    first, second = (admitted(token)[1] for token in made[:2])
    assert not is_of((first[0], first[1][:NONCE_BYTES] + second[1][NONCE_BYTES:]), body)
    elsewhere = HopSigner({"2026a": NEW}, "2026a", "tokyo").sign(
        msgspec.structs.replace(CLAIMS, entry_region="tokyo"), b"", body
    )
    assert not is_of((first[0], admitted(elsewhere)[1][1]), body)


def test_a_token_with_a_body_is_good_for_one_use():
    known, token = verifier(), signer().sign(CLAIMS, b"", b"{}")
    assert admitted(token, known)[0] == CLAIMS
    assert known.admit(token, NOW_MS) is HOP_USED


def test_derived_keys_bind_bodies_as_the_root_does():
    sends, reads = key_from(NEW, "virginia", ["frankfurt"]).encode(), key_to(NEW, "frankfurt").encode()
    token = HopSigner({"2026a": sends}, "2026a", "virginia").sign(CLAIMS, b"", b"{}")
    for known in (verifier(), HopVerifier({"2026a": reads}, "frankfurt")):
        assert is_of(admitted(token, known)[1], b"{}")
