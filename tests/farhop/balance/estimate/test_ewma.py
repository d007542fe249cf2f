"""Averages stay inside what was sampled, believe their formula, and refuse what is no number."""

from math import e, exp, inf, isfinite, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.ewma import Mean, PeakEwma, RevertingMean

RUN = settings(max_examples=150, deadline=None, derandomize=True)
SAMPLES = st.lists(
    st.tuples(st.floats(0, 1e308, allow_nan=False), st.floats(-5, 500)),  # value, seconds since the last (may go back)
    min_size=1,
    max_size=30,
)


def test_the_first_sample_is_the_value() -> None:
    mean = PeakEwma(10.0)
    assert mean.value is None
    mean.update(3.0, now=0.0)
    assert mean.value == 3.0


def test_a_clock_that_steps_back_is_no_time_and_does_not_move_the_mark() -> None:
    mean = PeakEwma(10.0)
    mean.update(9.0, now=100.0)
    assert mean.update(1.0, now=50.0)
    assert mean.value == 9.0
    mean.update(1.0, now=110.0)
    assert mean.value == pytest.approx(9.0 * exp(-1) + 1.0 * (1 - exp(-1)))


@given(SAMPLES, st.floats(1e-3, 1e3))
@RUN
def test_a_peak_stays_within_their_samples(samples: list[tuple[float, float]], tau_s: float) -> None:
    now = 1000.0
    seen: list[float] = []
    peak = PeakEwma(tau_s)
    for value, dt_s in samples:
        now += dt_s
        seen.append(value)
        assert peak.update(value, now)
        assert peak.value is not None
        assert isfinite(peak.value)
        assert min(seen) * (1 - 1e-9) <= peak.value <= max(seen)
        assert peak.value >= value * (1 - 1e-9)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_sample_that_is_not_a_number_is_ignored(bad: float) -> None:
    average = PeakEwma(1.0)
    average.update(7.0, now=0.0)
    assert not average.update(bad, now=10.0)
    assert average.value == 7.0
    # Nor was the time of the refused sample used as the last one's.
    average.update(5.0, now=10.0)
    assert average.value == pytest.approx(7.0 * exp(-10) + 5.0 * (1 - exp(-10)))
    bounded = Mean(0.5, lo=1.0, hi=8.0)
    bounded.update(4.0)
    assert not bounded.update(bad)
    assert bounded.value == 4.0


def test_a_peak_is_taken_over_at_once_and_fades_slowly() -> None:
    peak = PeakEwma(tau_s=10.0)
    peak.update(10.0, now=0.0)
    peak.update(500.0, now=0.001)
    assert peak.value == 500.0
    peak.update(10.0, now=10.001)
    assert peak.value == pytest.approx(500.0 * exp(-1) + 10.0 * (1 - exp(-1)))
    assert not peak.update(-1.0, now=11.0)


def test_reading_a_peak_later_decays_the_reading_and_not_the_peak() -> None:
    peak = PeakEwma(tau_s=10.0)
    assert peak.at(5.0) is None
    peak.update(100.0, now=0.0)
    assert peak.at(10.0) == pytest.approx(100.0 * exp(-1))
    assert peak.at(-10.0) == 100.0
    assert peak.value == 100.0


@given(st.lists(st.floats(), max_size=30), st.floats(0.01, 1.0))
@RUN
def test_a_mean_never_leaves_its_domain(values: list[float], weight: float) -> None:
    mean = Mean(weight, lo=1.0, hi=8.0)
    for value in values:
        assert mean.update(value) == (1.0 <= value <= 8.0)
        assert mean.value is None or 1.0 <= mean.value <= 8.0 + 1e-9
    assert (mean.value is None) == (not any(1.0 <= value <= 8.0 for value in values))


def test_a_mean_weighs_each_sample_alike_but_the_first() -> None:
    mean = Mean(0.25, lo=0.0, hi=100.0)
    mean.update(10.0)
    assert mean.value == 10.0
    mean.update(30.0)
    assert mean.value == 15.0


@pytest.mark.parametrize("tau_s", [0.0, -1.0, nan, inf])
def test_tau_must_be_a_positive_time(tau_s: float) -> None:
    with pytest.raises(ValueError, match="tau_s"):
        PeakEwma(tau_s)


def test_weights_and_domains_are_checked() -> None:
    for build in (lambda: Mean(0.0, 0.0, 1.0), lambda: Mean(0.5, 2.0, 1.0)):
        with pytest.raises(ValueError):
            build()


def test_a_mean_without_samples_returns_to_its_prior() -> None:
    share = RevertingMean(0.5, 1.0, 0.1, 1.0, 60.0)
    assert share.at(5.0) == 1.0
    assert share.update(0.1, 10.0)
    assert share.value == share.at(10.0) == share.at(0.0) == pytest.approx(0.55)
    assert share.at(70.0) == pytest.approx(1.0 - 0.45 / e)
    assert share.update(0.1, 70.0)  # half of the way from the estimate at that time
    assert share.value == pytest.approx((1.0 - 0.45 / e + 0.1) / 2)
    assert not share.update(0.05, 70.0)
    assert not share.update(nan, 70.0)


def test_the_first_sample_may_count_whole_and_none_counts_as_more_than_the_clip() -> None:
    length = RevertingMean(0.05, 256.0, 1.0, 1e6, 60.0, first=1.0, clip=8.0)
    assert length.update(40.0, 0.0)
    assert length.value == 40.0
    assert length.update(1e6, 0.0)
    assert length.value == pytest.approx(40.0 + 0.05 * 280.0)


@pytest.mark.parametrize(
    ("weight", "prior", "lo", "hi", "tau_s", "first", "clip", "named"),
    [
        (0.0, 1.0, 0.1, 1.0, 1.0, None, 2.0, "weights"),
        (0.5, 1.0, 0.1, 1.0, 1.0, 1.5, 2.0, "weights"),
        (0.5, 2.0, 0.1, 1.0, 1.0, None, 2.0, "prior"),
        (0.5, nan, 0.1, 1.0, 1.0, None, 2.0, "prior"),
        (0.5, 1.0, 0.0, 1.0, 1.0, None, 2.0, "prior"),
        (0.5, 1.0, 0.1, 1.0, 0.0, None, 2.0, "tau_s"),
        (0.5, 1.0, 0.1, 1.0, 1.0, None, 1.0, "clip"),
    ],
)
def test_a_returning_average_that_cannot_work_is_refused(weight, prior, lo, hi, tau_s, first, clip, named) -> None:
    with pytest.raises(ValueError, match=named):
        RevertingMean(weight, prior, lo, hi, tau_s, first, clip)


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.floats(0.0, 1e4)), max_size=30), st.floats(0.0, 1e6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_returning_average_stays_in_its_domain(samples, later_s: float) -> None:
    mean, now = RevertingMean(0.25, 200.0, 1.0, 6e4, 300.0, clip=4.0), 0.0
    for value, gap_s in samples:
        now += gap_s
        mean.update(value, now)
        assert 1.0 <= mean.value <= 6e4
        assert 1.0 <= mean.at(now + later_s) <= 6e4
        assert abs(mean.at(now + later_s) - 200.0) <= abs(mean.value - 200.0) + 1e-9
