"""The hop token: a global balancer's signed statement to a region of a request's tenant and limits.

`v3.<kid>.<issuer>~<audience>.<payload>.<mac>`: the issuer is the region of the global balancer, the audience the region
that it is sent to; payload (a nonce, the body's mac, then msgpack) and mac are in unpadded base64url. The mac,
HMAC-SHA256 by a key of that issuer and this audience alone (farhop.identity.hop_keys), covers all before it and the
request with the token: method, target and length of its body. `v2` has no mac of the body: its claims have the body's
SHA-256, or nothing if mutual TLS protects the body. Invariants: nothing of a payload is decoded before its mac is
verified; any input is answered with an Outcome, never an exception; no two texts are the same valid token; each is
valid for one use, which is not forgotten before it has expired, and a use that cannot be remembered is refused. A token
never leaves the fleet.

The body's mac is GMAC (AES-256-GCM over the body as associated data, all 16 bytes of it; NIST SP 800-38D), in an eighth
of the time that SHA-256 takes. Its key is derived from the pair's, and used for nothing else. Its nonce is the token's:
a random beginning of 95 bits for each process, and a count from there. 16,000 processes with one key that sign 2**33
tokens each use a nonce twice with a chance below 2**-33; an attacker who saw that, and both bodies, could work out the
key by which bodies are hashed, and no more: the token's own mac has another key. A body of 16 MiB is 2**20 blocks, so
that another in its place passes with a chance of 2**-107, and the attempt uses the token up.
"""

from __future__ import annotations

import os
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping
from hashlib import sha256
from hmac import compare_digest
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Meta

from farhop.balance.outcome import HOP_EXPIRED, HOP_FORGED, HOP_MISADDRESSED, HOP_MISSING, HOP_USED, NO_BUFFER, Outcome
from farhop.identity.api_keys import PRIORITY_MAX
from farhop.identity.hop_keys import KEY_BYTES_MIN, HopError, HopKey, body_key, read_keys

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["KEY_BYTES_MIN", "HopClaims", "HopError", "HopSigner", "HopVerifier", "ReplayCache", "request_line"]

HEADER = b"x-farhop-hop"
READ = 3  # the latest version that is read here; a region reports it, and gets no later one
TOKEN_BYTES_MAX = 4096
LAWFUL_MAX = 256
NARROW_LISTS_MAX = 8
NARROW_PLACES_MAX = 64
KEY_CHARS_MAX = 64
ATTEMPT_CHARS_MAX = 64
# A token is signed once its connection is open, and read with the head: this covers a slow network and the error of the
# receiver's clock. An expiry much further away was stamped by another clock than ours. No request lasts longer than a
# day.
LIFE_MS = 10_000.0
LIFE_MAX_MS = 30_000.0
BUDGET_MAX_MS = 86_400_000.0
USES_MAX = 131_072  # some 25 MB: 13,000 requests a second, each remembered for LIFE_MS, fill it
# Those that expired are removed together. To check all takes some 10 ms when it is full: not at each use.
_LOOK_MS = 100.0
NONCE_BYTES, TAG_BYTES = 12, 16
BODY_HASH_BYTES = 32  # SHA-256: second preimages are infeasible, and CPUs have instructions for it
_ISSUERS_MAX = 4096  # key id and region

_TO_URL = bytes.maketrans(b"+/", b"-_")
_FROM_URL = bytes.maketrans(b"-_", b"+/")

_Narrow = Annotated[tuple[str, ...], Meta(max_length=NARROW_PLACES_MAX)]


