"""The limits that apply to a tenant's key and model, and the most of each kind that a request may use.

Never takes anything: it only says how much to take.
"""

from __future__ import annotations

import asyncio
from math import ceil, inf
from typing import TYPE_CHECKING

from farhop.balance.estimate.estimates import BYTES_PER_TOKEN
from farhop.balance.quota_holder import Holder

if TYPE_CHECKING:
    from farhop.accounts.money import Rates
    from farhop.balance.machine import Request
    from farhop.balance.quota_holder import Holding

OUTPUT_TOKENS = 4096  # reserved for a request that does not say how long its answer may be, until others were seen
OUTPUT_FLOOR = 64
_LEARN = 0.1
REQUESTS, INPUT, OUTPUT, TOKENS, CONCURRENCY, MONEY = range(6)
Amounts = tuple[int, int, int, int, int, int]  # by kind, as above
KINDS = {
    "requests": REQUESTS, "input_tokens": INPUT, "output_tokens": OUTPUT, "tokens": TOKENS, "concurrency": CONCURRENCY,
    "usd": MONEY,
}  # fmt: skip
HEADER_NAMES = {
    REQUESTS: "requests", INPUT: "tokens", OUTPUT: "tokens", TOKENS: "tokens", CONCURRENCY: "concurrency",
    MONEY: "micro-usd",
}  # fmt: skip


class Lender:
    """The root of a region, as a balancer sees it. `silent_at`: when it was asked in vain, -inf since it answered."""

    def __init__(self, region: str) -> None:
        self.region, self.holder = region, Holder()
        self.wake, self.waiters = asyncio.Event(), list[asyncio.Future[None]]()
        self.silent_at = -inf


class Matched:
    """The limits of one tenant's key and model: (kind, units per period, period in seconds, holding). `rates`: the
    model's prices, if one of the limits is in money; `unpriced` is that limit's holding, if the model has no price."""

    __slots__ = (
        "by_header",
        "forms",
        "headers",
        "headers_at",
        "lender",
        "of",
        "output_tokens",
        "rates",
        "tokens_per_s",
        "unpriced",
        "until_s",
    )  # fmt: skip

    def __init__(self, lender: Lender, of: tuple[tuple[int, int, int, Holding], ...]) -> None:
        self.lender, self.of = lender, of
        self.rates: Rates | None = None
        self.unpriced: Holding | None = None
        self.until_s: float | None = None  # of the wall clock, when its price may be another; None: it matters not
        self.headers, self.headers_at = b"", -inf  # to clients, and when that was made
        named: dict[str, list[tuple[int, int, Holding]]] = {}
        for kind, size, period, holding in of:
            named.setdefault(HEADER_NAMES[kind], []).append((size, period, holding))
        self.by_header = tuple(named.items())
        self.forms: dict[tuple[int, ...], bytes] = {}  # by which limits of each name in headers are the tightest
        self.output_tokens = -1.0  # of an answer, on average; below 0: none was seen
        self.tokens_per_s = 0.0  # of the streams of one request, on average

    def learn(self, request: Request, output: int, seconds: float) -> None:
        """Learn from an answer: its tokens, and the seconds from its first to its last byte."""
        each, seen = output / request.answers, self.output_tokens
        self.output_tokens = each if seen < 0 else seen + _LEARN * (each - seen)
        if request.stream and seconds > 0.0 and output >= OUTPUT_FLOOR:
            seen, known = output / seconds, self.tokens_per_s
            self.tokens_per_s = known + _LEARN * (seen - known) if known else seen

    def amounts(self, request: Request) -> Amounts:
        """The most that a request may use of each kind."""
        rates, answers = self.rates, request.answers
        prompt = ceil(request.prompt_bytes / BYTES_PER_TOKEN)
        output = request.max_tokens
        if output is not None:
            output *= answers
        else:
            seen = self.output_tokens
            output = OUTPUT_TOKENS if seen < 0 else min(OUTPUT_TOKENS, max(OUTPUT_FLOOR, 2 * ceil(seen)))
            output *= answers
            for kind, _, _, holding in self.of:
                largest = int(holding.largest)  # below the limit's size, if a safe share is reserved
                if kind in (OUTPUT, TOKENS):
                    output = min(output, max(1, largest - prompt * (kind == TOKENS)))
                elif kind == MONEY and rates is not None:
                    output = min(output, max(1, rates.output_within(largest, prompt)))
        return 1, prompt, output, prompt + output, 1, 0 if rates is None else rates.at_most(prompt, output)
