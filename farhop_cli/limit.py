"""`farhop limit`: what tenants, their keys and their models may use, over the whole fleet.

All of a tenant's limits stand in one document, with the region that lends them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from farhop.accounts import segments
from farhop.accounts.usage import ANY, Reading, price_book, usd
from farhop.balance.quota import Bucket, Quota
from farhop.config import ConfigError
from farhop.service import effect
from farhop.service.clock import wall
from farhop.store.contract import LIMIT_PREFIX, limit_key
from farhop.store.documents import limits as documents
from farhop.store.documents.document import DocumentError
from farhop.store.documents.limits import NAMES, Limit, TenantLimits
from farhop_cli import region_document, setting
from farhop_cli.exits import NEGATIVE, fail, warn
from farhop_cli.law import in_force
from farhop_cli.setting import UNREADABLE, Item, Noun, Setting, SettingChange
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farhop.accounts.usage import Data, Prices
    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet, Status
    from farhop_cli.options import Where

UNPRICED_SHOWN = 8
MICRO_ERROR = 1e-3  # of a float that was written as whole microdollars
_TENANTS = ("region", "safe_share", "safe")  # said of all of a tenant's limits at once


@dataclass(frozen=True)
class Against:
    """Files that new limits are held against: a folder of usage files, in a dry run; a price book."""

    usage: Path | None
    prices: Path | None


def micro_usd(option: str, given: float | None) -> int | None:
    """USD in whole microdollars."""
    if given is None:
        return None
    if abs(given * 1e6 - round(given * 1e6)) > MICRO_ERROR:
        fail(f"{option}: {given} is no amount of whole microdollars; give one such as 50 or 0.25")
    return round(given * 1e6)


def set_limit(
    tenant: str, whose: tuple[str, str, bool], sizes: dict[str, int | None], home: str, safe_share: float | None,
    against: Against, why: str, by: str | None, where: Where,
) -> int:  # fmt: skip
    """Limit a tenant, or a key or a model of it, or each of its users; the exit code. `whose`: key, model, whether of
    each user. Limits left out stay. In a dry run it is told what usage says that they would have refused. Money is not
    limited where it could not be counted."""
    usage, prices = against.usage, _prices(against.prices)
    if usage is not None and not where.dry_run:
        fail("--usage: is for a dry run; give --dry-run, too")
    if usage is not None and not usage.is_dir():
        fail(f"--usage: {usage} is no folder; give what balancers have as usage.dir, or a copy of it")
    if not any(size is not None for size in sizes.values()) and not home and safe_share is None:
        options = ", ".join("--" + name.removeprefix("micro_").replace("_", "-") for name in NAMES)
        fail(f"give a limit: one of {options}")
    authorship = region_document.authorship(why, by)
    here, whom = where.fleet(), _whom(tenant, *whose)
    entries: list[str] = []
    given = {name: size for name, size in sizes.items() if size is not None}

    async def check(store: Store) -> None:
        if any(documents.kind_of(name) == "usd" for name in given):
            _check_priced(whose[1], prices, await here.statuses())
        if safe_share:
            entries.extend(sorted({f"{one['region']}/{one['instance']}" for one in await here.statuses()}))
        world = await in_force(store, here.topology)
        if world is None:
            return
        if tenant not in world.tenants:
            fail(f"TENANT: {quoted(tenant)} is no tenant of topology {quoted(world.name)}")
        if home and home not in world.regions:
            fail(f"--home: no region {quoted(home)}; there is {', '.join(sorted(world.regions)[:8])}")

    def make(before: Setting | None) -> bytes:
        if before is UNREADABLE:
            fail(f"what stands for {tenant} cannot be read; take it away with `farhop limit unset`", NEGATIVE)
        items = list(before.items) if before is not None else []
        shared = {name: value for item in items[:1] for name, value in item.value.items() if name in _TENANTS}
        if home:
            shared["region"] = home
        if not shared.get("region"):
            fail("--home: is needed for a tenant's first limit: the region that lends out what it may use")
        if safe_share is not None:
            if safe_share and not entries:
                fail("--safe-share: no global balancer answers, to have a part of it")
            shared |= {"safe_share": safe_share, "safe": entries if safe_share else []}
        old: dict[str, Any] = next((item.value for item in items if item.whom == whom), {})
        kept = {name: size for name, size in old.items() if name in NAMES}
        if kept or given:
            items = [*(item for item in items if item.whom != whom), Item(whom, {**kept, **given})]
        return _encoded(tenant, items, shared, authorship)

    async def effects(_store: Store) -> Sequence[str]:
        if usage is None:
            return ()
        return (refused(usage, tenant, *whose[:2], given, each_user=whose[2], prices=prices),)

    notes = (f"lent out by {home}" if home else "requests under way are not disturbed",)
    asked = SettingChange(_key(tenant), "", whom, make, check=check, notes=notes, effects=effects)
    return setting.change(NOUN, here, asked, where)


def _prices(path: Path | None) -> Prices | None:
    try:
        return price_book(path) if path is not None else None
    except ConfigError as error:
        fail(f"--prices: {error}")


def _check_priced(model: str, prices: Prices | None, statuses: Sequence[Status]) -> None:
    """Fail where money could not be counted: each balancer that answers must have a price for the model, or any price
    where the limit is on all models; so must the given book where none answers."""
    told = [(_who(one), (one.get("limits") or {}).get("prices"), effect.serving(one)) for one in statuses]
    if not told:
        if prices is None:
            fail("no balancer answers, to say which models have a price; give --prices, the price book that they have")
        epoch = prices.of(prices.epoch_at(wall().timestamp()))
        told = [("--prices", {"models": list(epoch.models), "more": False} if epoch is not None else None, {})]
    unpriced: set[str] = set()
    for who, book, served in told:
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


def refused(
    folder: Path, tenant: str, key: str, model: str, sizes: dict[str, int], *, each_user: bool = False,
    prices: Prices | None = None,
) -> str:  # fmt: skip
    """What limits would have refused of the last day in these usage files, by what was used in the end, at the prices
    that it was used at."""
    reading, used, unpriced = Reading(), list[tuple[float, float, tuple[int, ...]]](), 0
    money = any(documents.kind_of(name) == "usd" for name in sizes)
    if money and prices is None:
        fail("--usage: what it cost is told by prices; give --prices, the price book, too")
    for event in reading.events(line for _, line in segments.read(folder)):
        data = event.data
        named = data.tenant == tenant and key in ("", data.key) and model in ("", data.model)
        if named and data.region:  # it was sent somewhere
            tokens = data.input_tokens or 0, data.output_tokens or 0
            ended_at, took_s = datetime.fromisoformat(event.time).timestamp(), data.duration_ms / 1e3
            cost = _cost(data, ended_at, prices) if money and prices is not None else 0
            used.append((ended_at - took_s, took_s, (1, *tokens, sum(tokens), 1, cost)))
    if each_user:
        return "what limits of each user would have refused, usage does not tell"
    if not used:
        return f"{folder} holds no usage of this: nobody can say what it would have refused"
    used.sort()
    used = [one for one in used if one[0] > used[-1][0] - documents.DAY_S]
    kinds = ("requests", "input_tokens", "output_tokens", "tokens", "concurrency", "usd")
    buckets = [
        (name, kinds.index(documents.kind_of(name)), Bucket(_quota(name, n), used[0][0])) for name, n in sizes.items()
    ]
    by, ends = dict.fromkeys(sizes, 0), list[float]()  # of those under way
    for at, took_s, amounts in used:
        if amounts[-1] < 0:
            unpriced += 1
            continue
        while ends and ends[0] <= at:
            heappop(ends)
            for name, _, bucket in buckets:
                bucket.level -= name == "concurrency"
        short = next((name for name, kind, bucket in buckets if not bucket.fits(amounts[kind], at)), None)
        if short is not None:
            by[short] += 1
            continue
        for _, kind, bucket in buckets:
            bucket.level += amounts[kind]
        heappush(ends, at + took_s)
    total = sum(by.values()) + unpriced
    whys = [f"{n:,} by {_words(name)}" for name, n in by.items() if n]
    why = ", ".join([*whys, f"{unpriced:,} for want of a price"] if unpriced else whys)
    return f"would have refused {total:,} of the {len(used):,} requests of the last day{f': {why}' if why else ''}"


def _cost(data: Data, at_s: float, prices: Prices) -> int:
    """Microdollars; below 0 where it has no price. Records made without a price book are priced by when they ended."""
    rates = prices.rates(data.model, at_s, data.price_epoch or None)
    if rates is None:
        return -1
    cached = data.cached_tokens or 0
    return rates.micro_usd(max(0, (data.input_tokens or 0) - cached), cached, data.output_tokens or 0)


def _quota(name: str, n: int) -> Quota:
    period = documents.period_s(name)
    return Quota(n, n / period if period else 0.0)


def unset(tenant: str, whose: tuple[str, str, bool] | None, why: str, by: str | None, where: Where) -> int:
    """Take a limit away, or all of a tenant's (None), readable or not; the exit code."""
    authorship = region_document.authorship(why, by)
    whom = {"tenant": tenant} if whose is None else _whom(tenant, *whose)

    def make(before: Setting | None) -> bytes | None:
        if before is UNREADABLE and whose is not None:
            fail(f"what stands for {tenant} cannot be read; give --all to unset it all", NEGATIVE)
        items = list(before.items) if before is not None else []
        left = [item for item in items if whose is not None and item.whom != whom]
        if before is not UNREADABLE and len(left) == len(items):
            fail(f"{setting.title(whom)}: no limit stands there; nothing was changed", NEGATIVE)
        shared = {name: value for item in items[:1] for name, value in item.value.items() if name in _TENANTS}
        return _encoded(tenant, left, shared, authorship) if left else None

    back = (f"{setting.title(whom)}: not limited",)
    return setting.change(NOUN, where.fleet(), SettingChange(_key(tenant), "", whom, make, notes=back), where)


