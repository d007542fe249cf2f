"""A body that ended two processes goes to no third; cut links do not count against a body."""

from __future__ import annotations

from math import inf

from farhop.balance.health.suspects import BODIES_MAX, HOLD_S, SILENCE_S, Quarantine, Suspects

BODY, A, B, C = ("acme", 7), ("paris", "r1", "1"), ("tokyo", "r1", "1"), ("tokyo", "r1", "2")


def never(_process: tuple[str, ...]) -> float:
    return -inf


def test_a_request_that_ended_one_process_is_not_yet_suspect() -> None:
    made = Suspects()
    made.broke_off(BODY, A, 99.9, 100.0)
    made.broke_off(BODY, A, 99.9, 101.0)
    assert made.quarantine(BODY, never, 110.0) is None


def test_a_request_is_quarantined_while_two_processes_that_had_it_are_silent() -> None:
    made = Suspects()
    made.broke_off(BODY, A, 99.9, 100.0)
    made.broke_off(BODY, B, 100.9, 101.0)
    assert made.quarantine(BODY, never, 101.0) == Quarantine(100.0 + SILENCE_S, sure=False)
    assert made.quarantine(BODY, never, 103.5) == Quarantine(101.0 + SILENCE_S, sure=False)
    assert made.quarantine(BODY, never, 104.5) == Quarantine(100.0 + HOLD_S, sure=True)
    assert made.quarantine(("other", 7), never, 104.5) is made.quarantine(("acme", 8), never, 104.5) is None
    assert made.quarantine(BODY, never, 100.0 + HOLD_S) is None


def test_a_process_that_reports_again_lost_its_link_and_is_no_suspect() -> None:
    made = Suspects()
    made.broke_off(BODY, A, 99.9, 100.0)
    made.broke_off(BODY, B, 100.9, 101.0)
    assert made.quarantine(BODY, lambda process: 101.2 if process == B else -inf, 101.3) is None
    made.broke_off(BODY, C, 100.9, 102.0)  # another process of the same name
    assert made.quarantine(BODY, never, 110.0) is not None


def test_a_process_that_had_been_silent_before_it_was_given_up_had_stalled_even_if_it_recovers() -> None:
    made = Suspects()
    for process in (A, B):
        made.broke_off(BODY, process, 100.0 - SILENCE_S, 100.0)
    assert made.quarantine(BODY, lambda _process: 100.1, 100.2) == Quarantine(100.0 + HOLD_S, sure=True)


def test_a_request_that_was_answered_is_no_suspect() -> None:
    made = Suspects()
    for process in (A, B):
        made.broke_off(BODY, process, 0.0, 100.0)
    made.answered(BODY)
    assert made.quarantine(BODY, never, 100.0) is None
    assert len(made) == 0


def test_suspects_are_bounded_in_number() -> None:
    made = Suspects()
    for i in range(BODIES_MAX + 10):
        made.broke_off(("t", i), A, 0.0, 100.0)
    assert len(made) == BODIES_MAX
