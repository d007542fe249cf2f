"""What all parts of a simulated world share: time, wires, law, random numbers and measures.

Invariant: each part draws from its own generator, named and derived from the one seed, so that what happens to one part
does not change another's random numbers. No part keeps another's state.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from farhop_lab.sim.measures import Journal, Measures
from farhop_lab.sim.sites import Reporting, Watching
from farhop_lab.sim.timeline import Timeline
from farhop_lab.sim.wire import Wire
from topology.law import Law

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farhop_lab.sim.engines import Timing
    from topology.model import Topology


def _ignore(what: str, region: str, process: str, of: Any) -> None:
    """An observer that does nothing."""


class SimContext:
    """See the module's head."""

    def __init__(
        self,
        seed: int,
        topology: Topology,
        reporting: Reporting,
        watching: Watching,
        *,
        stood_s: float = 0.0,
        keep_journal: bool = False,
    ) -> None:
        self.seed, self.topology, self.reporting, self.watching = seed, topology, reporting, watching
        self.timeline = Timeline()
        self.timeline.now = -stood_s
        self.law = Law(topology)
        self.wire = Wire(topology, self.timeline)
        self.journal = Journal(self.timeline, keep=keep_journal)
        self.measures = Measures(self.journal)
        # Told of prompts and laws: (what, region, process, request or document). See World.
        self.observer: Callable[[str, str, str, Any], None] = _ignore
        self.timed: Callable[[str, str, Timing], None] | None = None  # by region and replica

    def rng(self, part: str) -> Random:
        """The random generator of one part. Random(str) hashes with SHA-512: the same in every process."""
        return Random(f"{self.seed} {part}")

    def nearest(self, region: str, names: Iterable[str]) -> list[str]:
        """All regions by distance from this one, itself first, as in the topology."""
        rtt_ms = self.topology.rtt_ms
        return sorted(names, key=lambda name: (name != region, rtt_ms(region, name), name))

    def every(self, period_s: float, act: Callable[[], None]) -> None:
        """Call it now and then every period, aligned with the timeline's zero, until the end."""
        act()
        # Not `after`: a sum of many periods would drift off the grid.
        step = round(self.timeline.now / period_s) + 1
        self.timeline.at(step * period_s, self._again, step, period_s, act)

    def _again(self, step: int, period_s: float, act: Callable[[], None]) -> None:
        act()
        self.timeline.at((step + 1) * period_s, self._again, step + 1, period_s, act)
