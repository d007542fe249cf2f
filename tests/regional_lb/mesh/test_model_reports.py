"""What a report says of each model."""

from __future__ import annotations

import pytest
from reporting import reporter
from worlds import MODEL, OTHER_MODEL, regional, replica, request

from farhop.balance.machine import AttemptBegan, ClientLeft, RequestArrived
from regional_lb.fleet.view import ReplicaProbed
from regional_lb.scheduler.split import RuleConfig, SplitConfig


async def test_each_models_queue_is_its_own() -> None:
    flow = regional(replica("a", slots=1), replica("b", models=frozenset({OTHER_MODEL})))
    for n in range(3):
        flow.handle(RequestArrived(request(f"q{n}")), 0.0)
    by_model = {m.model: m for m in reporter(flow, lambda: 0.0).build().models}
    assert by_model[MODEL].queued_requests == flow.queue.waiting(MODEL) == 2
    assert by_model[OTHER_MODEL].queued_requests == 0


async def test_foreign_requests_in_the_queue_are_reported_by_how_long_they_have_waited() -> None:
    flow = regional(replica("a", slots=1))
    now = 0.0
    reports = reporter(flow, lambda: now)
    assert reports.build().models[0].foreign_wait_ms == 0.0
    for name, region in (("q0", "london"), ("q1", "london"), ("q2", "tokyo"), ("q3", "tokyo")):
        flow.handle(RequestArrived(request(name, entry_region=region)), now)
        now += 1.0
    found = reports.build().models[0]
    assert (found.queued_requests, found.foreign_wait_ms) == (3, 2000.0)
    flow.handle(ClientLeft("q2"), now)
    assert reports.build().models[0].foreign_wait_ms == 1000.0


async def test_a_model_that_is_split_is_reported_whole_and_its_headroom_by_share() -> None:
    flow = regional(replica("a", version="v1", slots=4), replica("b", version="v2", slots=1))
    flow.splits.override(
        {MODEL: SplitConfig(weights={"v1": 3, "v2": 1}, rules=[RuleConfig(version="v2", tenant="other")])}
    )
    before = reporter(flow, lambda: 0.0).build().models[0]
    for n in range(3):
        flow.handle(RequestArrived(request(f"q{n}", tenant="other")), 0.0)
    found = reporter(flow, lambda: 0.0).build().models[0]
    assert (found.model, found.replicas_ready, found.queued_requests) == (MODEL, 2, 2)
    assert 0 < found.headroom_foreign_tokens <= 0.75 * before.headroom_foreign_tokens
    assert found.wait_ms == pytest.approx(0.25 * flow.wait_estimate.wait_ms(f"{MODEL} v2", 0.0))


async def test_replicas_of_a_version_without_a_share_are_not_offered() -> None:
    """Else a region whose green is full would seem half empty, and never hot."""
    flow = regional(replica("blue", version="v1", slots=4), replica("green", version="v2", slots=2))
    flow.splits.override({MODEL: SplitConfig(weights={"v1": 0, "v2": 1})})
    for n in range(2):
        flow.handle(RequestArrived(request(f"q{n}")), 0.0)
    found = reporter(flow, lambda: 0.0).build().models[0]
    assert (found.replicas_ready, found.replicas_total, found.slots_total, found.slots_free) == (1, 2, 2, 0)
    assert found.used_share == 1.0
    flow.splits.override({MODEL: SplitConfig(weights={"v1": 1, "v2": 3})})
    found = reporter(flow, lambda: 0.0).build().models[0]
    assert (found.replicas_ready, found.slots_total, found.slots_free) == (2, 6, 4)
    assert found.used_share == pytest.approx(0.75)  # for a quarter of the requests everything is free
    for n in range(2):
        flow.handle(AttemptBegan(f"q{n}", 1, 200), 0.0)
    for _ in range(3):
        flow.handle(ReplicaProbed("green", False), 0.0)
    found = reporter(flow, lambda: 0.0).build().models[0]
    assert (found.replicas_ready, found.slots_total, found.used_share) == (1, 4, 0.0)  # blue takes it all now
