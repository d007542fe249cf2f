"""Schedules: the same from the same seed, sound, and read back as they were written."""

from __future__ import annotations

from collections import Counter

import pytest

from farhop_lab.chaos import schedule
from farhop_lab.chaos.schedule import AT_ONCE, LONGEST_S, SPAN_S, WARM_S, Schedule, ScheduleError
from farhop_lab.sim.faults import KINDS, Fault

MANY = [schedule.drawn(seed) for seed in range(400)]


def test_a_seed_draws_the_same_for_ever_and_every_kind_comes() -> None:
    assert [schedule.drawn(seed) for seed in range(50)] == MANY[:50]
    kinds = Counter(fault.what for one in MANY for fault in one.faults)
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 10
    assert {(one.regions, one.replicas) for one in MANY} == {(2, 2), (2, 3), (3, 2)}


def test_drawn_schedule_is_valid_and_within_the_concurrency_bound() -> None:
    for one in MANY:
        schedule.check(one)
        assert one.faults
        for fault in one.faults:
            assert WARM_S <= fault.at_s <= WARM_S + SPAN_S
            assert 0.3 <= fault.for_s <= LONGEST_S + 0.3
            at_once = [other for other in one.faults if other.at_s <= fault.at_s < other.until_s]
            assert len(at_once) <= AT_ONCE
        assert one.mended_s == max(fault.until_s for fault in one.faults)


def test_no_fault_would_be_mended_by_the_end_of_another() -> None:
    slow = Fault(10.0, 5.0, "slow", "ash", "gpu-0", factor=2.0)
    assert schedule.fits(slow, [])
    assert not schedule.fits(slow, [Fault(12.0, 1.0, "oom", "ash", "gpu-0")])
    assert schedule.fits(slow, [Fault(12.0, 1.0, "oom", "ash", "gpu-1")])
    assert schedule.fits(slow, [Fault(15.0, 1.0, "oom", "ash", "gpu-0")]), "one after the other"
    link = Fault(10.0, 5.0, "freeze", "ash", to="elm")
    assert not schedule.fits(link, [Fault(12.0, 1.0, "cut", "elm", to="ash")])
    assert not schedule.fits(Fault(10.0, 5.0, "kill", "ash"), [Fault(12.0, 1.0, "restart-regional", "ash")])
    assert not schedule.fits(slow, [Fault(9.0, 9.0, "pause", "elm", f"gpu-{n}") for n in range(3)])


@pytest.mark.parametrize("one", [*MANY[:30], Schedule(3, about="what it showed: a:b"), Schedule(1)])
def test_schedule_survives_a_round_trip_through_its_file(one: Schedule) -> None:
    assert schedule.decode(schedule.encode(one)) == one


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1", "object"),
        ("seed: [", "no YAML"),
        ("{}", "seed"),
        ("seed: 1\nextra: 2", "extra"),
        ("seed: 1\nregions: 9", "regions"),
        ("seed: 1\nreplicas: 1", "replicas"),
        ("seed: 1\nfaults: [{at_s: 1, for_s: 1, what: quake, region: ash}]", r"faults\[0\].what"),
        ("seed: 1\nfaults: [{at_s: -1, for_s: 1, what: kill, region: ash}]", "at_s"),
        ("seed: 1\nfaults: [{at_s: 1, for_s: 0, what: kill, region: ash}]", "for_s"),
        ("seed: 1\nfaults: [{at_s: 1, for_s: .nan, what: kill, region: ash}]", "for_s"),
        ("seed: 1\nfaults: [{at_s: 1, for_s: 1, what: kill, region: oak}]", "region"),
        ("seed: 1\nfaults: [{at_s: 1, for_s: 1, what: oom, region: ash, replica: gpu-2}]", "replica"),
        ("seed: 1\nfaults: [{at_s: 1, for_s: 1, what: cut, region: ash, to: ash}]", "to"),
        ("seed: 1\nfaults: [{at_s: 1, for_s: 1, what: slow, region: ash, replica: gpu-0, factor: 0}]", "factor"),
        ("seed: 1\nfaults: [{at_s: 1, for_s: 1, what: lose-reports, region: ash, factor: 2}]", "factor"),
        ("#" * 70_000, "bytes"),
    ],
)
def test_invalid_schedule_is_refused_with_the_fault_named(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        schedule.decode(text)