class HopClaims(msgspec.Struct, frozen=True, array_like=True):
    """The claims of a token. Fields are sent by position: new ones go last and carry a default."""

    audience: str  # the region addressed
    entry_region: str  # the issuer's region
    issuer: str  # the instance of the global balancer
    tenant: str
    lawful: Annotated[tuple[str, ...], Meta(max_length=LAWFUL_MAX)]  # the regions in which the request may be processed
    epoch: int  # of the law
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)]  # within the bounds of a law
    deadline_ms: float  # the time left when the token was signed
    # A time of the RECEIVER's monotonic clock, learned from its ping: clocks of two hosts are never compared.
    expires_ms: float
    decision_id: str
    promised_ttft_ms: float | None = None  # the prediction on which the choice of the region rests; None: no promise
    # Lists of places: the request stays within one place of each list.
    narrow: Annotated[tuple[_Narrow, ...], Meta(max_length=NARROW_LISTS_MAX)] = ()
    # The name of the API key, which may have its own law; "": none.
    key: Annotated[str, Meta(max_length=KEY_CHARS_MAX)] = ""
    # The SHA-256 of the request's body; empty if the token has the body's mac, or if mutual TLS protects the body
    # between the tiers.
    body: Annotated[bytes, Meta(max_length=BODY_HASH_BYTES)] = b""
    waited_ms: float = 0.0  # how long the request waited in queues of other regions that released it
    # The attempt's name, unique to its issuer, which uses it later to ask whether the region has the attempt; "": a
    # build that does not ask.
    attempt: Annotated[str, Meta(max_length=ATTEMPT_CHARS_MAX)] = ""
    # The time left for the first token, less the round trip; None: the client states no objective.
    ttft_ms: float | None = None


_encode = msgspec.msgpack.Encoder().encode


def request_line(method: bytes, target: bytes, body_bytes: int | None) -> bytes:
    """The part of a request that its token is bound to; no token can be bound to a body of unknown length."""
    return b"\n%b %b %d" % (method, target, -1 if body_bytes is None else body_bytes)


def _b64(data: bytes) -> bytes:
    return b2a_base64(data, newline=False).translate(_TO_URL, b"=")


_Primed: TypeAlias = "tuple[_Hash, _Hash]"
BodyMac: TypeAlias = "tuple[AESGCM, bytes]"
"""The key, and the nonce followed by the mac, of the one body that a token allows."""
_INNER, _OUTER = (bytes(pad ^ byte for byte in range(256)) for pad in (0x36, 0x5C))


def _prime(key: bytes) -> _Primed:
    """HMAC-SHA256 (RFC 2104) by a key of at most a block, up to where the message begins: both hashes over the key."""
    block = key.ljust(64, b"\0")
    return sha256(block.translate(_INNER)), sha256(block.translate(_OUTER))


def _mac(primed: _Primed, signed: bytes) -> bytes:
    # Copies of two hashes take 0.8 us, one of a primed hmac.HMAC 1.2 (it is Python), the one-shot hmac.digest 1.8.
    inner, outer = primed[0].copy(), primed[1].copy()
    inner.update(signed)
    outer.update(inner.digest())
    return _b64(outer.digest())


def is_of(mac: BodyMac, body: bytes) -> bool:
    """Whether this is the MAC of the body."""
    key, made = mac
    try:
        key.decrypt(made[:NONCE_BYTES], made[NONCE_BYTES:], body)
    except InvalidTag:
        return False
    return True


