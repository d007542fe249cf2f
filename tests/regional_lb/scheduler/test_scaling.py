"""What a region's own load asks for."""

from __future__ import annotations

import pytest
from worlds import MODEL, regional, replica, request

from farhop.balance.machine import Forward, RequestArrived
from farhop.config import ConfigError
from regional_lb.fleet.view import ReplicaProbed
from regional_lb.scheduler.scaling import ScalingConfig

FIXED = ScalingConfig(target_share=0.5, spare_replicas=1, replicas_max=9, warm_up_s=0.0, down_after_s=0.0)


def busy(requests: int, *, replicas: int = 2, tokens: int = 400, scaling: ScalingConfig = FIXED):
    """A region of 2 slots a replica with so many requests under way and waiting."""
    flow = regional(*(replica(f"r{n}") for n in range(replicas)), scaling=scaling)
    for n in range(requests):
        flow.handle(RequestArrived(request(f"q{n}", tokens, max_tokens=10)), 0.1)
    return flow


@pytest.mark.parametrize(("requests", "load"), [(0, 0.0), (2, 1.0), (4, 2.0), (7, 3.5)])
def test_the_load_of_a_model_counts_running_and_queued_requests_in_replicas(requests: int, load: float) -> None:
    assert busy(requests).scaling.load(MODEL, 0.2) == pytest.approx(load)


def test_by_kv_cache_where_that_is_fuller() -> None:
    """20,000 bytes are 5,000 tokens: half of a replica's cache and half of its slots; more of them, and more so."""
    flow = regional(replica("a", slots=50), scaling=FIXED)
    sent = flow.handle(RequestArrived(request("q", 20_000, max_tokens=10)), 0.1)
    assert any(isinstance(one, Forward) for one in sent)
    assert 0.4 < flow.scaling.load(MODEL, 0.2) < 0.7


def test_the_desired_replicas_are_reported_and_shown() -> None:
    flow = busy(4)
    assert flow.scaling.desired() == {}
    assert flow.scaling.reported(MODEL) == {"replicas_min": 1, "replicas_max": 9}
    flow.scaling.look(1.0)
    assert flow.scaling.desired() == {MODEL: 5}  # the load of two replicas at half of each, and one to spare
    assert flow.scaling.reported(MODEL) == {
        "replicas_min": 1, "replicas_max": 9, "load_replicas": 4.0, "replicas_needed": 5,
    }  # fmt: skip
    assert flow.scaling.status()[MODEL]["desired"] == 5


def test_it_is_looked_at_once_a_second_and_by_other_bounds_when_configured() -> None:
    flow = busy(4)
    flow.scaling.look(1.0)
    flow.scaling.configure(FIXED, {MODEL: FIXED.model_copy(update={"replicas_max": 3})})
    assert flow.scaling.desired() == {MODEL: 3}
    for n in range(4, 30):
        flow.handle(RequestArrived(request(f"q{n}", 400, max_tokens=10)), 1.2)
    flow.scaling.look(1.9)
    assert flow.scaling.reported(MODEL)["replicas_needed"] == 5
    flow.scaling.look(200.0)
    assert flow.scaling.reported(MODEL)["replicas_needed"] > 20


def test_no_replica_count_is_desired_before_the_first_probe() -> None:
    flow = regional(replica("a"), replica("b"), up=False, scaling=FIXED)
    flow.scaling.look(1.0)
    assert flow.scaling.desired() == {}
    for name in ("a", "b"):
        flow.handle(ReplicaProbed(name, True), 1.5)
    flow.scaling.look(2.0)
    assert flow.scaling.desired() == {MODEL: 2}


def test_a_model_that_is_gone_is_forgotten() -> None:
    flow = busy(2)
    flow.scaling.look(1.0)
    other = regional(replica("a", models=frozenset({"qwen"})), scaling=FIXED).replicas.view
    flow.replicas.adopt(other)
    flow.scaling.look(2.5)
    assert MODEL not in flow.scaling.desired()


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises((ValueError, ConfigError), match="replicas_min 5 is above replicas_max 4"):
        ScalingConfig(replicas_min=5, replicas_max=4)
