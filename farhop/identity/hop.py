"""The hop token: how a global balancer tells a region on whose behalf, and how far, a request may go.

`v1.<kid>.<payload>.<mac>`, both in unpadded base64url; the payload is msgpack, the mac HMAC-SHA256 over all before it.
Invariants: nothing of a token is decoded before its mac holds; whatever arrives is answered with an Outcome, never an
exception; no two texts carry the same valid token. A token never leaves the fleet.
"""

from __future__ import annotations

import hmac
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from farhop.balance.outcome import HOP_EXPIRED, HOP_FORGED, HOP_MISADDRESSED, HOP_MISSING, Outcome

HEADER = b"x-farhop-hop"
TOKEN_BYTES_MAX = 4096
KEY_BYTES_MIN = 16
LAWFUL_MAX = 256
NARROW_LISTS_MAX = 8
NARROW_PLACES_MAX = 64
KEY_CHARS_MAX = 64
ATTEMPT_CHARS_MAX = 64
# No request outlives a day, and no token ten minutes: an expiry further away was stamped in another clock than ours.
BUDGET_MAX_MS = 86_400_000.0
LIFE_MAX_MS = 600_000.0

_KID = re.compile(r"[A-Za-z0-9_-]{1,32}")
_TO_URL = bytes.maketrans(b"+/", b"-_")
_FROM_URL = bytes.maketrans(b"-_", b"+/")

_Narrow = Annotated[tuple[str, ...], Meta(max_length=NARROW_PLACES_MAX)]


class HopError(ValueError):
    """A key or a claim that cannot be used, said in one line with its remedy."""


class HopClaims(msgspec.Struct, frozen=True, array_like=True):
    """What a token says. Fields are sent by position: new ones go last and carry a default.

    `audience` is the region addressed, `issuer` the global balancer's instance. `lawful` are the regions the request
    may be processed in; `narrow` the lists of places it asked to stay within (one of each list), `key` names
    the API key, which may have a law of its own. `deadline_ms` is the budget left when signed; `expires_ms` a moment of
    the RECEIVER's monotonic clock, learnt from its ping: clocks of two hosts are never compared. `promised_ttft_ms` is
    the prediction the choice of the region rests on. `attempt` names the attempt, uniquely to its issuer: by it the
    issuer asks later whether the region has it; "" of a build that does not ask.
    """

    audience: str
    entry_region: str
    issuer: str
    tenant: str
    lawful: Annotated[tuple[str, ...], Meta(max_length=LAWFUL_MAX)]
    epoch: int
    priority: int
    deadline_ms: float
    expires_ms: float
    decision_id: str
    promised_ttft_ms: float | None = None
    narrow: Annotated[tuple[_Narrow, ...], Meta(max_length=NARROW_LISTS_MAX)] = ()
    key: Annotated[str, Meta(max_length=KEY_CHARS_MAX)] = ""
    attempt: Annotated[str, Meta(max_length=ATTEMPT_CHARS_MAX)] = ""


_encode = msgspec.msgpack.Encoder().encode


def _b64(data: bytes) -> bytes:
    return b2a_base64(data, newline=False).translate(_TO_URL, b"=")


def _mac(primed: hmac.HMAC, signed: bytes) -> bytes:
    # A copy of a primed HMAC costs 2.9 us here, the one-shot hmac.digest 7: OpenSSL 3 sets the key up anew each time.
    mac = primed.copy()
    mac.update(signed)
    return _b64(mac.digest())


def _primed(keys: Mapping[str, bytes]) -> dict[str, hmac.HMAC]:
    if not keys:
        raise HopError("hop keys: none given; configure at least one key id with its secret")
    for kid, key in keys.items():
        if not _KID.fullmatch(kid):
            raise HopError(f"hop keys: key id {kid!r} must be 1 to 32 of A-Z a-z 0-9 _ -; rename it")
        if len(key) < KEY_BYTES_MIN:
            raise HopError(
                f"hop keys: key {kid!r} has {len(key)} bytes, at least {KEY_BYTES_MIN} are needed; "
                "make one with: openssl rand -base64 32"
            )
    return {kid: hmac.new(key, digestmod="sha256") for kid, key in keys.items()}


