"""Recently cached prefixes, in order, bounded, and to which peers they are sent."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from regional_lb.fleet.recent import Cached, Recent


def entry(n: int, own: bool = True, length: int = 1) -> Cached:
    return Cached(f"r{n}", tuple(range(n + 1, n + 1 + length)), None, own)


def test_a_reader_goes_on_from_where_it_was_in_slices() -> None:
    recent = Recent()
    for n in range(5):
        recent.add(entry(n, length=10))
    at, first = recent.read(0, 0, 25)
    assert [e.replica for e in first] == ["r0", "r1", "r2"]
    at, rest = recent.read(at, 0, 25)
    assert ([e.replica for e in rest], at) == (["r3", "r4"], 5)
    assert recent.read(at, 0, 25) == (5, [])
    assert recent.reaches(5)
    assert not recent.reaches(6)


def test_the_regions_that_may_know_of_a_prefix_count_in_a_slice() -> None:
    recent = Recent()
    for n in range(5):
        recent.add(Cached(f"r{n}", (n + 1,), frozenset(f"region-{m}" for m in range(9)), True))
    assert [e.replica for e in recent.read(0, 0, 25)[1]] == ["r0", "r1", "r2"]


def test_new_subscriber_first_gets_prefixes_of_all_peers_then_only_own() -> None:
    recent = Recent()
    recent.add(entry(0, own=False))
    recent.add(entry(1))
    begun = recent.seq
    recent.add(entry(2, own=False))
    recent.add(entry(3))
    assert [e.replica for e in recent.read(0, begun, 100)[1]] == ["r0", "r1", "r3"]
    assert [e.replica for e in recent.read(0, 0, 100)[1]] == ["r1", "r3"]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 10), st.integers(40, 100))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_entries_and_nodes_are_bounded_and_the_newest_stay(lengths, entries_max, nodes_max) -> None:
    recent = Recent(entries_max, nodes_max)
    for n, length in enumerate(lengths):
        recent.add(entry(n, length=length))
        at, kept = recent.read(0, 0, 10**9)
        assert len(kept) <= entries_max
        assert sum(len(e.chain) for e in kept) <= nodes_max
        assert kept[-1].replica == f"r{n}"
        assert at == recent.seq
        assert recent.reaches(recent.floor)
        assert not recent.reaches(recent.floor - 1)


def test_audiences_of_a_law_that_let_more_know_are_taken_back() -> None:
    recent = Recent()
    recent.add(Cached("r0", (1,), None, own=True))
    recent.add(Cached("r1", (2,), frozenset({"tokyo"}), own=True))
    recent.narrowed()
    recent.add(Cached("r2", (3,), frozenset({"tokyo"}), own=True))
    audiences = [entry.audience for entry in recent.read(0, 0, 100)[1]]
    assert audiences == [frozenset(), frozenset(), {"tokyo"}]
