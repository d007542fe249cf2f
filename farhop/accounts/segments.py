"""Lines on the disk of one process: handed over by the event loop, written by a thread, rotated, bounded.

    <folder>/<moment>.jsonl        whole: nothing is ever written to it again
    <folder>/<moment>.jsonl.open   being written, by the process that holds its lock

Invariants: `put` appends to a queue and does no IO; a line is in a file whole or not at all, except for the last one of
a file whose process was killed, which is cut off at the next start; lost lines are counted, and the reason is reported
for as long as it lasts. A killed process loses what it was handed in its last WAKE_S, and the next start says so: a
process that writes always has an open file, also between two of them. If somebody takes it away, another begins, and
what it held counts as lost. What a power failure may lose is bounded by `sync`. Never deletes what still has to be read
(`may_delete`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAKE_S = 0.1
RETRY_S = 1.0
WAITING_MAX = 100_000  # handed over and not on the disk: of more, the newest are lost
_BATCH = 2_000
OPEN, WHOLE = ".jsonl.open", ".jsonl"
_DAY_S = 86_400.0
_STEP_S = 3600.0  # of the wall clock, forward: files are aged by it once it has held for a day

Sync = Literal["always", "interval", "never"]


class Bounds:
    """Limits of what is kept on disk, in bytes and seconds. `keep_s`: how long files are kept that no longer have to be
    read.
    """

    def __init__(
        self,
        segment_bytes: int = 64 << 20,
        segment_s: float = 3600.0,
        bytes_max: int = 10 << 30,
        keep_s: float = 400 * _DAY_S,
        sync: Sync = "interval",
        sync_s: float = 1.0,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self.segment_bytes, self.segment_s, self.bytes_max, self.keep_s = segment_bytes, segment_s, bytes_max, keep_s
        self.sync, self.sync_s, self.waiting_max = sync, sync_s, waiting_max


class Segments:
    """See the module's docstring. `lines` makes, in the thread, of what was handed over a line each.

    `trouble` is why nothing is written now, "" while all is well. `written` and `lost` count what was handed over;
    `unclean` counts starts after a process that was killed.
    """

    def __init__(
        self,
        folder: Path,
        bounds: Bounds,
        lines: Callable[[list[Any]], list[bytes]],
        now: Callable[[], float],
        wall_s: Callable[[], float],
    ) -> None:
        """`now` is a monotonic clock, `wall_s` the wall's: files are named and aged by it."""
        self._now, self._wall_s = now, wall_s
        self.folder, self.bounds, self._lines = folder, bounds, lines
        self._queue: deque[Any] = deque()
        self._pending: deque[bytes] = deque()  # made, and not on the disk
        self.trouble = ""
        self.written = self.lost = self.unclean = self.torn = self.bytes_held = 0
        self.may_delete: Callable[[Path], bool] = lambda _path: True  # whether all of a whole file was read
        self._path: Path | None = None
        self._fd = -1
        self._at = self._in_file = 0  # bytes of the open file that are whole lines, and how many records they are
        self._began = self._synced = 0.0
        self._ahead_s = wall_s() - now()  # of the wall clock, as it is believed
        self._stepped_at = inf  # when it was first seen further ahead
        self._dirty = False
        self._stop = threading.Event()
        self._opening = threading.Lock()  # whoever waited for it may be gone, and close it meanwhile
        self._thread: threading.Thread | None = None

    # -- for the loop

    def put(self, one: Any) -> None:
        """Queue one record. Does no IO."""
        if len(self._queue) + len(self._pending) < self.bounds.waiting_max:
            self._queue.append(one)
        else:
            self.lost += 1

    def open(self) -> None:
        """Make the folder, finish what a killed process left, and begin. Raises OSError. Blocks."""
        with self._opening:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.recover()
            self._begin()
            self._measure()
            self._thread = threading.Thread(target=self._run, name=f"write {self.folder.name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what is left and end. What the disk will not take is lost, and counted. Blocks."""
        self._stop.set()
        with self._opening:
            if self._thread is not None:
                self._thread.join()
                self._thread = None

    # -- in the thread

    def _run(self) -> None:
        measured = self._now()
        while True:
            stopping = self._stop.wait(RETRY_S if self.trouble else WAKE_S)
            self._turn()
            if stopping:
                break
            now = self._now()
            if now - measured >= 10 * RETRY_S or self.trouble:
                self._measure()
                measured = now
        self.lost += len(self._queue) + len(self._pending)
        self._finish()

    def _turn(self) -> None:
        while self._queue or self._pending:
            if not self._pending:
                self._make()
            if not self._write():
                break
        self._upkeep()

    def _make(self) -> None:
        taken = list[Any]()
        while self._queue and len(taken) < _BATCH:
            taken.append(self._queue.popleft())
        self._pending.extend(self._lines(taken))

    def _write(self) -> bool:
        """Write to the disk what was handed over; returns whether that succeeded."""
        data = b"".join(self._pending)
        if self.bytes_held + len(data) > self.bounds.bytes_max and not self._free():
            most = self.bounds.bytes_max
            self.trouble = f"{self.folder}: holds bytes_max, {most} bytes; take files away, or raise it"
            return False
        try:
            self._begin_anew_if_removed()
            self._append(data)
        except OSError as error:
            self.trouble = f"{self.folder}: {error.strerror or error}; free space there, or let the process write to it"
            return False
        self.trouble = ""
        self.written += len(self._pending)
        self._in_file += len(self._pending)
        self._pending.clear()
        if self.bounds.sync == "always":
            self._flush()
        return not self.trouble

    def _append(self, data: bytes) -> None:
        """Append all of it or none: a part that a full disk took is cut off again."""
        view, done = memoryview(data), 0
        try:
            while done < len(data):
                done += os.write(self._fd, view[done:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._at)
                os.lseek(self._fd, self._at, os.SEEK_SET)
            raise
        self._at += len(data)
        self.bytes_held += len(data)
        self._dirty = True

    def _flush(self) -> None:
        if not self._dirty:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            self.trouble = f"{self.folder}: {error.strerror or error}; look at the disk"
        self._dirty, self._synced = False, self._now()

    def _upkeep(self) -> None:
        now = self._now()
        if self.bounds.sync == "interval" and now - self._synced >= self.bounds.sync_s:
            self._flush()
        old = self._at > 0 and now - self._began >= self.bounds.segment_s
        if self._at >= self.bounds.segment_bytes or old:
            with contextlib.suppress(OSError):  # where the next cannot be opened, the old one goes on
                self._rotate()

    # -- files

    def _rotate(self) -> None:
        """Create the next file before the current one is complete: if the process is killed between the two, the order
        of the files still shows which was being written.
        """
        fd, path = self._fd, self._path
        self._begin()
        self._complete(fd, path)

    def _begin(self) -> None:
        """Open a new file whose name sorts after those of all files there, even if the wall clock was set back: readers
        rely on the names, and would consider a file that sorts before one they have read as read, too."""
        while True:
            last = self._path.name.partition(".")[0] if self._path is not None else ""  # which may be gone
            names = (path.name.partition(".")[0] for path in self.folder.glob(f"*{WHOLE}*"))
            newest = max((int(name) for name in (*names, last) if name.isdigit()), default=-1)
            path = self.folder / f"{max(int(self._wall_s() * 1e9), newest + 1):020d}{OPEN}"
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue  # of another process, which was faster
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)  # before it was locked a process that started took it for a dead one's, and removed it
        self._path, self._fd, self._at, self._in_file = path, fd, 0, 0
        self._began = self._synced = self._now()

    def _begin_anew_if_removed(self) -> None:
        """Whoever makes room may take the open file away, too, or its folder: nobody reads what it gets then."""
        assert self._path is not None
        fd, held = self._fd, self._in_file
        mine = os.fstat(fd)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), mine):
                return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._begin()
        if not mine.st_nlink:  # else it was moved
            self.lost += held
        os.close(fd)

    def _finish(self) -> None:
        """Complete the open file, without beginning another."""
        fd, self._fd = self._fd, -1
        self._complete(fd, self._path)

    def _complete(self, fd: int, path: Path | None) -> None:
        """Give a complete file its final name; remove an empty one."""
        if fd < 0 or path is None:
            return
        try:
            if os.fstat(fd).st_size:
                if self.bounds.sync != "never":
                    os.fsync(fd)
                path.rename(whole_of(path))
            else:
                path.unlink()
        except OSError as error:
            self.trouble = f"{path}: {error.strerror or error}; look at the disk"
        finally:
            os.close(fd)

    def recover(self) -> None:
        """What a process left that was killed: its last line may be torn; between two files it leaves both."""
        killed = False
        for path in sorted(self.folder.glob(f"*{OPEN}")):
            try:
                fd = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue  # its process lives, and has just completed it
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                continue  # its process lives
            try:
                if not path.exists():
                    continue  # completed meanwhile
                size = os.fstat(fd).st_size
                end = _last_line_end(fd, size)
                self.torn += end != size
                os.ftruncate(fd, end)
                killed = True
                if end:
                    path.rename(whole_of(path))
                else:
                    path.unlink()
            finally:
                os.close(fd)
        self.unclean += killed

    def _measure(self) -> None:
        """Measure the folder, and remove files that are older than `keep_s`."""
        held, now = 0, self._believed_s()
        for path in sorted(self.folder.glob("*.jsonl*")):
            with contextlib.suppress(OSError):
                about = path.stat()
                if path.suffix == WHOLE and now - about.st_mtime >= self.bounds.keep_s and self.may_delete(path):
                    path.unlink()
                else:
                    held += about.st_size
        self.bytes_held = held

    def _believed_s(self) -> float:
        """The wall clock's time, but for a step forward that may be taken back: what was deleted stays deleted."""
        now = self._now()
        ahead_s = self._wall_s() - now
        if ahead_s - self._ahead_s < _STEP_S:
            self._ahead_s, self._stepped_at = ahead_s, inf
        else:
            self._stepped_at = min(self._stepped_at, now)
            if now - self._stepped_at >= _DAY_S:
                self._ahead_s = ahead_s
        return now + self._ahead_s

    def _free(self) -> bool:
        """Room, from files that were removed or read meanwhile."""
        self._measure()
        return self.bytes_held + sum(map(len, self._pending)) <= self.bounds.bytes_max


def whole_of(path: Path) -> Path:
    """The name that a file has once it is whole."""
    return path.with_name(path.name.removesuffix(".open"))


def _last_line_end(fd: int, size: int) -> int:
    at = size
    while at > 0:
        step = min(at, 65_536)
        found = os.pread(fd, step, at - step).rfind(b"\n")
        if found >= 0:
            return at - step + found + 1
        at -= step
    return 0


def read(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """All whole lines below a folder, each with its file, the oldest file first; torn ones are left out. A file that is
    completed meanwhile is read once all the same."""
    named = {path.parent / path.name.removesuffix(".open"): path for path in folder.rglob("*.jsonl*")}
    for whole, found in sorted(named.items(), key=lambda one: (one[1].name, str(one[1]))):
        if not found.name.endswith((OPEN, WHOLE)):
            continue
        for path in (found, whole):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        yield path, line
                break
