"""After what wait a request is late, and how long it may wait: by what its client wants, and what its prompt takes."""

from __future__ import annotations

from math import inf

import pytest
from worlds import MODEL, regional, replica, request

from farhop.balance.machine import Request
from regional_lb.scheduler.patience import LATE_MIN_S, Patience
from regional_lb.scheduler.queue import LATE_SHARE, SLOWDOWN_MAX, QueueConfig, RequestQueue
from regional_lb.scheduler.request_state import RequestState

CONFIG = QueueConfig(wait_s=30.0, ttft_objective_s=4.0)
PREFILL_MS = 0.5


def patience() -> tuple[Patience, RequestQueue]:
    flow = regional(replica("r1", prefill_ms_per_token=PREFILL_MS))
    return Patience(CONFIG, flow.queue, flow.wait_estimate, lambda _tenant: 1.0), flow.queue


def state(asked: Request) -> RequestState:
    flow = regional(replica("r1"))
    return RequestState(asked, flow.selector.need_of(asked), MODEL, flow.law)


def test_late_is_a_share_of_the_objective_or_longer_for_a_long_prompt() -> None:
    made, _ = patience()
    assert made.late_s(state(request("short")), 0.0) == pytest.approx(LATE_SHARE * 4.0)
    long = state(request("long", 256 * 1024))
    prefill_s = long.need.prompt_tokens * PREFILL_MS / 1e3
    assert made.late_s(long, 0.0) == pytest.approx(SLOWDOWN_MAX * prefill_s)


def test_request_with_an_objective_is_late_once_it_cannot_be_met() -> None:
    made, _ = patience()
    assert made.late_s(state(request("soon", first_token_by=2.0)), 0.0) <= LATE_SHARE * 2.0
    assert made.late_s(state(request("past", 256 * 1024, first_token_by=0.1)), 0.0) == LATE_MIN_S


def test_without_a_standing_queue_a_request_may_wait_the_whole_queue_timeout() -> None:
    made, _ = patience()
    assert made.most_s(state(request("a")), 0.0) == 30.0
    let_go = made.most_s(state(request("b", waited_s=3.0)), 0.0)  # in another region: it may do so once more
    assert let_go == pytest.approx(LATE_SHARE * 4.0 + 3.0)


def test_a_foreign_request_waits_no_longer_than_its_ttft_objective() -> None:
    made, _ = patience()
    own, foreign = state(request("a")), state(request("b", issuer="tokyo/lb", promised_ttft_ms=10.0))
    for one, until in ((own, 30.0), (foreign, 4.0)):
        assert made.late_until(one, 0.0) == until
        one.held_at = 0.0
        assert made.late_until(one, until) == until  # counted from when it began to wait
    own.late = True
    assert made.late_until(own, 0.0) == -inf  # it stepped back once
    assert made.most_s(own, 0.0) == 30.0


def test_a_tenant_alone_has_its_share() -> None:
    made, queue = patience()
    assert made.crowds(state(request("a")))
    for name in ("x", "y"):
        queue.push(name, MODEL, "other", 1.0, request("a").priority, 10.0, 0.0)
    assert not made.crowds(state(request("a")))
    assert made.crowds(state(request("a")), more=2)
