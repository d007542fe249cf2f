"""What new limits would have done, by usage files, and whether the limited models have a price: before they are set.

Reads files and what balancers have reported; writes nothing.
"""

from __future__ import annotations

from datetime import datetime
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from farhop.accounts import segments
from farhop.accounts.prices import ANY, price_book
from farhop.accounts.usage import Reading
from farhop.balance.quota import Bucket, Quota
from farhop.config import ConfigError
from farhop.service import effect
from farhop.service.clock import wall
from farhop.store.documents import limits as documents
from farhop_cli.exits import fail, first_of, warn
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farhop.accounts.prices import Prices
    from farhop.accounts.usage import Data
    from farhop_cli.fleet import Status

UNPRICED_SHOWN = 8


def prices_in(path: Path) -> Prices:
    """The price book in a file. Ends the command if it is invalid."""
    try:
        return price_book(path)
    except ConfigError as error:
        fail(f"--prices: {first_of(error)}")


def check_priced(model: str, prices: Prices | None, statuses: Sequence[Status]) -> None:
    """Fail if money cannot be counted: each balancer that answers must have a price for the model, or any price if the
    limit is on all models; so must the given book if none answers.
    """
    books = [(_who(one), (one.get("limits") or {}).get("prices"), effect.serving(one)) for one in statuses]
    if not books:
        if prices is None:
            fail("no balancer answers, to say which models have a price; give --prices, the price book that they have")
        epoch = prices.of(prices.epoch_at(wall().timestamp()))
        books = [("--prices", {"models": list(epoch.models), "more": False} if epoch is not None else None, {})]
    unpriced: set[str] = set()
    for who, book, served in books:
        if not book:
            fail(f"{who}: no prices are in force there; give all balancers a price book, as usage.prices")
        if book["more"] or ANY in book["models"]:
            continue
        if model and model not in book["models"]:
            fail(f"--model: {quoted(model)} has no price at {who}; add it to the price book, usage.prices")
        unpriced |= served.keys() - set(book["models"])
    if unpriced and not model:
        names = ", ".join(sorted(unpriced)[:UNPRICED_SHOWN])
        warn(f"requests for {names} will be refused: no price; add one to the price book, usage.prices")


def _who(status: Status) -> str:
    return "/".join(str(status[name]) for name in ("region", "instance") if status.get(name))


_KINDS = ("requests", "input_tokens", "output_tokens", "tokens", "concurrency", "usd")


def refused(
    folder: Path, tenant: str, key: str, model: str, sizes: dict[str, int], *, each_user: bool = False,
    prices: Prices | None = None,
) -> str:  # fmt: skip
    """What limits would have refused of the last day in these usage files, by actual usage, at the prices of the time.
    For each user: requests without a user count as one user's.
    """
    reading, used, unpriced = Reading(), list[tuple[float, float, str, tuple[int, ...]]](), 0
    money = any(documents.kind_of(name) == "usd" for name in sizes)
    if money and prices is None:
        fail("--usage: costs need prices; give --prices, the price book, too")
    for event in reading.events(line for _, line in segments.read(folder)):
        data = event.data
        named = data.tenant == tenant and key in ("", data.key) and model in ("", data.model)
        if named and data.region:  # it was sent to a region
            tokens = data.input_tokens or 0, data.output_tokens or 0
            ended_at, took_s = datetime.fromisoformat(event.time).timestamp(), data.duration_ms / 1e3
            cost = _cost(data, ended_at, prices) if money and prices is not None else 0
            user = data.user if each_user else ""
            used.append((ended_at - took_s, took_s, user, (1, *tokens, sum(tokens), 1, cost)))
    if not used:
        return f"{folder} holds no usage of this, so refusals cannot be estimated"
    used.sort()
    used = [one for one in used if one[0] > used[-1][0] - documents.DAY_S]
    kinds = {name: _KINDS.index(documents.kind_of(name)) for name in sizes}
    buckets = {user: {name: Bucket(_quota(name, n), used[0][0]) for name, n in sizes.items()} for _, _, user, _ in used}
    by, ends = dict.fromkeys(sizes, 0), list[tuple[float, str]]()  # of requests under way
    hit = set[str]()
    for at, took_s, user, amounts in used:
        if amounts[-1] < 0:
            unpriced += 1
            continue
        while ends and ends[0][0] <= at:
            _, whose = heappop(ends)
            if "concurrency" in sizes:
                buckets[whose]["concurrency"].level -= 1
        mine = buckets[user]
        short = next((name for name, bucket in mine.items() if not bucket.fits(amounts[kinds[name]], at)), None)
        if short is not None:
            by[short] += 1
            hit.add(user)
            continue
        for name, bucket in mine.items():
            bucket.level += amounts[kinds[name]]
        heappush(ends, (at + took_s, user))
    total = sum(by.values()) + unpriced
    whys = [f"{n:,} by {documents.unit(name)}" for name, n in by.items() if n]
    why = ", ".join([*whys, f"{unpriced:,} for want of a price"] if unpriced else whys)
    refusals = f"would have refused {total:,} of the {len(used):,} requests of the last day{f': {why}' if why else ''}"
    if not each_user:
        return refusals
    if buckets.keys() == {""}:
        return f"{refusals}; they name no user, so that all are one: users are written down with identity.user_salt"
    return f"{refusals}; of {len(hit):,} of {len(buckets):,} users"


def _cost(data: Data, at_s: float, prices: Prices) -> int:
    """Microdollars; below 0 if it has no price. Records made without a price book are priced by when they ended."""
    rates = prices.rates(data.model, at_s, data.price_epoch or None)
    if rates is None:
        return -1
    cached = data.cached_tokens or 0
    return rates.micro_usd(max(0, (data.input_tokens or 0) - cached), cached, data.output_tokens or 0)


def _quota(name: str, n: int) -> Quota:
    period = documents.period_s(name)
    return Quota(n, n / period if period else 0.0)