class HopSigner:
    """Signs for the global balancers of one region, `issuer`.

    To rotate: give both tiers the new key, make it active here, then drop the old one.
    """

    __slots__ = ("_head", "_issuer", "_key", "_nonces", "by_audience")
    # Under the mac: no token of one kind passes for another.
    VERSION: ClassVar[bytes] = b"v2"
    WITH_BODY: ClassVar[bytes] = b"v3"

    def __init__(self, keys: Mapping[str, bytes], active_kid: str, issuer: str) -> None:
        known = read_keys(keys)
        if active_kid not in known:
            raise HopError(f"hop keys: the active key id {active_kid!r} is not among {', '.join(sorted(known))}")
        self._key, self._issuer = known[active_kid], issuer
        self._key.check_issuer(active_kid, issuer)
        self._head = b".%b.%b~" % (active_kid.encode(), issuer.encode())
        self.by_audience: dict[str, tuple[bytes, _Primed, AESGCM]] = {}
        # Unlike those of every other process and of ours before a restart: after a random start, a count is enough.
        self._nonces = count(int.from_bytes(os.urandom(NONCE_BYTES)) >> 1)

    def reaches(self, audience: str) -> bool:
        """Whether there is a key for tokens to this region."""
        return self._key.pair(self._issuer, audience) is not None

    def sign(self, claims: HopClaims, request: bytes = b"", body: bytes | None = None) -> bytes:
        """The header's value, valid only with that `request_line` and, if given, that `body`, for receivers that read
        READ.

        Raises HopError if the claims exceed the receiver's bounds, or there is no key for the audience.
        """
        if len(claims.lawful) > LAWFUL_MAX:
            raise HopError(f"hop token: {len(claims.lawful)} lawful regions, at most {LAWFUL_MAX}; split the fleet")
        narrow = claims.narrow
        if narrow and (len(narrow) > NARROW_LISTS_MAX or max(map(len, narrow)) > NARROW_PLACES_MAX):
            raise HopError(
                f"hop token: narrow has more than {NARROW_LISTS_MAX} lists or {NARROW_PLACES_MAX} places in one; "
                "ask for fewer"
            )
        head, primed, key = self.by_audience.get(claims.audience) or self._primed(claims.audience)
        payload = nonce = next(self._nonces).to_bytes(NONCE_BYTES)
        if body is not None:
            payload += key.encrypt(nonce, b"", body)
        signed = (self.VERSION if body is None else self.WITH_BODY) + head + _b64(payload + _encode(claims))
        token = signed + b"." + _mac(primed, signed + request)
        if len(token) > TOKEN_BYTES_MAX:
            raise HopError(f"hop token: {len(token)} bytes, at most {TOKEN_BYTES_MAX}; shorten names or narrow the law")
        return token

    def _primed(self, audience: str) -> tuple[bytes, _Primed, AESGCM]:
        key = self._key.pair(self._issuer, audience)
        if key is None:
            raise HopError(f"hop keys: none for region {audience!r}; derive them again with `farhop certs hop-key`")
        if len(self.by_audience) >= _ISSUERS_MAX:
            self.by_audience.clear()
        made = b"%b%b." % (self._head, audience.encode()), _prime(key), AESGCM(body_key(key))
        self.by_audience[audience] = made
        return made


class ReplayCache:
    """Used tokens, by mac (one token has one text), with the end of their validity; never more than `most` of them."""

    __slots__ = ("_looked_ms", "_most", "until_ms")

    def __init__(self, most: int) -> None:
        self._most = most
        self._looked_ms = -inf  # when all of them were checked last
        self.until_ms: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self.until_ms)

    def take(self, mac: bytes, until_ms: float, clock_ms: float, used: Outcome) -> Outcome | None:
        """Record a use; returns `used` if it was recorded before, NO_BUFFER if there is no room, otherwise None."""
        known = self.until_ms
        if mac in known:
            return used
        if (known and known[next(iter(known))] <= clock_ms - _LOOK_MS) or len(known) >= self._most:
            self._forget(clock_ms)
        if len(known := self.until_ms) >= self._most:
            return NO_BUFFER
        known[mac] = until_ms
        return None

    def _forget(self, clock_ms: float) -> None:
        """The first used have expired first, except for clocks' errors: the rest is removed when the memory is full."""
        known = self.until_ms
        while known and known[oldest := next(iter(known))] <= clock_ms:
            del known[oldest]
        if len(known) >= self._most and clock_ms - self._looked_ms >= _LOOK_MS:
            self._looked_ms = clock_ms
            self.until_ms = {mac: until for mac, until in known.items() if until > clock_ms}


