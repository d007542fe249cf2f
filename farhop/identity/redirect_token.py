"""The token in a redirect's URL: from it alone a region learns the caller, the law, and the balancer that decided.

It is made as the hop token is, with the same keys, but of another kind: neither is accepted as the other. It is good
for one use, within a minute, of the path that it names, at the one process that it names: that process counts the uses,
and the token expires by its clock. It names the caller and the limits of the request, never its contents: these are
judged by the region that serves it. Invariants: a token is removed from a request's target before anything else sees
the target; no use is forgotten before its token has expired, and a use that cannot be remembered is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import msgspec

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.identity.api_keys import PRIORITY_MAX
from farhop.identity.hop_token import HopClaims, HopSigner, HopVerifier

PARAMETER = b"farhop-pass"
HEADER = b"x-farhop-pass"  # carries it once it is removed from the target; a client may send it this way, too
LIFE_MS = 30_000.0  # it is used at once; this covers a slow connect and the error of the receiver's clock
_LIFE_MAX_MS = 60_000.0
USES_MAX = 65_536  # some 10 MB; 1,000 redirects a second, each remembered for a minute, do not fill it

_OUTCOMES = {
    outcome.HOP_FORGED: outcome.REDIRECT_TOKEN_FORGED,
    outcome.HOP_MISSING: outcome.REDIRECT_TOKEN_FORGED,
    outcome.HOP_EXPIRED: outcome.REDIRECT_TOKEN_OVER,
    outcome.HOP_MISADDRESSED: outcome.REDIRECT_TOKEN_MISADDRESSED,
}


class RedirectToken(HopClaims, frozen=True, array_like=True):
    """What it says beyond a hop token: the tenant's `key`, and `holder`, the one process that may take it. `key_id`: of
    a key that was issued, and `models`, all that it is for; `user`, `priority_max` and `explain` as a Principal's;
    `ttft_ms` as a hop token has it. `path`: the only one that it is for (a key may be for some alone); "" of a
    build that does not say."""

    key: str = ""
    holder: str = ""
    key_id: str = ""
    models: tuple[str, ...] = ()
    user: str = ""
    priority_max: int = PRIORITY_MAX
    ttft_ms: float | None = None
    path: str = ""
    explain: bool = False


def holder(instance: str, incarnation: int) -> str:
    """The name of one process of a region. After a restart it is another one, which knows of no used tokens."""
    return f"{instance}/{incarnation}"


class RedirectTokenSigner(HopSigner):
    """Signs redirect tokens. See HopSigner."""

    __slots__ = ()
    VERSION: ClassVar[bytes] = b"r2"
    WITH_BODY: ClassVar[bytes] = VERSION  # there is none: the body is not known yet


class RedirectTokenVerifier(HopVerifier):
    """Checks those addressed to one process of one region, and counts their uses."""

    __slots__ = ("_holder",)
    VERSION: ClassVar[bytes] = b"r2"
    WITH_BODY: ClassVar[bytes | None] = None
    DECODE: ClassVar[Callable[[memoryview], HopClaims]] = msgspec.msgpack.Decoder(RedirectToken).decode
    LIFE_MAX_MS: ClassVar[float] = _LIFE_MAX_MS
    USED: ClassVar[Outcome] = outcome.REDIRECT_TOKEN_OVER

    def __init__(self, keys: Mapping[str, bytes], audience: str, holder: str, uses_max: int = USES_MAX) -> None:
        super().__init__(keys, audience, uses_max)
        self._holder = holder

    def use(self, token: bytes | None, clock_ms: float, request: bytes = b"") -> RedirectToken | Outcome:
        """The claims of a genuine, timely token for this process at its first use, or why not. `request` is the path
        that is asked for: others may follow a redirect with a query that is spelled otherwise."""
        claims = self.verify(token, clock_ms)
        if isinstance(claims, Outcome):
            return _OUTCOMES[claims]
        assert isinstance(claims, RedirectToken)  # DECODE makes no other
        if claims.holder != self._holder or (claims.path and claims.path.encode() != request):
            return outcome.REDIRECT_TOKEN_MISADDRESSED
        assert token is not None  # it was verified
        return self._uses.take(token.rpartition(b".")[2], claims.expires_ms, clock_ms, self.USED) or claims


def split_token(target: bytes) -> tuple[bytes, bytes | None]:
    """A request's target without the token, and the token; None without one, b"" (which no key signs) for several."""
    path, _, query = target.partition(b"?")
    if PARAMETER not in query:
        return target, None
    mark = PARAMETER + b"="
    fields = query.split(b"&")
    found = [field[len(mark) :] for field in fields if field.startswith(mark)]
    rest = b"&".join(field for field in fields if not field.startswith(mark))
    token = (found[0] if len(found) == 1 else b"") if found else None
    return (path + b"?" + rest if rest else path), token


def joined(base: str, target: bytes, token: bytes) -> str:
    """The URL at which a client brings its token."""
    mark = "&" if b"?" in target else "?"
    return f"{base}{target.decode('latin-1')}{mark}{PARAMETER.decode()}={token.decode()}"
