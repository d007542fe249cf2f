"""`farhop law`: the law in etcd, shown, set, signed and looked back on. All balancers follow it; none is touched.

A law is checked against the world's map before it is written, every fault at once, and gets an epoch above all that
anybody knows of: nothing here leads back, and to unset it is to set the topology's own under a new epoch. Every write
is a compare-and-set; what it replaces is kept for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import typer
import yaml

from farhop.store.contract import LAW_HISTORY_PREFIX, LAW_KEY, VALUE_LIMIT_BYTES, StoreError, law_history_key
from farhop.store.envelope import EnvelopeError, Keys, bare, is_sealed, key_named, public_key
from farhop.store.hubs import stores_of
from farhop.store.sealed import inner
from farhop_cli import fleet, show
from farhop_cli.drain import author_here, heeded, signing_key, under, with_store
from farhop_cli.exits import NEGATIVE, fail, warn
from topology import policy
from topology.document import TEXT_CHARS_MAX, read
from topology.problems import TopologyError, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.store.contract import Entry, Store
    from farhop_cli.fleet import Fleet, Status
    from topology.model import Topology
    from topology.policy import Policy

KEPT_MAX = 20  # laws that were replaced
_SIGNED = ("epoch", "author", "why", "at")
_ERA = "1970-01-01T00:00:00Z"
_COLUMNS = (">epoch", "set at", "by", ">tenants", "why")


@dataclass(frozen=True)
class Options:
    """What the user asked for, as typed, of each command's options."""

    world: Path
    config: Path | None
    etcd: str | None
    as_json: bool
    file: str = ""
    why: str = ""
    author: str | None = None
    after: int | None = None
    epoch: int | None = None
    key: str = ""
    public: tuple[str, ...] = ()


class _Stands(msgspec.Struct, frozen=True):
    """A law in etcd as far as anybody can read it; it may still be one that balancers refuse."""

    epoch: int
    author: str
    why: str
    at: str
    tenants: list[dict[str, Any]]
    models: dict[str, Any] = {}


_reader = msgspec.json.Decoder(_Stands)


def _read(value: bytes) -> _Stands | None:
    try:
        return _reader.decode(bare(value))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # who asks says so


# -- get


def get(options: Options) -> int:
    """Print the law, so that it can be changed and set; the exit code."""
    where = fleet.find(options.world, options.config, options.etcd)

    async def work(store: Store) -> int:
        key = LAW_KEY if options.epoch is None else law_history_key(options.epoch)
        entry = await store.get(LAW_KEY)
        if options.epoch is not None and not (entry is not None and _epoch_of(entry) == options.epoch):
            entry = await store.get(key)
            if entry is None and not (where.topology is not None and where.topology.epoch == options.epoch):
                fail(f"--epoch: no law of epoch {options.epoch} is kept; see `farhop law history`", NEGATIVE)
        if entry is None and where.topology is None:
            fail("no law stands in that etcd; balancers go by their topology files", NEGATIVE)
        _print(entry, where.topology, options)
        return 0

    return with_store(where, work)


def _epoch_of(entry: Entry) -> int | None:
    known = _read(entry.value)
    return known.epoch if known is not None else None


def _print(entry: Entry | None, world: Topology | None, options: Options) -> None:
    if entry is None:
        assert world is not None  # who asked saw to it
        law, told = policy.document_of(world), {"epoch": world.epoch, "source": f"topology {world.name}"}
        said = f"# law of epoch {world.epoch}, of topology {world.name}: none stands in etcd\n"
    else:
        known = _read(entry.value)
        if known is None:
            fail(f"what stands at {entry.key} cannot be read; set another with `farhop law set`", NEGATIVE)
        law = {"models": known.models, "tenants": known.tenants}
        told = {name: getattr(known, name) for name in _SIGNED}
        told |= {"source": "etcd", "revision": entry.revision}
        said = f"# law of epoch {known.epoch}, from etcd (revision {entry.revision})\n"
        said += f"# by {_line(known.author)} at {_line(known.at)}: {_line(known.why)}\n"
    if options.as_json:
        show.json({**told, **law})
    else:
        sys.stdout.write(said + yaml.safe_dump(law, sort_keys=False, allow_unicode=True))