def _whom(tenant: str, key: str, model: str, each_user: bool) -> dict[str, str]:
    key, model = region_document.named("--key", key), region_document.named("--model", model)
    more = {"key": key, "model": model, "user": "each" if each_user else ""}
    return {"tenant": tenant, **{name: word for name, word in more.items() if word}}


def _key(tenant: str) -> str:
    try:
        return limit_key(tenant)
    except ValueError:
        fail(f"TENANT: {quoted(tenant)} is no tenant's name")


def _encoded(tenant: str, items: Sequence[Item], shared: dict[str, Any], by: Any) -> bytes:
    try:
        limits = tuple(
            Limit(
                key=item.whom.get("key", ""), model=item.whom.get("model", ""), each_user="user" in item.whom,
                **{name: size for name, size in item.value.items() if name in NAMES},
            )
            for item in items
        )  # fmt: skip
        one = TenantLimits(
            tenant=tenant, home=shared["region"], limits=limits, author=by.author, why=by.why, at=by.at,
            safe_share=shared.get("safe_share", 0.0), safe=tuple(shared.get("safe", ())),
            seq=int(datetime.now(UTC).timestamp()) - 1_600_000_000,
        )  # fmt: skip
        return documents.encode(one)
    except DocumentError as error:
        fail(f"{tenant}: the limits would be refused: {error}", NEGATIVE)


