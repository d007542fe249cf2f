"""The ledger's sums against the reservations that a plain model believes to be live."""

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from farhop.balance.ledger import Ledger, Load, Reservation

IDS = st.sampled_from([f"r{i}" for i in range(8)])
TARGETS = st.sampled_from(["a", "b", "c"])
TOKENS = st.sampled_from([0, 1]) | st.integers(0, 10**6)  # 0 and 1: where counting prefills begins
# Marks like those of prompts: each names all before it, so that two prompts agree up to the point where they diverge.
MARKS = st.lists(st.integers(0, 1), max_size=5).map(
    lambda turns: tuple(hash((0, *turns[: n + 1])) for n in range(len(turns)))
)


def rows_of(ledger: Ledger, target: str) -> list[tuple[float, ...]]:
    """What each request at a target holds, in the order in which they came."""
    columns = ledger.columns(target)
    assert columns.shape[0] == 3
    return [tuple(row) for row in columns.T.tolist()]


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[str, Load]] = []
        self.ledger = Ledger(lambda target, load: self.changes.append((target, load)), columns=True)
        self.live: dict[str, Reservation] = {}

    @rule(request_id=IDS, place=TARGETS, prefill=TOKENS, kv=TOKENS, marks=MARKS, answer=TOKENS, context=TOKENS)
    def reserve(
        self, request_id: str, place: str, prefill: int, kv: int, marks: tuple[int, ...], answer: int, context: int
    ) -> None:
        reservation = Reservation(place, prefill, kv, marks, answer, context_tokens=context)
        if request_id in self.live:
            with pytest.raises(ValueError, match=request_id):
                self.ledger.reserve(request_id, reservation)
        else:
            self.ledger.reserve(request_id, reservation)
            self.live[request_id] = reservation
            self.changed(place)

    def changed(self, target: str) -> None:
        """Who asked to know of each new sum was told of this one, once."""
        assert self.changes == [(target, self.ledger.load(target))]
        self.changes.clear()

    @rule(request_id=IDS, now=st.integers(0, 1000))
    def began(self, request_id: str, now: int) -> None:
        self.ledger.began(request_id, float(now))
        if request_id in self.live and self.live[request_id].began_at is None:
            held = self.live[request_id]
            self.changed(held.target)
            self.live[request_id] = replace(held, prefill_tokens=0, began_at=float(now))

    @rule(request_id=IDS)
    def release(self, request_id: str) -> None:
        held = self.live.pop(request_id, None)
        assert self.ledger.release(request_id) == held
        if held is not None:
            self.changed(held.target)

    @rule(place=TARGETS, marks=MARKS)
    def shared(self, place: str, marks: tuple[int, ...]) -> None:
        there = {mark for r in self.live.values() if r.target == place for mark in r.marks}
        assert self.ledger.shared(place, marks) == sum(mark in there for mark in marks)

    @precondition(lambda self: self.live)
    @rule()
    def release_all(self) -> None:
        for request_id in list(self.live):
            held = self.live.pop(request_id)
            assert self.ledger.release(request_id) == held
            self.changed(held.target)
        assert self.ledger.targets() == ()

    @invariant()
    def sums_equal_the_live(self) -> None:
        for target in ("a", "b", "c", "never"):
            mine = [r for r in self.live.values() if r.target == target]
            assert self.ledger.load(target) == Load(
                len(mine),
                sum(r.prefill_tokens for r in mine),
                sum(r.kv_tokens for r in mine),
                sum(r.prefill_tokens > 0 for r in mine),
                sum(r.answer_tokens for r in mine),
                sum(r.began_at is not None for r in mine),
                sum(r.began_at or 0.0 for r in mine),
                sum(r.context_tokens for r in mine),
            )
            assert rows_of(self.ledger, target) == [
                (r.kv_tokens - r.answer_tokens, r.answer_tokens, inf if r.began_at is None else r.began_at)
                for r in mine
            ]
        assert self.changes == []
        assert set(self.ledger.targets()) == {r.target for r in self.live.values()}
        assert len(self.ledger) == len(self.live)
        assert all(self.ledger.held(f"r{i}") == self.live.get(f"r{i}") for i in range(8))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_a_request_holds_its_prefill_until_it_begins_and_its_kv_until_it_is_over() -> None:
    ledger = Ledger()
    ledger.reserve("r", Reservation("a", prefill_tokens=900, kv_tokens=1200))
    assert ledger.load("a") == Load(1, 900, 1200, 1)
    ledger.began("r", 5.0)
    ledger.began("r", 6.0)
    assert ledger.load("a") == Load(1, 0, 1200, decoding=1, began_s=5.0)
    assert ledger.release("r") == Reservation("a", 0, 1200, began_at=5.0)
    assert ledger.release("r") is None
    assert ledger.load("a") == Load()


