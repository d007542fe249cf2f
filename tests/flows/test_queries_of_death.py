"""A body that was under way at two processes that ended goes to no third; cut links do not count against it."""

from __future__ import annotations

from playbook import answered, held, sent, timer
from worlds import everywhere, instance, regional, replica, request, seen, worldwide

from farhop.balance import outcome
from farhop.balance.health.suspects import HOLD_S, SILENCE_S
from farhop.balance.machine import AttemptBegan, AttemptEnded, AttemptFailed, RequestArrived, TimerFired

BODY = 0xDEAD


def died(name: str, attempt: int) -> AttemptFailed:
    return AttemptFailed(name, attempt, outcome.DIED_BEFORE_START)


def test_body_that_ended_two_balancers_is_held_until_confirmed_and_then_refused(play) -> None:
    flow = worldwide()
    book = (
        play(flow)
        .at(1.0).on(RequestArrived(request("a", body_hash=BODY))).expect(sent("a", "london"))
        .at(1.1).on(died("a", 1)).expect(sent("a", "frankfurt", attempt=2))
        .at(1.5).on(died("a", 2)).expect(held("a", 1.1 + SILENCE_S))
    )  # fmt: skip
    book.at(1.1 + SILENCE_S).on(TimerFired("a")).expect(timer("a", at=1.5 + SILENCE_S))
    book.at(1.5 + SILENCE_S).on(TimerFired("a")).expect(
        answered("a", outcome.ENDED_TWO_PROCESSES, retry_after_s=lambda s: HOLD_S - 5 < s < HOLD_S)
    )
    # The same request within the minute is refused at once; another body and another tenant are served.
    (
        book.at(10.0).on(RequestArrived(request("b", body_hash=BODY)))
        .expect(answered("b", outcome.ENDED_TWO_PROCESSES))
        .on(RequestArrived(request("c", body_hash=BODY + 1))).expect(sent("c", "london"))
    )  # fmt: skip
    assert not outcome.ENDED_TWO_PROCESSES.retryable
    assert flow.under_way == 1


def test_cut_link_does_not_count_as_a_death(play) -> None:
    """The reports of the region go on by way of a hub: it lives."""
    flow = worldwide()
    (
        play(flow)
        .at(1.0).on(RequestArrived(request("a", body_hash=BODY))).expect(sent("a", "london"))
        .at(1.1).on(died("a", 1)).expect(sent("a", "frankfurt", attempt=2))
        .at(1.5).on(died("a", 2)).expect(held("a", 1.1 + SILENCE_S))
        .at(1.8).on(everywhere(received_at=1.8)).expect(sent("a", "tokyo", attempt=3))
        .at(1.9).on(AttemptBegan("a", 3, 200)).expect()
        .at(2.0).on(AttemptEnded("a", 3, 200, None)).expect()
        .at(2.0).on(RequestArrived(request("b", body_hash=BODY))).expect(sent("b", lambda _t: True))
    )  # fmt: skip


def test_silence_before_the_request_was_sent_is_not_blamed_on_it(play) -> None:
    """This process, or the whole machine, stood still for a while: who is heard of again goes on being asked."""
    flow = worldwide()
    (
        play(flow)
        .at(5.0).on(RequestArrived(request("a", body_hash=BODY, deadline=30.0))).expect(sent("a", "london"))
        .at(5.1).on(died("a", 1)).expect(sent("a", "frankfurt", attempt=2))
        .at(5.5).on(died("a", 2)).expect(held("a", 5.1 + SILENCE_S))
        .at(5.8).on(everywhere(received_at=5.8)).expect(sent("a", "tokyo", attempt=3))
    )  # fmt: skip


def test_restarted_balancer_is_no_sign_of_life_of_the_former_process(play) -> None:
    flow = worldwide()
    again = seen(*(instance(r, received_at=2.0, incarnation=2) for r in ("london", "frankfurt", "tokyo")))
    (
        play(flow)
        .at(1.0).on(RequestArrived(request("a", body_hash=BODY))).expect(sent("a", "london"))
        .at(1.1).on(died("a", 1)).expect(sent("a", "frankfurt", attempt=2))
        .at(1.5).on(died("a", 2)).expect(held("a", 1.1 + SILENCE_S))
        .at(2.0).on(again).expect()
        .at(1.5 + SILENCE_S).on(TimerFired("a")).expect(answered("a", outcome.ENDED_TWO_PROCESSES))
    )  # fmt: skip


def test_failed_connection_does_not_count_as_a_death(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a", body_hash=BODY))).expect(sent("a", "london"))
        .on(AttemptFailed("a", 1, outcome.CONNECT_TIMEOUT)).expect(sent("a", "frankfurt", attempt=2))
        .on(AttemptFailed("a", 2, outcome.CONNECT_FAILED)).expect(sent("a", "tokyo", attempt=3))
        .on(AttemptBegan("a", 3, 200)).expect()
        .on(AttemptEnded("a", 3, 200, None)).expect()
    )  # fmt: skip


def test_two_replicas_are_enough_for_a_region(play) -> None:
    flow = regional(replica("r1"), replica("r2"), replica("r3"))
    first = flow.handle(RequestArrived(request("a", body_hash=BODY)), 0.0)[-1].target
    book = play(flow).at(0.1).on(died("a", 1))
    second = flow.replicas.ledger.held("a").target
    assert second != first
    book.expect(sent("a", second, attempt=2))
    book.at(0.2).on(died("a", 2)).expect(answered("a", outcome.ENDED_TWO_PROCESSES))
    book.at(0.3).on(RequestArrived(request("b", body_hash=BODY + 1))).expect(
        sent("b", ({"r1", "r2", "r3"} - {first, second}).pop())
    )
    assert len(flow.replicas.ledger) == 1
