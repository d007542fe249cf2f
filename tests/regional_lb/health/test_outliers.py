"""Outliers: against their peers and their own usual, robustly, and not a slower kind of GPU."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regional_lb.health.outliers import FAILING, SLOW, Peers

RUN = settings(max_examples=100, deadline=None, derandomize=True)
NAMES = tuple(f"r{n}" for n in range(6))


def peers(names: tuple[str, ...] = NAMES, factor: float = 3.0) -> Peers:
    made = Peers(factor)
    made.adopt(names)
    return made


def paced(made: Peers, paces: dict[str, float], *, begin: int = 0, seconds: int = 60) -> float:
    """First tokens for a minute, one a second each, at these paces (ms per token)."""
    for second in range(begin, begin + seconds):
        for name, pace in paces.items():
            made.began(name, pace, float(second))
    return float(begin + seconds)


def answer(made: Peers, name: str, share_failing: float, n: int = 100, seed: int = 1) -> None:
    rng = Random(seed)
    for _ in range(n):
        made.answered(name, rng.random() >= share_failing)


@pytest.mark.parametrize("names", [NAMES, NAMES[:2]])
def test_who_becomes_slow_beside_its_peers_is_an_outlier(names: tuple[str, ...]) -> None:
    made = peers(names)
    now = paced(made, dict.fromkeys(names, 0.1))
    assert made.outliers({"m": names}, now) == []
    now = paced(made, {name: 2.0 if name == "r1" else 0.11 for name in names}, begin=60, seconds=20)
    assert made.outliers({"m": names}, now) == [("r1", SLOW)]
    made.forgive("r1")
    assert made.outliers({"m": names}, now) == []
    for n in range(20):
        made.began("r1", 0.1, now + n / 4.0)
    assert made.outliers({"m": names}, now + 5.0) == []  # back at its old pace: what was before counts no more


def test_a_slower_kind_of_gpu_is_none() -> None:
    made = peers()
    now = paced(made, {name: 0.04 if name != "r1" else 0.6 for name in NAMES}, seconds=120)
    assert made.outliers({"m": NAMES}, now) == []


def test_when_all_are_slow_nobody_is_an_outlier() -> None:
    made = peers()
    paced(made, dict.fromkeys(NAMES, 0.1))
    now = paced(made, dict.fromkeys(NAMES, 2.0), begin=60, seconds=20)
    assert made.outliers({"m": NAMES}, now) == []


def test_what_stays_slow_becomes_usual() -> None:
    """Then it is a slower replica: measured speed sends it less, and it is not taken out for ever."""
    made = peers()
    paced(made, dict.fromkeys(NAMES, 0.1))
    now = paced(made, {name: 1.0 if name == "r1" else 0.1 for name in NAMES}, begin=60, seconds=600)
    assert made.outliers({"m": NAMES}, now) == []


def test_little_heard_is_no_evidence() -> None:
    made = peers()
    now = paced(made, dict.fromkeys(NAMES, 0.1), seconds=12)
    now = paced(made, {"r1": 9.0}, begin=12, seconds=5)
    made.answered("r2", False)
    assert made.outliers({"m": NAMES}, now) == []


@pytest.mark.parametrize(("names", "share"), [(NAMES, 0.6), (NAMES[:2], 0.9)])
def test_who_fails_beside_its_peers_is_an_outlier(names: tuple[str, ...], share: float) -> None:
    made = peers(names)
    for name in names:
        answer(made, name, share if name == "r1" else 0.01)
    assert made.outliers({"m": names}, 1.0) == [("r1", FAILING)]
    assert made.excess("r1") > 0.3
    assert made.excess("r0") < 0.1


def test_when_all_fail_alike_it_is_not_their_fault() -> None:
    """A client's poisoned requests fail wherever they go."""
    made = peers()
    for n, name in enumerate(NAMES):
        answer(made, name, 0.8, seed=n)
    assert made.outliers({"m": NAMES}, 1.0) == []
    assert all(made.excess(name) < 0.3 for name in NAMES)


def test_alone_nobody_is_an_outlier_nor_held_to_less() -> None:
    made = peers(("r1",))
    answer(made, "r1", 1.0)
    assert made.outliers({"m": ("r1",)}, 1.0) == []
    assert made.excess("r1") == 0.0


def test_old_failures_fade_and_the_worst_come_first() -> None:
    made = peers()
    for name in NAMES:
        answer(made, name, {"r1": 0.7, "r4": 1.0}.get(name, 0.0))
    assert [name for name, _ in made.outliers({"m": NAMES}, 1.0)] == ["r4", "r1"]
    assert made.outliers({"m": NAMES}, 600.0) == []
    assert made.failing("r4") == 0.0


def test_peers_are_those_of_the_same_model() -> None:
    made = peers()
    for name in NAMES[:3]:
        answer(made, name, 0.9)  # a broken model version, on all that serve it
    assert made.outliers({"a": NAMES[:3], "b": NAMES[3:]}, 1.0) == []


def test_turned_off_nothing_is_slow() -> None:
    made = peers(factor=0.0)
    paced(made, dict.fromkeys(NAMES, 0.1))
    assert made.outliers({"m": NAMES}, paced(made, {"r1": 9.0}, begin=60)) == []


def test_who_left_is_forgotten_and_who_stays_is_not() -> None:
    made = peers()
    answer(made, "r1", 1.0)
    made.adopt(("r1", "r9"))
    assert (made.failing("r1") > 0.9, made.failing("r9"), made.failing("r0")) == (True, 0.0, 0.0)
    made.answered("r0", False)
    made.began("r0", 1.0, 0.0)


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.floats(0.01, 100.0)), max_size=200), st.integers(1, 6)
)
@RUN
def test_never_more_than_half_are_outliers_and_shares_stay_shares(events, n: int) -> None:
    made, names = peers(), NAMES[:n]
    for second, (name, ok, pace) in enumerate(events):
        made.answered(name, ok)
        made.began(name, pace, float(second))
    found = [name for name, _ in made.outliers({"m": names}, 500.0)]
    assert len(found) == len(set(found)) <= n // 2 + n // 2  # by failures and by pace
    for name in names:
        assert 0.0 <= made.excess(name) <= made.failing(name) <= 1.0
