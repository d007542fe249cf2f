"""Plain series against prometheus_client's own, and their bounds."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from farhop.telemetry.series import OTHER, Buckets, Counter, Histogram, Labels

BOUNDS = (0.1, 0.5, 1.0, 5.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS), max_size=40))
def test_buckets_count_as_prometheus_client_does(samples):
    reference = Reference("h", "h", buckets=BOUNDS, registry=CollectorRegistry())
    ours = Buckets(BOUNDS)
    for sample in samples:
        reference.observe(sample)
        assert ours.observe(sample)
    (family,) = reference.collect()
    theirs = [(sample.labels["le"], sample.value) for sample in family.samples if sample.name == "h_bucket"]
    assert list(ours.cumulative()) == theirs
    assert math.isclose(ours.total, next(s.value for s in family.samples if s.name == "h_sum"))


def test_absurd_samples_change_nothing():
    buckets = Buckets(BOUNDS)
    for absurd in (-1.0, math.nan, math.inf, -math.inf, 1e12):
        assert not buckets.observe(absurd)
    assert (sum(buckets.counts), buckets.total) == (0, 0.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from("abcdefgh"), max_size=60))
def test_labels_never_exceed_their_bound(values):
    labels = Labels(3)
    held: set[str] = set()
    for value in values:
        admitted = labels.admit(value)
        assert admitted == (value if value in held or len(held) < 3 else OTHER)
        if admitted == value:
            held.add(value)


def test_families_carry_the_constant_labels_first():
    counter = Counter("c", "c", ("to",))
    counter.add(("tokyo",), 2)
    counter.add(("tokyo",))
    (sample,) = counter.family([("tier", "global")]).samples
    assert (sample.name, sample.labels, sample.value) == ("c_total", {"tier": "global", "to": "tokyo"}, 3)
    histogram = Histogram("h", "h", BOUNDS, ("to",))
    histogram.series(("tokyo",)).observe(0.2)
    labels = {tuple(sample.labels) for sample in histogram.family([("tier", "global")]).samples}
    assert labels == {("tier", "to", "le"), ("tier", "to")}
