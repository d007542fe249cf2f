"""Moving averages of what was measured: by time (PeakEwma), by sample (Mean), or by both (RevertingMean).

Invariants: a value is None or finite and inside the range of the samples taken (and the prior); a sample that is not a
finite number in its domain changes nothing, and update() says so by False, so that the caller can count it. Reading
never changes. Never reads a clock: `now` is monotonic seconds, and a step back in it counts as no time at all.
"""

from math import exp, inf


def _check_tau(tau_s: float) -> float:
    if not 0.0 < tau_s < inf:
        raise ValueError(f"tau_s must be a positive number of seconds, not {tau_s!r}")
    return tau_s


class PeakEwma:
    """An average that believes bad news at once: it jumps up to any sample above it and decays down with tau_s.

    Source: Finagle's and Linkerd's peak EWMA load metric. There, reading an idle endpoint decays its stored cost; here
    `at(now)` computes the same figure and leaves the state alone. Samples are 0 or more (latencies).
    """

    __slots__ = ("_last_s", "_tau_s", "value")

    def __init__(self, tau_s: float) -> None:
        self._tau_s = _check_tau(tau_s)
        self._last_s: float | None = None
        self.value: float | None = None

    def update(self, value: float, now: float) -> bool:
        """Add a sample at `now`. Returns False, and changes nothing, if it is NaN, infinite or negative."""
        if not 0.0 <= value < inf:
            return False
        last_s, mean = self._last_s, self.value
        if last_s is None or mean is None:
            self.value, self._last_s = value, now
            return True
        if value >= mean:
            self.value = value
        elif now > last_s:
            keep = exp((last_s - now) / self._tau_s)
            self.value = min(mean, mean * keep + value * (1.0 - keep))
        if now > last_s:
            self._last_s = now
        return True

    def at(self, now: float) -> float | None:
        """The value as of `now`, decayed towards 0 since the last sample: what was bad becomes worth a new try."""
        if self.value is None or self._last_s is None or now <= self._last_s:
            return self.value
        return self.value * exp((self._last_s - now) / self._tau_s)


class Mean:
    """Per-sample average of a ratio or length (bytes per token, output tokens): each sample weighs `weight`.

    `lo` and `hi` are the domain, inclusive: a sample outside it is refused, not clamped, as it says nothing true.
    """

    __slots__ = ("_hi", "_lo", "_weight", "value")

    def __init__(self, weight: float, lo: float, hi: float) -> None:
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"weight must be above 0 and at most 1, not {weight!r}")
        if not -inf < lo <= hi < inf:
            raise ValueError(f"lo and hi must be finite with lo <= hi, not {lo!r} and {hi!r}")
        self._weight = weight
        self._lo = lo
        self._hi = hi
        self.value: float | None = None

    def update(self, value: float) -> bool:
        """Add a sample. Returns False, and changes nothing, if it is NaN or outside the domain."""
        if not self._lo <= value <= self._hi:
            return False
        mean = self.value
        self.value = value if mean is None else mean + self._weight * (value - mean)
        return True


class RevertingMean:
    """Per-sample average that goes back to `prior` with `tau_s` while nothing is sampled: what is believed decides what
    is tried, and so what is sampled. Each sample weighs `weight`, the first `first`; none counts as more than `clip`
    times what is believed. `lo` and `hi` are the domain, `prior` in it; a sample outside is refused.
    """

    __slots__ = ("_at", "_clip", "_hi", "_lo", "_next", "_prior", "_tau_s", "_weight", "value")

    def __init__(
        self,
        weight: float,
        prior: float,
        lo: float,
        hi: float,
        tau_s: float,
        first: float | None = None,
        clip: float = inf,
    ) -> None:
        if not 0.0 < weight <= 1.0 or not (first is None or 0.0 < first <= 1.0):
            raise ValueError(f"weights must be above 0 and at most 1, not {weight!r} and {first!r}")
        if not 0.0 < lo <= prior <= hi < inf:
            raise ValueError(f"prior must lie within lo, above 0, and hi, not {prior!r} within {lo!r} and {hi!r}")
        if not clip > 1.0:
            raise ValueError(f"clip must be above 1, not {clip!r}")
        self._weight, self._next = weight, weight if first is None else first
        self._prior, self._lo, self._hi, self._clip = prior, lo, hi, clip
        self._tau_s = _check_tau(tau_s)
        self._at: float | None = None
        self.value = prior  # as of the last sample

    def update(self, value: float, now: float) -> bool:
        """Add a sample at `now`. Returns False, and changes nothing, if it is NaN or outside the domain."""
        if not self._lo <= value <= self._hi:
            return False
        mean = self.at(now)
        self.value = mean + self._next * (min(value, self._clip * mean) - mean)
        self._next = self._weight
        self._at = now if self._at is None else max(self._at, now)
        return True

    def at(self, now: float) -> float:
        """The estimate as of `now`."""
        if self._at is None or now <= self._at:
            return self.value
        return self._prior + (self.value - self._prior) * exp((self._at - now) / self._tau_s)
