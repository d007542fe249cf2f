"""Overrides in etcd of any kind: read, written, removed, compared, and their history.

Never contacts a balancer: all of them follow etcd. Every write is a compare-and-set, so that two operators cannot
overwrite each other unnoticed; with `--dry-run` everything is checked and nothing is written. A read or a dry run says
so, and is partial (exit code 3), if a balancer or a hub did not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import socket
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.loose_json import as_dict
from farhop.service.law import effect
from farhop.store.contract import ChangeKind, Conflict, StoreError
from farhop.store.envelope import KEY_TEXT_MAX, NO_KEYS, EnvelopeError, Signer, bare
from farhop.store.sealed import Sealed
from farhop_cli import fleet, show
from farhop_cli.exits import NEGATIVE, PARTIAL, fail, warn
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from farhop.store.contract import Change as Written
    from farhop.store.contract import KeyValue, Store
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions

SIGNING_KEY = "FARHOP_SIGNING_KEY"
KNOWN_WITHIN_S = 2.0  # how long to wait for balancers to report that they follow
FILE_CHARS_MAX = 1024 * 1024


@dataclass(frozen=True)
class Item:
    """One override: `value`, as plain values, for its subject `whom`, such as {"region": "tokyo", "model": "llama"}."""

    whom: Mapping[str, str]
    value: Any


@dataclass(frozen=True)
class Setting:
    """The content of one key. `until` None: until it is unset. `author` None: written by hand."""

    items: tuple[Item, ...]
    author: str | None = None
    why: str | None = None
    at: datetime | None = None
    until: datetime | None = None

    def row(self, item: Item) -> dict[str, Any]:
        """An item's row in `--json`."""
        authorship = {"author": self.author, "why": self.why, "at": self.at, "until": self.until}
        return {**item.whom, "value": item.value, **authorship}


@dataclass(frozen=True)
class Noun:
    """A kind of override, by the name of its commands and of its JSON.

    `read` parses a document, with its key; ValueError for one that balancers would refuse. `line` renders an item for
    people. Of the balancers `asked` for a region, `followed` is the number that report a move from `before` to `after`
    (None: nothing set). `configured` finds the items of a balancer's configuration. `beside`: more prefixes of such
    keys.
    """

    name: str
    prefix: str
    nothing: str
    read: Callable[[str, bytes], Setting]
    line: Callable[[Any], str]
    asked: Callable[[Fleet, str], int]
    followed: Callable[[Fleet, str, Setting | None, Setting | None], Awaitable[int]]
    configured: Callable[[dict[str, Any]], list[Item]] | None = None
    beside: tuple[str, ...] = ()


_NOT_READ = (ValueError, TypeError, msgspec.MsgspecError, RecursionError)
UNREADABLE = Setting(())  # the content of a key that cannot be read


def read(noun: Noun, entry: KeyValue | None) -> Setting | None:
    """An entry's content; None if there is none, UNREADABLE if it cannot be read."""
    if entry is None:
        return None
    try:
        return noun.read(entry.key, bare(entry.value))
    except _NOT_READ:
        return UNREADABLE


# -- get


def get(noun: Noun, region: str, fleet_options: FleetOptions) -> int:
    """Print what is set, for a region or for all; the exit code."""
    here = fleet_options.fleet(region)

    async def work(store: Store) -> int:
        found = await _all(noun, store, region)
        if fleet_options.as_json:
            show.json({noun.name: [one.row(item) for one, items in found for item in items]})
            return 0
        for one, items in found:
            for item in items:
                show.line(f"{title(item.whom)}: {noun.line(item.value)}")
            show.line(f"  {byline(one)}", "dim")
        if not found:
            show.line(noun.nothing)
        return 0

    return with_store(here, work)


async def _all(noun: Noun, store: Store, region: str) -> list[tuple[Setting, list[Item]]]:
    found = []
    listed = [entry for prefix in (noun.prefix, *noun.beside) for entry in await store.list(prefix)]
    for entry in listed:
        setting = read(noun, entry)
        if setting is UNREADABLE or setting is None:
            warn(f"the document at {entry.key} cannot be read, and no balancer uses it; unset it, or set it again")
            continue
        items = [item for item in setting.items if not region or _concerns(item, region)]
        if items:
            found.append((setting, items))
    return found


def _concerns(item: Item, region: str) -> bool:
    if "region" in item.whom:
        return item.whom["region"] == region
    return isinstance(item.value, dict) and item.value.get("region") == region


# -- set, unset


