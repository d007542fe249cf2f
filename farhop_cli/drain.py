"""`farhop drain`: a region's new work goes elsewhere for a while. Refused where a tenant would have no region left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from farhop.store.contract import OVERRIDE_PREFIX, REGION_PREFIX, override_key, parse_report_key
from farhop.store.documents import overrides as documents
from farhop.store.documents.document import DocumentError
from farhop.store.documents.overrides import DrainOverride
from farhop_cli import effect, fleet, leased
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.law import in_force
from farhop_cli.options import duration, duration_s
from farhop_cli.standing import Item, Noun, Standing
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet, Status
    from farhop_cli.options import Where
    from topology.model import Topology


def put(region: str, why: str, by: str | None, length: str, over: str, force: bool, where: Where) -> int:
    """Drain the region; the exit code."""
    signature = leased.signature(why, by, length)
    document = DrainOverride(region=region, over_s=duration_s("--over", over), **signature)
    try:
        value = documents.encode(document)
    except DocumentError as error:
        leased.refused(error, {"over_s": "--over: give 0s to 1h"})
        raise
    here = where.fleet(region)

    async def check(store: Store) -> None:
        statuses = await here.statuses()
        if here.topology is None:
            await _reporting(store, region)
        if not force:
            _not_the_last(await in_force(store, here.topology), statuses, region)

    async def effects(store: Store) -> Sequence[str]:
        world = await in_force(store, here.topology)
        return effect.drained(world, await here.statuses(), region) if world is not None else ()

    notes = ("new requests move away where the law gives them another region; those under way finish",)
    return leased.put(
        NOUN, here, override_key(region), {"region": region}, value, document.for_s, where, check, notes, effects
    )


def unset(region: str, where: Where) -> int:
    """Take the drain back; the exit code."""
    here = where.fleet(region)
    try:
        key = override_key(region)
    except ValueError:
        fail(f"{quoted(region)} is no region's name")
    notes = (f"{region} takes new requests again, a growing share of them",)
    return leased.unset(NOUN, here, key, {"region": region}, where, notes)


async def _reporting(store: Store, region: str) -> None:
    """Without a topology, a region is one that reports."""
    names = (parse_report_key(entry.key) for entry in await store.list(REGION_PREFIX))
    fleet.known(region, {name[0] for name in names if name is not None}, "those that report to this etcd")


def _not_the_last(world: Topology | None, statuses: list[Status], region: str) -> None:
    """End the command if somebody would be left with nothing, or if nobody can tell."""
    if world is None:
        _refuse(f"etcd alone cannot tell whether {region} is the last region of a tenant; give --config")
    if not statuses:
        _refuse(f"no global balancer answers, so nobody can tell whether {region} is the last region of a tenant")
    left = effect.bereft(world, statuses, region)
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        _refuse(f"{region} is the last region serving {', '.join(left[:5])}{more}")


def _refuse(text: str) -> NoReturn:
    fail(f"{text}; --force drains it anyway", NEGATIVE)


# -- the document


def _read(_key: str, document: bytes) -> Standing:
    one = documents.decode_drain(document)
    item = Item({"region": one.region}, {"over_s": one.over_s})
    return Standing((item,), one.author, one.why, one.at, one.until)


def _line(says: Any) -> str:
    over_s = says.get("over_s") if isinstance(says, dict) else None
    return f"drained, over {duration(over_s)}" if over_s else "drained, at once"


async def _followed(here: Fleet, _region: str, before: Standing | None, after: Standing | None) -> int:
    one = after or before
    if one is None or not one.items:
        return len(here.admins)  # what could not be read nobody followed
    region = one.items[0].whom["region"]
    return sum(_says(status, region, after) for status in await here.statuses())


def _says(status: Status, region: str, drain: Standing | None) -> bool:
    regions = (one for one in status.get("regions") or [] if isinstance(one, dict))
    shown = next((one for one in regions if one.get("region") == region), {}).get("override")
    if drain is None or not isinstance(shown, dict):
        return drain is None and shown is None
    return bool(shown.get("author") == drain.author and shown.get("why") == drain.why)


NOUN = Noun("drain", OVERRIDE_PREFIX, "no region is drained", _read, _line, leased.everybody, _followed)
