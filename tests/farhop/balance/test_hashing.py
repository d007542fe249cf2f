"""Owners, draws and points: no agreement needed, as few moves as can be, the same numbers in every version."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance import hashing
from farhop.balance.hashing import owner

_names = st.text(min_size=1, max_size=12)
_members = st.lists(_names, min_size=1, max_size=8, unique=True)


@given(_names, _members, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_there_is_one_owner_whatever_the_order(thing, members, rng) -> None:
    first = owner(thing, members)
    assert first in members
    rng.shuffle(members)
    assert owner(thing, members) == first


@given(_names, _members, _names)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_join_moves_keys_only_to_the_new_member_and_a_leave_only_its_own(thing, members, other) -> None:
    if other in members:
        return
    before, after = owner(thing, members), owner(thing, [*members, other])
    assert after in (before, other)


def test_without_candidates_there_is_no_owner() -> None:
    assert owner("r1", []) is None


def test_things_are_spread_evenly() -> None:
    owned = Counter(owner(f"replica-{n}", ("r1", "r2", "r3")) for n in range(3000))
    assert all(850 < count < 1150 for count in owned.values()), owned


def test_every_process_and_version_comes_to_the_same_answer() -> None:
    assert [owner(f"gpu-{n}", ("r1", "r2", "r3")) for n in range(1, 6)] == ["r1", "r1", "r3", "r1", "r3"]
    assert hashing.uniform(5, ("a", "b")).tolist() == [0.36854239103838854, 0.7411217115066788]
    assert hashing.uniform(2**64 - 1, ("x",)).tolist() == [0.7088973119518331]
    assert hashing.costs(5, ("a", "b"), np.array([1.0, 2.0])).argmin() == 1
    weighted = [("v1", 0.9, b"m\0\0v1\0"), ("v2", 0.1, b"m\0\0v2\0")]
    keys = [n * 0x9E3779B97F4A7C15 % 2**64 for n in range(12)]
    assert [hashing.draw(key, weighted) for key in keys] == ["v1"] * 3 + ["v2"] + ["v1"] * 4 + ["v2"] * 2 + ["v1"] * 2
    assert np.sort(hashing.points(("a", "b"), 128), axis=None)[:2].tolist() == [6039976925418401, 62586504287915215]
    assert hashing.fraction(12345) == 0.6295911174519004
    assert hashing.key_of("tenant a") == 15031877055477352017


_keys = st.integers(min_value=0, max_value=2**64 - 1)
_weighted = st.dictionaries(_names, st.floats(min_value=0.01, max_value=100.0), min_size=2, max_size=8)


@given(_keys, _weighted, st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_removed_target_moves_only_its_own_keys(key: int, weights: dict[str, float], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(weights)))

    def drawn(names: tuple[str, ...]) -> tuple[str, str]:
        least = hashing.costs(key, names, np.array([weights[name] for name in names])).argmin()
        return names[least], hashing.draw(key, [(name, weights[name], name.encode()) for name in names])

    before, after = drawn(tuple(weights)), drawn(tuple(name for name in weights if name != gone))
    for was, now in zip(before, after, strict=True):
        assert now == was or was == gone


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    drawn = np.array([hashing.uniform(key, ("a", "b", "c")) for key in range(3000)])
    assert drawn.min() > 0.0
    assert drawn.max() < 1.0
    assert np.abs(drawn.mean(axis=0) - 0.5).max() < 0.03
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.06
    assert hashing.uniform(5, ("a", "b")).tolist() == hashing.uniform(5, ("a", "b", "c"))[:2].tolist()


def test_draws_are_by_weight() -> None:
    weights = {"a": 6.0, "b": 3.0, "c": 1.0}
    weighted = [(name, weight, name.encode()) for name, weight in weights.items()]
    drawn = Counter(hashing.draw(n, weighted) for n in range(4000))
    least = Counter(int(hashing.costs(n, ("a", "b", "c"), np.array([6.0, 3.0, 1.0])).argmin()) for n in range(4000))
    for at, (name, weight) in enumerate(weights.items()):
        assert abs(drawn[name] - 400 * weight) < 130, drawn
        assert abs(least[at] - 400 * weight) < 130, least


@given(_members, _names)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_names_points_are_its_own(members: list[str], other: str) -> None:
    with_other = hashing.points((other, *members), 16)
    assert with_other[1:].tolist() == hashing.points(tuple(members), 16).tolist()
    assert len(set(with_other.reshape(-1).tolist())) == 16 * len({other, *members})


def test_fractions_of_neighbours_are_far_apart() -> None:
    assert all(0.3 < abs(hashing.fraction(n) - hashing.fraction(n + 1)) < 0.7 for n in range(1000))
