"""How much later first tokens come than a target's cost model predicts; promises are corrected by it.

The model knows wires, waits and prefill. It does not know what the tiers and the engine's own server take, nor how long
a request waits for the step that an engine is at when it comes. That is measured: the median of what the latest were
late. Most come to an engine that is free and some into a step; a mean would promise all of them the same in between.
Invariants: finite whatever was seen, within +-RESIDUAL_MAX_MS; nothing is promised sooner than FLOOR_SHARE of what was
predicted. Corrects what is promised, never a score: what all have in common chooses nobody. Never reads a clock.
"""

from __future__ import annotations

from collections import deque

RESIDUAL_MAX_MS = 10_000.0
LATEST = 31  # odd: a median is one of them; a load that changes is followed after half as many
FLOOR_SHARE = 0.1


class Residual:
    """Of one target and model. 0 until something was seen."""

    __slots__ = ("_latest", "value_ms")

    def __init__(self) -> None:
        self.value_ms = 0.0
        self._latest: deque[float] = deque(maxlen=LATEST)

    def seen(self, predicted_ms: float, seen_ms: float) -> None:
        """A first token came `seen_ms` after it was asked for, where the model alone said `predicted_ms`. What is no
        number, or beyond the bound, changes nothing."""
        late_ms = seen_ms - predicted_ms
        if -RESIDUAL_MAX_MS <= late_ms <= RESIDUAL_MAX_MS:
            self._latest.append(late_ms)
            self.value_ms = sorted(self._latest)[(len(self._latest) - 1) // 2]


def corrected(predicted_ms: float, residual_ms: float) -> float:
    """What to promise: both together, and not less than FLOOR_SHARE of the prediction."""
    return max(predicted_ms + residual_ms, FLOOR_SHARE * predicted_ms)


__all__ = ["FLOOR_SHARE", "LATEST", "RESIDUAL_MAX_MS", "Residual", "corrected"]
