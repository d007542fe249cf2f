"""How clients learn about limits: headers of every answer, and refusals that say when to try again.

In the form of OpenAI and draft-ietf-httpapi-ratelimit-headers-11. Never decides whether a request may go on.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING

from farhop.accounts.money import usd
from farhop.balance import outcome
from farhop.relay import answers
from farhop.service.limits.match import CONCURRENCY, HEADER_NAMES, INPUT, MONEY, OUTPUT, REQUESTS, TOKENS

if TYPE_CHECKING:
    from farhop.relay.answers import Reply
    from farhop.service.limits.match import Matched

SPANS_MAX = 1024  # lengths of time in whole seconds, as clients are told them, remembered
HEADERS_S = 0.05  # between two looks at what clients are told is left

_UNITS = {
    REQUESTS: "requests", INPUT: "input tokens", OUTPUT: "output tokens", TOKENS: "tokens", CONCURRENCY: "requests",
    MONEY: "USD",
}  # fmt: skip
_NO_MONEY = "insufficient_quota"
_PERIODS = {60: "per minute", 86_400: "per day", 2_592_000: "per 30 days", 0: "at once"}


def refusal(
    matched: Matched, kind: int, size: int, period: int, n: int, retry_s: float | None, now: float,
    *, used_up: bool = True, largest: int | None = None,
) -> Reply:  # fmt: skip
    """The refusal (429). `retry_s` None: the request would never fit, as one request may take no more than `largest`.
    If the money is `used_up`, clients should not retry automatically; if it merely was not lent in time, they may."""
    money = kind == MONEY
    size_text, n_text, uses = (usd(size), usd(n), "cost") if money else (str(size), str(n), "use")
    limit = f"{size_text} {_UNITS[kind]} {_PERIODS[period]}"
    type_, code = (_NO_MONEY, _NO_MONEY) if money else (HEADER_NAMES[kind], "")
    matched.headers_at = -inf  # it is to say what it is refused for
    extra = headers(matched, now)
    if retry_s is None:
        if largest is not None and largest < size:
            limit += f", of which one request may take {largest}"
        detail = f"request too large: it may {uses} {n_text} {_UNITS[kind]}, and the limit is {limit}; ask for less"
        extra += b"x-should-retry: false\r\n"
        return answers.refusal(outcome.RATE_LIMITED, detail, extra=extra, kind=type_, code=code)
    needs = f", and this request may {uses} {n_text}" if period else ""
    what = ("budget used up" if used_up else "budget not lent in time") if money else "rate limit reached"
    detail = f"{what}: {limit}{needs}; try again in {span(max(1.0, retry_s))}"
    extra += b"retry-after-ms: %d\r\nx-should-retry: %b\r\n" % (
        ceil(retry_s * 1e3), b"false" if money and used_up else b"true"
    )  # fmt: skip
    return answers.refusal(outcome.RATE_LIMITED, detail, retry_after_s=retry_s, extra=extra, kind=type_, code=code)


def headers(matched: Matched, now: float) -> bytes:
    """The headers of OpenAI and of draft-ietf-httpapi-ratelimit-headers-11, for the tightest limit on requests, on
    tokens and on concurrent requests. "Remaining" is what this balancer has plus what the root could lend when last
    asked; it is computed every HEADERS_S, as it costs more than everything else here."""
    if 0.0 <= now - matched.headers_at < HEADERS_S:
        return matched.headers
    tightest: list[int] = []  # list[int]() costs as much as the rest of a limit
    lines: list[int | bytes] = []
    states: list[int] = []
    for _, limits in matched.by_header:
        least, place = 2.0, 0
        for at, (size, _, holding) in enumerate(limits):
            left = holding.available + (int(holding.free) if holding.free > 0.0 else 0)
            left = size if left > size else left if left > 0 else 0  # two calls cost more than the rest
            if left < least * size:
                least, place, remaining = left / size, at, left
        tightest.append(place)
        lines.append(remaining)
        states.append(remaining)
        if period := limits[place][1]:
            reset_s = (1.0 - least) * period
            whole_s = ceil(reset_s)
            lines.append(_whole_span(whole_s) if reset_s >= 1.0 else b"%dms" % ceil(reset_s * 1e3))
            states.append(whole_s)
    form = matched.forms.get(which := tuple(tightest))
    if form is None:
        form = matched.forms[which] = _form(
            [(header, *limits[place][:2]) for (header, limits), place in zip(matched.by_header, tightest, strict=True)]
        )
    matched.headers = form % (*lines, *states)
    matched.headers_at = now
    return matched.headers


def _form(of: list[tuple[str, int, int]]) -> bytes:
    """The header lines of these limits, of a name, a size and a period each, with places for what is left of each and
    when it is whole again: in the lines, and once more in the states."""
    lines, policies, states = "", list[str](), list[str]()
    for name, size, period in of:
        lines += f"x-ratelimit-limit-{name}: {size}\r\nx-ratelimit-remaining-{name}: %d\r\n"
        if period:
            lines += f"x-ratelimit-reset-{name}: %b\r\n"
        # It is unknown when a concurrent request ends.
        policies.append(f'"{name}";q={size};w={period}' if period else f'"{name}";q={size};qu="concurrent-requests"')
        states.append(f'"{name}";r=%d;t=%d' if period else f'"{name}";r=%d')
    return f"{lines}ratelimit-policy: {', '.join(policies)}\r\nratelimit: {', '.join(states)}\r\n".encode()


@lru_cache(SPANS_MAX)
def _whole_span(seconds: int) -> bytes:
    return span(float(seconds)).encode()


def span(seconds: float) -> str:
    """A duration as OpenAI writes it: 120ms, 6s, 1m30s, 2h0m0s."""
    if seconds < 1.0:
        return f"{ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(ceil(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def lent_elsewhere(region: str) -> Reply:
    """429 if this region never gets units of the tenant's limits: retrying here cannot help."""
    detail = f"the limits of this tenant are held in region {region}: ask a global balancer, or that region"
    return answers.refusal(outcome.RATE_LIMITED, detail, extra=b"x-should-retry: false\r\n", kind="requests")


def not_priced(model: str, *, has_book: bool) -> Reply:
    """429 for a request under a limit in money whose model has no price."""
    held = "it has no price in the price book" if has_book else "no price book is configured here"
    detail = f"the use of `{model[:128]}` is limited in money, and {held}; ask for another model, or your operator"
    extra = b"x-should-retry: false\r\n"
    return answers.refusal(
        outcome.RATE_LIMITED, detail, param="model", extra=extra, kind=_NO_MONEY, code="model_not_priced"
    )
