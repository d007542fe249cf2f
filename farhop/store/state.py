"""Small named documents on a process's own disk, so that it can start while etcd is silent.

Invariants: a document is replaced whole or not at all (written to another file, flushed to the disk, renamed), whenever
the process or the machine stops; a document read back is the one written, for this fleet, or it is refused with the
reason: never half of it is used. Never decides what a document means, and never reads a clock.

    <dir>/<fleet>/<owner>/<name>:   farhop-state 1 FLEET NAME SHA256 LENGTH\\n  and LENGTH bytes

The fleet's id separates fleets: epoch 7 of one fleet's law has nothing to do with that of another's. Calls block for as
long as the disk takes: if that matters, call them outside the event loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENT_BYTES_MAX = 64 * 1024 * 1024
_HEADER_BYTES_MAX = 1024
_MAGIC, _VERSION = b"farhop-state", b"1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class StateError(Exception):
    """A document that cannot be believed, read or written; the text names the file, why, and the remedy."""


class SavedDocument(msgspec.Struct, frozen=True):
    """A document as it was written. `written_at`: seconds of the disk's wall clock, to be shown, and to discard
    documents that are too old; never compared with another host's."""

    document: bytes
    written_at: float


class StateDir:
    """One process's documents. `owner` distinguishes instances that share a disk, and is unique in the fleet's region.

    ValueError if a name would not be one safe path component. Nothing is touched before the first call.
    """

    def __init__(self, root: Path, fleet: str, owner: str) -> None:
        self.fleet = _checked("fleet", fleet)
        self._folder = root / fleet / _checked("owner", owner)
        self._saving = threading.Lock()  # a save continues if its caller is cancelled

    def path(self, name: str) -> Path:
        """The path of a document."""
        return self._folder / _checked("name", name)

    def load(self, name: str) -> SavedDocument | None:
        """The document as last saved; None if there never was one. Raises StateError if the file is something else."""
        path = self.path(name)
        try:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise self._broken(path, "it is not a file")
                if about.st_size > DOCUMENT_BYTES_MAX + _HEADER_BYTES_MAX:
                    raise self._broken(path, f"it has {about.st_size} bytes, at most {DOCUMENT_BYTES_MAX}")
                written = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError(f"{path}: cannot be read: {error.strerror or error}; check its permissions") from None
        return SavedDocument(self._opened(path, name, written), about.st_mtime)

    def save(self, name: str, document: bytes) -> None:
        """Replace the document atomically. Raises StateError if that fails; the former document then remains."""
        path = self.path(name)
        if len(document) > DOCUMENT_BYTES_MAX:
            raise StateError(f"{path}: a document of {len(document)} bytes is not kept, at most {DOCUMENT_BYTES_MAX}")
        # One name, so that a process that dies here leaves one file at most. Two processes with the same owner by
        # mistake may mix their bytes in it: the checksum detects that.
        beside = path.with_name(f".{name}.new")
        try:
            # Laws hold hashes of keys: only we may read them.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._saving:
                try:
                    write_whole(beside, self._header(name, document) + document)
                    beside.replace(path)
                    _flush_folder(self._folder)
                except OSError:
                    with contextlib.suppress(OSError):
                        beside.unlink()
                    raise
        except OSError as error:
            raise StateError(
                f"{path}: cannot be written: {error.strerror or error}; give the process a directory it may write to"
            ) from None

    def _header(self, name: str, document: bytes) -> bytes:
        checksum = hashlib.sha256(document).hexdigest().encode()
        fields = (_MAGIC, _VERSION, self.fleet.encode(), name.encode(), checksum, b"%d" % len(document))
        return b" ".join(fields) + b"\n"

    def _opened(self, path: Path, name: str, written: bytes) -> bytes:
        header, newline, document = written.partition(b"\n")
        fields = header.split(b" ") if newline and len(header) <= _HEADER_BYTES_MAX else []
        if len(fields) < 2 or fields[0] != _MAGIC:
            raise self._broken(path, "it is no state of Farhop")
        if fields[1] != _VERSION:
            raise self._broken(path, "another version of Farhop wrote it")
        if fields[2:4] != [self.fleet.encode(), name.encode()]:
            raise self._broken(path, "it was written for another fleet or under another name")
        if header + newline != self._header(name, document):
            raise self._broken(path, "its checksum does not hold: it was cut short or changed")
        return document

    def _broken(self, path: Path, why: str) -> StateError:
        return StateError(f"{path}: {why}; it is not used: move it away, and it is written again")


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what}: {name[:64]!r} is not a name of letters, digits, '.', '_', '-', at most 128 long")
    return name


def write_whole(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """The rename itself is on the disk only once the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
