"""`farhop drain` and `farhop undrain`: an operator's word about a region, written to etcd under a lease of its length.

Never touches a balancer: all of them follow etcd. Every write is a compare-and-set, so that two operators at once
cannot overwrite each other unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import re
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

from farhop.store import override as words
from farhop.store.contract import LAW_KEY, REGION_PREFIX, Conflict, Entry, StoreError, override_key, parse_report_key
from farhop.store.envelope import KEY_TEXT_MAX, NO_KEYS, EnvelopeError, Signer
from farhop.store.hubs import store_of, unreached
from farhop.store.override import Override, OverrideError
from farhop.store.sealed import Sealed
from farhop_cli import fleet, show
from farhop_cli.exits import NEGATIVE, fail, warn
from farhop_cli.last import bereft
from topology import policy
from topology.problems import TopologyError, quoted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet, Status
    from topology.model import Topology

SIGNING_KEY = "FARHOP_SIGNING_KEY"
KNOWN_WITHIN_S = 2.0  # how long to wait for balancers to say that they know
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")


@dataclass(frozen=True)
class Options:
    """What the user asked for, as typed. `undrain` uses region, world, config, etcd and as_json."""

    region: str
    world: Path
    config: Path | None
    etcd: str | None
    as_json: bool
    length: str = "1h"
    why: str = ""
    over: str = "10s"
    author: str | None = None
    force: bool = False


def drain(options: Options) -> int:
    """Write the word, and tell what will happen; the exit code."""
    word = _word(options)
    where = fleet.find(options.world, options.config, options.etcd)
    if where.topology is not None:
        fleet.known(word.region, where.topology.regions, f"topology {quoted(where.topology.name)}")
    return with_store(where, lambda store: _drain(store, where, word, options))


def undrain(options: Options) -> int:
    """Take the word back, and tell whose it was; the exit code."""
    where = fleet.find(options.world, options.config, options.etcd)
    if where.topology is not None:
        fleet.known(options.region, where.topology.regions, f"topology {quoted(where.topology.name)}")
    return with_store(where, lambda store: _undrain(store, where, options))


def duration_s(option: str, text: str) -> float:
    """Seconds in `90s`, `30m`, `2h`, `1d`. Ends the command, naming the option, for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        fail(f"{option}: {quoted(text)} is no duration; give one such as 90s, 30m or 2h")
    return float(match[1]) * _UNITS_S[match[2]]


def _word(options: Options) -> Override:
    length_s, over_s = duration_s("--for", options.length), duration_s("--over", options.over)
    author = options.author or author_here()
    word = Override(
        region=options.region, why=options.why, author=author, at=datetime.now(UTC), for_s=length_s, over_s=over_s
    )
    try:
        words.check(word)
    except OverrideError as error:
        told = {"for_s": "--for: give 1s to 7d", "over_s": "--over: give 0s to 1h"}
        option = f"--{error.field}" if error.field in ("why", "author") else error.field
        fail(told.get(error.field, f"{option}: {error.message}"))
    return word


def author_here() -> str:
    """Who is at the keyboard. Ends the command if that cannot be told."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # an account without a name
        fail("--author: this account has no name; say who you are")


def signing_key(text: str, of: str) -> Signer | None:
    """The private key in the file `[NAME=]PATH`, by its name in configurations: without one the file's, but for its
    suffix. None for "". Ends the command, naming the option, where there is none."""
    if not text:
        return None
    name, _, path = text.rpartition("=")
    try:
        with Path(path).open("rb") as file:
            return Signer(name or Path(path).stem, file.read(KEY_TEXT_MAX))
    except OSError as error:
        fail(f"{of}: {quoted(path)}: {(error.strerror or 'cannot be read').lower()}")
    except ValueError as error:
        fail(f"{of}: {error}")


def with_store(where: Fleet, work: Callable[[Store], Awaitable[int]]) -> int:
    """Do this with all of the fleet's hubs; the exit code. Ends the command, in one line, if none of them answers or
    another operator is in the way; tells which one was not reached. What is written is signed with the key that the
    environment names, if it does; what would not count by the fleet's keys, where they are known, is not written."""

    signer = signing_key(os.environ.get(SIGNING_KEY, ""), SIGNING_KEY)

    async def run() -> int:
        store = store_of(where.hubs, Random(), lambda _, one: Sealed(one, NO_KEYS, signer=signer, must=where.keys))
        try:
            await store.open()
            return await _everywhere(store, work)
        except Conflict:
            fail("somebody else changed it just now; look with `farhop status`, then decide again", NEGATIVE)
        except EnvelopeError as error:
            fail(
                f"{SIGNING_KEY}: balancers would not heed it, and nothing was changed: {error}; name there the private "
                "key of one that `signing.keys` lists for this, as [NAME=]PATH"
            )
        except StoreError as error:
            fail(f"etcd: {error}")
        finally:
            await store.close()

    return asyncio.run(run())


async def _everywhere(store: Store, work: Callable[[Store], Awaitable[int]]) -> int:
    code = await work(store)
    for hub, why in unreached(store).items():
        warn(f"hub {hub} was not reached, so what stands there stands until it ends by itself ({why})")
    return code


# -- drain


async def _drain(store: Store, where: Fleet, word: Override, options: Options) -> int:
    statuses = await where.statuses()
    if where.topology is None:
        await _reporting(store, word.region)
    if not options.force:
        _not_the_last(await in_force(store, where.topology), statuses, word.region)
    key = override_key(word.region)
    before = await store.get(key)
    revision = before.revision if before is not None else 0
    await store.put(key, words.encode(word), expect_revision=revision, ttl_s=word.for_s)
    aware = await _aware(where, word.region, word)
    if options.as_json:
        told = {"region": word.region, "override": word, "until": word.until, "replaced": _document(before)}
        show.json({**told, "balancers": len(where.admins), "aware": aware})
    else:
        _tell(where, word, options, before, _under_way(statuses, word.region))
        _tell_aware(where, aware)
    return 0


