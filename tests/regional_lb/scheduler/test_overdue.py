"""What a frozen replica never began is found by what a healthy one would have done, and a slow one is left alone."""

from __future__ import annotations

from regional_lb.scheduler.overdue import CHECK_S, CONFIRM_S, OverdueRequests


def looked(requests: OverdueRequests, begin: float, until: float) -> tuple[float, list[tuple[str, str]]]:
    """Asked whenever it is due: when something was overdue first, and what."""
    now = begin
    while now < until:
        now = max(now + 0.01, min(requests.due, until))
        if found := requests.overdue(now):
            return now, found
    return until, []


def measured(requests: OverdueRequests) -> None:
    for n in range(400):
        requests.began(100.0 if n % 2 else 130.0, 100.0)


def test_a_request_that_never_begins_is_overdue_by_its_predicted_time() -> None:
    requests = OverdueRequests()
    measured(requests)
    assert requests.factor == 3.0  # it never differed by more
    for name, expected_ms in (("short", 30.0), ("long", 2000.0)):
        requests.sent("r1", name, expected_ms, 0.0)
    at, found = looked(requests, 0.0, 20.0)
    assert found == [("r1", "short")]
    assert at <= 3.0 * 0.05 + CONFIRM_S + 2 * CHECK_S
    requests.over("r1", "short")
    at, found = looked(requests, at, 20.0)
    assert found == [("r1", "long")]
    assert 3.0 * 2.0 < at < 3.0 * 2.02 + 1.0


def test_before_anything_was_measured_it_takes_longer() -> None:
    requests = OverdueRequests()
    requests.sent("r1", "a", 30.0, 0.0)
    at, found = looked(requests, 0.0, 9.0)
    assert found == [("r1", "a")]
    assert 0.5 < at < 2.2


def test_a_slow_replica_that_shows_signs_of_life_is_never_overdue() -> None:
    requests = OverdueRequests()
    measured(requests)
    requests.sent("r1", "a", 30.0, 0.0)
    for tick in range(100):
        requests.alive("r1", tick * 0.5)
        assert looked(requests, tick * 0.5, tick * 0.5 + 0.5)[1] == []
    assert looked(requests, 50.0, 60.0)[1] == [("r1", "a")]


def test_time_in_which_the_process_did_not_look_makes_no_request_overdue() -> None:
    requests = OverdueRequests()
    measured(requests)
    requests.sent("r1", "a", 30.0, 0.0)
    assert requests.overdue(30.0) == []  # this process was stopped, or had nothing to do
    assert looked(requests, 30.0, 40.0)[1] == [("r1", "a")]


def test_a_finished_request_leaves_no_overdue_check() -> None:
    requests = OverdueRequests()
    requests.sent("r1", "a", 30.0, 0.0)
    requests.alive("r1", 0.1)
    requests.over("r1", "a")
    requests.over("r1", "a")
    requests.alive("r1", 0.2)
    assert not requests.waiting
    assert not requests.alive_at
    assert requests.overdue(1.0) == []
    assert requests.due == float("inf")
