"""Outliers: against their peers and their own usual, robustly, and not a slower kind of GPU."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regional_lb.fleet.outliers import FAILING, RUN, RUN_S, SLOW, USUAL_S, WELL_MIN, Outliers

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)
NAMES = tuple(f"r{n}" for n in range(6))


def peers(names: tuple[str, ...] = NAMES, factor: float = 3.0) -> Outliers:
    made = Outliers(factor)
    made.adopt(names)
    return made


def first(made: Outliers, name: str, ms_per_token: float, now: float, *, sure: bool = True) -> None:
    """A first token at this prefill speed (ms per token), after its share of a decode step."""
    made.began(name, ms_per_token * 1000.0 + 20.0, 1000.0, 20.0, now, sure=sure)


def served(made: Outliers, ms_per_token: dict[str, float], *, begin: float = 0.0, seconds: int = 60) -> float:
    """First tokens for a minute at these speeds (ms per token), one after another, about one a second each."""
    due = dict.fromkeys(ms_per_token, begin)
    while due:
        name = min(due, key=due.__getitem__)
        due[name] += max(1.0, ms_per_token[name] + 0.03)
        if due[name] > begin + seconds:
            del due[name]
        else:
            first(made, name, ms_per_token[name], due[name])
    return begin + seconds


def answer(made: Outliers, name: str, share_failing: float, n: int = 100, seed: int = 1) -> None:
    rng = Random(seed)
    for _ in range(n):
        made.answered(name, rng.random() >= share_failing)


@pytest.mark.parametrize("names", [NAMES, NAMES[:2]])
def test_a_replica_that_becomes_slow_beside_its_peers_is_an_outlier_until_it_recovers(names: tuple[str, ...]) -> None:
    made = peers(names)
    now = served(made, dict.fromkeys(names, 0.1))
    assert made.found({"m": names}, now) == []
    now = served(made, {name: 0.5 if name == "r1" else 0.11 for name in names}, begin=now, seconds=RUN)
    assert made.found({"m": names}, now) == [("r1", SLOW)]
    made.forgive("r1", slow=True)
    assert made.found({"m": names}, now) == []
    now = served(made, {name: 0.5 if name == "r1" else 0.11 for name in names}, begin=now, seconds=1)
    assert made.on_trial("r1")
    assert made.found({"m": names}, now) == [("r1", SLOW)]  # one more like the earlier ones is enough
    made.forgive("r1", slow=True)
    now = served(made, dict.fromkeys(names, 0.11), begin=now, seconds=1)
    assert not made.on_trial("r1")
    now = served(made, {name: 0.5 if name == "r1" else 0.11 for name in names}, begin=now, seconds=RUN - 1)
    assert made.found({"m": names}, now) == []  # it was healthy: as many as at first, then


@pytest.mark.parametrize("names", [NAMES, NAMES[:2]])
def test_unexpected_cache_misses_do_not_count_as_slowness(names: tuple[str, ...]) -> None:
    """What had been evicted makes a first token 30 times later than what was thought to be left of its prompt."""
    made = peers(names)
    now = served(made, dict.fromkeys(names, 0.04), seconds=120)
    first(made, "r1", 1.3, now + 8.0)
    assert made.found({"m": names}, now + 8.5) == []
    for n in range(40):
        now = served(made, dict.fromkeys(names, 0.04), begin=now + 10.0, seconds=1)
        for miss in range(RUN - 1):
            first(made, "r1", 1.3, now + 2.0 * miss)
        assert made.found({"m": names}, now + 8.0) == [], n


def test_a_replica_that_lost_all_it_had_cached_is_not_slow() -> None:
    made = peers()
    now = served(made, dict.fromkeys(NAMES, 0.1))
    for second in range(2, 40, 2):
        for name in NAMES:
            first(made, name, 1.9 if name == "r1" else 0.1, now + second, sure=False)
        assert made.found({"m": NAMES}, now + second) == []
    first(made, "r1", 1.9, now + 42.0)
    assert made.found({"m": NAMES}, now + 42.0) == [("r1", SLOW)]  # with nothing cached it is not faster


def test_a_stall_is_one_moment_however_many_were_under_way_and_is_over_with_the_first_that_is_well() -> None:
    made = peers()
    now = served(made, dict.fromkeys(NAMES, 0.1))
    for n in range(20):  # sent in nine seconds without any answer; then all answers at once
        sent_s_ago = 9.0 - n * 0.4
        made.began("r1", sent_s_ago * 1e3, 1000.0, 20.0, now + 9.0)
    for second in range(10, 15):
        for name in NAMES:
            first(made, name, 0.1, now + second)
        assert made.found({"m": NAMES}, now + second) == []


def test_a_peer_s_stall_makes_no_other_replica_slow() -> None:
    """Its usual is too slow after it, so that it looks faster than usual; whoever is as usual is no slower for it."""
    made = peers(NAMES[:2])
    served(made, {"r0": 0.1, "r1": 0.1}, seconds=20)
    now = served(made, {"r0": 0.3, "r1": 2.0}, begin=20.0, seconds=500)
    now = served(made, {"r0": 0.9, "r1": 0.1}, begin=now, seconds=2)
    for second in range(60):
        first(made, "r0", 0.29, now + 2.0 * second)
        first(made, "r1", 0.1, now + 2.0 * second)
        assert made.found({"m": NAMES[:2]}, now + 2.0 * second) == []


def test_a_replica_as_fast_as_its_peers_is_no_outlier_even_if_it_was_faster_before() -> None:
    """A cache that had more than was known made it look fast for long."""
    made = peers()
    now = served(made, {name: 0.01 if name == "r1" else 0.1 for name in NAMES})
    now = served(made, dict.fromkeys(NAMES, 0.11), begin=now, seconds=20)
    assert made.found({"m": NAMES}, now) == []


def test_a_slower_kind_of_gpu_is_an_outlier_only_if_it_becomes_slower_than_before() -> None:
    made = peers()
    ms_per_token = {name: 0.04 if name != "r1" else 0.6 for name in NAMES}
    now = served(made, ms_per_token, seconds=120)
    assert made.found({"m": NAMES}, now) == []
    now = served(made, ms_per_token | {"r1": 3.0}, begin=now, seconds=20)
    assert made.found({"m": NAMES}, now) == [("r1", SLOW)]


def test_when_all_are_slow_none_is_an_outlier() -> None:
    made = peers()
    served(made, dict.fromkeys(NAMES, 0.1))
    now = served(made, dict.fromkeys(NAMES, 2.0), begin=60, seconds=20)
    assert made.found({"m": NAMES}, now) == []


def test_peers_are_asked_about_the_same_time() -> None:
    """Who has nothing to do is no measure for who has, nor is what anybody did a minute ago."""
    made = peers()
    now = served(made, dict.fromkeys(NAMES, 0.1))
    later = served(made, {"r1": 2.0}, begin=now + 30.0, seconds=20)
    assert made.found({"m": NAMES}, later) == []
    served(made, {name: 2.0 if name == "r1" else 0.1 for name in NAMES}, begin=later, seconds=12)
    assert made.found({"m": NAMES}, later + 12.0) == [("r1", SLOW)]
    assert made.found({"m": NAMES}, later + 12.0 + RUN_S) == []


def test_a_speed_that_stays_slow_becomes_the_usual_one() -> None:
    """Then it is a slower replica: measured speed sends it less, and it is not taken out for ever."""
    made = peers()
    served(made, dict.fromkeys(NAMES, 0.1))
    now = served(made, {name: 1.0 if name == "r1" else 0.1 for name in NAMES}, begin=60, seconds=600)
    assert made.found({"m": NAMES}, now) == []
    made = peers()
    now = served(made, dict.fromkeys(NAMES, 0.1)) + USUAL_S + 60.0
    now = served(made, {name: 1.0 if name == "r1" else 0.1 for name in NAMES}, begin=now, seconds=15)
    assert made.found({"m": NAMES}, now) == []


def test_few_measurements_are_no_evidence_of_an_outlier() -> None:
    made = peers()
    now = served(made, dict.fromkeys(NAMES, 0.1), seconds=12)
    now = served(made, {"r1": 9.0}, begin=12, seconds=60)
    made.answered("r2", False)
    assert made.found({"m": NAMES}, now) == []


def test_a_replica_that_failed_and_recovered_is_no_outlier() -> None:
    made = peers()
    for name in NAMES:
        answer(made, name, 1.0 if name == "r1" else 0.0)
    for _ in range(WELL_MIN):
        assert made.found({"m": NAMES}, 1.0) == [("r1", FAILING)]
        made.answered("r1", True)
    assert made.found({"m": NAMES}, 1.0) == []


@pytest.mark.parametrize(("names", "share"), [(NAMES, 0.6), (NAMES[:2], 0.9)])
def test_a_replica_that_fails_beside_its_peers_is_an_outlier(names: tuple[str, ...], share: float) -> None:
    made = peers(names)
    for name in names:
        answer(made, name, share if name == "r1" else 0.01)
    assert made.found({"m": names}, 1.0) == [("r1", FAILING)]
    assert made.excess("r1", 500.0) > 0.3
    assert made.excess("r0", 500.0) < 0.1


def test_when_all_fail_alike_it_is_not_their_fault() -> None:
    """A client's poisoned requests fail wherever they go."""
    made = peers()
    for n, name in enumerate(NAMES):
        answer(made, name, 0.8, seed=n)
    assert made.found({"m": NAMES}, 1.0) == []
    assert all(made.excess(name, 500.0) < 0.3 for name in NAMES)


