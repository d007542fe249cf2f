"""`farhop drain`: sends a region's new work, or an entry's new clients, elsewhere for a time.

A region's drain is refused if a tenant would have no region left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from farhop.loose_json import as_dict, dicts
from farhop.service.law import effect
from farhop.store.contract import (
    ENTRY_DRAIN_PREFIX,
    OVERRIDE_PREFIX,
    REGION_PREFIX,
    entry_drain_key,
    override_key,
    parse_report_key,
)
from farhop.store.documents import overrides as documents
from farhop.store.documents.document import DocumentError
from farhop.store.documents.overrides import DrainOverride, EntryDrainOverride
from farhop_cli import fleet, leased
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.law import in_force
from farhop_cli.leased import Leased
from farhop_cli.options import duration, duration_s
from farhop_cli.setting import Item, Noun, Setting
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet, Status
    from farhop_cli.options import FleetOptions
    from topology.model import Topology


def put(
    region: str,
    why: str,
    by: str | None,
    length: str,
    over: str,
    force: bool,
    move_streams: bool,
    fleet_options: FleetOptions,
) -> int:
    """Drain the region; the exit code."""
    authorship = leased.authorship(why, by, length)
    over_s = duration_s("--over", over)
    document = DrainOverride(region=region, over_s=over_s, move_streams=move_streams, **authorship)
    try:
        value = documents.encode(document)
    except DocumentError as error:
        leased.refused(error, {"over_s": "--over: give 0s to 1h"})
        raise
    here = fleet_options.fleet(region)

    async def check(store: Store) -> None:
        statuses = await here.statuses()
        if here.topology is None:
            await _reporting(store, region)
        if not force:
            _not_the_last(await in_force(store, here.topology), statuses, region)

    async def effects(store: Store) -> Sequence[str]:
        topology = await in_force(store, here.topology)
        return effect.drained(topology, await here.statuses(), region) if topology is not None else ()

    under_way = "streams under way continue elsewhere at that pace, if they can" if move_streams else (
        "those under way finish"
    )  # fmt: skip
    notes = (f"new requests move away if the law allows another region; {under_way}",)
    made = Leased(override_key(region), {"region": region}, value, document.for_s, check, effects)
    return leased.put(NOUN, here, made, fleet_options, notes)


def put_entry(entry: str, why: str, by: str | None, length: str, over: str, fleet_options: FleetOptions) -> int:
    """Drain an entry of clients; the exit code."""
    authorship = leased.authorship(why, by, length)
    here = fleet_options.fleet()
    document = EntryDrainOverride(
        region=_home(here, entry), entry=entry, over_s=duration_s("--over", over), **authorship
    )
    try:
        value = documents.encode(document)
    except DocumentError as error:
        leased.refused(error, {"over_s": "--over: give 0s to 1h"})
        raise
    notes = ("DNS leaves it out of its answers, and its anycast routes drain and go; connected clients stay",)
    return leased.put(NOUN, here, Leased(document.key, {"entry": entry}, value, document.for_s), fleet_options, notes)


def unset_entry(entry: str, fleet_options: FleetOptions) -> int:
    """End an entry's drain; the exit code."""
    here = fleet_options.fleet()
    key = entry_drain_key(_home(here, entry), entry)
    notes = (f"entry {entry} takes new clients again, as DNS and its announcer let it",)
    return leased.unset(NOUN, here, key, {"entry": entry}, fleet_options, notes)


def _home(here: Fleet, entry: str) -> str:
    """The region of an entry. Ends the command if the map knows none of that name."""
    if here.topology is None:
        fail("--entry: only the map says which region it is in; give --config, or a context with a topology")
    fleet.known(entry, here.topology.entries, f'topology "{here.topology.name}"', "entry")
    return here.topology.entries[entry].region


def unset(region: str, fleet_options: FleetOptions) -> int:
    """End the drain; the exit code."""
    here = fleet_options.fleet(region)
    try:
        key = override_key(region)
    except ValueError:
        fail(f"{quoted(region)} is no region's name")
    notes = (f"{region} takes new requests again, a growing share of them",)
    return leased.unset(NOUN, here, key, {"region": region}, fleet_options, notes)


async def _reporting(store: Store, region: str) -> None:
    """Without a topology, a region is one that reports."""
    names = (parse_report_key(entry.key) for entry in await store.list(REGION_PREFIX))
    fleet.known(region, {name[0] for name in names if name is not None}, "those that report to this etcd")


def _not_the_last(topology: Topology | None, statuses: list[Status], region: str) -> None:
    """End the command if a tenant would be left without a region, or if that cannot be known."""
    if topology is None:
        _refuse(f"etcd alone does not show whether {region} is the last region of a tenant; give --config")
    if not statuses:
        _refuse(f"no global balancer answers, so it is unknown whether {region} is the last region of a tenant")
    left = effect.stranded_by(topology, statuses, region)
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        _refuse(f"{region} is the last region serving {', '.join(left[:5])}{more}")


def _refuse(text: str) -> NoReturn:
    fail(f"{text}; --force drains it anyway", NEGATIVE)


# -- the document


def _read(key: str, document: bytes) -> Setting:
    one: DrainOverride | EntryDrainOverride
    if key.startswith(ENTRY_DRAIN_PREFIX):
        one = documents.decode_entry_drain(document)
        item = Item({"entry": one.entry}, {"over_s": one.over_s})
    else:
        one = documents.decode_drain(document)
        kept = {"keep_share": one.keep_share} if one.keep_share else {}
        moves = {"move_streams": True} if one.move_streams else {}
        item = Item({"region": one.region}, {"over_s": one.over_s, **kept, **moves})
    return Setting((item,), one.author, one.why, one.at, one.until)


def _line(value: Any) -> str:
    names = ("over_s", "keep_share", "move_streams")
    over_s, keep, moves = (as_dict(value).get(name) for name in names)
    what = f"drained but for {keep:.0%} of new requests" if keep else "drained"
    what += " of streams, too" if moves else ""
    return f"{what}, over {duration(over_s)}" if over_s else f"{what}, at once"


async def _followed(here: Fleet, _region: str, before: Setting | None, after: Setting | None) -> int:
    one = after or before
    if one is None or not one.items:
        return len(here.admins)  # no balancer followed a document that cannot be read
    region = one.items[0].whom.get("region")
    if region is None:
        return len(here.admins)  # an entry's: `farhop dns` and `farhop anycast` follow it, not balancers
    return sum(_follows(status, region, after) for status in await here.statuses())


def _follows(status: Status, region: str, drain: Setting | None) -> bool:
    regions = dicts(status.get("regions"))
    shown = next((one for one in regions if one.get("region") == region), {}).get("override")
    if drain is None or not isinstance(shown, dict):
        return drain is None and shown is None
    return bool(shown.get("author") == drain.author and shown.get("why") == drain.why)


NOUN = Noun(
    "drain",
    OVERRIDE_PREFIX,
    "no region and no entry is drained",
    _read,
    _line,
    leased.all_balancers,
    _followed,
    beside=(ENTRY_DRAIN_PREFIX,),
)
