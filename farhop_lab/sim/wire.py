"""The ocean in virtual time: half a round trip each way, and links that freeze.

Invariants: what is sent on one link arrives in the order it was sent; a frozen link loses nothing and delivers nothing
until it is healed, as TCP does on a path that swallows packets. Never knows what it carries.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.sim.timeline import Timeline
    from topology.model import Topology

_Parcel = tuple["Callable[..., object]", tuple[Any, ...]]


class Wire:
    """Links between all regions of a topology, its wire times to begin with."""

    def __init__(self, topology: Topology, timeline: Timeline) -> None:
        self._timeline = timeline
        names = list(topology.regions)
        self._rtt_ms = {(a, b): topology.rtt_ms(a, b) for a in names for b in names}
        self._frozen: dict[tuple[str, str], tuple[float, list[_Parcel]]] = {}
        self._arrives: dict[tuple[str, str], float] = {}

    def rtt_ms(self, a: str, b: str) -> float:
        """The round trip as it is now. KeyError for a region that the world lacks."""
        return self._rtt_ms[a, b]

    def set_rtt(self, a: str, b: str, rtt_ms: float) -> None:
        """Another path, both ways, for what is sent from now on."""
        if not 0.0 <= rtt_ms < inf:
            raise ValueError(f"rtt_ms: {rtt_ms!r} is no wire time; give 0 or more milliseconds")
        self._rtt_ms[a, b] = self._rtt_ms[b, a] = rtt_ms

    def send(self, a: str, b: str, act: Callable[..., object], *args: Any) -> None:
        """`act` when it arrives in `b`."""
        frozen = self._frozen.get((a, b))
        if frozen is not None:
            frozen[1].append((act, args))
            return
        # A path that became shorter must not let what is sent now overtake what is under way.
        due = max(self._timeline.now + self._rtt_ms[a, b] / 2e3, self._arrives.get((a, b), 0.0))
        self._arrives[a, b] = due
        self._timeline.at(due, act, *args)

    def freeze(self, a: str, b: str) -> None:
        """Nothing gets through, either way, of what is sent from now on. Idempotent."""
        for pair in ((a, b), (b, a)):
            self._frozen.setdefault(pair, (self._timeline.now, []))

    def heal(self, a: str, b: str) -> None:
        """The link works again: what waited goes first. Idempotent."""
        for pair in ((a, b), (b, a)):
            for act, args in self._frozen.pop(pair, (0.0, []))[1]:
                self.send(*pair, act, *args)

    def frozen_since(self, a: str, b: str) -> float | None:
        """Since when nothing gets from `a` to `b`; None if it does."""
        frozen = self._frozen.get((a, b))
        return frozen[0] if frozen is not None else None
