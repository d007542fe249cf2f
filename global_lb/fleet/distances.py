"""How far regions are and how far their clocks are off, only from pings. Never decides.

Invariants: until a region was pinged, and again when it no longer is, the topology's figure holds; a clock's offset
counts only for the incarnation that was pinged; an absurd reply changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance.estimate.rtt import RttEstimate
from farhop.store.documents.report import CLOCK_LIMIT_MS

if TYPE_CHECKING:
    from topology.model import Topology

MOVED_MS, MOVED_SHARE = 1.0, 0.05


def moved(known_ms: float, rtt_ms: float) -> bool:
    """Whether a round-trip time is worth an event at once; the region's next report brings it in any case."""
    return abs(rtt_ms - known_ms) > max(MOVED_MS, MOVED_SHARE * known_ms)


class Distances:
    """Round-trip times by region and clock offsets by (region, instance), as seen from `here`. Milliseconds."""

    def __init__(self, topology: Topology, here: str) -> None:
        self._here = here
        self._estimates = {region: RttEstimate(topology.rtt_ms(here, region)) for region in topology.regions}
        self._offsets: dict[tuple[str, str], tuple[int, float]] = {}

    def remap(self, topology: Topology) -> None:
        """Use another topology. For regions that stay in it, what pings measured is kept."""
        estimates: dict[str, RttEstimate] = {}
        for region in topology.regions:
            figure_ms = topology.rtt_ms(self._here, region)
            estimates[region] = estimate = self._estimates.get(region) or RttEstimate(figure_ms)
            estimate.assume(figure_ms)
        self._estimates = estimates

    def rtt_ms(self, region: str, now: float) -> float:
        """The round-trip time to a region of the topology, at `now` (our clock, seconds)."""
        return self._estimates[region].at(now)

    def moving(self, region: str) -> bool:
        """Whether the last ping was far off the estimate, so that pinging more often is worthwhile."""
        return self._estimates[region].moving

    def offset_ms(self, name: tuple[str, str], incarnation: int) -> float | None:
        """The instance's clock less ours; None if this incarnation was not pinged yet."""
        known = self._offsets.get(name)
        return known[1] if known is not None and known[0] == incarnation else None

    def pinged(self, name: tuple[str, str], incarnation: int, clock_ms: float, sent_at: float, now: float) -> bool:
        """A ping sent at `sent_at` (our clock, seconds) came back; False, and nothing changed, if that is absurd.

        Its clock was read half a round trip ago, give or take that half: a report does not say how old it is.
        """
        rtt_ms = (now - sent_at) * 1e3
        if not 0.0 <= clock_ms <= CLOCK_LIMIT_MS or not self._estimates[name[0]].sample(rtt_ms, now):
            return False
        self._offsets[name] = (incarnation, clock_ms - (sent_at + now) / 2.0 * 1e3)
        return True

    def forget(self, name: tuple[str, str]) -> None:
        """The instance is gone."""
        self._offsets.pop(name, None)
