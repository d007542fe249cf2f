"""Adds measured latencies to an atlas based on geography: each corrected network gets a location of its own.

A measured network may contain several networks that geography or lists distinguish. Each of these keeps its own
confinement, and all get the measured latencies. Private networks are unchanged. Never reads a clock; runs outside the
processes that answer queries, like all preparation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from entry_dns.answers.prepare import UNKNOWN_MS, Atlas
from entry_dns.fleet.latencies import Measured, judge
from entry_dns.fleet.networks import BITS, PRIVATE, Space

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    from entry_dns.fleet.latencies import LearningConfig
    from topology.model import Topology

FINDINGS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one measured network.

    By region, in milliseconds: `predicted` by geography (empty if the location is unknown), `measured`, and `costs` as
    they are used now. `before` and `now`: the nearest region by geography and by `costs`. `why`: why the costs by
    geography stay in use; "" if they were corrected.
    """

    network: str
    predicted: Mapping[str, float]
    measured: Measured
    costs: Mapping[str, float]
    before: str
    now: str
    why: str


def corrected(
    known: Atlas,
    topology: Topology,
    learned: Mapping[IPv4Network | IPv6Network, Measured],
    config: LearningConfig,
) -> tuple[Atlas, list[Finding]]:
    """The atlas by geography and measurement, and the findings for each network (at most FINDINGS_MAX)."""
    region_of = [topology.entries[name].region for name in known.entries]
    rows: list[npt.NDArray[np.float64]] = []
    allowed: list[npt.NDArray[np.bool_]] = []
    findings: list[Finding] = []
    spaces: dict[int, Space] = {}
    for family, space in known.spaces.items():
        networks = sorted((n for n in learned if n.version == family), key=lambda n: int(n.network_address))
        if not networks:
            spaces[family] = space
            continue
        shift = 0 if family == 4 else 64
        firsts = np.array([int(n.network_address) >> shift for n in networks], dtype=np.uint64)
        sizes = [1 << (BITS[family] - n.prefixlen) for n in networks]
        ends = [
            end for first, size in zip(firsts.tolist(), sizes, strict=True) if (end := first + size) >> space.bits == 0
        ]
        starts = np.sort(np.concatenate([space.starts, firsts, np.array(ends, dtype=np.uint64)]))
        starts = starts[np.concatenate([[True], starts[1:] != starts[:-1]])]  # union1d takes ten times as long
        values = space.values[np.searchsorted(space.starts, starts, side="right") - 1].copy()
        owner = np.searchsorted(firsts, starts, side="right").astype(np.int64) - 1
        inside = owner >= 0
        last = firsts + np.array(sizes, dtype=np.uint64) - np.uint64(1)
        inside[inside] = starts[inside] <= last[owner[inside]]
        inside &= values != PRIVATE
        made: dict[tuple[int, int], int] = {}
        for at in np.flatnonzero(inside).tolist():
            key = (int(values[at]), int(owner[at]))
            if key not in made:
                finding, costs = _corrected(known, key[0], region_of, networks[key[1]], learned, topology, config)
                if len(findings) < FINDINGS_MAX:
                    findings.append(finding)
                made[key] = key[0]
                if costs is not None:
                    made[key] = len(known.costs) + len(rows)
                    rows.append(costs)
                    allowed.append(known.allowed[key[0]])
            values[at] = made[key]
        spaces[family] = Space(space.bits, starts, values).with_values(values)
    if not rows:
        return known, findings
    laid = Atlas(known.entries, spaces, np.vstack([known.costs, *rows]), np.vstack([known.allowed, *allowed]))
    return laid, findings


def _corrected(
    known: Atlas,
    row: int,
    region_of: list[str],
    network: IPv4Network | IPv6Network,
    learned: Mapping[IPv4Network | IPv6Network, Measured],
    topology: Topology,
    config: LearningConfig,
) -> tuple[Finding, npt.NDArray[np.float64] | None]:
    """The correction of one network at one location; None: no correction."""
    base = known.costs[row]
    measured = {region: ms for region, ms in learned[network].items() if region in region_of}
    by_region = {region: float(base[at]) for at, region in enumerate(region_of)}
    somewhere = all(ms < UNKNOWN_MS for ms in by_region.values())
    predicted = by_region if somewhere else None
    costs: dict[str, float] = {}
    why = "no region of the map's entries measured it"
    if measured:
        costs, why = judge(tuple(by_region), predicted, measured, topology.rtt_ms, config)
    counts = costs or by_region
    finding = Finding(
        str(network),
        by_region if somewhere else {},
        measured,
        counts if costs or somewhere else {},
        min(by_region, key=lambda one: (by_region[one], one)) if somewhere else "",
        min(counts, key=lambda one: (counts[one], one)) if costs or somewhere else "",
        why,
    )
    return finding, np.array([costs[region] for region in region_of]) if costs else None