@pytest.mark.parametrize("prefill", [0, 1, 900])
@pytest.mark.parametrize("began", [False, True])
def test_releasing_a_reservation_leaves_the_load_of_others(prefill: int, began: bool) -> None:
    changes: list[tuple[str, Load]] = []
    ledger = Ledger(lambda target, load: changes.append((target, load)))
    ledger.reserve("other", Reservation("a", 5, 7))
    alone = ledger.load("a")
    ledger.reserve("r", Reservation("a", prefill, 9))
    assert ledger.load("a") == Load(2, 5 + prefill, 16, 1 + (prefill > 0))
    if began:
        ledger.began("r", 0.0)
    ledger.release("r")
    assert ledger.load("a") == alone
    assert changes[-1] == ("a", alone)
    ledger.release("other")
    assert changes[-1] == ("a", Load())


@pytest.mark.parametrize(("prefill", "kv"), [(-1, 0), (0, -1)])
def test_negative_tokens_are_refused_and_leave_nothing(prefill: int, kv: int) -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="0 or more"):
        ledger.reserve("r", Reservation("a", prefill, kv))
    assert ledger.held("r") is None
    assert ledger.targets() == ()


def test_a_load_once_read_does_not_change_under_its_reader() -> None:
    ledger = Ledger()
    ledger.reserve("r", Reservation("a", 1, 1))
    before = ledger.load("a")
    ledger.reserve("s", Reservation("a", 1, 1))
    assert before == Load(1, 1, 1, 1)


def test_columns_hold_any_number_of_requests_in_their_order() -> None:
    ledger = Ledger(columns=True)
    for n in range(100):
        ledger.reserve(f"r{n}", Reservation("a", 1, 10 * n, answer_tokens=n))
    for n in range(0, 100, 3):
        ledger.release(f"r{n}")
    ledger.reserve("late", Reservation("a", 0, 8, answer_tokens=3, began_at=2.5))  # its answer goes on elsewhere
    left = [(9.0 * n, float(n), inf) for n in range(100) if n % 3]
    assert rows_of(ledger, "a") == [*left, (5.0, 3.0, 2.5)]


def test_a_ledger_of_which_no_columns_are_asked_keeps_none() -> None:
    ledger = Ledger()
    ledger.reserve("r", Reservation("a", 1, 1))
    assert rows_of(ledger, "a") == []


def test_a_mark_is_there_as_long_as_any_request_that_has_it() -> None:
    """And no longer, though others without it are still under way at the target."""
    ledger = Ledger()
    for name, marks in (("a", (1, 2)), ("b", (1, 3)), ("c", ())):
        ledger.reserve(name, Reservation("x", 10, 10, marks))
    assert [ledger.shared("x", marks) for marks in ((1, 2), (1, 3))] == [2, 2]
    ledger.release("a")
    assert [ledger.shared("x", marks) for marks in ((1, 2), (1, 3))] == [1, 2]
    ledger.release("b")
    assert [ledger.shared("x", marks) for marks in ((1, 2), (1, 3))] == [0, 0]
