"""`farhop law`: the law in etcd, shown, set, signed and its history. All balancers follow it; none is contacted.

A law is checked against the fleet's map before it is written, all errors at once, and gets an epoch above all known
ones: no command goes back to an earlier epoch, and `unset` sets the topology's own law under a new one. Every write is
a compare-and-set; replaced laws are kept for a while.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import yaml

from farhop.service.law import effect
from farhop.store.contract import LAW_HISTORY_PREFIX, LAW_KEY, VALUE_LIMIT_BYTES, StoreError, law_history_key
from farhop.store.envelope import EnvelopeError, Keys, bare, is_sealed, key_named, public_key
from farhop.store.hubs import stores_of
from farhop.store.sealed import inner
from farhop_cli import show
from farhop_cli.exits import NEGATIVE, PARTIAL, fail, first_of, warn
from farhop_cli.setting import author_here, followers_of, print_aware, signing_key, unanswered, with_store
from topology import law_document
from topology.document import TEXT_CHARS_MAX, read
from topology.problems import TopologyError, quoted
from topology.schema import EPOCH_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farhop.store.contract import KeyValue, Store
    from farhop_cli.fleet import Fleet, Status
    from farhop_cli.options import FleetOptions
    from topology.law_document import LawDocument
    from topology.model import Topology

KEPT_MAX = 20  # replaced laws
_SIGNED = ("epoch", "author", "why", "at")
_ERA = "1970-01-01T00:00:00Z"
_COLUMNS = (">epoch", "set at", "by", ">tenants", "why")


class _StandingLaw(msgspec.Struct, frozen=True):
    """A law in etcd as far as it can be read; balancers may still refuse it."""

    epoch: int
    author: str
    why: str
    at: str
    tenants: list[dict[str, Any]]
    models: dict[str, Any] = {}


_DIGITS_MAX = 20  # of a key of the history: a longer one is not an epoch
_reader = msgspec.json.Decoder(_StandingLaw)


def _read(value: bytes) -> _StandingLaw | None:
    try:
        return _reader.decode(bare(value))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the caller reports it


# -- get


def get(epoch: int | None, fleet_options: FleetOptions) -> int:
    """Print the present law, or a past one, so that it can be edited and set; the exit code."""
    here = fleet_options.fleet()

    async def work(store: Store) -> int:
        entry = await _of_epoch(store, epoch, here.topology)
        if entry is None and here.topology is None:
            fail("etcd holds no law; balancers use the one in their topology files", NEGATIVE)
        _print(entry, epoch, here.topology, fleet_options.as_json)
        return 0

    return with_store(here, work)


async def _of_epoch(store: Store, epoch: int | None, topology: Topology | None) -> KeyValue | None:
    """The present law, or that of an epoch; None for the topology's own. Ends the command if none is kept."""
    stands = await store.get(LAW_KEY)
    if epoch is None or (stands is not None and _epoch_of(stands) == epoch):
        return stands
    kept = await store.get(law_history_key(epoch))
    if kept is None and (topology is None or topology.epoch != epoch):
        fail(f"--epoch: no law of epoch {epoch} is kept; see `farhop law history`", NEGATIVE)
    return kept


def _epoch_of(entry: KeyValue) -> int | None:
    known = _read(entry.value)
    return known.epoch if known is not None else None


def _print(entry: KeyValue | None, epoch: int | None, topology: Topology | None, as_json: bool) -> None:
    if entry is None:
        assert topology is not None  # the caller has checked
        law, signature = (
            law_document.document_of(topology),
            {"epoch": topology.epoch, "source": f"topology {topology.name}"},
        )
        none = ": etcd holds none" if epoch is None else ""
        head = f"# law of epoch {topology.epoch}, of topology {topology.name}{none}\n"
    else:
        known = _read(entry.value)
        if known is None:
            fail(f"the document at {entry.key} cannot be read; set another with `farhop law set`", NEGATIVE)
        law = {"models": known.models, "tenants": known.tenants}
        signature = {name: getattr(known, name) for name in _SIGNED}
        signature |= {"source": "etcd", "revision": entry.revision}
        head = f"# law of epoch {known.epoch}, from etcd (revision {entry.revision})\n"
        head += f"# by {_line(known.author)} at {_line(known.at)}: {_line(known.why)}\n"
    if as_json:
        show.json({**signature, **law})
    else:
        sys.stdout.write(head + yaml.safe_dump(law, sort_keys=False, allow_unicode=True))