async def _reporting(store: Store, region: str) -> None:
    """Without a topology, a region is one that reports."""
    names = (parse_report_key(entry.key) for entry in await store.list(REGION_PREFIX))
    fleet.known(region, {name[0] for name in names if name is not None}, "those that report to this etcd")


async def in_force(store: Store, world: Topology | None) -> Topology | None:
    """The world under the law that stands in etcd; its own where none stands, or what stands cannot be the law."""
    if world is None:
        return None
    entry = await store.get(LAW_KEY)
    return under(world, entry.value if entry is not None else None)


def under(world: Topology, document: bytes | None) -> Topology:
    """As `in_force`, of a document at hand."""
    try:
        held = policy.read(document, world, LAW_KEY) if document is not None else None
    except TopologyError as error:
        warn(f"the law in etcd cannot be read ({len(error.problems)} problems); the topology's is taken")
        return world
    return held.over(world) if held is not None and held.epoch > world.epoch else world


def _not_the_last(world: Topology | None, statuses: list[Status], region: str) -> None:
    """End the command if somebody would be left with nothing, or if nobody can tell."""
    if world is None:
        _refuse(f"etcd alone cannot tell whether {region} is the last region of a tenant; give --config")
    if not statuses:
        _refuse(f"no global balancer answers, so nobody can tell whether {region} is the last region of a tenant")
    left = bereft(world, statuses, region)
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        _refuse(f"{region} is the last region serving {', '.join(left[:5])}{more}")


def _refuse(text: str) -> NoReturn:
    fail(f"{text}; --force drains it anyway", NEGATIVE)


def _under_way(statuses: list[Status], region: str) -> int:
    counts = (_seen(status, region).get("in_flight") for status in statuses)
    return sum(count for count in counts if isinstance(count, int))


def _tell(where: Fleet, word: Override, options: Options, before: Entry | None, under_way: int) -> None:
    until = word.until.strftime("%Y-%m-%d %H:%M:%S UTC")
    show.line(f"{word.region} is drained for {options.length}, until {until}, by {word.author}: {word.why}", "bold")
    pace = f"over {options.over}" if word.over_s else "at once"
    count = f" ({under_way} now)" if where.admins else ""
    show.line(f"new requests move away {pace}, where the law gives them another region; those under way{count} finish")
    if before is not None:
        show.line(f"this replaces: {_summary(before)}", "yellow")
    show.line(f"it ends by itself; sooner with: farhop undrain {word.region}")


# -- undrain


async def _undrain(store: Store, where: Fleet, options: Options) -> int:
    try:
        key = override_key(options.region)
    except ValueError:
        fail(f"{quoted(options.region)} is no region's name")
    before = await store.get(key)
    if before is None:
        fail(f"{options.region} is not drained; nothing was changed", NEGATIVE)
    await store.delete(key, expect_revision=before.revision)
    aware = await _aware(where, options.region, None)
    if options.as_json:
        show.json(
            {"region": options.region, "lifted": _document(before), "balancers": len(where.admins), "aware": aware}
        )
    else:
        show.line(f"lifted: {_summary(before)}", "bold")
        show.line(f"{options.region} takes new requests again, a growing share of them")
        _tell_aware(where, aware)
    return 0


# -- both


def _document(entry: Entry | None) -> Override | str | None:
    """What stood there; text where it is no override."""
    if entry is None:
        return None
    try:
        return words.decode(entry.value)
    except OverrideError:
        return entry.value.decode(errors="replace")[: words.DOCUMENT_LIMIT_BYTES]


def _summary(entry: Entry) -> str:
    word = _document(entry)
    if not isinstance(word, Override):
        return "a word that cannot be read"
    set_at, until = (at.strftime("%Y-%m-%d %H:%M:%S UTC") for at in (word.at, word.until))
    return f"{word.action} of {word.region} by {word.author} at {set_at}, until {until}: {word.why}"


async def _aware(where: Fleet, region: str, word: Override | None) -> int:
    """How many of the balancers say so within a moment. Those that do not will follow when they can."""

    async def count() -> int:
        return sum(_says(status, region, word) for status in await where.statuses())

    return await heeded(count, len(where.admins))


async def heeded(count: Callable[[], Awaitable[int]], wanted: int) -> int:
    """How many of so many balancers know by `count` within KNOWN_WITHIN_S. That some do not yet is told by the number,
    and no failure: they follow when they can."""
    aware = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KNOWN_WITHIN_S):
            while aware < wanted:
                aware = await count()
                await asyncio.sleep(0.02)
    return aware


def _says(status: Status, region: str, word: Override | None) -> bool:
    told = _seen(status, region).get("override")
    if word is None or not isinstance(told, dict):
        return word is None and told is None
    return bool(told.get("author") == word.author and told.get("why") == word.why)


def _seen(status: Status, region: str) -> dict[str, Any]:
    """The region in a balancer's eyes."""
    regions = (one for one in status.get("regions") or [] if isinstance(one, dict))
    return next((one for one in regions if one.get("region") == region), {})


def _tell_aware(where: Fleet, aware: int) -> None:
    if aware == len(where.admins):
        if aware:
            show.line(f"{aware} of {aware} global balancers know", "dim")
    else:
        warn(f"{aware} of {len(where.admins)} global balancers know by now; the others follow when they can")
