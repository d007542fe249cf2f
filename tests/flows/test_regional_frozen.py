"""A frozen replica closes no connection: requests that it has not begun move, those of a slow replica stay."""

from __future__ import annotations

from worlds import regional, replica, request, swapped

from farhop.balance.machine import AttemptBegan, Cancel, Forward, RequestArrived
from regional_lb.fleet.view import ReplicaProbed, ReplicaSampled, Sample

TICK_S = 0.25


def _sent() -> tuple:
    flow = regional()
    flow.handle(swapped(replica("r1"), replica("r2")), 0.0)
    for name in ("r1", "r2"):
        flow.handle(ReplicaProbed(name, True), 0.0)
    commands = flow.handle(RequestArrived(request("a", stream=True, deadline=60.0)), 0.0)
    (sent,) = [command for command in commands if isinstance(command, Forward)]
    return flow, sent, {"r1": "r2", "r2": "r1"}[sent.target]


def _moved(flow, speaks: dict[str, float]) -> tuple[float, list]:
    """When something was moved; each of `speaks` tells every TICK_S, and its hits grow by so much."""
    for tick in range(1, 60):
        now = tick * TICK_S
        for name, grows in speaks.items():
            sample = Sample(now, 0, 1, 0.1, prefix_queries=tick * grows, prefix_hits=0.0)
            moved = [c for c in flow.handle(ReplicaSampled(name, sample), now) if isinstance(c, Cancel | Forward)]
            if moved:
                return now, moved
    return 15.0, []


def test_request_not_begun_by_a_frozen_replica_goes_to_another() -> None:
    flow, sent, other = _sent()
    at, (cancel, again) = _moved(flow, {other: 10.0})
    assert (cancel.id, cancel.attempt, again.target, again.attempt) == (sent.id, 1, other, 2)
    expected_s = (sent.promised_ttft_ms + 100.0) / 1e3
    assert at < flow.overdue_requests.factor * expected_s + 1.0


def test_a_replica_whose_server_answers_but_generates_nothing_is_frozen() -> None:
    flow, sent, other = _sent()
    _, moved = _moved(flow, {other: 10.0, sent.target: 0.0})
    assert [type(command) for command in moved] == [Cancel, Forward]


def test_slow_replica_keeps_the_requests_it_works_on() -> None:
    flow, sent, other = _sent()
    assert _moved(flow, {other: 10.0, sent.target: 5.0})[1] == []


def test_a_request_whose_answer_began_is_not_moved() -> None:
    flow, sent, other = _sent()
    flow.handle(AttemptBegan(sent.id, 1, 200), 0.1)
    assert _moved(flow, {other: 10.0})[1] == []


def test_a_request_at_the_only_replica_is_not_moved() -> None:
    flow, sent, other = _sent()
    flow.handle(swapped(replica(sent.target)), 0.1)
    assert _moved(flow, {other: 10.0})[1] == []
