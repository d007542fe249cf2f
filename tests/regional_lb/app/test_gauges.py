"""What a scrape reads of a region's machine: its figures after some events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from worlds import MODEL, regional, replica

from farhop.balance.ledger import Reservation
from farhop.telemetry.metrics import TierMetrics
from regional_lb.app import gauges
from regional_lb.fleet.view import ReplicaProbed, ReplicaSampled, Sample


def read(metrics: TierMetrics, name: str, **labels: str) -> float | None:
    """The one sample of `name` with these labels, beside those of the process."""
    for family in metrics.collect():
        for one in family.samples:
            if one.name == f"farhop_{name}" and labels.items() <= one.labels.items():
                return one.value
    return None


def test_the_queue_the_replicas_and_their_caches() -> None:
    metrics, now = TierMetrics("regional", "london", "r1"), [0.0]
    flow = regional(replica("a", slots=4), replica("b", slots=4))
    gauges.observe_flow(metrics, flow, lambda: now[0])
    assert read(metrics, "queued_requests") == 0.0
    assert read(metrics, "ready_replicas", model=MODEL) == 2.0
    assert read(metrics, "replica_usable_ratio", replica="a") == 1.0
    assert read(metrics, "replica_kv_cache_usage_ratio", replica="a") is None, "nobody sampled it"
    flow.replicas.ledger.reserve("x", Reservation("a", 100, 400))
    flow.handle(ReplicaSampled("a", Sample(0.0, 0, 1, 0.25)), 0.0)
    for _ in range(4):
        flow.handle(ReplicaProbed("b", False), 0.0)
    now[0] = 1.0
    assert read(metrics, "replica_in_flight", replica="a") == 1.0
    assert read(metrics, "replica_kv_cache_usage_ratio", replica="a") == 0.25
    assert read(metrics, "replica_usable_ratio", replica="b") == 0.0
    assert read(metrics, "replicas", state="down") == 1.0
    assert read(metrics, "ready_replicas", model=MODEL) == 1.0
    assert sum(read(metrics, "models_by_mode", mode=mode) or 0.0 for mode in ("normal", "panic", "all_down")) == 1.0


def test_tokenizers_and_gateways_are_counted_where_there_are_some() -> None:
    metrics, flow = TierMetrics("regional", "london", "r1"), regional(replica("a"))
    tokenizers = cast("Any", SimpleNamespace(prompts=7, unread={"too_long": 2}))
    gauges.observe_tokenizers(metrics, flow, tokenizers)
    picker = cast("Any", SimpleNamespace(streams=3, moved=1.0, violations={"headers": 1}, fails_open=bool))
    pools: list[str] = []
    gauges.observe_picker(metrics, picker, lambda: pools)
    assert read(metrics, "tokenized_prompts_total") == 7.0
    assert read(metrics, "untokenized_prompts_total", reason="too_long") == 2.0
    assert (read(metrics, "picker_streams"), read(metrics, "picker_misled_total", reason="headers")) == (3.0, 1.0)
    assert read(metrics, "picker_fails_open") == 0.0
    pools.append("pool")
    assert read(metrics, "picker_fails_open") == 1.0
