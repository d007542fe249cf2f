"""`farhop bias`, `unbias`, `pin`, `unpin`: operators' words about where requests go, written to etcd under a lease.

Never touches a balancer: all of them follow etcd. A pin only ever narrows; one that the law would pass over is refused
here. Every write is a compare-and-set, so that two operators at once cannot overwrite each other unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farhop.store import steer
from farhop.store.override import DOCUMENT_LIMIT_BYTES, OverrideError
from farhop.store.steer import BiasWord, PinWord
from farhop_cli import fleet, show
from farhop_cli.drain import author_here, duration_s, heeded, in_force, with_store
from farhop_cli.exits import NEGATIVE, fail, warn
from topology.law import Law
from topology.problems import quoted

if TYPE_CHECKING:
    from farhop.store.contract import Entry, Store
    from farhop.store.steer import Word
    from farhop_cli.fleet import Fleet, Status
    from topology.model import Topology


@dataclass(frozen=True)
class Options:
    """What the user asked for, as typed. `unbias` uses the region, `unpin` tenant and model, and both what follows."""

    region: str
    world: Path
    config: Path | None
    etcd: str | None
    as_json: bool
    ms: float = 0.0
    tenant: str = ""
    model: str = ""
    strict: bool = False
    length: str = "1h"
    why: str = ""
    author: str | None = None


def bias(options: Options) -> int:
    """Write a bias, and tell what it does; the exit code."""
    word = BiasWord(region=options.region, ms=options.ms, **_said(options))
    return _put(word, options)


def pin(options: Options) -> int:
    """Write a pin, and tell what it does; the exit code."""
    tenant, model, strict = options.tenant, options.model, options.strict
    word = PinWord(region=options.region, tenant=tenant, model=model, strict=strict, **_said(options))
    return _put(word, options)


def unbias(options: Options) -> int:
    """Take the bias of a region back, and tell whose it was; the exit code."""
    return _lift(steer.bias_key(options.region), f"{options.region} is not biased", options)


def unpin(options: Options) -> int:
    """Take a pin back, and tell whose it was; the exit code."""
    if bool(options.tenant) == bool(options.model):
        fail("give either --tenant or --model")
    return _lift(
        steer.pin_key(options.tenant, options.model), f"{options.tenant or options.model} is not pinned", options
    )


def _said(options: Options) -> dict[str, Any]:
    author = options.author or author_here()
    return {"why": options.why, "author": author, "at": datetime.now(UTC), "for_s": duration_s("--for", options.length)}


# -- writing


def _put(word: Word, options: Options) -> int:
    try:
        steer.check(word)
    except OverrideError as error:
        told = {"for_s": "--for: give 1s to 7d", "tenant": "give either --tenant or --model"}
        option = f"--{error.field}" if error.field in ("why", "author", "ms") else error.field
        fail(told.get(error.field, f"{option}: {error.message}"))
    where = fleet.find(options.world, options.config, options.etcd)
    if where.topology is not None:
        fleet.known(word.region, where.topology.regions, f"topology {quoted(where.topology.name)}")
    return with_store(where, lambda store: _write(store, where, word, options))


def _lawful(word: Word, topology: Topology | None) -> None:
    """End the command for a pin that would never have an effect."""
    if topology is None or isinstance(word, BiasWord) or not word.tenant:
        return
    if word.tenant not in topology.tenants:
        fail(f"--tenant: {quoted(word.tenant)} is no tenant of topology {quoted(topology.name)}")
    clause = Law(topology).verdict(word.tenant, "").why_not(word.region)
    if clause is not None:
        fail(f"{word.region} is not lawful for {word.tenant} ({clause}); a pin cannot change that", NEGATIVE)


async def _write(store: Store, where: Fleet, word: Word, options: Options) -> int:
    _lawful(word, await in_force(store, where.topology))
    before = await store.get(word.key)
    revision = before.revision if before is not None else 0
    await store.put(word.key, steer.encode(word), expect_revision=revision, ttl_s=word.for_s)
    aware = await _aware(where, word, present=True)
    if options.as_json:
        told = {"word": word, "until": word.until, "replaced": _document(before)}
        show.json({**told, "balancers": len(where.admins), "aware": aware})
        return 0
    show.line(f"{_summary(word)}, for {options.length}", "bold")
    if before is not None:
        show.line(f"this replaces: {_read(before)}", "yellow")
    undo = f"unbias {word.region}" if isinstance(word, BiasWord) else f"unpin {_whom(word)}"
    show.line(f"it ends by itself; sooner with: farhop {undo}")
    _tell_aware(where, aware)
    return 0


# -- taking back


def _lift(key: str, absent: str, options: Options) -> int:
    where = fleet.find(options.world, options.config, options.etcd)
    return with_store(where, lambda store: _delete(store, where, key, absent, options))


async def _delete(store: Store, where: Fleet, key: str, absent: str, options: Options) -> int:
    before = await store.get(key)
    if before is None:
        fail(f"{absent}; nothing was changed", NEGATIVE)
    await store.delete(key, expect_revision=before.revision)
    word = _document(before)
    aware = 0 if isinstance(word, str) or word is None else await _aware(where, word, present=False)
    if options.as_json:
        show.json({"lifted": word, "balancers": len(where.admins), "aware": aware})
    else:
        show.line(f"lifted: {_read(before)}", "bold")
        _tell_aware(where, aware)
    return 0


# -- telling


def _document(entry: Entry | None) -> Word | str | None:
    """What stood there; text where it cannot be read."""
    if entry is None:
        return None
    try:
        return steer.decode(entry.value)
    except OverrideError:
        return entry.value.decode(errors="replace")[:DOCUMENT_LIMIT_BYTES]


def _read(entry: Entry) -> str:
    word = _document(entry)
    return "a word that cannot be read" if isinstance(word, str) or word is None else _summary(word)


def _summary(word: Word) -> str:
    until = word.until.strftime("%Y-%m-%d %H:%M:%S UTC")
    if isinstance(word, BiasWord):
        what = f"{word.region} counts as {abs(word.ms):g} ms {'worse' if word.ms >= 0 else 'better'} than it is"
    else:
        else_ = "and nowhere else" if word.strict else "while it serves"
        what = f"requests of {_whom(word)} go to {word.region}, {else_}"
    return f"{what}, until {until}, by {word.author}: {word.why}"


def _whom(word: PinWord) -> str:
    return f"--tenant {word.tenant}" if word.tenant else f"--model {word.model}"


async def _aware(where: Fleet, word: Word, *, present: bool) -> int:
    """How many of the balancers say so within a moment. Those that do not will follow when they can."""

    async def count() -> int:
        return sum(_says(status, word) is present for status in await where.statuses())

    return await heeded(count, len(where.admins))


def _says(status: Status, word: Word) -> bool:
    said = status.get("words")
    own = {"region": word.region, "author": word.author, "why": word.why}
    return any(
        isinstance(one, dict) and all(one.get(field) == value for field, value in own.items())
        for one in (said if isinstance(said, list) else ())
    )


def _tell_aware(where: Fleet, aware: int) -> None:
    if aware < len(where.admins):
        warn(f"{aware} of {len(where.admins)} global balancers know by now; the others follow when they can")
    elif aware:
        show.line(f"{aware} of {aware} global balancers know", "dim")
