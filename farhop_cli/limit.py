"""`farhop limit`: what tenants, their keys and their models may use, over the whole fleet.

All of a tenant's limits stand in one document, with the region that lends them out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from farhop.accounts import segments
from farhop.accounts.usage import Reading
from farhop.balance.quota import Bucket, Quota
from farhop.store.contract import LIMIT_PREFIX, limit_key
from farhop.store.documents import limits as documents
from farhop.store.documents.document import DocumentError
from farhop.store.documents.limits import NAMES, Limit, TenantLimits
from farhop_cli import region_document, setting
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.law import in_force
from farhop_cli.setting import UNREADABLE, Item, Noun, Setting, SettingChange
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import Where

_TENANTS = ("region", "safe_share", "safe")  # said of all of a tenant's limits at once


def set_limit(
    tenant: str, whose: tuple[str, str, bool], sizes: dict[str, int | None], home: str, safe_share: float | None,
    usage: Path | None, why: str, by: str | None, where: Where,
) -> int:  # fmt: skip
    """Limit a tenant, or a key or a model of it, or each of its users; the exit code. `whose`: key, model, whether of
    each user. Limits left out stay. In a dry run it is told what `usage`, a folder of usage files, says that they would
    have refused."""
    if usage is not None and not where.dry_run:
        fail("--usage: is for a dry run; give --dry-run, too")
    if usage is not None and not usage.is_dir():
        fail(f"--usage: {usage} is no folder; give what balancers have as usage.dir, or a copy of it")
    if not any(size is not None for size in sizes.values()) and not home and safe_share is None:
        options = ", ".join("--" + name.replace("_", "-") for name in NAMES)
        fail(f"give a limit: one of {options}")
    authorship = region_document.authorship(why, by)
    here, whom = where.fleet(), _whom(tenant, *whose)
    entries: list[str] = []

    async def check(store: Store) -> None:
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
        given = {name: size for name, size in sizes.items() if size is not None}
        kept = {name: size for name, size in old.items() if name in NAMES}
        if kept or given:
            items = [*(item for item in items if item.whom != whom), Item(whom, {**kept, **given})]
        return _encoded(tenant, items, shared, authorship)

    async def effects(_store: Store) -> Sequence[str]:
        given = {name: size for name, size in sizes.items() if size is not None}
        return (refused(usage, tenant, *whose[:2], given, each_user=whose[2]),) if usage is not None else ()

    notes = (f"lent out by {home}" if home else "requests under way are not disturbed",)
    asked = SettingChange(_key(tenant), "", whom, make, check=check, notes=notes, effects=effects)
    return setting.change(NOUN, here, asked, where)


def refused(folder: Path, tenant: str, key: str, model: str, sizes: dict[str, int], *, each_user: bool = False) -> str:
    """What limits would have refused of the last day in these usage files, by what was used in the end."""
    reading, used = Reading(), list[tuple[float, float, tuple[int, ...]]]()
    for event in reading.events(line for _, line in segments.read(folder)):
        data = event.data
        named = data.tenant == tenant and key in ("", data.key) and model in ("", data.model)
        if named and data.region:  # it was sent somewhere
            tokens = data.input_tokens or 0, data.output_tokens or 0
            took_s = data.duration_ms / 1e3
            used.append((datetime.fromisoformat(event.time).timestamp() - took_s, took_s, (1, *tokens, sum(tokens), 1)))
    if each_user:
        return "what limits of each user would have refused, usage does not tell"
    if not used:
        return f"{folder} holds no usage of this: nobody can say what it would have refused"
    used.sort()
    used = [one for one in used if one[0] > used[-1][0] - documents.DAY_S]
    kinds = ("requests", "input_tokens", "output_tokens", "tokens", "concurrency")
    buckets = [
        (name, kinds.index(documents.kind_of(name)), Bucket(_quota(name, n), used[0][0])) for name, n in sizes.items()
    ]
    by, ends = dict.fromkeys(sizes, 0), list[float]()  # of those under way
    for at, took_s, amounts in used:
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
    total = sum(by.values())
    why = ", ".join(f"{n:,} by {_words(name)}" for name, n in by.items() if n)
    return f"would have refused {total:,} of the {len(used):,} requests of the last day{f': {why}' if why else ''}"


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
    parts = [f"{value[name]:,} {_words(name)}" for name in NAMES if name in value]
    safe = value.get("safe_share")
    own = f", {safe:.4g} of it split among {len(value.get('safe') or ())} balancers" if safe else ""
    return f"{', '.join(parts) or 'nothing'}; lent out by {value.get('region')}{own}"


def _words(name: str) -> str:
    return name.replace("_", " ") if documents.period_s(name) else "requests at once"


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
