"""SkyWalker (EuroSys'26): selective pushing by pending requests, home first, by a trie of what was sent.

    every 100 ms: a replica is available iff its engine's pending queue is 0
                  a remote router is available iff q_remote <= 10 and q_remote <= q_self and it has an available replica
    the head of the line goes to an available local replica, else to an available remote router (once, never again)
    among them: who was sent the longest prefix (tie: fewest in flight) if it is more than half of the text, else the
    fewest in flight

Nothing is accounted for between two probes; a remote router's trie holds what this router sent there. Reads only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_lab.sim.baselines.tastes import least
from farhop_lab.sim.baselines.tree import PrefixTree
from farhop_lab.sim.baselines.words import forwarded, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.words import Board

PROBE_S = 0.1
PACE_S = 0.01
"""What its loop sleeps after each request that leaves the line: at most 100 a second."""
REMOTE_LINE_MAX = 10
THRESHOLD = 0.5


class SelectivePushing:
    """Its scope, SP-P."""

    def candidates(self, request: Request, board: Board, now: float) -> Sequence[str]:
        """See router.Scope."""
        free = [name for name in board.serving(board.local) if board.pending(name) == 0]
        if free or forwarded(request):
            return free
        return [name for name in board.serving(board.peers) if self._free(name, board)]

    def _free(self, peer: str, board: Board) -> bool:
        said = board.said.get(peer)
        return said is not None and said.available and said.line <= min(REMOTE_LINE_MAX, board.line)


class LongestPrefix:
    """Its taste."""

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self._threshold = threshold
        self._tree = PrefixTree()

    def choose(self, request: Request, among: Sequence[str], board: Board, now: float) -> str:
        """See router.Taste."""
        text = text_of(request)
        length, owners = self._tree.match(text, among)
        return least(owners if owners and length > self._threshold * len(text) else among, board)

    def sent(self, request: Request, target: str, board: Board, now: float) -> None:
        """See router.Taste."""
        self._tree.insert(text_of(request), target, now)