@dataclass(frozen=True)
class SettingChange:
    """A change of a key: `make` gives the new document from the present one, or None to delete the key.

    `check` ends the command if the change is not allowed, before anything is written; `sense` if the fleet shows that
    it has no effect, which a dry run words differently. `notes` are printed once it is written. `effects` is called in
    a dry run: whom it would strand, what would move.
    """

    key: str
    region: str  # whose balancers follow it; "": all
    whom: Mapping[str, str]
    make: Callable[[Setting | None], bytes | None]
    ttl_s: float | None = None
    check: Callable[[Store], Awaitable[None]] | None = None
    notes: Sequence[str] = ()
    warnings: Callable[[], Awaitable[Sequence[str]]] | None = None
    effects: Callable[[Store], Awaitable[Sequence[str]]] | None = None
    sense: Callable[[], Awaitable[None]] | None = None


def change(noun: Noun, here: Fleet, asked: SettingChange, fleet_options: FleetOptions) -> int:
    """Set or remove; the exit code."""

    async def work(store: Store) -> int:
        if asked.check is not None:
            await asked.check(store)
        entry = await store.get(asked.key)
        before = read(noun, entry)
        document = asked.make(before)
        after = noun.read(asked.key, document) if document is not None else None
        aware, of = 0, 0 if fleet_options.dry_run else noun.asked(here, asked.region)
        if asked.sense is not None and not fleet_options.dry_run:
            await asked.sense()
        if not fleet_options.dry_run:
            revision = entry.revision if entry is not None else 0
            if document is None:
                await store.delete(asked.key, expect_revision=revision)
            else:
                await store.put(asked.key, document, expect_revision=revision, ttl_s=asked.ttl_s)
            aware = await followers_of(lambda: noun.followed(here, asked.region, before, after), of)
        effects = await asked.effects(store) if asked.effects is not None and fleet_options.dry_run else ()
        if here.asked and all(one.status is None for one in here.asked.values()):
            effects = ()  # it affects no traffic
        _print(noun, asked, before, after, fleet_options, (aware, of), effects, unanswered(here, store))
        if asked.warnings is not None and not fleet_options.dry_run:
            for text in await asked.warnings():
                warn(text)
        return 0

    return with_store(here, work, writes=not fleet_options.dry_run)


def _print(
    noun: Noun,
    asked: SettingChange,
    before: Setting | None,
    after: Setting | None,
    fleet_options: FleetOptions,
    known: tuple[int, int],
    effects: Sequence[str],
    silent: Sequence[str],
) -> None:
    now = [item for item in after.items if item.whom == asked.whom] if after is not None else []
    left = [item.whom for item in after.items if not now] if after is not None else []
    gone = [item for item in before.items if item.whom == asked.whom or not now] if before is not None else []
    was = [item for item in gone if item.whom not in left]
    if fleet_options.as_json:
        rows = {
            "set": [after.row(item) for item in now] if after is not None else [],
            "was": [before.row(item) for item in was] if before is not None else [],
        }
        tried = {"effects": list(effects), "unreachable": list(silent)} if fleet_options.dry_run else {}
        dry_run = {"dry_run": fleet_options.dry_run, **tried}
        show.json({"noun": noun.name, **rows, **dry_run, "balancers": known[1], "aware": known[0]})
        return
    dry = show.DRY if fleet_options.dry_run else ""
    for item in now:
        show.line(f"{dry}{title(item.whom)}: {noun.line(item.value)}", "bold")
        show.line(f"  {byline(after)}", "dim")
    for item in was:
        text = f"{title(item.whom)}: {noun.line(item.value)}, {byline(before)}"
        show.line(f"this replaces: {text}" if now else f"{dry}unset: {text}", "yellow" if now else "bold")
    if before is UNREADABLE:
        show.line(f"{dry}the previous document could not be read", "yellow")
    for note in asked.notes:
        show.line(note)
    for text in effects:
        show.line(text, "yellow" if text.startswith("strands") else None)
    print_aware(*known)


async def warn_unserved(here: Fleet, models: Sequence[str]) -> None:
    """Warn if a model is served nowhere: it may be mistyped, or come later."""
    for text in effect.unserved(await here.statuses(), models) if models else ():
        warn(f"--model: {text}")


def print_aware(aware: int, asked: int) -> None:
    """Print how many balancers follow, of how many."""
    if aware < asked:
        late = f"{aware} of {asked} balancers follow it by now; the others follow when they can: see `farhop status`"
        warn(late if os.environ.get(SIGNING_KEY) else f"{late} (where signatures are required: set {SIGNING_KEY})")
    elif asked:
        show.line(f"{aware} of {asked} balancers follow it", "dim")


# -- diff


