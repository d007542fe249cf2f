"""How demand varies over the day in each time zone, and how the sum of all zones varies.

A region's level at its local hour h is w * exp(k * cos(2 pi (h - PEAK_HOUR) / 24)), w its weight and k = ln(swing) / 2,
so that its peak is `swing` times its trough. SkyWalker measured swings of 2.9 to 32.6 in single regions over a day, and
1.29 for all of them together: `THREE` are regions of such swings whose sum has that swing. Pure. A day may be shortened
(`day_s`), so that a simulation need not last 86,400 s.
"""

from __future__ import annotations

from math import cos, exp, log, pi, sqrt

import msgspec

from farhop_lab.workloads.program import WorkloadError

DAY_S = 86_400.0
PEAK_HOUR = 14.0
AWAKE_STEPS = 288
"""How often a day a client checks whether it may wake: every 5 minutes of the day."""


class Daylight(msgspec.Struct, frozen=True, kw_only=True):
    """One region's day. `utc_hours` is its time zone; at second 0 it is midnight UTC plus `starts_hour`."""

    utc_hours: float
    swing: float
    weight: float = 1.0
    starts_hour: float = 0.0
    day_s: float = DAY_S

    def __post_init__(self) -> None:
        if not (self.swing >= 1.0 and self.weight >= 0.0 and self.day_s > 0.0):
            raise WorkloadError(
                f"a day of swing {self.swing}, weight {self.weight} and {self.day_s} s: give a swing of 1 or more, a "
                "weight of 0 or more, a length above 0"
            )

    def level(self, at: float) -> float:
        """Demand at a time (seconds), in units of `weight`: from weight / sqrt(swing) to weight * sqrt(swing)."""
        hour = self.starts_hour + self.utc_hours + at / self.day_s * 24.0
        return self.weight * exp(log(self.swing) / 2.0 * cos(2.0 * pi * (hour - PEAK_HOUR) / 24.0))

    @property
    def peak(self) -> float:
        """The highest level of the day."""
        return self.weight * sqrt(self.swing)

    def awake(self, at: float, threshold: float) -> float:
        """When a client with this threshold (0..1 of the peak) may next begin: now, or later."""
        if not 0.0 <= threshold <= 1.0:
            raise WorkloadError(f"threshold: {threshold} is not within 0 and 1")
        step_s = self.day_s / AWAKE_STEPS
        for step in range(AWAKE_STEPS + 1):
            # With a tolerance: a threshold of 1 must be met at the peak, whichever way cos rounds there.
            if self.level(at + step * step_s) >= threshold * self.peak * (1.0 - 1e-3):
                return at + step * step_s
        return at + self.day_s


THREE = {
    "us": Daylight(utc_hours=-6.0, swing=8.0),
    "asia": Daylight(utc_hours=9.0, swing=8.0),
    "eu": Daylight(utc_hours=1.0, swing=12.0, weight=0.8),
}
"""Peak over trough of their sum: 1.29."""