def _read(_place: str, document: bytes) -> Setting:
    one = documents.decode(document)
    shared = {"region": one.home, **({"safe_share": one.safe_share, "safe": list(one.safe)} if one.safe else {})}
    items = [
        Item(_whom(one.tenant, limit.key, limit.model, limit.each_user), {**limit.sizes(), **shared})
        for limit in one.limits
    ]
    return Setting(tuple(items), one.author, one.why, one.at)


def _line(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    parts = [
        f"{usd(value[name]) if documents.kind_of(name) == 'usd' else format(value[name], ',')} {_words(name)}"
        for name in NAMES if name in value
    ]  # fmt: skip
    safe = value.get("safe_share")
    own = f", {safe:.4g} of it split among {len(value.get('safe') or ())} balancers" if safe else ""
    return f"{', '.join(parts) or 'nothing'}; lent out by {value.get('region')}{own}"


def _words(name: str) -> str:
    return (
        name.removeprefix("micro_").replace("_", " ").replace("usd", "USD")
        if documents.period_s(name) else "requests at once"
    )  # fmt: skip


def _everybody(here: Fleet, _region: str) -> int:
    return len(here.admins)


async def _followed(here: Fleet, _region: str, before: Setting | None, after: Setting | None) -> int:
    at = after.at.isoformat() if after is not None and after.at is not None else None
    tenants = {item.whom["tenant"] for one in (after, before) if one is not None for item in one.items[:1]}
    return sum(_says(status, tenants, at) for status in await here.statuses())


def _says(status: Any, tenants: set[str], at: str | None) -> bool:
    shown = (status.get("limits") or {}).get("tenants")
    return isinstance(shown, dict) and all(shown.get(tenant) == at for tenant in tenants)


NOUN = Noun("limit", LIMIT_PREFIX, "no tenant is limited", _read, _line, _everybody, _followed)