class HopSigner:
    """Signs for one pair of tiers. To rotate: give both the new key, make it active here, then drop the old one."""

    __slots__ = ("_head", "_key")
    VERSION: ClassVar[bytes] = b"v1"  # under the mac: no token of one kind passes for another

    def __init__(self, keys: Mapping[str, bytes], active_kid: str) -> None:
        known = _primed(keys)
        if active_kid not in known:
            raise HopError(f"hop keys: the active key id {active_kid!r} is not among {', '.join(sorted(known))}")
        self._key = known[active_kid]
        self._head = self.VERSION + b"." + active_kid.encode() + b"."

    def sign(self, claims: HopClaims) -> bytes:
        """The header's value. Raises HopError where the claims exceed the bounds a receiver keeps."""
        if len(claims.lawful) > LAWFUL_MAX:
            raise HopError(f"hop token: {len(claims.lawful)} lawful regions, at most {LAWFUL_MAX}; split the fleet")
        narrow = claims.narrow
        if narrow and (len(narrow) > NARROW_LISTS_MAX or max(map(len, narrow)) > NARROW_PLACES_MAX):
            raise HopError(
                f"hop token: narrow has more than {NARROW_LISTS_MAX} lists or {NARROW_PLACES_MAX} places in one; "
                "ask for fewer"
            )
        signed = self._head + _b64(_encode(claims))
        token = signed + b"." + _mac(self._key, signed)
        if len(token) > TOKEN_BYTES_MAX:
            raise HopError(f"hop token: {len(token)} bytes, at most {TOKEN_BYTES_MAX}; shorten names or narrow the law")
        return token


class HopVerifier:
    """Checks tokens addressed to one region. `keys` are all key ids still accepted."""

    __slots__ = ("_audience", "_keys")
    VERSION: ClassVar[bytes] = b"v1"
    DECODE: ClassVar[Callable[[bytes], HopClaims]] = msgspec.msgpack.Decoder(HopClaims).decode

    def __init__(self, keys: Mapping[str, bytes], audience: str) -> None:
        self._keys = {kid.encode(): key for kid, key in _primed(keys).items()}
        self._audience = audience

    def verify(self, token: bytes | None, clock_ms: float) -> HopClaims | Outcome:
        """The claims of a genuine, timely token for this region, or why not. `clock_ms` is monotonic, of this host."""
        if not token:
            return HOP_MISSING
        payload = self._genuine(token)
        if payload is None:
            return HOP_FORGED
        try:
            claims = type(self).DECODE(a2b_base64(payload.translate(_FROM_URL) + b"=="))
        except ValueError:  # binascii.Error and every msgspec error: signed by a build that speaks otherwise
            return HOP_FORGED
        promised = claims.promised_ttft_ms
        # Chained comparisons are false for NaN and infinities, which msgpack carries without complaint.
        if not 0.0 <= claims.deadline_ms <= BUDGET_MAX_MS or not (promised is None or 0.0 <= promised <= BUDGET_MAX_MS):
            return HOP_FORGED
        if claims.audience != self._audience:
            return HOP_MISADDRESSED
        if not 0.0 < claims.expires_ms - clock_ms <= LIFE_MAX_MS:
            return HOP_EXPIRED
        return claims

    def _genuine(self, token: bytes) -> bytes | None:
        """The encoded payload if the token's mac holds, else None."""
        if len(token) > TOKEN_BYTES_MAX or token.count(b".") != 3:
            return None
        version, kid, payload, mac = token.split(b".")
        key = self._keys.get(kid)
        if version != self.VERSION or key is None:
            return None
        # Texts are compared, not the bytes they stand for: base64's spare bits would let one mac be written four ways.
        if not hmac.compare_digest(_mac(key, token[: -len(mac) - 1]), mac):
            return None
        return payload
