"""How uncertain an old report is, by how fast its figures were changing.

    uncertainty_ms = age * rate of wait + (age * rate of use - slots left, if positive) * ms until a slot frees
                     + SILENT_MS_PER_S * silence                      age up to AGE_MAX_S, silence what is beyond it

A silent target grows more and more uncertain, however steady it was: only its own reports said that its wait does not
change. Invariants: the uncertainty is never negative, never above UNCERTAINTY_MAX_MS, 0 at age 0 unless the slots are
overdrawn, 0 for a target that reports and does not change, and never falls as time goes by. Never reads a clock: `now`
is monotonic seconds.
"""

from __future__ import annotations

from math import exp

UNCERTAINTY_MAX_MS = 500.0  # beyond it, an ocean away would count as near
MEMORY_S = 5.0
GAP_MIN_S = 0.05  # reports closer than this measure jitter, not change
AGE_MAX_S = 3.0  # reports come once a second at least: beyond it a target is silent, and its rates say nothing more
SILENT_MS_PER_S = 100.0  # all uncertainty there is after 5 s: answers take seconds, and a queue is another one by then


class Drift:
    """Rates of change of one target's wait (ms per second) and of its slots taken (slots per second)."""

    __slots__ = ("_at", "_slots", "_use", "_wait", "_wait_ms")

    def __init__(self) -> None:
        self._at: float | None = None
        self._wait_ms = 0.0
        self._slots = 0
        self._wait: float | None = None
        self._use = 0.0

    def reported(self, wait_ms: float, slots_free: int, at: float) -> None:
        """Take the target's report, received at `at`. Ignored if it is not newer, or too close to the last one."""
        before_ms, before_at = self._wait_ms, self._at
        if before_at is not None:
            gap_s = at - before_at
            if gap_s < GAP_MIN_S:
                return
            wait, use = abs(wait_ms - before_ms) / gap_s, max(0, self._slots - slots_free) / gap_s
            if self._wait is None:
                self._wait, self._use = wait, use
            else:  # averages that decay with MEMORY_S, by one exponential: a region has many, 20 times a second
                keep = exp(-gap_s / MEMORY_S)
                self._wait = self._wait * keep + wait * (1.0 - keep)
                self._use = self._use * keep + use * (1.0 - keep)
        self._at, self._wait_ms, self._slots = at, wait_ms, slots_free

    @property
    def still(self) -> bool:
        """Whether nothing was seen to change: then there is no uncertainty while it reports."""
        return not self._wait and not self._use

    @property
    def rates(self) -> tuple[float, float, float]:
        """Since when its figures are known, and how fast wait (ms a second) and use (slots a second) change."""
        return self._at or 0.0, self._wait or 0.0, self._use

    def uncertainty_ms(self, now: float, slots_left: float, slot_ms: float) -> float:
        """By how much the reported wait may be wrong at `now` (ms). `slot_ms`: the time until one more slot becomes
        free.
        """
        if self._at is None:
            return 0.0
        age_s = min(max(0.0, now - self._at), AGE_MAX_S)
        overflow = age_s * self._use - max(0.0, slots_left)
        uncertainty_ms = age_s * (self._wait or 0.0) + max(0.0, overflow) * slot_ms
        uncertainty_ms += SILENT_MS_PER_S * max(0.0, now - self._at - AGE_MAX_S)
        return min(uncertainty_ms, UNCERTAINTY_MAX_MS)
