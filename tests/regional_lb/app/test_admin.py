"""What a regional balancer shows its operators."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from inprocess import MODEL, Both, Engine, both, regional_config, topology, until

from farhop_lab.memory_store import MemoryStore
from regional_lb.app.main import RegionalBalancer

WORLD = topology()


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    async with both(engine, WORLD) as running:
        yield running
        await running.at_rest()


async def test_a_replica_that_is_down_makes_it_unready(up: Both, engine: Engine) -> None:
    assert up.regional.tier_admin.ready()
    engine.healthy = False
    await until(lambda: not up.regional.tier_admin.ready())
    (replica,) = up.regional.tier_admin.status()["replicas"]
    assert (replica["state"], replica["why"]) == ("down", "alive, not ready")  # 503 is its own status for that
    assert up.regional.tier_admin.status()["modes"] == {MODEL: "all_down"}


async def test_the_engines_cache_metrics_are_shown(engine: Engine) -> None:
    engine.page += "vllm:kv_cache_usage_perc 0.25\n"
    async with both(engine, WORLD) as up:

        def read_status() -> dict[str, Any]:
            return dict(up.regional.tier_admin.status()["replicas"][0])

        await until(lambda: read_status()["engine_kv_usage"] == 0.25)
        assert read_status()["engine_hit_share"] is None
        engine.page += "vllm:prefix_cache_queries_total 200\nvllm:prefix_cache_hits_total 150\n"
        await until(lambda: read_status()["engine_hit_share"] == 0.75)
        (line,) = [
            li
            for li in up.regional.metrics.render().decode().splitlines()
            if "farhop_replica_kv_cache_usage_ratio{" in li
        ]
        assert line.endswith(" 0.25")


async def test_a_closed_balancer_is_not_ready(engine: Engine) -> None:
    balancer = RegionalBalancer(regional_config(engine), WORLD, Random(1), MemoryStore(Random(2)))
    await balancer.open()
    await until(balancer.tier_admin.ready)
    await balancer.close()
    assert not balancer.tier_admin.ready()


async def test_the_status_shows_slow_replicas_and_since_when_nothing_came(up: Both) -> None:
    flow = up.regional.flow
    (name,) = flow.replicas.view.replicas
    (found,) = up.regional.tier_admin.status()["replicas"]
    assert (found["slow"], found["speed_sample_age_s"], found["speed_uncertainty"]) == ("", None, 0.5)
    now = up.regional.clock.now()
    for n in range(30):
        flow.replicas.speeds.ended(name, 1000.0, 1000.0, 101, 1.0, now - 31.0 + n)
    flow.replicas.age(now)
    (found,) = up.regional.tier_admin.status()["replicas"]
    assert found["speed_sample_age_s"] == pytest.approx(2.0, abs=1.0)
    assert found["tpot_ms"] == pytest.approx(10.0, rel=0.2)
    assert found["slow"] == ""  # there is no other replica to compare with
