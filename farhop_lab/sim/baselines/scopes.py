"""Whom a request may be sent to: everybody; or the nearest region that has room. Reads, never writes.

Invariant: `NearestFirst` hands on whole regions, so that the same taste that picks at home picks abroad.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.words import Board

    Full = Callable[[Sequence[str], Board, float], bool]

UTILISED = 0.8
"""Where GKE's gateway calls a backend full, unless its owner says otherwise."""


class Everybody:
    """Blind pushing: every engine not known to be gone, at once. Where none is left, a request goes out and fails."""

    def candidates(self, request: Request, board: Board, now: float) -> Sequence[str]:
        """See router.Scope."""
        return board.serving(board.engines) or board.engines


class WholePool:
    """A scope: all engines as one pool, and while that is `full` requests stay in line."""

    def __init__(self, full: Full) -> None:
        self._full = full

    def candidates(self, request: Request, board: Board, now: float) -> Sequence[str]:
        """See router.Scope."""
        names = board.serving(board.engines)
        return () if self._full(names, board, now) else names


class NearestFirst:
    """The engines of the nearest region (its own first, then by wire time) that is not `full`. Where all are: its own
    again, or with `hold` none, and requests stay in line."""

    def __init__(self, full: Full, *, hold: bool = False) -> None:
        self._full, self._hold = full, hold

    def candidates(self, request: Request, board: Board, now: float) -> Sequence[str]:
        """See router.Scope."""
        regions = list(by_distance(board))
        for names in regions:
            if not self._full(names, board, now):
                return names
        if self._hold and regions:
            return ()
        return regions[0] if regions else board.engines


def by_distance(board: Board) -> Iterator[list[str]]:
    """The serving engines of each region that has any, home first and then by wire time."""
    regions = sorted(board.by_region, key=lambda region: (region != board.here, board.rtt_ms[region], region))
    for region in regions:
        names = board.serving(board.by_region[region])
        if names:
            yield names


def all_pending(names: Sequence[str], board: Board, now: float) -> bool:
    """Full: requests wait in every engine, as was last seen."""
    return all(board.pending(name) > 0 for name in names)


def utilised(names: Sequence[str], board: Board, now: float) -> bool:
    """Full: the mean KV use of these engines, as was last seen, is at GKE's threshold. A waterfall's rule."""
    used = sum(board.seen[name][0].usage for name in names if name in board.seen)
    return used >= UTILISED * len(names)