class HopVerifier:
    """Checks tokens addressed to one region, and counts their uses. `keys` are all key ids still accepted."""

    __slots__ = ("_audience", "_keys", "_uses", "by_head")
    VERSION: ClassVar[bytes] = b"v2"
    WITH_BODY: ClassVar[bytes | None] = b"v3"
    DECODE: ClassVar[Callable[[memoryview], HopClaims]] = msgspec.msgpack.Decoder(HopClaims).decode
    LIFE_MAX_MS: ClassVar[float] = LIFE_MAX_MS
    USED: ClassVar[Outcome] = HOP_USED

    def __init__(self, keys: Mapping[str, bytes], audience: str, uses_max: int = USES_MAX) -> None:
        self._keys: dict[bytes, HopKey] = {}
        for kid, key in read_keys(keys).items():
            key.check_audience(kid, audience)
            self._keys[kid.encode()] = key
        self._audience = audience
        # Of heads that came before a valid mac: the issuer, and what checks its tokens and their bodies.
        self.by_head: dict[bytes, tuple[str, _Primed, AESGCM | None]] = {}
        self._uses = ReplayCache(uses_max)

    def adopt(self, other: HopVerifier) -> None:
        """Replace the keys; tokens used before remain used."""
        self._keys, self.by_head = other._keys, {}

    def admit(
        self, token: bytes | None, clock_ms: float, request: bytes = b""
    ) -> tuple[HopClaims, BodyMac | None] | Outcome:
        """As `verify`, for the first use of the token. Also returns the MAC of the allowed body, None if the token has
        none.
        """
        found = self._read(token, clock_ms, request)
        if isinstance(found, Outcome):
            return found
        assert token is not None  # it was verified
        used = self._uses.take(token.rpartition(b".")[2], found[0].expires_ms, clock_ms, self.USED)
        return found if used is None else used

    def verify(self, token: bytes | None, clock_ms: float, request: bytes = b"") -> HopClaims | Outcome:
        """The claims of a genuine, timely token for this region in this request, or why not.

        `clock_ms` is monotonic, of this host; `request` the `request_line`.
        """
        found = self._read(token, clock_ms, request)
        return found if isinstance(found, Outcome) else found[0]

    def _read(self, token: bytes | None, clock_ms: float, request: bytes) -> tuple[HopClaims, BodyMac | None] | Outcome:
        if not token:
            return HOP_MISSING
        genuine = self._genuine(token, request)
        if isinstance(genuine, Outcome):
            return genuine
        issuer, text, key = genuine
        said_at = NONCE_BYTES if key is None else NONCE_BYTES + TAG_BYTES
        try:
            payload = a2b_base64(text.translate(_FROM_URL) + b"==")
            claims = type(self).DECODE(memoryview(payload)[said_at:])
        except ValueError:  # binascii.Error and every msgspec error: signed by an incompatible build
            return HOP_FORGED
        if (claims.entry_region, claims.audience) != (issuer, self._audience):
            return HOP_FORGED
        promised, ttft_ms = claims.promised_ttft_ms, claims.ttft_ms
        # Chained comparisons are false for NaN and infinities, which msgpack carries without complaint.
        if not (0.0 <= claims.deadline_ms <= BUDGET_MAX_MS and 0.0 <= claims.waited_ms <= BUDGET_MAX_MS):
            return HOP_FORGED
        if promised is not None and not 0.0 <= promised <= BUDGET_MAX_MS:
            return HOP_FORGED
        if ttft_ms is not None and not 0.0 <= ttft_ms <= BUDGET_MAX_MS:
            return HOP_FORGED
        if not 0.0 < claims.expires_ms - clock_ms <= self.LIFE_MAX_MS:
            return HOP_EXPIRED
        return claims, None if key is None else (key, payload[:said_at])

    def _genuine(self, token: bytes, request: bytes) -> tuple[str, bytes, AESGCM | None] | Outcome:
        """The issuer's region, the encoded payload, and the key that checks the body's mac in it, if it has one; only
        if the token's own mac is valid."""
        if len(token) > TOKEN_BYTES_MAX:
            return HOP_FORGED
        signed, _, mac = token.rpartition(b".")
        head, _, payload = signed.rpartition(b".")
        known = self.by_head.get(head) or self._primed(head)
        # Texts are compared, not the bytes they encode: base64's spare bits would let one mac be written in four ways.
        if isinstance(known, Outcome):
            return known
        if not compare_digest(_mac(known[1], signed + request), mac):
            return HOP_FORGED
        if head not in self.by_head:  # only now: otherwise any caller could fill it
            if len(self.by_head) >= _ISSUERS_MAX:
                self.by_head.clear()
            self.by_head[head] = known
        return known[0], payload, known[2]

    def _primed(self, head: bytes) -> tuple[str, _Primed, AESGCM | None] | Outcome:
        """The issuer in `version.kid.issuer~audience`, and what checks its tokens and their bodies."""
        version, _, rest = head.partition(b".")
        kid, _, between = rest.partition(b".")
        issuer, _, audience = between.partition(b"~")
        key = self._keys.get(kid)
        if (
            version not in (self.VERSION, self.WITH_BODY)
            or key is None
            or not issuer
            or not audience
            or not between.isascii()
        ):
            return HOP_FORGED
        if audience.decode() != self._audience:
            return HOP_MISADDRESSED  # genuine or not: only its audience could check
        pair = key.pair(issuer.decode(), self._audience)
        if pair is None:
            return HOP_FORGED
        return issuer.decode(), _prime(pair), AESGCM(body_key(pair)) if version == self.WITH_BODY else None
