from __future__ import annotations

from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.workloads.arrivals import (
    Burst,
    bunched,
    placed,
    poisson,
    programs,
    renewals,
    sped,
    thinned,
    varying,
)
from farhop_lab.workloads.places import uniform
from farhop_lab.workloads.program import Ask, Program, Schedule, Start, WorkloadError, one


def asks(name: str, rng: Random) -> Program:
    return one(Ask(prompt=f"{name} {rng.random()}".encode()))


def starts(*moments: float) -> Schedule:
    return iter([Start(at, "a", lambda: asks("x", Random(1))) for at in moments])


def test_poisson_arrivals_have_their_rate_and_variation() -> None:
    moments = list(poisson(5.0, Random(1), since=10.0, until=2010.0))
    assert 10.0 < moments[0] < moments[-1] < 2010.0
    assert len(moments) == pytest.approx(10_000, rel=0.04)
    gaps = [b - a for a, b in pairwise(moments)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.0, abs=0.05)
    assert list(poisson(0.0, Random(1))) == []
    with pytest.raises(WorkloadError, match="no rate"):
        next(poisson(-1.0, Random(1)))


def test_a_rate_that_changes_is_met_at_every_moment() -> None:
    moments = list(varying(lambda at: 10.0 if at < 100.0 else 2.0, 10.0, Random(2), until=200.0))
    assert sum(at < 100.0 for at in moments) == pytest.approx(1000, rel=0.12)
    assert sum(at >= 100.0 for at in moments) == pytest.approx(200, rel=0.25)
    with pytest.raises(WorkloadError, match="give its bound"):
        list(varying(lambda at: 3.0, 2.0, Random(1), until=100.0))


def test_bunched_arrivals_are_as_many_at_the_beginning_of_each_interval() -> None:
    moments = list(poisson(5.0, Random(1), until=300.0))
    at_once = list(bunched(iter(moments), 5.0, 0.0))
    assert at_once == [at // 5.0 * 5.0 for at in moments]
    lasting = list(bunched(iter(moments), 60.0, 6.0))
    assert lasting == sorted(lasting)
    assert len(lasting) == len(moments)
    assert all(at % 60.0 <= 6.0 for at in lasting)
    assert list(bunched(iter(moments), 0.1, 0.1)) == pytest.approx(moments)
    for every_s, for_s in ((0.0, 0.0), (5.0, 6.0), (5.0, -1.0)):
        with pytest.raises(WorkloadError, match="give every_s above 0"):
            next(bunched(iter(moments), every_s, for_s))


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_bursts_have_their_rate_and_variation(cv: float) -> None:
    moments = list(renewals(iter([Burst(0.0, 3000.0, 4.0, cv), Burst(3000.0, 600.0, 0.0), Burst(3600.0, 100.0, 1.0)]),
                            Random(3)))  # fmt: skip
    assert moments == sorted(moments)
    first = [at for at in moments if at < 3000.0]
    assert len(first) == pytest.approx(12_000, rel=0.06 * max(1.0, cv))
    gaps = [b - a for a, b in pairwise(first)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1)
    assert not [at for at in moments if 3000.0 <= at < 3600.0 or at >= 3700.0]


def test_each_program_has_a_name_dice_and_a_region_of_its_own() -> None:
    first, again = (
        [
            (start.at, start.region, next(start.make())[0].prompt)
            for start in programs(iter([1.0, 2.0, 3.0]), rule, asks, n)
        ]
        for rule, n in ((uniform(["a", "b"]), "x"), (uniform(["a", "b"]), "x"))
    )
    assert first == again
    assert len({prompt for _, _, prompt in first}) == 3
    moved = list(placed(iter([(1.0, "b"), (2.0, "a")]), asks, "x"))
    assert [(start.at, start.region) for start in moved] == [(1.0, "b"), (2.0, "a")]
    assert next(moved[0].make())[0].prompt == first[0][2]


def test_schedules_are_thinned_and_sped_up() -> None:
    assert [start.at for start in sped(starts(1, 4, 10), 2.0, since=4.0)] == [0.0, 3.0]
    kept = list(thinned(starts(*range(4000)), 0.25, Random(1)))
    assert len(kept) == pytest.approx(1000, rel=0.12)
    assert list(thinned(starts(1, 2), 0.0, Random(1))) == []
    assert len(list(thinned(starts(1, 2), 1.0, Random(1)))) == 2
    with pytest.raises(WorkloadError, match="speed"):
        next(sped(starts(1), 0.0))
    with pytest.raises(WorkloadError, match="share"):
        thinned(starts(1), 1.5, Random(1))


@settings(deadline=None)
@given(st.integers(0, 99), st.floats(0.1, 50.0))
def test_arrival_times_are_strictly_increasing(seed: int, per_s: float) -> None:
    moments = list(islice(poisson(per_s, Random(seed)), 50))
    assert all(a < b for a, b in pairwise(moments))


def test_a_session_is_kept_or_left_out_whole() -> None:
    many = [msgspec.structs.replace(start, session=f"s{n % 500}") for n, start in enumerate(starts(*range(2000)))]
    kept = [start.session for start in thinned(iter(many), 0.25, Random(1))]
    assert all(kept.count(name) == 4 for name in set(kept))
    assert 75 < len(set(kept)) < 175
    other = {start.session for start in thinned(iter(many), 0.25, Random(2))}
    assert set(kept) != other
