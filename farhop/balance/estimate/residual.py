"""How much later first tokens come than a target's cost model predicts; used to correct promised times.

The model knows network time, waits and prefill. It does not know the time that the tiers and the engine's own server
take, nor how long a request waits for the engine's current step. That is measured: the median of the latest delays.
Most requests find an engine idle and some arrive within a step; a mean would predict the same value in between for all.
Invariants: finite for every input, within +-RESIDUAL_MAX_MS; a corrected time is at least FLOOR_SHARE of the
prediction. Corrects only promised times, never a score: what all targets share cannot change a choice. Never reads a
clock.
"""

from __future__ import annotations

from collections import deque

RESIDUAL_MAX_MS = 10_000.0
LATEST = 31  # odd: a median is one of them; a load that changes is followed after half as many
FLOOR_SHARE = 0.1


class Residual:
    """The residual (ms) of one target and model; 0 before the first sample."""

    __slots__ = ("_latest", "value_ms")

    def __init__(self) -> None:
        self.value_ms = 0.0
        self._latest: deque[float] = deque(maxlen=LATEST)

    def seen(self, predicted_ms: float, seen_ms: float) -> None:
        """A request's first token came after `seen_ms`; the model alone had predicted `predicted_ms`. Values that are
        not finite, or beyond the bound, are ignored.
        """
        late_ms = seen_ms - predicted_ms
        if -RESIDUAL_MAX_MS <= late_ms <= RESIDUAL_MAX_MS:
            self._latest.append(late_ms)
            self.value_ms = sorted(self._latest)[(len(self._latest) - 1) // 2]


def corrected(predicted_ms: float, residual_ms: float) -> float:
    """The time to promise (ms): prediction plus residual, at least FLOOR_SHARE of the prediction."""
    return max(predicted_ms + residual_ms, FLOOR_SHARE * predicted_ms)


__all__ = ["FLOOR_SHARE", "LATEST", "RESIDUAL_MAX_MS", "Residual", "corrected"]
