"""The search for the least fleet, on arithmetic instead of worlds: it finds what is least, and stops in time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from farhop_lab.studies.planning import Outcome, Search, Trial

PRICES = {"a": 1.0, "b": 3.0, "c": 2.0}
PEAK = {"a": 4.0, "b": 3.0, "c": 2.0}
TOGETHER = 6.0  # peaks come at different hours: together they need less than their sum


class Fleet:
    """Regions that need so many replicas each, alone or together."""

    def __init__(self) -> None:
        self.asked: list[Trial] = []

    def __call__(self, trials: Sequence[Trial]) -> list[Outcome]:
        self.asked += trials
        return [self._of(trial) for trial in trials]

    def _of(self, trial: Trial) -> Outcome:
        fleet = dict(trial.replicas)
        usd = sum(PRICES[name] * n for name, n in fleet.items())
        if not trial.routed:
            return Outcome({name: 1.0 if fleet[name] >= need else 0.5 for name, need in PEAK.items()}, usd)
        left = sum(n for name, n in fleet.items() if name != trial.lost)
        return Outcome(dict.fromkeys(PEAK, 1.0 if left >= TOGETHER else 0.5), usd)


def test_planning_regions_alone_gives_each_its_least_fleet() -> None:
    planned = Search(PRICES, 0.9, Fleet()).run()
    assert planned.alone.replicas == {"a": 4, "b": 3, "c": 2}
    assert planned.alone.settled
    assert planned.alone.usd_per_hour == 17.0
    assert planned.alone_spare.replicas is None
    assert "no other region" in planned.alone_spare.why


def test_planning_regions_together_needs_fewer_replicas_and_drops_the_dearest() -> None:
    planned = Search(PRICES, 0.9, Fleet()).run()
    assert planned.together.total == 6
    assert planned.together.usd_per_hour < planned.alone.usd_per_hour
    spare = planned.together_spare
    assert spare.replicas is not None
    assert all(spare.total - n >= TOGETHER for n in spare.replicas.values())
    for name in spare.replicas:  # one replica less anywhere would not be enough
        less = {**spare.replicas, name: spare.replicas[name] - 1}
        assert less[name] < 1 or any(sum(less.values()) - n < TOGETHER for n in less.values())


def test_nothing_is_asked_twice_and_rounds_are_few() -> None:
    fleet = Fleet()
    planned = Search(PRICES, 0.9, fleet).run()
    assert len(fleet.asked) == len(set(fleet.asked))
    assert planned.rounds <= 17
    assert len(fleet.asked) <= 30  # 27 rounds of 51 if one waits for the other and nothing follows from other trials


def test_the_replicas_of_a_lost_region_do_not_matter() -> None:
    fleet = Fleet()
    Search(PRICES, 0.9, fleet).run()
    lost = [trial for trial in fleet.asked if trial.lost]
    assert lost
    assert all(dict(trial.replicas)[trial.lost] == 1 for trial in lost)
    small, large = Trial((("a", 1), ("b", 2)), True, "a"), Trial((("a", 3), ("b", 2)), True)
    assert small.within(large)
    assert not large.within(small)
    assert small.within(small)


def test_the_worst_share_is_given_with_its_interval() -> None:
    outcome = Outcome({"a": 0.9, "b": 1.0}, 1.0, {"a": 100, "b": 100})
    share, half = outcome.worst
    assert share == 0.9
    assert 0.07 < half < 0.1
    assert Outcome({"a": 0.9}, 1.0).worst == (0.9, 0.0)


def test_insufficient_capacity_is_reported() -> None:
    planned = Search(PRICES, 0.9, Fleet(), most=3).run()
    assert planned.alone.replicas is None
    assert planned.alone.why == "3 replicas are not enough in a (50% good)"
    assert planned.together.total == 6
    assert Search(PRICES, 0.9, Fleet(), most=1).run().together.replicas is None


@pytest.mark.parametrize("after", [0, 3, 9])
def test_when_time_is_up_the_best_so_far_is_reported(after: int) -> None:
    left = iter([False] * after)
    planned = Search(PRICES, 0.9, Fleet(), over=lambda: next(left, True)).run()
    assert planned.alone.replicas is not None
    assert not (planned.alone.settled and planned.together.settled and planned.together_spare.settled)
    assert planned.together.worst >= 0.9


def test_a_single_region_has_no_n_minus_1_fleet() -> None:
    def ask(trials: Sequence[Trial]) -> list[Outcome]:
        return [Outcome({"a": 1.0 if dict(trial.replicas)["a"] >= 5 else 0.0}, 1.0) for trial in trials]

    planned = Search({"a": 1.0}, 0.9, ask).run()
    assert planned.alone.replicas == planned.together.replicas == {"a": 5}
    assert planned.together_spare.replicas is None


def test_equal_sizes_are_tried_if_the_proportions_of_single_regions_fail() -> None:
    def ask(trials: Sequence[Trial]) -> list[Outcome]:
        def good(trial: Trial) -> float:
            fleet = dict(trial.replicas)
            if not trial.routed:
                return float(fleet["a"] >= 4 and fleet["b"] >= 1)
            return float(min(fleet.values()) >= 3)

        return [Outcome({"a": good(trial), "b": good(trial)}, 1.0) for trial in trials]

    planned = Search({"a": 1.0, "b": 1.0}, 0.9, ask, most=4).run()
    assert planned.together.replicas == {"a": 3, "b": 3}
