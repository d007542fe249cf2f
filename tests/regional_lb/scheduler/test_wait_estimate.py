"""How long one more request would wait."""

from __future__ import annotations

from worlds import MODEL, OTHER_MODEL, regional, replica, request

from farhop.balance.machine import (
    RequestArrived,
)
from regional_lb.fleet.shares import PeerReported


def test_requests_queued_at_a_peer_count_only_as_far_as_turns_alternate() -> None:
    flow = regional(replica("r1", slots=1), instance="a")
    flow.handle(RequestArrived(request("b")), 0.0)
    alone_ms = flow.wait_estimate.wait_ms(MODEL, 0.0)
    flow.handle(PeerReported("b", {}, {MODEL: 50}), 0.0)
    assert flow.wait_estimate.wait_ms(MODEL, 0.0) == 2 * alone_ms  # one of theirs for one of ours, not all fifty
    assert flow.wait_estimate.queued_elsewhere(MODEL) == 50


def test_a_model_that_no_replica_serves_is_not_waited_for() -> None:
    flow = regional(replica("r1", slots=1))
    for name in ("a", "b"):
        flow.handle(RequestArrived(request(name)), 0.0)
    assert (flow.wait_estimate.in_line(MODEL), flow.wait_estimate.in_line(OTHER_MODEL)) == (1, 0)
    assert flow.wait_estimate.wait_ms(MODEL, 0.0) > flow.wait_estimate.wait_ms(OTHER_MODEL, 0.0) == 0.0
