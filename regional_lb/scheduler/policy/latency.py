"""`least-latency`: peak EWMA of the time to the first byte, times what is under way (Finagle's, Linkerd's load metric).

    score_ms(i) = max(peak EWMA(i), uncached(i) * prefill_ms_per_token(i)) * (in flight(i) + 1)

The peak jumps up to a slow answer at once, no higher than PEAK_MAX times those of the others, and decays with TAU_S, so
that a replica that was slow is tried again within half a minute. The request's own prefill time is its floor, so that a
replica without samples does not look best. Errors are no samples: a replica that fails fast must not look fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from farhop.balance.estimate.ewma import PeakEwma
from regional_lb.scheduler.policy.base import PerReplica, Policy

if TYPE_CHECKING:
    from regional_lb.fleet.table import Column, ScoreInputs, Table
    from regional_lb.scheduler.policy.base import Need

TAU_S = 10.0  # Finagle's default
PEAK_MAX = 10.0  # times the others' peaks: decayed in 2.3 times TAU_S
_LEAST_MS = 1.0  # a wholly cached prompt takes a step, too


class LeastLatency(Policy):
    """See the module's docstring. An answer in one piece counts whole: its first token does not show."""

    name, unit = "least-latency", "ms"
    ties_share = 0.05
    learns = True

    def __init__(self) -> None:
        self._peaks: dict[str, PeakEwma] = {}
        self._peak_ms, self._updated_at = PerReplica(0.0), PerReplica(0.0)

    def score(self, need: Need, table: Table, work_tokens: Column, backlog_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """See the module's docstring; PeakEwma.at for one replica."""
        peak_ms = self._peak_ms.of(table) * np.exp(np.minimum(self._updated_at.of(table) - now, 0.0) / TAU_S)
        floor_ms = np.maximum(work_tokens * table.prefill_ms_per_token, _LEAST_MS)
        score_ms: Column = np.maximum(peak_ms, floor_ms) * (table.in_flight + 1.0)
        return score_ms

    def terms(self, inputs: ScoreInputs, work_tokens: Column, output_tokens: float, score: Column) -> dict[str, Column]:  # noqa: ARG002
        """See Policy: one request's time to the first byte, and as much again for each that is under way."""
        first_byte_ms: Column = score / (inputs.in_flight + 1.0)
        return {"first byte": first_byte_ms, "others": score - first_byte_ms}

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy."""
        self._peak_ms.adopt(names)
        self._updated_at.adopt(names)
        self._peaks = {name: self._peaks.get(name) or PeakEwma(TAU_S) for name in names}

    def answered(self, name: str, elapsed_ms: float, now: float) -> None:
        """See Policy."""
        peak = self._peaks.get(name)
        if peak is not None and peak.update(self._clipped(name, elapsed_ms, now), now):
            self._peak_ms.set(name, peak.value or 0.0)
            self._updated_at.set(name, now)

    def _clipped(self, name: str, elapsed_ms: float, now: float) -> float:
        """At most PEAK_MAX times what is usual among the others: the peak of a stall of seconds would take a minute to
        decay."""
        mine = self._peaks[name].at(now)
        if mine is not None and elapsed_ms <= PEAK_MAX * mine:
            return elapsed_ms  # nearly always
        others = sorted(ms for other, peak in self._peaks.items() if other != name and (ms := peak.at(now)) is not None)
        return min(elapsed_ms, PEAK_MAX * max(others[len(others) // 2], _LEAST_MS)) if others else elapsed_ms
