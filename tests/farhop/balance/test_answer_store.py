"""Answers kept within one bound: by recency, by holder, and together with those being recorded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farhop.balance.answer_store import ENTRY_BYTES, SHARE, AnswerStore


def test_the_least_recently_requested_goes_first() -> None:
    store = AnswerStore[str](SHARE * (100 + ENTRY_BYTES))
    for n in range(SHARE):
        assert store.put("a", b"%d" % n, str(n), 100)
    assert store.get("a", b"0") == "0"  # it was the oldest, and is requested
    assert store.put("a", b"new", "new", 100)
    assert store.get("a", b"0") == "0"
    assert store.get("a", b"1") is None
    assert len(store) == SHARE


def test_the_holder_of_the_most_bytes_is_evicted_first() -> None:
    store = AnswerStore[str](SHARE * (100 + ENTRY_BYTES))
    store.put("small", b"mine", "mine", 100)  # the oldest of all
    for n in range(2 * SHARE):
        store.put("abusive", b"%d" % n, str(n), 100)
    assert store.get("small", b"mine") == "mine"
    assert store.get("abusive", b"mine") is None  # no client gets another's answer


class Name(str):
    """A holder that counts how often it is looked up."""

    __slots__ = ()
    looked_up = 0

    def __hash__(self) -> int:
        Name.looked_up += 1
        return str.__hash__(self)


def test_room_is_found_without_a_look_at_every_holder() -> None:
    """An answer may push out thousands of small ones: the process serves nobody meanwhile."""
    store = AnswerStore[int](4 << 20)
    for n in range(500):
        store.put(Name(f"tenant {n}"), b"k", n, 10)
    for n in range(8000):
        store.put(Name("many"), b"%d" % n, n, 10)
    before, Name.looked_up = len(store), 0
    assert store.put(Name("large"), b"k", 0, store.largest)
    gone = before + 1 - len(store)
    assert gone > 400
    assert Name.looked_up < 20 * gone


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 900)), max_size=60), st.integers(0, 5))
def test_the_holder_with_the_most_bytes_gives_up_its_oldest_answer(puts: list[tuple[str, int]], drops: int) -> None:
    store = AnswerStore[int](1 << 20)
    for n, (who, size) in enumerate(puts):
        store.put(who, b"%d" % n, n, size)
    for n in range(min(drops, len(puts))):
        store.drop(puts[n][0], b"%d" % n)
    of = {
        who: [size + ENTRY_BYTES for n, (one, size) in enumerate(puts) if one == who and n >= drops] for who in "abcdef"
    }
    while len(store):
        most = max(sum(sizes) for sizes in of.values())
        assert store.take(store.capacity - store.taken - store.stored + 1)  # one has to go
        (gave,) = [who for who, sizes in of.items() if len(store.by_holder.get(who, ())) < len(sizes)]
        assert sum(of[gave]) == most
        del of[gave][0]


def test_an_answer_above_its_share_is_not_kept() -> None:
    store = AnswerStore[str](1 << 20)
    assert not store.put("a", b"k", "large", store.largest + 1)
    assert store.put("a", b"k", "fits", store.largest)
    assert not store.put("a", b"k", "large", store.largest + 1)
    assert store.get("a", b"k") is None  # the answer that it was to replace is not current any more
    assert store.stored == 0
    assert not AnswerStore[str](0).put("a", b"k", "none", 0)


def test_recordings_displace_kept_answers() -> None:
    store = AnswerStore[str](SHARE * (100 + ENTRY_BYTES))
    for n in range(SHARE):
        store.put("a", b"%d" % n, str(n), 100)
    assert store.take(store.capacity)
    assert len(store) == 0
    assert not store.take(1)
    assert not store.put("a", b"k", "late", 1)
    store.give(store.capacity)
    assert store.put("a", b"k", "now", 1)
    with pytest.raises(ValueError, match="given back"):
        store.give(1)
    with pytest.raises(ValueError, match="0 or more"):
        store.take(-1)
    with pytest.raises(ValueError, match="0 or more"):
        AnswerStore[str](-1)


class Bounds(RuleBasedStateMachine):
    """Against a plain dict: what is here is what was put last, and the sum is never above the bound."""

    def __init__(self) -> None:
        super().__init__()
        self.store: AnswerStore[int] = AnswerStore(64_000)
        self.put_last: dict[tuple[str, bytes], int] = {}
        self.taken = 0

    @rule(
        who=st.sampled_from("abc"),
        key=st.sampled_from([b"1", b"2", b"3"]),
        size=st.integers(0, 5_000),
        it=st.integers(),
    )
    def put(self, who: str, key: bytes, size: int, it: int) -> None:
        self.put_last.pop((who, key), None)
        if self.store.put(who, key, it, size):
            self.put_last[who, key] = it
            assert size <= self.store.largest

    @rule(who=st.sampled_from("abc"), key=st.sampled_from([b"1", b"2", b"3"]))
    def get(self, who: str, key: bytes) -> None:
        found = self.store.get(who, key)
        assert found is None or found == self.put_last[who, key]

    @rule(n=st.integers(0, 70_000))
    def take(self, n: int) -> None:
        if self.store.take(n):
            self.taken += n

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.taken))
        self.store.give(n)
        self.taken -= n

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.put_last.clear()

    @invariant()
    def bounded(self) -> None:
        store = self.store
        assert store.stored >= 0
        assert store.stored + store.taken <= store.capacity
        assert store.taken == self.taken
        assert (len(store) == 0) == (store.stored == 0)


TestBounds = Bounds.TestCase
