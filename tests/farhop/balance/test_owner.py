"""Who owns what: one owner, no agreement needed, and as few moves as can be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.owner import owner

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
def test_a_join_moves_things_only_to_who_joined_and_a_leave_only_its_own(thing, members, other) -> None:
    if other in members:
        return
    before, after = owner(thing, members), owner(thing, [*members, other])
    assert after in (before, other)


def test_nobody_owns_what_nobody_is_there_for() -> None:
    assert owner("r1", []) is None


def test_things_are_spread_evenly() -> None:
    owned = Counter(owner(f"replica-{n}", ("r1", "r2", "r3")) for n in range(3000))
    assert all(850 < count < 1150 for count in owned.values()), owned


def test_every_process_and_version_comes_to_the_same_answer() -> None:
    assert [owner(f"gpu-{n}", ("r1", "r2", "r3")) for n in range(1, 6)] == ["r1", "r1", "r3", "r1", "r3"]
