"""Puts a run's memory on huge pages, if the kernel allows a process to ask for them.

A simulated world accesses some 100 MB at random, and a tenth of its time goes to address translation. Invariants: no
result depends on it; if huge pages are not available (not Linux, an old kernel, switched off), nothing happens. Never
raises.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farhop_lab.sim.world import World

PAGE_BYTES = 2 << 20
WORTH_IT = 500  # requests: to ask takes up to 50 ms, and a small run is over sooner
_MAPS = Path("/proc/self/maps")
_PRIVATE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 *(?:\[heap\])?$")  # anonymous memory only
_HUGEPAGE, _COLLAPSE = 14, 25  # madvise(2): for future pages, and for those already there


def ask() -> int:
    """Ask for huge pages for the process's present memory. Returns the bytes asked for."""
    try:
        madvise = ctypes.CDLL(None).madvise
        lines = _MAPS.read_text().splitlines()
    except (OSError, AttributeError):
        return 0
    asked = 0
    for found in filter(None, map(_PRIVATE.match, lines)):
        start, end = -(-int(found[1], 16) // PAGE_BYTES) * PAGE_BYTES, int(found[2], 16) // PAGE_BYTES * PAGE_BYTES
        if end > start:
            span = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
            if madvise(*span, _HUGEPAGE) == 0:
                madvise(*span, _COLLAPSE)
                asked += end - start
    return asked


class Growing:
    """Asks again each time a run has become twice as long. To be called now and then."""

    def __init__(self, world: World) -> None:
        self._world, self._due = world, WORTH_IT

    def __call__(self) -> None:
        """Ask if it is time."""
        arrived = self._world.measures.arrived
        if arrived >= self._due:
            self._due = 2 * arrived
            ask()
