"""Corrects each client network's distance from each region by the latencies that entries measured.

Geography is a guess from a registry; a handshake's round trip is measured. But the measurement includes the client's
own access link, which no geography knows, and exists only for regions that the network's clients connected to. So a
network is corrected by the measurements of several regions, or by that of one region from which it is nearer than
geography says; a single larger measurement may be due to a slow access link, and corrects nothing. Invariants: a
correction is bounded; measurements that no entry publishes any more are forgotten. Never reads a clock. Never changes
what is lawful: it only changes the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farhop.balance.estimate.network_latencies import parse
from farhop.store.contract import REGION_INSTANCES_MAX

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    from farhop.store.documents.latencies import LatencyReport

REPORTS_MAX = 1024
NETWORKS_MAX = 65_536
_FINE_MS = 20.0  # below, steps of 1 ms; above, of 5: a finer change is no reason to prepare every answer anew
_COARSE_MS = 5.0

Measured = Mapping[str, float]
"""By region, milliseconds."""


@dataclass(frozen=True, slots=True)
class LearningConfig:
    """`samples_min`: connections of a network that a region must have measured; `far_ms`: how much nearer than by
    geography one region must find it to be used alone; `correction_max_ms`: how far a cost may be from geography;
    `age_s`: how long measurements are used while etcd is out of contact.
    """

    samples_min: int = 4
    far_ms: float = 30.0
    correction_max_ms: float = 200.0
    age_s: float = 21_600.0


@dataclass(slots=True)
class Learned:
    """The present reports of all entries, by network and region: the least of the instances' figures."""

    config: LearningConfig
    _reports: dict[tuple[str, str], LatencyReport] = field(default_factory=dict)
    _lost_at: float | None = None

    def reported(self, report: LatencyReport) -> None:
        """An entry's report, which replaces the previous one."""
        name = (report.region, report.instance)
        siblings = sum(region == report.region for region, _ in self._reports)
        if name in self._reports or (len(self._reports) < REPORTS_MAX and siblings < REGION_INSTANCES_MAX):
            self._reports[name] = report

    def gone(self, region: str, instance: str) -> None:
        """An entry withdraws its report."""
        self._reports.pop((region, instance), None)

    def contact(self, up: bool, now: float) -> None:
        """etcd is in contact, or is not."""
        if up:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = now

    def read(self, now: float) -> dict[IPv4Network | IPv6Network, dict[str, float]]:
        """Networks that regions measured often enough; in steps, so that only relevant changes show."""
        if self._lost_at is not None and now - self._lost_at > self.config.age_s:
            return {}
        found: dict[str, dict[str, tuple[float, int]]] = {}
        for report in self._reports.values():
            for network, one in report.networks.items():
                by_region = found.get(network)
                if by_region is None:
                    if len(found) >= NETWORKS_MAX:
                        continue
                    by_region = found[network] = {}
                ms, samples = by_region.get(report.region, (one.ms, 0))
                by_region[report.region] = (min(ms, one.ms), samples + one.samples)
        enough = {
            network: {
                region: _stepped(ms)
                for region, (ms, samples) in sorted(by_region.items())
                if samples >= self.config.samples_min
            }
            for network, by_region in found.items()
        }
        return {parse(network): by_region for network, by_region in sorted(enough.items()) if by_region}


def _stepped(ms: float) -> float:
    return float(round(ms)) if ms < _FINE_MS else _COARSE_MS * round(ms / _COARSE_MS)


def judge(
    regions: Sequence[str],
    predicted: Measured | None,
    measured: Measured,
    wire_ms: Callable[[str, str], float],
    config: LearningConfig,
) -> tuple[dict[str, float], str]:
    """The cost of each region with entries for a network that some of them measured; or none, and why geography stays.

    `predicted`: by geography, for all of `regions`; None if it is unknown. A region that did not measure it costs
    geography and the access link's own time, within the triangle inequality on the measured ones. If nothing is known,
    it costs the maximum that this allows.
    """
    near = any(
        ms < predicted[region] - config.far_ms if predicted is not None else ms <= config.far_ms
        for region, ms in measured.items()
    )
    if len(measured) < 2 and not near:
        reason = "no nearer than geography says" if predicted is not None else "not near, and nothing else is known"
        return {}, f"one region alone measured it: {reason}"
    access_ms = max(0.0, min(ms - predicted[region] for region, ms in measured.items())) if predicted else 0.0
    costs: dict[str, float] = {}
    for region in regions:
        ms = measured.get(region)
        most = min(wire_ms(region, other) + seen for other, seen in measured.items())
        if predicted is None:
            costs[region] = most if ms is None else ms
            continue
        geographic = predicted[region] + access_ms
        if ms is None:
            least = max(wire_ms(region, other) - seen for other, seen in measured.items())
            ms = min(max(geographic, least), most)
        bound = config.correction_max_ms
        costs[region] = min(max(ms, geographic - bound), geographic + bound)
    return costs, ""