def test_a_single_replica_is_no_outlier_and_keeps_its_capacity() -> None:
    made = peers(("r1",))
    answer(made, "r1", 1.0)
    assert made.found({"m": ("r1",)}, 1.0) == []
    assert made.excess("r1", 500.0) == 0.0


def test_old_failures_fade_and_the_worst_come_first() -> None:
    made = peers()
    for name in NAMES:
        answer(made, name, {"r1": 0.7, "r4": 1.0}.get(name, 0.0))
    assert [name for name, _ in made.found({"m": NAMES}, 1.0)] == ["r4", "r1"]
    assert made.found({"m": NAMES}, 600.0) == []
    assert made.failing("r4") == 0.0


def test_peers_are_those_of_the_same_model() -> None:
    made = peers()
    for name in NAMES[:3]:
        answer(made, name, 0.9)  # a broken model version, on all that serve it
    assert made.found({"a": NAMES[:3], "b": NAMES[3:]}, 1.0) == []


def test_no_outlier_is_found_if_detection_is_off() -> None:
    made = peers(factor=0.0)
    served(made, dict.fromkeys(NAMES, 0.1))
    assert made.found({"m": NAMES}, served(made, {"r1": 9.0}, begin=60)) == []


def test_a_replica_that_left_is_forgotten_and_the_others_are_not() -> None:
    made = peers()
    answer(made, "r1", 1.0)
    made.adopt(("r1", "r9"))
    assert (made.failing("r1") > 0.9, made.failing("r9"), made.failing("r0")) == (True, 0.0, 0.0)
    made.answered("r0", False)
    first(made, "r0", 1.0, 0.0)
    assert not made.on_trial("r0")


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.floats(0.01, 100.0)), max_size=200), st.integers(1, 6)
)
@SETTINGS
def test_never_more_than_half_are_outliers_and_shares_stay_shares(events, n: int) -> None:
    made, names = peers(), NAMES[:n]
    for second, (name, ok, ms_per_token) in enumerate(events):
        made.answered(name, ok)
        first(made, name, ms_per_token, float(second))
    found = [name for name, _ in made.found({"m": names}, 500.0)]
    assert len(found) == len(set(found)) <= n // 2 + n // 2  # by failures and by slowness
    for name in names:
        assert 0.0 <= made.excess(name, 500.0) <= made.failing(name) <= 1.0
