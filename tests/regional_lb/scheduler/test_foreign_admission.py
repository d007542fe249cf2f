"""When a request from another region is turned away."""

from __future__ import annotations

from worlds import MODEL, regional, replica, request

from farhop.balance import outcome
from farhop.balance.machine import (
    RequestArrived,
)


def test_only_foreign_requests_are_turned_away() -> None:
    flow = regional(replica("r1"))
    own = request("a")
    foreign = request("b", entry_region="tokyo", promised_ttft_ms=1.0)
    flow.handle(RequestArrived(request("big", 64 * 1024)), 0.0)
    assert flow.foreign_admission.turned_away(own, flow.selector.need_of(own), 0.0) is None
    assert flow.foreign_admission.turned_away(foreign, flow.selector.need_of(foreign), 0.0) is not None
    assert flow.wait_estimate.wait_ms(MODEL, 0.0) > 0.0


def test_a_burst_on_an_idle_engine_breaks_no_promise_that_its_prefills_keep() -> None:
    """Hardly any request leaves an engine that has just begun: by Little's law nobody would begin there."""
    flow = regional(replica("r1", slots=200, prefill_ms_per_token=0.5, prefill_tokens_max=2048))
    for n in range(3):  # two fill a step, the third is queued
        flow.handle(RequestArrived(request(f"r{n}", 4 * 1024)), 0.0)
    assert (len(flow.queue), len(flow.replicas.ledger)) == (1, 2)
    in_time = request("in-time", 4 * 1024, entry_region="tokyo", promised_ttft_ms=800.0)
    late = request("late", 4 * 1024, entry_region="tokyo", promised_ttft_ms=50.0)
    need = flow.selector.need_of(in_time)
    assert flow.wait_estimate.wait_ms(MODEL, 0.0) > 3000.0
    assert flow.foreign_admission.turned_away(in_time, need, 0.0) is None
    assert flow.foreign_admission.turned_away(late, need, 0.0).outcome is outcome.BROKEN_PROMISE
