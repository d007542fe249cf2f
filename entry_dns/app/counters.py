"""A file that the processes of one server share: the version of the view in force, and each worker's counters.

    8 bytes: the view's version · for each worker ROW numbers of 8 bytes: a fault count, COUNTERS, then entries led to

Each row has one writer, so nothing is locked. Never decides anything.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from entry_dns.answers.responder import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Sequence

ENTRIES_MAX = 1024
ROW = 1 + len(COUNTERS) + ENTRIES_MAX


class Counters:
    """The mapped file. Each method that writes a row is called only by the process that owns that row."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self.version = self._map[:1]

    @staticmethod
    def make(path: Path, workers: int) -> Counters:
        """Create the file, all zeros, for this number of workers."""
        path.write_bytes(bytes(8 * (1 + workers * ROW)))
        return Counters(path)

    def raise_version(self) -> None:
        """Inform the workers that a new view is in force."""
        self.version[0] += 1

    def fault(self, row: int) -> None:
        """Count a query that failed with an internal error."""
        self._map[1 + row * ROW] += 1

    def add(self, row: int, counts: list[int], led: list[int]) -> None:
        """Add the counts since the last call to a row, and reset the given lists to 0.

        `counts`: in the order of COUNTERS; `led`: by entry, answers that listed it first.
        """
        at = 2 + row * ROW
        for n, count in enumerate(counts):
            if count:
                self._map[at + n] += count
                counts[n] = 0
        at += len(COUNTERS)
        for n, count in enumerate(led[:ENTRIES_MAX]):
            if count:
                self._map[at + n] += count
                led[n] = 0

    def total(self, workers: int) -> tuple[int, dict[str, int]]:
        """Faults, and every counter by its name, of all workers together."""
        sums = dict.fromkeys(COUNTERS, 0)
        faults = 0
        for row in range(workers):
            at = 1 + row * ROW
            faults += self._map[at]
            for n, name in enumerate(COUNTERS):
                sums[name] += self._map[at + 1 + n]
        return faults, sums

    def led(self, workers: int, entries: Sequence[str]) -> dict[str, int]:
        """How many answers led to each entry first."""
        at = 2 + len(COUNTERS)
        return {
            name: sum(self._map[row * ROW + at + n] for row in range(workers))
            for n, name in enumerate(entries[:ENTRIES_MAX])
        }
