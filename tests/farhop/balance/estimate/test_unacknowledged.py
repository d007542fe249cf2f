"""Unacknowledged load: exact if reports come in order, and never too little otherwise."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.unacknowledged import UnacknowledgedLoad

RUN = settings(max_examples=200, deadline=None, derandomize=True)
STEPS = st.lists(
    st.tuples(st.sampled_from(("send", "count", "report", "begin", "lose")), st.integers(1, 5)), max_size=60
)


def test_sent_bytes_are_outstanding_until_acknowledged_or_answered() -> None:
    known = UnacknowledgedLoad()
    known.acknowledged(1, 0.0)
    known.sent(100)
    known.sent(50)
    assert known.outstanding_bytes == 150.0
    known.acknowledged(1, 100.0)
    assert known.outstanding_bytes == 50.0
    known.answered(100)
    known.answered(50)  # answered before any report counted it
    assert known.outstanding_bytes == 0.0


def test_a_refused_request_is_no_longer_outstanding() -> None:
    known = UnacknowledgedLoad()
    known.sent(100)
    known.sent(30)
    known.came_back(100)
    assert known.outstanding_bytes == 30.0
    known.acknowledged(1, 30.0)
    assert known.outstanding_bytes == 0.0


def test_cached_bytes_are_outstanding_but_not_to_be_prefilled() -> None:
    known = UnacknowledgedLoad()
    known.sent(100, 10)
    known.sent(100, 50)
    assert (known.outstanding_bytes, known.outstanding_work_bytes) == (200.0, 60.0)
    known.acknowledged(1, 100.0)  # which of the two is not known: half of both
    assert (known.outstanding_bytes, known.outstanding_work_bytes) == (100.0, 30.0)
    known.answered(100, 10)
    assert (known.outstanding_bytes, known.outstanding_work_bytes) == (100.0, 50.0)
    known.came_back(100, 50)
    assert (known.outstanding_bytes, known.outstanding_work_bytes) == (0.0, 0.0)


def test_a_late_or_repeated_report_undoes_nothing() -> None:
    known = UnacknowledgedLoad()
    known.sent(100)
    known.acknowledged(2, 80.0)
    known.acknowledged(2, 10.0)
    known.acknowledged(1, 5000.0)
    known.acknowledged(2, 80.0)
    assert known.outstanding_bytes == 20.0


def test_a_new_process_counts_from_zero() -> None:
    known = UnacknowledgedLoad()
    known.acknowledged(1, 0.0)
    known.sent(100)
    known.sent(40)
    known.acknowledged(1, 100.0)
    known.acknowledged(2, 0.0)
    assert known.outstanding_bytes == 40.0  # still on its way, to the present process
    known.acknowledged(2, 40.0)
    assert known.outstanding_bytes == 0.0
    known.sent(7)
    assert known.outstanding_bytes == 7.0


def test_a_sender_that_restarts_takes_the_receivers_count() -> None:
    known = UnacknowledgedLoad()
    known.acknowledged(5, 1e9)
    assert known.outstanding_bytes == 0.0
    known.sent(10)
    assert known.outstanding_bytes == 10.0


def test_a_counting_error_is_gone_once_nothing_is_under_way() -> None:
    known = UnacknowledgedLoad()
    known.acknowledged(1, 0.0)
    known.sent(500)
    known.answered(500)  # assumed to be counted, but it never was
    known.acknowledged(1, 0.0)
    known.acknowledged(1, 0.0)
    known.sent(10)
    known.acknowledged(1, 10.0)
    assert known.outstanding_bytes == 0.0


@given(st.lists(st.tuples(st.floats(1.0, 1e6), st.floats(0.0, 1.0), st.booleans()), max_size=20))
@RUN
def test_bytes_to_prefill_are_a_part_of_the_outstanding_ones(sent: list[tuple[float, float, bool]]) -> None:
    known = UnacknowledgedLoad()
    for n_bytes, share, _ in sent:
        known.sent(n_bytes, share * n_bytes)
        assert 0.0 <= known.outstanding_work_bytes <= known.outstanding_bytes * (1.0 + 1e-9)
    for n_bytes, share, arrived in sent:
        (known.answered if arrived else known.came_back)(n_bytes, share * n_bytes)
        assert 0.0 <= known.outstanding_work_bytes <= known.outstanding_bytes + 1e-6
    assert known.outstanding_work_bytes == 0.0


@given(STEPS)
@RUN
def test_the_outstanding_load_is_exact_if_all_messages_arrive_in_order(steps: list[tuple[str, int]]) -> None:
    """Requests travel, are counted, reported and answered, each in order: what no report knows of is outstanding."""
    known = UnacknowledgedLoad()
    known.acknowledged(1, 0.0)
    travelling: list[int] = []
    counted: list[int] = []  # and not answered
    accepted = reported = 0
    for what, n in steps:
        if what == "send":
            known.sent(n)
            travelling.append(n)
        elif what == "lose" and travelling:
            known.came_back(travelling.pop())
        elif what == "count" and travelling:
            counted.append(travelling.pop(0))
            accepted += counted[-1]
        elif what == "report":
            reported = accepted
            known.acknowledged(1, float(accepted))
        elif what == "begin" and counted:
            known.answered(counted.pop(0))
        unanswered = sum(travelling) + sum(counted)
        assert known.outstanding_bytes == min(sum(travelling) + accepted - reported, unanswered)
    if not travelling and not counted:
        assert known.outstanding_bytes == 0.0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300), st.integers(1, 3)), max_size=80))
@RUN
def test_outstanding_bytes_stay_within_bounds_for_any_report(steps: list[tuple[int, int, int]]) -> None:
    """Any order, loss, repetition, restart or lie: never negative, never more than is unanswered, nothing at rest."""
    known = UnacknowledgedLoad()
    pending: list[int] = []
    for what, n, incarnation in steps:
        if what <= 1:
            known.sent(n)
            pending.append(n)
        elif what == 2:
            before = known.outstanding_bytes
            known.acknowledged(incarnation, float(n))
            assert known.outstanding_bytes <= before
        elif pending:
            (known.answered if what == 3 else known.came_back)(pending.pop(n % len(pending)))
        assert 0.0 <= known.outstanding_bytes <= sum(pending)
    for n in pending:
        known.answered(n)
    assert known.outstanding_bytes == 0.0