def diff(noun: Noun, region: str, file: str, fleet_options: FleetOptions) -> int:
    """What would change if a file replaced what is set; the exit code: 1 if anything.

    Without a file, against the configuration alone: what `unset` would remove.
    """
    here = fleet_options.fleet(region)
    wanted, configured = _file_items(noun, file, region) if file else ({}, True)

    async def work(store: Store) -> int:
        stands = {_key(item): item for _, items in await _all(noun, store, region) for item in items}
        added = [] if configured else [item for key, item in wanted.items() if key not in stands]
        removed = [item for key, item in stands.items() if key not in wanted]
        both = [(stands[key], item) for key, item in wanted.items() if key in stands]
        changed = [(was, now) for was, now in both if was.value != now.value]
        if fleet_options.as_json:
            rows = {name: [_plain(one) for one in items] for name, items in (("added", added), ("removed", removed))}
            pairs = [{**was.whom, "was": was.value, "value": now.value} for was, now in changed]
            show.json({"noun": noun.name, **rows, "changed": pairs})
        else:
            for sign, items in (("+", added), ("-", removed)):
                for one in items:
                    show.line(f"{sign} {title(one.whom)}: {noun.line(one.value)}")
            for was, now in changed:
                show.line(f"~ {title(was.whom)}: {noun.line(was.value)} -> {noun.line(now.value)}")
            if not (added or removed or changed):
                show.line("no difference" if file else noun.nothing)
        return NEGATIVE if added or removed or changed else 0

    return with_store(here, work)


def _key(item: Item) -> frozenset[tuple[str, str]]:
    return frozenset(item.whom.items())


def _plain(item: Item) -> dict[str, Any]:
    return {**item.whom, "value": item.value}


def _file_items(noun: Noun, name: str, region: str) -> tuple[dict[frozenset[tuple[str, str]], Item], bool]:
    """The items in a file, and whether it is a configuration, of which only what is overridden counts."""
    raw = _raw(name)
    rows, configured = raw.get(noun.name), False
    if isinstance(rows, list) and all(isinstance(row, dict) and "value" in row for row in rows):
        others = ("value", "author", "why", "at", "until")
        items = [Item({k: str(v) for k, v in row.items() if k not in others}, row["value"]) for row in rows]
    elif noun.configured is not None and isinstance(raw.get("region"), str):
        items, configured = noun.configured(raw), True
    else:
        what = " or a balancer's configuration" if noun.configured is not None else ""
        fail(f"{name}: give what `farhop {noun.name} get --json` prints{what}")
    return {_key(item): item for item in items if not region or _concerns(item, region)}, configured


def _raw(name: str) -> dict[str, Any]:
    import yaml

    try:
        if name == "-":
            text = sys.stdin.read(FILE_CHARS_MAX)
        else:
            with Path(name).open(encoding="utf-8-sig") as file:
                text = file.read(FILE_CHARS_MAX)
        raw = yaml.safe_load(text)
    except OSError as error:
        fail(f"{quoted(name)}: {(error.strerror or 'cannot be read').lower()}")
    except (UnicodeError, yaml.YAMLError, ValueError, RecursionError):
        fail(f"{quoted(name)}: not YAML or JSON")
    return as_dict(raw)


# -- history


def history(noun: Noun, region: str, fleet_options: FleetOptions) -> int:
    """What was set and removed, as far back as etcd's history goes, the newest first; the exit code."""
    here = fleet_options.fleet(region)
    since, changes = asyncio.run(_remembered(here, (noun.prefix, *noun.beside)))
    rows = [row for change in reversed(changes) for row in _past(noun, change, region)]
    if fleet_options.as_json:
        show.json({noun.name: rows, "since_revision": since})
        return 0
    shown = ("at", "author", "what", "why")
    lines = [[str(row["revision"]), *(show.cell(row[name]) for name in shown)] for row in rows]
    if lines:
        show.table(f"{noun.name}: what was set and unset, the newest first", _PAST, lines)
    else:
        show.line("nothing was set or unset")
    show.line(f"etcd remembers what was written since its revision {since}, and no more", "dim")
    return 0


_PAST = (">revision", "at", "by", "what", "why")


async def _remembered(here: Fleet, prefixes: Sequence[str]) -> tuple[int, Sequence[Written]]:
    """The history of the first hub that answers: all of them get every write."""
    from farhop.store import etcd_history

    _with_etcd(here)
    for left, name in zip(reversed(range(len(here.hubs))), sorted(here.hubs), strict=True):
        try:
            found = [await etcd_history.history(here.hubs[name], prefix) for prefix in prefixes]
        except StoreError as error:
            (warn if left else fail)(f"etcd: hub {name}: {error}")
        else:
            changes = sorted((change for one in found for change in one.changes), key=lambda change: change.revision)
            return max(one.since for one in found), changes
    raise AssertionError("a fleet has a hub")


