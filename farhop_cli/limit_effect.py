"""What new limits would have done, by usage files, and whether the limited models have a price: before they are set.

Reads files and what balancers have reported; writes nothing.
"""

from __future__ import annotations

from datetime import datetime
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from farhop.accounts import segments
from farhop.accounts.prices import ANY, price_book
from farhop.accounts.usage import Reading
from farhop.balance.quota import Bucket, Quota
from farhop.config import ConfigError
from farhop.service.law import effect
from farhop.service.process.clock import wall
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
    if any(documents.kind_of(name) == "usd" for name in sizes):
        if prices is None:
            fail("--usage: costs need prices; give --prices, the price book, too")
    else:
        prices = None
    requests = _last_day(folder, tenant, key, model, prices, each_user=each_user)
    if not requests:
        return f"{folder} holds no usage of this, so refusals cannot be estimated"
    trial = _tried(requests, sizes)
    total = sum(trial.by_limit.values()) + trial.unpriced
    whys = [f"{n:,} by {documents.unit(name)}" for name, n in trial.by_limit.items() if n]
    why = ", ".join([*whys, f"{trial.unpriced:,} for want of a price"] if trial.unpriced else whys)
    asked = f"{len(requests):,} requests of the last day"
    refusals = f"would have refused {total:,} of the {asked}{f': {why}' if why else ''}"
    users = {one.user for one in requests}
    if not each_user:
        return refusals
    if users == {""}:
        return f"{refusals}; they name no user, so that all are one: users are written down with identity.user_salt"
    return f"{refusals}; of {len(trial.users):,} of {len(users):,} users"


class _Request(NamedTuple):
    """A request of the usage files. `amounts`: by _KINDS; a negative cost: it has no price."""

    began_at: float
    took_s: float
    user: str
    amounts: tuple[int, ...]


class _Trial(NamedTuple):
    """How many requests the limits would have refused: by each limit, for want of a price; and the users they hit."""

    by_limit: dict[str, int]
    unpriced: int
    users: set[str]


def _last_day(
    folder: Path, tenant: str, key: str, model: str, prices: Prices | None, *, each_user: bool
) -> list[_Request]:
    """The requests of the last day that were sent to a region, in the order in which they began. Without `prices` they
    cost nothing."""
    reading, found = Reading(), list[_Request]()
    for event in reading.events(line for _, line in segments.read(folder)):
        data = event.data
        if data.tenant == tenant and key in ("", data.key) and model in ("", data.model) and data.region:
            tokens = data.input_tokens or 0, data.output_tokens or 0
            ended_at, took_s = datetime.fromisoformat(event.time).timestamp(), data.duration_ms / 1e3
            cost = _cost(data, ended_at, prices) if prices is not None else 0
            user = data.user if each_user else ""
            found.append(_Request(ended_at - took_s, took_s, user, (1, *tokens, sum(tokens), 1, cost)))
    found.sort()
    return [one for one in found if one.began_at > found[-1].began_at - documents.DAY_S]


def _tried(requests: list[_Request], sizes: dict[str, int]) -> _Trial:
    """Play these requests, of which there is one at least, against the limits."""
    kinds = {name: _KINDS.index(documents.kind_of(name)) for name in sizes}
    first_at = requests[0].began_at
    buckets = {one.user: {name: Bucket(_quota(name, n), first_at) for name, n in sizes.items()} for one in requests}
    by_limit, unpriced, users = dict.fromkeys(sizes, 0), 0, set[str]()
    ends = list[tuple[float, str]]()  # of requests under way
    for began_at, took_s, user, amounts in requests:
        if amounts[-1] < 0:
            unpriced += 1
            continue
        while ends and ends[0][0] <= began_at:
            _, whose = heappop(ends)
            if "concurrency" in sizes:
                buckets[whose]["concurrency"].level -= 1
        own = buckets[user].items()
        short = next((name for name, bucket in own if not bucket.fits(amounts[kinds[name]], began_at)), None)
        if short is not None:
            by_limit[short] += 1
            users.add(user)
            continue
        for name, bucket in own:
            bucket.level += amounts[kinds[name]]
        heappush(ends, (began_at + took_s, user))
    return _Trial(by_limit, unpriced, users)


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