def _line(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


# -- history


def history(fleet_options: FleetOptions) -> int:
    """Past laws and the present one, newest first; the exit code."""
    here = fleet_options.fleet()

    async def work(store: Store) -> int:
        entries = [*await store.list(LAW_HISTORY_PREFIX), *filter(None, [await store.get(LAW_KEY)])]
        known = [one for one in map(_read, (entry.value for entry in entries)) if one is not None]
        known.sort(key=lambda one: one.epoch, reverse=True)
        if len(known) < len(entries):
            warn(f"{len(entries) - len(known)} entries there cannot be read")
        if fleet_options.as_json:
            laws = [{**{n: getattr(one, n) for n in _SIGNED}, "tenants": len(one.tenants)} for one in known]
            show.json({"law": laws})
        elif known:
            rows = [[str(one.epoch), one.at, one.author, str(len(one.tenants)), one.why] for one in known]
            show.table("laws, the newest first", _COLUMNS, rows)
        else:
            show.line("no law was ever set; balancers use the one in their topology files")
        return 0

    return with_store(here, work)


# -- set


def put(file: str, why: str, by: str | None, after: int | None, fleet_options: FleetOptions) -> int:
    """Check a law and set it instead of the one in force; the exit code."""
    here, topology = _known(fleet_options)
    sealed = _sealed_in(file)
    if sealed is None and not why:
        fail("--why: give the reason, for the record")
    if sealed is not None and (why or by):
        fail("--why, --by: a signed law already contains both; leave them out")
    law = _file(file) if sealed is None else {}

    def document(epoch: int) -> bytes:
        return sealed if sealed is not None else _written(law, epoch, why, by)

    return with_store(
        here,
        lambda store: _set(store, here, topology, document, file, after, fleet_options),
        writes=not fleet_options.dry_run,
    )


def unset(why: str, by: str | None, after: int | None, fleet_options: FleetOptions) -> int:
    """Set the topology's own law, under a new epoch, which never goes back; the exit code."""
    here, topology = _known(fleet_options)
    law = law_document.document_of(topology)

    def document(epoch: int) -> bytes:
        return _written(law, epoch, why, by)

    return with_store(
        here,
        lambda store: _set(store, here, topology, document, "the topology", after, fleet_options),
        writes=not fleet_options.dry_run,
    )


def _known(fleet_options: FleetOptions) -> tuple[Fleet, Topology]:
    here = fleet_options.fleet()
    if here.topology is None:
        fail("etcd alone does not name the regions and places; give --config")
    return here, here.topology


def _sealed_in(name: str) -> bytes | None:
    """The law in a file that `farhop law sign` wrote; None for any other file."""
    with contextlib.suppress(OSError):  # reading it as a law reports the error
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
        _print_problems(error)
    if doubles:
        _print_problems(TopologyError(name, doubles))
    for field in _SIGNED:
        if field in raw:
            fail(f"{name}: {field}: this command sets it; leave it out")
    return raw


def _print_problems(error: TopologyError) -> NoReturn:
    for one in error.problems:
        warn(f"{error.source}: {one}")
    count = len(error.problems)
    fail(f"{error.source}: {count} problem{'s' * (count != 1)}; nothing was changed", NEGATIVE)


async def _set(
    store: Store,
    here: Fleet,
    topology: Topology,
    document_of: Callable[[int], bytes],
    source: str,
    after: int | None,
    fleet_options: FleetOptions,
) -> int:
    before = await store.get(LAW_KEY)
    statuses = await here.all_statuses()
    newest = await newest_law(store, before, statuses, topology)
    if after is not None and after != newest:
        fail(f"--after: the newest law has epoch {newest}, not {after}; review it, then set yours again", NEGATIVE)
    document = document_of(newest + 1)
    held = under(topology, before.value if before is not None else None)
    read = _checked(bare(document), topology, source)
    if read.epoch <= newest:
        fail(
            f"{source}: signed for epoch {read.epoch}, but the newest law has epoch {newest}; sign it again",
            NEGATIVE,
        )
    revision, aware, asked = 0, 0, 0
    if not fleet_options.dry_run:
        revision = await _write(store, before, document)
        asked = len(here.admins) + len(here.regional)
        aware = await followers_of(lambda: _aware(here, read.epoch), asked)
    difference = law_document.changed(held, read.over(topology))
    effects = effect.of_law(held, read.over(topology), statuses)
    if fleet_options.as_json:
        written: dict[str, Any] = {"epoch": read.epoch, "revision": revision, "dry_run": fleet_options.dry_run}
        if fleet_options.dry_run:
            written["unreachable"] = list(unanswered(here, store))
        show.json({**written, **difference, "effects": effects, "balancers": asked, "aware": aware})
        return 0
    dry = show.DRY if fleet_options.dry_run else ""
    show.line(f"{dry}law of epoch {read.epoch} is set, by {read.author}: {read.why}", "bold")
    _print_difference(difference, effects)
    print_aware(aware, asked)
    return 0


async def _write(store: Store, before: KeyValue | None, document: bytes) -> int:
    """Write it instead of the present one, which is kept; the new revision."""
    if before is not None:
        kept = _epoch_of(before)
        if kept is not None:
            await store.put(law_history_key(kept), before.value)
        else:
            warn(f"the previous document at {LAW_KEY} could not be read and is not kept")
    revision = await store.put(LAW_KEY, document, expect_revision=before.revision if before is not None else 0)
    await _trim(store)
    return revision


async def raised(store: Store, here: Fleet, topology: Topology, why: str, by: str) -> int:
    """Put the law in force under the next epoch, unchanged, for a drill; that epoch."""
    before = await store.get(LAW_KEY)
    held = under(topology, before.value if before is not None else None)
    epoch = await newest_law(store, before, await here.all_statuses(), topology) + 1
    await _write(store, before, _written(law_document.document_of(held), epoch, why, by))
    return epoch


def _written(law: dict[str, Any], epoch: int, why: str, by: str | None) -> bytes:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return law_document.encode(law, epoch, by or author_here(), why, at)


def _checked(document: bytes, topology: Topology, source: str) -> LawDocument:
    try:
        return law_document.read(document, topology, source)
    except TopologyError as error:
        _print_problems(error)


def _print_difference(difference: Mapping[str, list[str]], effects: Sequence[str]) -> None:
    labels = {"added": "new tenants", "changed": "changed", "removed": "removed, and no longer served"}
    for kind, label in labels.items():
        if difference[kind]:
            show.line(f"{label}: {_named(difference[kind])}", "yellow" if kind == "removed" else None)
    if difference["models"]:
        show.line(f"models whose rule changed: {_named(difference['models'])}")
    if not any(difference.values()):
        show.line("no change: the two laws are the same", "yellow")
    for one in effects:
        show.line(one, "yellow" if one.startswith("strands") else None)


def _named(names: list[str]) -> str:
    return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")


async def newest_law(store: Store, before: KeyValue | None, statuses: list[Status], topology: Topology) -> int:
    """The largest known epoch, so that a wiped etcd does not lead back. A value above the largest that a law may have
    is used by no balancer, and does not prevent setting one.
    """
    kept = [entry.key.removeprefix(LAW_HISTORY_PREFIX) for entry in await store.list(LAW_HISTORY_PREFIX)]
    known: list[Any] = [int(key) for key in kept if key.isascii() and key.isdigit() and len(key) <= _DIGITS_MAX]
    known += [status.get("law_epoch") for status in statuses]
    known += [_epoch_of(before)] if before is not None else []
    newest = max([topology.epoch, *(one for one in known if isinstance(one, int) and one <= EPOCH_MAX)])
    if newest == EPOCH_MAX:
        fail(f"the law in force has the largest possible epoch, {EPOCH_MAX}: no other can follow it", NEGATIVE)
    return newest


async def _trim(store: Store) -> None:
    kept = await store.list(LAW_HISTORY_PREFIX)
    for entry in kept[: max(0, len(kept) - KEPT_MAX)]:
        await store.delete(entry.key)


async def _aware(here: Fleet, epoch: int) -> int:
    """How many balancers report that epoch."""
    epochs = [status.get("law_epoch") for status in await here.all_statuses()]
    return sum(isinstance(known, int) and known >= epoch for known in epochs)


async def in_force(store: Store, topology: Topology | None) -> Topology | None:
    """The topology under the law in etcd; under its own if there is none, or it cannot be valid."""
    if topology is None:
        return None
    entry = await store.get(LAW_KEY)
    return under(topology, entry.value if entry is not None else None)


def under(topology: Topology, document: bytes | None) -> Topology:
    """As `in_force`, for a given document."""
    try:
        held = law_document.read(document, topology, LAW_KEY) if document is not None else None
    except TopologyError as error:
        warn(f"the law in etcd cannot be read ({len(error.problems)} problems); using the topology's")
        return topology
    return held.over(topology) if held is not None and held.epoch > topology.epoch else topology


# -- diff


def diff(file: str, epoch: int | None, fleet_options: FleetOptions) -> int:
    """What the law in a file would change against the present one, or that of an epoch; the exit code: 1 if anything.

    Without a file: what changed since that epoch, or, without one, what `unset` would change.
    """
    here, topology = _known(fleet_options)
    sealed = _sealed_in(file) if file else None
    law = law_document.document_of(topology) if not file else {} if sealed is not None else _file(file)

    async def work(store: Store) -> int:
        entry = await _of_epoch(store, epoch, topology)
        held = under(topology, entry.value if entry is not None else None)
        if not file and epoch is not None:
            made = await in_force(store, topology)
            assert made is not None  # the topology is known
        else:
            document = bare(sealed) if sealed is not None else law_document.encode(law, 1, "author", "why", _ERA)
            made = _checked(document, topology, file or "the topology").over(topology)
        difference = law_document.changed(held, made)
        effects = effect.of_law(held, made, await here.all_statuses())
        if fleet_options.as_json:
            show.json({**difference, "effects": effects, "unreachable": list(unanswered(here, store))})
        else:
            _print_difference(difference, effects)
        return NEGATIVE if any(difference.values()) else 0

    return with_store(here, work)


# -- sign, verify


def sign(file: str, key: str, epoch: int, why: str, by: str | None) -> int:
    """Print a file's law, signed for an epoch, to be set by somebody without the key; the exit code."""
    signer = signing_key(key, "--key")
    if signer is None:
        fail("--key: give the private key's file, [NAME=]PATH; `openssl genpkey -algorithm ed25519` makes one")
    document = _written(_file(file), epoch, why, by)
    sys.stdout.write(signer.seal(LAW_KEY, document).decode() + "\n")
    return 0


def verify(file: str, public: Sequence[str], fleet_options: FleetOptions) -> int:
    """Whether the law in a file, or in each hub, is valid by these keys; the exit code: 1 if any is not."""
    keys = _keys(public, fleet_options.config)
    if file:
        value = _sealed_in(file)
        if value is None and not Path(file).is_file():
            fail(f"{quoted(file)}: no such file; give a law that `farhop law sign` wrote")
        return _print_verified([(file, value if value is not None else b"")], keys, fleet_options.as_json)
    here = fleet_options.fleet()

    async def work(store: Store) -> int:
        copies, missed = [], False
        for name, hub in stores_of(store, "etcd").items():
            try:
                entry = await inner(hub).get(LAW_KEY)
            except StoreError as error:
                warn(f"hub {name} was not reached ({error})")
                missed = True
                continue
            copies.append((f"hub {name}", entry.value if entry is not None else None))
        return _print_verified(copies, keys, fleet_options.as_json) or (PARTIAL if missed else 0)

    return with_store(here, work)


def _keys(public: Sequence[str], config: Path | None) -> Keys:
    if public:
        keys = {}
        for one in public:
            name, _, path = one.rpartition("=")
            try:
                keys[name or Path(path).name.partition(".")[0]] = (public_key(Path(path).read_text("utf-8")), ("law",))
            except (OSError, ValueError) as error:
                fail(f"--public: {path}: {getattr(error, 'strerror', None) or error}")
        return Keys(keys)
    if config is None:
        fail("give --config, a balancer's configuration with its signing keys, or --public [NAME=]PATH")
    from farhop.config import ConfigError, load
    from global_lb.app.config import GlobalConfig

    try:
        keys_made = load(GlobalConfig, config, absent=[]).signing.made()
    except ConfigError as error:
        fail(f"--config: {first_of(error)}")
    if not keys_made.asks(LAW_KEY):
        fail("--config: no key is configured to sign laws (`signing.keys`): any law counts", NEGATIVE)
    return keys_made


def _print_verified(copies: list[tuple[str, bytes | None]], keys: Keys, as_json: bool) -> int:
    checked = []
    for source, value in copies:
        one: dict[str, Any] = {
            "source": source,
            "epoch": None,
            "signed_by": None,
            "good": value is None,
            "why": "no law",
        }
        if value is not None:
            known = _read(value)
            one |= {"epoch": known.epoch if known is not None else None, "signed_by": key_named(value) or None}
            try:
                keys.open(LAW_KEY, value)
                one |= {"good": True, "why": "the signature is good"}
            except EnvelopeError as error:
                one |= {"why": str(error)}
        checked.append(one)
    if as_json:
        show.json({"law": checked})
    else:
        for one in checked:
            signer = f"signed by {one['signed_by']}" if one["signed_by"] else "unsigned"
            epoch = f", epoch {one['epoch']}, {signer}" if one["epoch"] else ""
            show.line(f"{one['source']}{epoch}: {one['why']}", None if one["good"] else "red")
    return 0 if all(one["good"] for one in checked) else NEGATIVE