def _past(noun: Noun, change: Written, region: str) -> list[dict[str, Any]]:
    """A row for people and `--json` for each document that was put, and each key that was deleted."""
    place = change.key
    for prefix in (noun.prefix, *noun.beside):
        place = place.removeprefix(prefix)
    row = {"revision": change.revision, "place": place, "at": None, "author": None, "why": None}
    if change.kind is ChangeKind.DELETE:
        # A pin's subject is in its key; its region went with its document.
        gone = {**row, "what": f"{place}: taken away, or its time was over", "items": []}
        return [gone] if not region or place == region else []
    try:
        setting = noun.read(change.key, bare(change.value))
    except _NOT_READ:
        return [{**row, "what": f"{place}: cannot be read", "items": None}]
    items = [item for item in setting.items if not region or _concerns(item, region)]
    if region and not items and place != region:
        return []
    at = setting.at.isoformat(timespec="seconds") if setting.at is not None else None
    what = "; ".join(f"{title(item.whom)}: {noun.line(item.value)}" for item in items) or f"{place}: as configured"
    authorship = {"at": at, "author": setting.author, "why": setting.why, "what": what}
    return [{**row, **authorship, "items": [_plain(item) for item in items]}]


# -- for people


def title(whom: Mapping[str, str]) -> str:
    """An item's subject: `tokyo, model llama`."""
    named = [name if kind == "region" else f"{kind} {name}" for kind, name in whom.items() if name]
    others = "model" in whom and not whom["model"] and "tenant" not in whom
    return ", ".join([*named, *(["all other models"] if others else [])])


def byline(one: Setting | None) -> str:
    """Author, time, end and reason."""
    if one is None or one.author is None:
        return "written by hand; no author is named"
    at, until = (time.strftime("%Y-%m-%d %H:%M:%S UTC") if time else "" for time in (one.at, one.until))
    return f"by {one.author} at {at}{f', until {until}' if until else ''}: {one.why}"


# -- with etcd


def author_here() -> str:
    """The user at the keyboard. Ends the command if unknown."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # an account without a name
        fail("--by: this account has no name; give yours")


def signing_key(text: str, of: str) -> Signer | None:
    """The private key in the file `[NAME=]PATH`, by its name in configurations: by default the file's, without its
    suffix. None for "". Ends the command, naming the option, if there is none.
    """
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


def _with_etcd(here: Fleet) -> None:
    if not here.hubs:
        fail(f"{here.name} names no etcd to hold this; give --etcd, or a context that has `etcd.endpoints`")


def unanswered(here: Fleet, store: Store) -> tuple[str, ...]:
    """The hubs and balancers asked by this command that did not answer, and why."""
    from farhop.store.hubs import unreached

    hubs = (f"etcd: hub {hub}: {why}" for hub, why in unreached(store).items())
    return tuple(dict.fromkeys((*hubs, *here.unanswered)))


def with_store(here: Fleet, work: Callable[[Store], Awaitable[int]], *, writes: bool = False) -> int:
    """Do this with all of the fleet's hubs; the exit code. Ends the command, in one line, if none of them answers or
    another operator is in the way. If it `writes`, hubs that were not reached are reported; otherwise all that did not
    answer, as the output is then partial. What is written is signed with the key that the environment names, if it
    does; what would not be valid by the fleet's keys, if they are known, is not written.
    """

    from farhop.store.hubs import store_of, unreached

    _with_etcd(here)
    signer = signing_key(os.environ.get(SIGNING_KEY, ""), SIGNING_KEY)

    async def run() -> int:
        store = store_of(here.hubs, Random(), lambda _, one: Sealed(one, NO_KEYS, signer=signer, must=here.keys))
        try:
            await store.open()
            code = await work(store)
            if writes:
                for hub, why in unreached(store).items():
                    warn(f"hub {hub} was not reached, so what is set there stays, unless it expires ({why})")
            elif missing := fleet.in_part(list(here.asked.values()), unanswered(here, store)):
                warn(missing)
                code = code or PARTIAL
        except Conflict:
            fail("another writer changed it just now; look with `farhop status`, then repeat the command", NEGATIVE)
        except EnvelopeError as error:
            fail(
                f"{SIGNING_KEY}: balancers would not follow it, and nothing was changed: {error}; name there the "
                "private key of one that `signing.keys` lists for this, as [NAME=]PATH"
            )
        except StoreError as error:
            fail(f"etcd: {error}")
        else:
            return code
        finally:
            await store.close()

    return asyncio.run(run())


async def followers_of(followed: Callable[[], Awaitable[int]], asked: int) -> int:
    """How many of the balancers follow, once all do or KNOWN_WITHIN_S is over. Fewer than all is not an error: the rest
    follow when they can.
    """
    aware = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KNOWN_WITHIN_S):
            while aware < asked:
                aware = await followed()
                await asyncio.sleep(0.02)
    return aware
