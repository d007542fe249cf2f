"""A repeatedly measured figure, robust against stalls, whose weight fades with age.

Samples are gathered in windows of time, each window counts with the weighted median of its samples, and the figure is
the weighted median of the latest windows. Many samples of one bad moment (the answers that a stall held up all end
together) are only one window among many. A window's evidence fades with TAU_S, so what is not measured any more becomes
uncertain: readers weigh `evidence` against what is to be expected anyway.

Invariants: the value is one of the samples; evidence is 0 or more, falls with time, and rises with no more than 1 a
window; what is kept is bounded. Never reads a clock: `now` is monotonic seconds, and a step back in it is no time.
"""

from __future__ import annotations

from bisect import insort
from math import exp, inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_S = 1.0
KEPT = 16  # windows: at TAU_S the oldest of a steady flow counts an eighth
SAMPLES_MAX = 32  # of one window; further ones in the same second add nothing
# How fast evidence fades. After three times as long (24 s) it hardly counts beside a single new window, so a replica
# that was slow is assumed to be like its peers half a minute later; one that answers once in 8 s is known half.
TAU_S = 8.0
_REBASE_S = 50.0 * TAU_S


class Windows:
    """See the module's docstring. `half` is the weight of samples at which a window's evidence is 1/2: 1 sample, or
    that many tokens if samples are weighted by tokens. Samples may be taken at a load, for `rescale`.
    """

    __slots__ = ("_closed", "_half", "_loads", "_open", "_opened_at", "_since", "by_age", "by_value", "sampled_at")

    def __init__(self, half: float = 1.0) -> None:
        self._half = half
        # Closed windows: value, and evidence as it was when they were opened, times what has faded of evidence between
        # `_since` and then. So all of them fade by one factor, and none is touched again.
        self.by_age: list[tuple[float, float, float]] = []  # and its mean load
        self.by_value: list[tuple[float, float]] = []
        self._closed = 0.0  # their evidence, in sum
        self._since = 0.0
        self._open: list[tuple[float, float]] = []
        self._loads = 0.0  # of the open ones, in sum
        self._opened_at = 0.0
        self.sampled_at: float | None = None

    def take(self, sample: float, now: float, weight: float = 1.0, load: float = 0.0) -> None:
        """Add a finite sample with a weight above 0. The caller checks its domain."""
        if self._open and now - self._opened_at >= WINDOW_S:
            self._close()
        if not self._open:
            self._opened_at = now
            if not 0.0 <= now - self._since < _REBASE_S:
                self._rebase(now)
        if len(self._open) < SAMPLES_MAX:
            self._open.append((sample, weight))
            self._loads += load
        self.sampled_at = now

    def adopt(self, value: float, evidence: float, now: float) -> None:
        """Start with another balancer's figure and the evidence for it, as windows of equal value."""
        self._rebase(now)
        n_windows = min(KEPT, int(evidence) + 1)
        self.by_age = [(value, max(0.0, evidence - 0.5) / n_windows, 0.0)] * n_windows
        self.by_value = [(value, evidence) for value, evidence, _ in self.by_age]
        self._forget_open()
        self.take(value, now, self._half)  # which is half a window's

    def rescale(self, factor: Callable[[float], float]) -> None:
        """Multiply the samples by a factor above 0, which depends on the load at which they were taken."""
        self.by_age = [(value * factor(load), evidence, load) for value, evidence, load in self.by_age]
        self.by_value = sorted([(value, evidence) for value, evidence, _ in self.by_age])
        if self._open:
            by = factor(self._loads / len(self._open))
            self._open = [(value * by, weight) for value, weight in self._open]

    def read(self, now: float) -> tuple[float, float]:
        """The value, and the evidence for it as of `now`: (0, 0) before the first sample."""
        if not self._open:
            return 0.0, 0.0
        value, evidence = own = self._window()
        total = self._closed + evidence
        if self._closed:
            value = _median(self.by_value, own, 0.5 * total)
        return value, total * exp((self._since - max(now, self._opened_at)) / TAU_S)

    def _window(self) -> tuple[float, float]:
        """The open window as a pair, in the form of closed ones."""
        weight = sum([weight for _, weight in self._open])
        evidence = weight / (weight + self._half) * exp((self._opened_at - self._since) / TAU_S)
        return weighted_median(self._open), evidence

    def _close(self) -> None:
        window = self._window()
        self.by_age.append((*window, self._loads / len(self._open)))
        insort(self.by_value, window)
        if len(self.by_age) > KEPT:
            self.by_value.remove(self.by_age.pop(0)[:2])
        self._forget_open()

    def _forget_open(self) -> None:
        self._closed = sum([evidence for _, evidence, _ in self.by_age])
        self._open.clear()
        self._loads = 0.0

    def _rebase(self, now: float) -> None:
        """Measure time from `now` on, so that the exponent stays small."""
        left = exp(min(0.0, self._since - now) / TAU_S)
        self.by_age = [(value, evidence * left, load) for value, evidence, load in self.by_age]
        self.by_value = sorted([(value, evidence) for value, evidence, _ in self.by_age])
        self._closed *= left
        self._since = now


def _median(by_value: list[tuple[float, float]], one: tuple[float, float], half: float) -> float:
    """The least value at which `half` of the weight is reached, over sorted pairs and one more pair."""
    reached, (own, weight) = 0.0, one
    for value, more in by_value:
        if own <= value:
            reached += weight
            if reached >= half:
                return own
            own = inf
        reached += more
        if reached >= half:
            return value
    return one[0] if own < inf else by_value[-1][0]


def weighted_median(pairs: list[tuple[float, float]]) -> float:
    """The least value at which half of the weight is reached. At least one pair of (value, weight 0 or more)."""
    if len(pairs) == 1:
        return pairs[0][0]
    half = 0.5 * sum(weight for _, weight in pairs)
    reached = 0.0
    for value, weight in sorted(pairs):
        reached += weight
        if reached >= half:
            return value
    return max(pairs)[0]
