"""Plain counters and histograms, cheap enough for every request; Prometheus sees them only when it scrapes.

prometheus_client's own children take a lock per update, and `labels()` costs more than all of this. Invariants: one
thread (the event loop) writes and reads; label sets are bounded, what is past the bound counts as "other"; a value
outside its domain (negative, NaN, infinite) is refused and counted, never added.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

OTHER = "other"
# A day in seconds, or a token count no request has: a sample beyond is a broken clock or a broken engine.
SAMPLE_MAX = 1e9


class Labels:
    """Which values of one label get a series of their own: the first `bound` seen."""

    __slots__ = ("_bound", "_known")

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._known: dict[str, str] = {}

    def admit(self, value: str) -> str:
        """The value itself, or "other" once the bound is reached."""
        known = self._known.get(value)
        if known is not None:
            return known
        if len(self._known) >= self._bound:
            return OTHER
        self._known[value] = value
        return value


class Counter:
    """Non-negative sums by label values (in the order of the names). Callers bound the values with `Labels`."""

    __slots__ = ("help", "labels", "name", "values")

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.help = help_text
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, key: tuple[str, ...], amount: float = 1) -> None:
        """Add `amount` (0 or more)."""
        values = self.values
        values[key] = values.get(key, 0) + amount

    def family(self, const: Sequence[tuple[str, str]]) -> CounterMetricFamily:
        """The scrape's form, with the constant labels first."""
        names, own = [name for name, _ in const], [value for _, value in const]
        family = CounterMetricFamily(self.name, self.help, labels=[*names, *self.labels])
        for key, value in self.values.items():
            family.add_metric([*own, *key], value)
        return family


class Buckets:
    """One histogram series: counts per bucket (the last is +Inf) and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> bool:
        """Add a sample; False (and nothing added) if it is outside [0, 1e9]. Bucket bounds are inclusive above."""
        if not 0.0 <= value <= SAMPLE_MAX:  # false for NaN as well
            return False
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        return True

    def cumulative(self) -> Iterator[tuple[str, float]]:
        """(le, samples up to le) as Prometheus wants them."""
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            yield str(floatToGoString(bound)), seen  # type: ignore[no-untyped-call]


class Histogram:
    """Histograms of one name by label values; `series` creates on first use."""

    __slots__ = ("bounds", "by_key", "help", "labels", "name")

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...], labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.help = help_text
        self.bounds = bounds
        self.labels = labels
        self.by_key: dict[tuple[str, ...], Buckets] = {} if labels else {(): Buckets(bounds)}

    def series(self, key: tuple[str, ...] = ()) -> Buckets:
        """The buckets for these label values; callers bound the values with `Labels`."""
        found = self.by_key.get(key)
        if found is None:
            found = self.by_key[key] = Buckets(self.bounds)
        return found

    def family(self, const: Sequence[tuple[str, str]]) -> HistogramMetricFamily:
        """The scrape's form, with the constant labels first."""
        names, own = [name for name, _ in const], [value for _, value in const]
        family = HistogramMetricFamily(self.name, self.help, labels=[*names, *self.labels])
        for key, buckets in self.by_key.items():
            family.add_metric([*own, *key], list(buckets.cumulative()), buckets.total)
        return family