def _line(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


# -- history


def history(options: Options) -> int:
    """The laws that were and the one that stands, newest first; the exit code."""
    where = fleet.find(options.world, options.config, options.etcd)

    async def work(store: Store) -> int:
        entries = [*await store.list(LAW_HISTORY_PREFIX), *filter(None, [await store.get(LAW_KEY)])]
        known = [one for one in map(_read, (entry.value for entry in entries)) if one is not None]
        known.sort(key=lambda one: one.epoch, reverse=True)
        if len(known) < len(entries):
            warn(f"{len(entries) - len(known)} of what stands there cannot be read")
        if options.as_json:
            told = [{**{n: getattr(one, n) for n in _SIGNED}, "tenants": len(one.tenants)} for one in known]
            show.json({"laws": told})
        elif known:
            rows = [[str(one.epoch), one.at, one.author, str(len(one.tenants)), one.why] for one in known]
            show.table("laws, the newest first", _COLUMNS, rows)
        else:
            show.line("no law was ever set; balancers go by their topology files")
        return 0

    return with_store(where, work)


# -- set


def put(options: Options) -> int:
    """Check a law and put it in the place of the one that stands; the exit code."""
    where, world = _known(options)
    sealed = _sealed_in(options.file)
    if sealed is None and not options.why:
        fail("--why: say why, for whoever asks")
    law = _file(options.file) if sealed is None else {}
    return with_store(where, lambda store: _set(store, where, world, law, options, sealed))


def unset(options: Options) -> int:
    """Set the topology's own law, under a new epoch: nothing leads back to an old one; the exit code."""
    where, world = _known(options)
    return with_store(where, lambda store: _set(store, where, world, policy.document_of(world), options))


def _known(options: Options) -> tuple[Fleet, Topology]:
    where = fleet.find(options.world, options.config, options.etcd)
    if where.topology is None:
        fail("etcd alone cannot tell which places there are; give --config")
    return where, where.topology


def _sealed_in(name: str) -> bytes | None:
    """The law in a file that `farhop law sign` wrote; None for any other file."""
    with contextlib.suppress(OSError):  # who reads it as a law says so
        if name != "-" and is_sealed(value := Path(name).read_bytes()[: VALUE_LIMIT_BYTES + 1].strip()):
            return value
    return None


def _file(name: str) -> dict[str, Any]:
    try:
        if name == "-":
            text = sys.stdin.read(TEXT_CHARS_MAX + 1)
        else:
            with Path(name).open(encoding="utf-8-sig") as file:
                text = file.read(TEXT_CHARS_MAX + 1)
    except UnicodeError:
        fail(f"{name}: not UTF-8; save the file as UTF-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "cannot be read"
        fail(f"{ascii(name)[1:-1]}: {why.lower()}; give a law, such as `farhop law get` prints")
    try:
        raw, doubles = read(text, name)
    except TopologyError as error:
        _tell_problems(error)
    if doubles:
        _tell_problems(TopologyError(name, doubles))
    for field in _SIGNED:
        if field in raw:
            fail(f"{name}: {field}: this command sets it; leave it out")
    return raw


def _tell_problems(error: TopologyError) -> NoReturn:
    for one in error.problems:
        typer.echo(f"farhop: {error.source}: {one}", err=True)
    count = len(error.problems)
    fail(f"{error.source}: {count} problem{'s' * (count != 1)}; nothing was changed", NEGATIVE)


async def _set(
    store: Store, where: Fleet, world: Topology, law: dict[str, Any], options: Options, sealed: bytes | None = None
) -> int:
    before = await store.get(LAW_KEY)
    newest = await _newest(store, before, await _statuses(where), world)
    if options.after is not None and options.after != newest:
        fail(
            f"--after: the newest law is of epoch {newest}, not {options.after}; look at it, then decide again",
            NEGATIVE,
        )
    document = sealed if sealed is not None else _written(law, newest + 1, options)
    held = under(world, before.value if before is not None else None)
    read = _checked(bare(document), world, options.file)
    if read.epoch <= newest:
        fail(
            f"{options.file}: it was signed for epoch {read.epoch}, and there was one of {newest}; sign it anew",
            NEGATIVE,
        )
    if before is not None:
        kept = _epoch_of(before)
        if kept is not None:
            await store.put(law_history_key(kept), before.value)
        else:
            warn(f"what stood at {LAW_KEY} could not be read and is not kept")
    revision = await store.put(LAW_KEY, document, expect_revision=before.revision if before is not None else 0)
    await _trim(store)
    aware, asked = await _aware(where, read.epoch)
    difference = policy.changed(held, read.over(world))
    if options.as_json:
        show.json({"epoch": read.epoch, "revision": revision, **difference, "balancers": asked, "aware": aware})
        return 0
    show.line(f"law of epoch {read.epoch} stands, by {read.author}: {read.why}", "bold")
    _tell_difference(difference)
    if aware < asked:
        warn(f"{aware} of {asked} balancers go by it yet; the others follow when they can: see `farhop status`")
    elif asked:
        show.line(f"{aware} of {asked} balancers go by it", "dim")
    return 0


def _written(law: dict[str, Any], epoch: int, options: Options) -> bytes:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return policy.encode(law, epoch, options.author or author_here(), options.why, at)


def _checked(document: bytes, world: Topology, source: str) -> Policy:
    try:
        return policy.read(document, world, source)
    except TopologyError as error:
        _tell_problems(error)


def _tell_difference(difference: Mapping[str, list[str]]) -> None:
    words = {"added": "new tenants", "changed": "changed", "removed": "removed, and served no more"}
    for kind, word in words.items():
        if difference[kind]:
            show.line(f"{word}: {_named(difference[kind])}", "yellow" if kind == "removed" else None)
    if difference["models"]:
        show.line(f"models whose rule changed: {_named(difference['models'])}")
    if not any(difference.values()):
        show.line("it says what the law before said", "yellow")


def _named(names: list[str]) -> str:
    return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")


async def _newest(store: Store, before: Entry | None, statuses: list[Status], world: Topology) -> int:
    """The largest epoch that anybody knows of: an etcd that was wiped must not lead back."""
    kept = [entry.key.removeprefix(LAW_HISTORY_PREFIX) for entry in await store.list(LAW_HISTORY_PREFIX)]
    epochs = [world.epoch, *(int(key) for key in kept if key.isascii() and key.isdigit())]
    epochs += [e for e in (status.get("policy_epoch") for status in statuses) if isinstance(e, int)]
    known = _epoch_of(before) if before is not None else None
    return max([*epochs, *([known] if known is not None else [])])


async def _trim(store: Store) -> None:
    kept = await store.list(LAW_HISTORY_PREFIX)
    for entry in kept[: max(0, len(kept) - KEPT_MAX)]:
        await store.delete(entry.key)


async def _statuses(where: Fleet) -> list[Status]:
    regional = await asyncio.gather(*(where.status_of(region) for region in where.regional))
    return [*await where.statuses(), *(status for status in regional if status is not None)]


async def _aware(where: Fleet, epoch: int) -> tuple[int, int]:
    """How many balancers say within a moment that they go by it, and of how many."""

    async def count() -> int:
        epochs = [status.get("policy_epoch") for status in await _statuses(where)]
        return sum(isinstance(known, int) and known >= epoch for known in epochs)

    asked = len(where.admins) + len(where.regional)
    return await heeded(count, asked), asked


# -- diff


def diff(options: Options) -> int:
    """What a law would change of the one that stands, or of one that was; the exit code: 1 if anything."""
    where, world = _known(options)
    sealed = _sealed_in(options.file)
    law = _file(options.file) if sealed is None else {}

    async def work(store: Store) -> int:
        stands = await store.get(LAW_KEY)
        entry = stands
        if options.epoch is not None and not (stands is not None and _epoch_of(stands) == options.epoch):
            entry = await store.get(law_history_key(options.epoch))
            if entry is None and options.epoch != world.epoch:
                fail(f"--epoch: no law of epoch {options.epoch} is kept; see `farhop law history`", NEGATIVE)
        document = bare(sealed) if sealed is not None else policy.encode(law, 1, "author", "why", _ERA)
        made = _checked(document, world, options.file).over(world)
        difference = policy.changed(under(world, entry.value if entry is not None else None), made)
        if options.as_json:
            show.json(difference)
        else:
            _tell_difference(difference)
        return NEGATIVE if any(difference.values()) else 0

    return with_store(where, work)


# -- sign, verify


def sign(options: Options) -> int:
    """Print the law of a file, signed for an epoch: to be set by who has no key; the exit code."""
    signer = signing_key(options.key, "--key")
    if signer is None:
        fail("--key: give the private key's file, [NAME=]PATH; `openssl genpkey -algorithm ed25519` makes one")
    assert options.epoch is not None
    document = _written(_file(options.file), options.epoch, options)
    sys.stdout.write(signer.seal(LAW_KEY, document).decode() + "\n")
    return 0


def verify(options: Options) -> int:
    """Whether the law in a file, or what stands in each hub, counts by these keys; the exit code: 1 if any does not."""
    keys = _keys(options)
    if options.file:
        value = _sealed_in(options.file)
        if value is None and not Path(options.file).is_file():
            fail(f"{quoted(options.file)}: no such file; give a law that `farhop law sign` wrote")
        return _tell_verified([(options.file, value if value is not None else b"")], keys, options)
    where = fleet.find(options.world, options.config, options.etcd)

    async def work(store: Store) -> int:
        copies = []
        for name, hub in stores_of(store, "etcd").items():
            try:
                entry = await inner(hub).get(LAW_KEY)
            except StoreError as error:
                warn(f"hub {name} was not reached ({error})")
                continue
            copies.append((f"hub {name}", entry.value if entry is not None else None))
        return _tell_verified(copies, keys, options)

    return with_store(where, work)


def _keys(options: Options) -> Keys:
    if options.public:
        keys = {}
        for one in options.public:
            name, _, path = one.rpartition("=")
            try:
                keys[name or Path(path).name.partition(".")[0]] = (public_key(Path(path).read_text("utf-8")), ("law",))
            except (OSError, ValueError) as error:
                fail(f"--public: {getattr(error, 'strerror', None) or error}")
        return Keys(keys)
    if options.config is None:
        fail("give --config, a balancer's configuration with its signing keys, or --public [NAME=]PATH")
    from farhop.shell.config import ConfigError, load
    from global_lb.config import GlobalConfig

    try:
        keys_made = load(GlobalConfig, options.config).signing.made()
    except ConfigError as error:
        fail(f"--config: {error}")
    if not keys_made.asks(LAW_KEY):
        fail("--config: no key is configured to sign laws (`signing.keys`): any law counts", NEGATIVE)
    return keys_made


def _tell_verified(copies: list[tuple[str, bytes | None]], keys: Keys, options: Options) -> int:
    told = []
    for where, value in copies:
        one: dict[str, Any] = {"where": where, "epoch": None, "signed_by": None, "good": value is None, "why": "no law"}
        if value is not None:
            known = _read(value)
            one |= {"epoch": known.epoch if known is not None else None, "signed_by": key_named(value) or None}
            try:
                keys.open(LAW_KEY, value)
                one |= {"good": True, "why": "the signature is good"}
            except EnvelopeError as error:
                one |= {"why": str(error)}
        told.append(one)
    if options.as_json:
        show.json({"laws": told})
    else:
        for one in told:
            epoch = f", epoch {one['epoch']}, signed by {one['signed_by'] or 'nobody'}" if one["epoch"] else ""
            show.line(f"{one['where']}{epoch}: {one['why']}", None if one["good"] else "red")
    return 0 if all(one["good"] for one in told) else NEGATIVE
