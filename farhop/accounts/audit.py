"""The audit log of one balancer: what was decided under which law, in tamper-evident files.

    <folder>/checkpoint, tile/...   as C2SP's tlog-tiles: an auditor needs these, and the log's key
    <folder>/vkey                   that key, for readers who do not have it from elsewhere
    <folder>/journal.<N>            entries from number N on, which no checkpoint names yet
    <folder>/salt                   what names are hashed with: it never leaves the machine

Invariants: `put` appends to a queue and does no IO; an entry is in the journal before any tile, tiles are on the disk
before the checkpoint that names them, and a checkpoint replaces another as a whole. So a process killed at any moment
leaves a valid log; the next start continues it, takes in the journal's entries, and records in the log that the
previous process did not end properly. Lost entries are recorded as an entry, too, with their number. Names of tenants,
models and keys are only there as HMAC-SHA-256 under the salt; text never is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import struct
import threading
import zlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from farhop.accounts import tlog
from farhop.accounts.moments import moment
from farhop.accounts.tlog import HASH_BYTES, WIDTH, Checkpoint, LogError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
    from io import BufferedWriter

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

WAKE_S = 0.05
SEAL_S = 1.0
WAITING_MAX = 100_000
NAMES_MAX = 4096  # whose hashes are kept at hand
ALIKE_MAX = 8192  # decisions that differ in more than id and moment
HASH_SHOWN = 16  # bytes of a salted hash
_FRAME = struct.Struct(">I4s")  # before an entry in the journal: its length, and how its leaf hash begins
_HASHED = 1 << 31  # set in that length; without it the four bytes are a CRC-32, as they were once
_SALT_BYTES = 32
_BATCH = 5_000
_AT_ONCE = 64  # files that are written together
_BEGIN: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)  # Linux begins to write such pages, and waits for none


class Decided(msgspec.Struct, frozen=True, gc=False):
    """One decision, as the event loop hands it over.

    `at_s`: seconds since 1970; `epoch`: of the law; `tenant`: "" if the law forbids to record the caller here;
    `served`: the region or replica that served it; `lawful`: the regions that the law allowed, None if they were not
    determined.
    """

    at_s: float
    id: str
    epoch: int
    tenant: str
    model: str
    key: str
    entry: str
    served: str
    why: str
    status: int
    lawful: frozenset[str] | None


class _Decision(msgspec.Struct, frozen=True, gc=False):
    """The fields of a decision in the log besides its id and time. Names are salted hashes; unrecorded fields are
    UNSET.
    """

    epoch: int
    tenant: str | UnsetType
    model: str | UnsetType
    key: str | UnsetType
    entry: str
    served: str
    why: str
    status: int
    lawful: list[str] | UnsetType


class AuditEvent(NamedTuple):
    """Any other entry that an auditor needs: its kind and its fields."""

    at_s: float
    kind: str
    fields: dict[str, Any]


class AuditLog:
    """See the module's docstring. `trouble` is why nothing is written now, "" while all is well. `sealed` is how many
    entries are signed, `lost` how many never got in. `now` is a monotonic clock, `wall_s` the wall's."""

    def __init__(
        self,
        folder: Path,
        origin: str,
        key: Ed25519PrivateKey,
        now: Callable[[], float],
        wall_s: Callable[[], float],
    ) -> None:
        self.folder, self.origin, self._key, self._now, self._wall_s = folder, origin, key, now, wall_s
        self._queue: deque[Decided | AuditEvent] = deque()
        self._made: list[bytes] = []  # entries that are not in the journal yet
        self.alike: dict[tuple[Any, ...], str] = {}  # the rest of decisions, behind id and time
        self.trouble = ""
        self.lost = self.sealed = self.recovered = 0
        self.unclean = False
        self._lost_logged = 0
        self._tree = tlog.Tree()
        self._bundle: list[bytes] = []
        self._full: dict[str, bytes] = {}  # whole tiles and bundles that are not on the disk yet
        self._parts: Set[str] = frozenset()  # those on the disk that are not whole
        self._journal = -1
        self._journal_at = 0
        self._lock = -1
        self._salt = b""
        self._names: dict[str, str] = {}  # as they are in the log
        self._sealed_at = 0.0
        self._stop = threading.Event()
        self._turn = threading.Lock()  # whoever waited for it to open may be gone, and close it meanwhile
        self._thread: threading.Thread | None = None

    # -- for the loop

    def put(self, one: Decided | AuditEvent) -> None:
        """Queue one entry. Does no IO."""
        if len(self._queue) + len(self._made) < WAITING_MAX:
            self._queue.append(one)
        else:
            self.lost += 1

    @property
    def size(self) -> int:
        """The number of entries, signed or not."""
        return self._tree.size

    def open(self) -> None:
        """Continue the log on disk, or begin a new one. Blocks.

        Raises OSError, and LogError if the files contradict the checkpoint: nothing is ever appended to such a log.
        """
        with self._turn:
            self._open()

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LogError(f"{self.folder}: another process writes there; give each its own") from None
        self._salt = _salt(self.folder / "salt")
        for path in self.folder.rglob(".*.new"):
            path.unlink(missing_ok=True)  # what was being written when a process ended
        vkey, key = self.folder / "vkey", (tlog.verifier_key(self.origin, self._key.public_key()) + "\n").encode()
        if not vkey.exists() or vkey.read_bytes() != key:  # a full disk keeps no log from being continued
            _replace(vkey, key)
        clean = self._recover()
        if self._journal < 0:
            self._begin_journal()
        fields = {"clean": clean, "recovered": self.recovered, "at_entry": self._tree.size}
        self.put(AuditEvent(self._wall_s(), "start", fields))
        self._thread = threading.Thread(target=self._run, name="write audit", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write and sign the queued entries, and close the files. Blocks."""
        with self._turn:
            if self._thread is not None:
                self.put(AuditEvent(self._wall_s(), "stop", {}))
                self._stop.set()
                self._thread.join()
                self._thread = None
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    # -- in the thread

    def _run(self) -> None:
        while True:
            stopping = self._stop.wait(SEAL_S if self.trouble else WAKE_S)
            try:
                self._take()
                if stopping or self._now() - self._sealed_at >= SEAL_S:
                    self._seal()
                self.trouble = ""
            except OSError as error:
                self._troubled(error)
            if stopping:
                break
        self.lost += len(self._queue) + len(self._made)
        os.close(self._journal)
        if self.sealed == self._tree.size:  # else the next start finds the entries there
            for path in self.folder.glob("journal.*"):
                path.unlink(missing_ok=True)

    def _troubled(self, error: OSError) -> None:
        self.trouble = f"{self.folder}: {error.strerror or error}; free space there, or let the process write to it"

    def _take(self) -> None:
        """Write the entries that were handed over to the journal, and add them to the tree."""
        while self._queue or self._made:
            if not self._made:
                if self.lost > self._lost_logged:
                    self._made.append(_event(AuditEvent(self._wall_s(), "lost", {"entries": self.lost})))
                    self._lost_logged = self.lost
                queue = self._queue
                self._made += self._entries([queue.popleft() for _ in range(min(len(queue), _BATCH))])
            hashes = tlog.leaf_hashes(self._made)
            self._append(_framed(self._made, hashes))
            made, self._made = self._made, []
            self._add(made, hashes)

    def _append(self, data: bytes) -> None:
        """Append the data to the journal completely, or not at all."""
        view, done = memoryview(data), 0
        try:
            while done < len(data):
                done += os.write(self._journal, view[done:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._journal, self._journal_at)
                os.lseek(self._journal, self._journal_at, os.SEEK_SET)
            raise
        self._journal_at += len(data)

    def _add(self, entries: Sequence[bytes], leaves: Sequence[bytes]) -> None:
        for level, index, hashes in self._tree.extend(leaves):
            self._full[tlog.tile_path(level, index, WIDTH)] = hashes
        first = self._tree.size - len(entries) - len(self._bundle)
        waiting = [*self._bundle, *entries]
        whole = len(waiting) - len(waiting) % WIDTH
        for at in range(0, whole, WIDTH):
            self._full[tlog.bundle_path((first + at) // WIDTH, WIDTH)] = tlog.bundle(waiting[at : at + WIDTH])
        self._bundle = waiting[whole:]

    def _seal(self) -> None:
        """Everything so far to the disk, then a checkpoint over it."""
        self._sealed_at = self._now()
        size = self._tree.size
        if size == self.sealed and (self.folder / "checkpoint").exists():
            return
        files = self._partial()
        self._parts = self._parts | files.keys()  # they may be there, and never be signed
        _write(self.folder, {**self._full, **files})
        checkpoint = Checkpoint(self.origin, size, self._tree.root())
        _replace(self.folder / "checkpoint", tlog.sign(checkpoint, self._key))
        self.sealed = size
        self._full.clear()
        old = self._journal
        self._begin_journal()
        os.close(old)
        for path in self.folder.glob("journal.*"):
            if path.name != f"journal.{size}":
                path.unlink(missing_ok=True)
        self._tidy(files.keys())

    def _partial(self) -> dict[str, bytes]:
        """The tiles and the bundle that are not whole yet."""
        rows = self._tree.partial()
        files = {tlog.tile_path(level, index, len(data) // HASH_BYTES): data for level, index, data in rows}
        if self._bundle:
            files[tlog.bundle_path(self._tree.size // WIDTH, len(self._bundle))] = tlog.bundle(self._bundle)
        return files

    def _tidy(self, partial: Set[str]) -> None:
        """Partial tiles that later ones took the place of, now that those are signed."""
        for name in self._parts - partial:
            path = self.folder / name
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # of a tile that is whole now
        self._parts = partial

    def _begin_journal(self) -> None:
        path = self.folder / f"journal.{self._tree.size}"
        self._journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._journal_at = 0

    # -- entries

    def _entries(self, some: Iterable[Decided | AuditEvent]) -> list[bytes]:
        """As they are in the log: equal decisions are encoded once, except for the id and the time."""
        known, made, ms, begun = self.alike.get, list[bytes](), -1, ""
        for one in some:
            if isinstance(one, AuditEvent):
                made.append(_event(one))
                continue
            alike = (
                one.epoch, one.tenant, one.model, one.key, one.entry, one.served, one.why, one.status, one.lawful
            )  # fmt: skip
            rest = known(alike) or self.spelled(one, alike)
            if int(one.at_s * 1e3) != ms:
                ms, begun = int(one.at_s * 1e3), f'{{"kind":"decision","at":"{moment(one.at_s)}","id":"'
            called = one.id if one.id.isalnum() else msgspec.json.encode(one.id).decode()[1:-1]
            made.append(f"{begun}{called}{rest}".encode())
        return made

    def spelled(self, one: Decided, alike: tuple[Any, ...]) -> str:
        recorded = bool(one.tenant)
        whole = msgspec.json.encode(_Decision(
            one.epoch, self.salted(one.tenant) if recorded else UNSET,
            self.salted(one.model) if recorded and one.model else UNSET,
            self.salted(one.key) if recorded and one.key else UNSET,
            one.entry, one.served, one.why, one.status,
            UNSET if one.lawful is None else sorted(one.lawful)[:WIDTH],
        ))  # fmt: skip
        if len(self.alike) >= ALIKE_MAX:
            self.alike.clear()
        found = self.alike[alike] = '",' + whole.decode()[1:]
        return found

    def salted(self, name: str) -> str:
        """A name as it is written in the log: salted and hashed."""
        found = self._names.get(name)
        if found is None:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            found = self._names[name] = salted(self._salt, name)
        return found

    # -- starting

    def _recover(self) -> bool:
        """Continue the log where it ended. Returns whether it was closed in order."""
        path, journals = self.folder / "checkpoint", sorted(self.folder.glob("journal.*"), key=_number)
        if path.exists():
            reader = Files(self.folder, self.origin, self._key.public_key())
            checkpoint = reader.checkpoint()
            for entry in reader.entries(checkpoint.size, checkpoint.size - checkpoint.size % WIDTH):
                self._bundle.append(entry)
            self._tree = reader.edge(checkpoint)
            leaves = self._tree.levels[0]
            if tlog.leaf_hashes(self._bundle) != leaves:
                raise LogError(f"{self.folder}: the last entries are not those that were signed; move the log away")
            self.sealed, self._parts = checkpoint.size, self._partial().keys()
        elif (self.folder / "tile").exists() and not journals:
            raise LogError(f"{self.folder}: there are tiles and no checkpoint; move the log away")
        if journals and _number(journals[0]) > self._tree.size:
            raise LogError(f"{self.folder}: the checkpoint is older than the journal; move the log away")
        for journal in journals:
            self.unclean = True
            for number, entry in enumerate(_unframed(journal.read_bytes()), _number(journal)):
                if number == self._tree.size:  # those before are signed
                    self._add([entry], [tlog.leaf_hash(entry)])
                    self.recovered += 1
        if self.recovered:  # it is signed before its journal goes
            self._journal = os.open(os.devnull, os.O_WRONLY)
            try:
                self._seal()
            except OSError as error:  # the journals stay until a checkpoint names what is in them
                self._troubled(error)
                os.close(self._journal)
                self._journal = -1
        if self.unclean:
            self._clear()
        return not self.unclean

    def _clear(self) -> None:
        """Partial tiles that a killed process had not tidied yet."""
        expected = {tlog.tile_path(*at) for at in tlog.tiles_of(self.sealed)}
        expected.add(tlog.bundle_path(self.sealed // WIDTH, self.sealed % WIDTH))
        for path in (self.folder / "tile").rglob("*.p/*"):
            if str(path.relative_to(self.folder)) not in expected:
                path.unlink(missing_ok=True)


# -- reading a log


class Files:
    """A log's files, as read by an auditor who has them and the log's key."""

    def __init__(self, folder: Path, origin: str, public: Ed25519PublicKey) -> None:
        self.folder, self.origin, self._public = folder, origin, public

    def checkpoint(self) -> Checkpoint:
        """The last one. LogError if it does not hold, OSError."""
        return self.opened(self._read("checkpoint"))

    def opened(self, note: bytes) -> Checkpoint:
        """A checkpoint of this log that somebody kept."""
        return tlog.open_checkpoint(note, self.origin, self._public)

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise LogError(f"{name}: is missing") from None

    def tile(self, at: tlog.TileAt) -> bytes:
        """The hashes of a tile; of a partial one, if it is gone, the beginning of the whole one."""
        name = tlog.tile_path(*at)
        whole = tlog.tile_path(at[0], at[1], WIDTH)
        data = self._read(name if (self.folder / name).exists() else whole)[: at[2] * HASH_BYTES]
        if len(data) != at[2] * HASH_BYTES:
            raise LogError(f"{name}: has {len(data)} bytes, and {at[2] * HASH_BYTES} are to be there")
        return data

    def entries(self, size: int, first: int = 0) -> Iterator[bytes]:
        """The entries of a log of `size` entries, from `first` on, which must be the first of a bundle."""
        for part in self._bundles(size, first):
            yield from part

    def _bundles(self, size: int, first: int = 0) -> Iterator[list[bytes]]:
        for index in range(first // WIDTH, -(-size // WIDTH)):
            width = min(WIDTH, size - index * WIDTH)
            name = tlog.bundle_path(index, width)
            if not (self.folder / name).exists():
                name = tlog.bundle_path(index, WIDTH)
            found = tlog.unbundle(self._read(name), name)
            if len(found) < width:
                raise LogError(f"{name}: has {len(found)} entries, and {width} are to be there")
            yield found[:width]

    def edge(self, checkpoint: Checkpoint) -> tlog.Tree:
        """The unfinished tiles of a log, to go on from. LogError if they do not lead to the root that was signed."""
        tree = tlog.Tree()
        tree.size, tree.levels = checkpoint.size, []
        hashes = checkpoint.size
        level = 0
        while hashes:
            row = list[bytes]()
            if hashes % WIDTH:
                data = self.tile((level, hashes // WIDTH, hashes % WIDTH))
                row = [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
            tree.levels.append(row)
            level, hashes = level + 1, hashes // WIDTH
        tree.levels = tree.levels or [[]]
        if tree.root() != checkpoint.root:
            raise LogError(f"{self.folder}: the tiles do not lead to the root that was signed; move the log away")
        return tree

    def reader(self, size: int) -> Callable[[int, int], bytes]:
        """A function that reads the hashes of whole subtrees, from the tiles of a log of `size` entries."""
        kept: dict[tlog.TileAt, bytes] = {}

        def tile(at: tlog.TileAt) -> bytes:
            if at not in kept:
                kept[at] = self.tile(at)
            return kept[at]

        return tlog.hash_reader(tile, size)

    # -- proofs

    def verify(self, earlier: list[bytes] | None = None) -> tuple[Checkpoint, list[str]]:
        """Compute everything anew from the entries: the checkpoint, and notes of what is there beside. `earlier` are
        checkpoints that somebody kept: this log must begin with theirs. LogError at the first byte that does not hold.
        """
        checkpoint = self.checkpoint()
        tree, tiles, bundles = tlog.Tree(), dict[str, bytes](), list[str]()
        for part in self._bundles(checkpoint.size):
            bundles.append(tlog.bundle_path(tree.size // WIDTH, len(part)))
            for level, index, hashes in tree.extend(tlog.leaf_hashes(part)):
                tiles[tlog.tile_path(level, index, WIDTH)] = hashes
        if tree.root() != checkpoint.root:
            raise LogError("the entries do not lead to the root that was signed: some were changed or removed")
        for level, index, hashes in tree.partial():
            tiles[tlog.tile_path(level, index, len(hashes) // HASH_BYTES)] = hashes
        for name, hashes in tiles.items():
            if self._read(name) != hashes:
                raise LogError(f"{name}: is not what the entries lead to")
        for name in bundles:
            self._whole_bundle(name)
        read = self.reader(checkpoint.size)
        for note in earlier or []:
            old = self.opened(note)
            if old.size > checkpoint.size:
                raise LogError(f"a checkpoint of {old.size} entries was signed, and {checkpoint.size} are left")
            if old.size:
                proof = tlog.consistency_proof(read, old.size, checkpoint.size)
                tlog.check_consistency(old.size, old.root, checkpoint.size, checkpoint.root, proof)
        return checkpoint, self._beside({*tiles, *bundles}, checkpoint.size)

    def _whole_bundle(self, name: str) -> None:
        """Raise LogError if anything follows a bundle's entries."""
        width = int(name.rpartition("/")[2]) if ".p/" in name else WIDTH
        if len(tlog.unbundle(self._read(name), name)) != width:
            raise LogError(f"{name}: holds more entries than it may")

    def _beside(self, expected: set[str], size: int) -> list[str]:
        """Files among the tiles that no checkpoint covers."""
        found = {str(path.relative_to(self.folder)) for path in (self.folder / "tile").rglob("*") if path.is_file()}
        return [f"{name}: is not of the {size} entries that are signed" for name in sorted(found - expected)]

    def find(self, decision: str, size: int) -> Iterator[tuple[int, bytes]]:
        """The entries on a decision, each with its index."""
        wanted = decision.encode()
        for index, entry in enumerate(self.entries(size)):
            if wanted in entry and _id_of(entry).partition("-")[0] == decision.partition("-")[0]:
                yield index, entry

    def proof(self, index: int, entry: bytes, checkpoint: Checkpoint) -> list[bytes]:
        """The inclusion proof of an entry, which holds. LogError if it does not."""
        path = tlog.inclusion_proof(self.reader(checkpoint.size), index, checkpoint.size)
        if tlog.root_of(tlog.leaf_hash(entry), index, checkpoint.size, path) != checkpoint.root:
            raise LogError(f"entry {index} is not what was signed")
        return path


def salted(salt: bytes, name: str) -> str:
    """A name as it is written in a log with this salt."""
    return hmac.new(salt, name.encode(), hashlib.sha256).digest()[:HASH_SHOWN].hex()


def _id_of(entry: bytes) -> str:
    try:
        found = msgspec.json.decode(entry).get("id", "")
    except (msgspec.DecodeError, AttributeError):
        return ""
    return found if isinstance(found, str) else ""


def _event(one: AuditEvent) -> bytes:
    entry = msgspec.json.encode({"kind": one.kind, "at": moment(one.at_s), **one.fields})
    if len(entry) <= tlog.ENTRY_BYTES_MAX:
        return entry
    return msgspec.json.encode({"kind": one.kind, "at": moment(one.at_s), "too_long": len(entry)})


def _framed(entries: Iterable[bytes], leaves: Iterable[bytes]) -> bytes:
    pack, made = _FRAME.pack, list[bytes]()
    for one, leaf in zip(entries, leaves, strict=True):
        made += (pack(len(one) | _HASHED, leaf), one)
    return b"".join(made)


def _unframed(data: bytes) -> Iterator[bytes]:
    """The entries of a journal, up to where it was cut."""
    at = 0
    while at + _FRAME.size <= len(data):
        size, check = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        entry = data[at : at + (size & ~_HASHED)]
        of = tlog.leaf_hash(entry)[:4] if size & _HASHED else zlib.crc32(entry).to_bytes(4, "big")
        if len(entry) != size & ~_HASHED or of != check:
            return
        yield entry
        at += len(entry)


def _number(path: Path) -> int:
    number = path.name.rpartition(".")[2]
    return int(number) if number.isdigit() else -1


def _salt(path: Path) -> bytes:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        found = secrets.token_bytes(_SALT_BYTES)
        _replace(path, found)
    if len(found) != _SALT_BYTES:
        raise LogError(f"{path}: is no salt: put back what was there, or move the log away")
    return found


def _replace(path: Path, data: bytes) -> None:
    """Replace the file atomically."""
    _write(path.parent, {path.name: data})


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Each of them whole or not at all, and all of them on the disk at the end.

    Some are written and on their way to the disk before the first of them is waited for: a filesystem then has most of
    the work for all of them once, where each by itself takes a commit of its own.
    """
    names = sorted(files)
    for at in range(0, len(names), _AT_ONCE):
        _write_some(folder, names[at : at + _AT_ONCE], files)
    for beneath in {(folder / name).parent for name in names}:
        _sync_folder(beneath)


def _write_some(folder: Path, names: Sequence[str], files: Mapping[str, bytes]) -> None:
    with contextlib.ExitStack() as stack:
        opened: list[tuple[str, str, BufferedWriter]] = []
        try:
            for name in names:
                path = f"{folder}/{name}"
                above, _, last = path.rpartition("/")
                beside = f"{above}/.{last}.new"
                file = stack.enter_context(_created(beside))
                opened.append((path, beside, file))
                file.write(files[name])
                file.flush()
                if _BEGIN is not None:
                    os.posix_fadvise(file.fileno(), 0, 0, _BEGIN)
            for _, _, file in opened:
                os.fsync(file.fileno())
            for path, beside, _ in opened:
                os.replace(beside, path)
        except OSError:
            for _, beside, _ in opened:
                with contextlib.suppress(OSError):
                    os.unlink(beside)  # a full disk needs the room
            raise


def _created(path: str) -> BufferedWriter:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    return open(descriptor, "wb")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
