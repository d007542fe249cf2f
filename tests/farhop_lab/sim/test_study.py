from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from farhop_lab.sim.baselines.router import RouterState
from farhop_lab.sim.baselines.world import build
from farhop_lab.sim.clients import ClientPool
from farhop_lab.sim.measures import RequestRecord
from farhop_lab.sim.sites import flat, gpus, station
from farhop_lab.sim.study import Objective, Score, Window, cell, is_good, judge, share_of
from farhop_lab.sim.world import World
from farhop_lab.workloads.chat import ARENA, chats
from topology.model import Rule, Topology

STRICT = Objective(ttft_ms=100.0, tpot_ms=20.0, patience_ms=5_000.0)


def record(**fields: Any) -> RequestRecord:
    """Served: first byte after 50 ms, 11 tokens within 250 ms: 20 ms a token."""
    return RequestRecord(
        **{
            "id": "r",
            "tenant": "t",
            "entry": "a",
            "region": "a",
            "outcome": "served",
            "arrived_at": 1.0,
            "ended_at": 1.25,
            "ttft_ms": 50.0,
            "attempts": 1,
            "prompt_tokens": 100,
            "cached_tokens": 40,
            "answer_tokens": 11,
            **fields,
        }
    )


def test_good_answers_are_counted() -> None:
    assert is_good(record(), Objective(ttft_ms=50.0, tpot_ms=20.000001))
    assert not is_good(record(), Objective(ttft_ms=49.0))
    assert not is_good(record(), Objective(tpot_ms=19.0))
    assert not is_good(record(outcome="died_mid_stream"), Objective())
    assert not is_good(record(ttft_ms=None, outcome="queue_full"), Objective())
    assert is_good(record(answer_tokens=1), Objective(tpot_ms=0.0))  # no time between tokens to miss


def test_failures_count_as_requests_that_took_their_clients_patience() -> None:
    refused = record(outcome="queue_full", region="", ttft_ms=None, ended_at=1.01, answer_tokens=0, prompt_tokens=0)
    late = record(outcome="client_left", region="", ttft_ms=None, ended_at=10.0, answer_tokens=0, prompt_tokens=0)
    broken = record(outcome="died_mid_stream", ended_at=1.5, prompt_tokens=0)
    share = share_of([record(), record(ttft_ms=150.0), refused, late, broken], 1, STRICT)
    assert (share.asked, share.served, share.good, share.failed) == (6, 2, 1, 4)
    assert share.good_share == pytest.approx(1 / 6)
    # first bytes: 50, 150, 50 (broken later), 5000 (refused), 9000 (left after 9 s), 5000 (never heard the end)
    assert share.ttft_ms.mean == pytest.approx((50 + 150 + 50 + 5000 + 9000 + 5000) / 6)
    assert (share.ttft_ms.p50, share.ttft_ms.p99) == (150.0, 9000.0)
    # ends: 250, 250, 5000, 9000, 5000 (broken), 5000
    assert share.e2e_ms.mean == pytest.approx((250 + 250 + 5000 + 9000 + 5000 + 5000) / 6)
    assert share.tpot_ms.p50 == pytest.approx(10.0)
    assert share.hit == pytest.approx(0.4)


def test_a_share_of_no_requests_has_no_failures_and_zero_latency() -> None:
    share = share_of([], 0, STRICT)
    assert (share.asked, share.hit, share.good_share, share.ttft_ms.p99) == (0, 0.0, 1.0, 0.0)


def priced(rtt_ms: float = 100.0, tenants: dict[str, Rule] | None = None) -> Topology:
    world = flat(["a", "b"], rtt_ms, tenants)
    regions = {
        name: replace(region, egress_usd_per_gb=usd, usd_per_gpu_hour=2.0)
        for (name, region), usd in zip(world.regions.items(), (0.1, 0.5), strict=True)
    }
    return Topology("priced", 1, regions, world.tenants, rtt=dict(world.rtt))


def test_a_steady_world_by_hand() -> None:
    """One request a second for 100 s into 4 slots of 2 s, first byte at 0.5 s, 100 tokens."""
    world = World(1, priced(), {"a": station(4, 2.0, first_s=0.5)}, balancers={"a": 1})
    world.stream(1.0, lambda: world.arrive("a", "t", 400), until=100.0, even=True)
    score = judge(world, Window(20.0, 80.0), Objective(ttft_ms=600.0, tpot_ms=100.0), drain_s=10.0)
    whole = score.whole
    assert (whole.asked, whole.served, whole.good, whole.failed) == (60, 60, 60, 0)
    assert score.requests_per_s == pytest.approx(1.0)
    assert score.answer_tokens_per_s == pytest.approx(100.0) == pytest.approx(score.good_tokens_per_s)
    assert score.tokens_per_s == pytest.approx(200.0)
    assert 500.0 < whole.ttft_ms.p50 < 510.0
    assert whole.tpot_ms.p50 == pytest.approx(1500 / 99, rel=0.01)
    assert 2000.0 < whole.e2e_ms.p99 < 2020.0
    assert score.loads["a"].running == pytest.approx(2.0, abs=0.1)
    assert score.loads["a"].used == pytest.approx(0.5, abs=0.03)
    assert score.busy == pytest.approx(1.0)
    assert (score.waiting, score.spill, score.crossed_gb, score.usd, score.unlawful) == (0.0, 0.0, 0.0, 0.0, 0)
    assert score.gpu_usd == pytest.approx(2.0 * 60 / 3600)
    assert (score.attempts, score.violations, score.outcomes) == (1.0, 0, {"served": 60})


def test_traffic_between_regions_costs_the_price_of_its_origin_and_only_in_the_window() -> None:
    """All is served in b: 1200 B there, 10 tokens of 250 B back. Clients of a, prices 0.1 and 0.5 $/GB."""
    world = World(1, priced(), {"b": station(40, 1.0, answer_tokens=10)}, balancers={"a": 1})
    world.stream(2.0, lambda: world.arrive("a", "t", 1000), since=2.0, until=100.0, even=True)
    score = judge(world, Window(50.0, 80.0), Objective(), drain_s=10.0)
    assert score.spill == 1.0
    assert score.whole.asked == 60
    assert score.crossed_gb * 1e9 == pytest.approx(60 * (1200 + 2500), rel=0.03)
    assert score.usd == pytest.approx(60 * (1200 * 0.1 + 2500 * 0.5) / 1e9, rel=0.03)
    assert score.regions.keys() == {"a"}
    assert score.whole.ttft_ms.p50 == pytest.approx(100 + 20 + 1, abs=2.0)


def test_unfinished_requests_count_as_failed_and_those_in_an_engine_s_queue_as_waiting() -> None:
    world = build("local-round-robin", 1, priced(), {"a": station(1, 1000.0, first_s=999.0)})  # pushes blindly
    for at in (5.0, 6.0, 7.0):
        world.at(at, lambda: world.arrive("a", "t", 400))
    score = judge(world, Window(5.0, 55.0), Objective(patience_ms=40_000.0), drain_s=5.0)
    assert (score.whole.asked, score.whole.served, score.whole.failed) == (3, 0, 3)
    assert score.outcomes == {"unfinished": 3}
    assert score.whole.ttft_ms.p50 == 40_000.0
    # Two wait behind one: from 6 s and from 7 s on.
    assert score.waiting == pytest.approx((49 + 48) / 50, abs=0.05)


def test_regions_and_tenants_are_distinguished_and_fairness_is_theirs() -> None:
    topology = priced(tenants={"t": Rule(("world",)), "lost": Rule(("atlantis",))})
    sites = {"a": station(40, 1.0, first_s=0.1), "b": station(40, 1.0, first_s=0.1)}
    world = World(1, topology, sites)
    world.stream(2.0, lambda: world.arrive("a", "t"), since=2.0, until=60.0)
    world.stream(1.0, lambda: world.arrive("b", "lost"), since=2.0, until=60.0)
    score = judge(world, Window(10.0, 50.0), Objective(), drain_s=10.0)
    assert score.tenants["t"].good_share == 1.0
    assert score.tenants["lost"].good_share == 0.0
    assert score.regions["a"].asked == score.tenants["t"].asked
    assert score.jain_tenants == pytest.approx(0.5) == pytest.approx(score.jain_regions)
    assert score.outcomes.keys() == {"served", "no_lawful_region"}
    assert score.unlawful == 0


def test_router_that_ignores_the_law_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterState, "within", lambda self, _lawful: self)
    topology = priced(tenants={"bound": Rule(("a",))})
    world = build("central-round-robin", 1, topology, {"b": station(40, 1.0)})
    world.stream(2.0, lambda: world.arrive("a", "bound"), since=2.0, until=30.0)
    score = judge(world, Window(5.0, 25.0), Objective(), drain_s=10.0)
    assert score.unlawful == score.whole.served > 20
    assert score.spill == 1.0


def run(policy: str, seed: int) -> Score:
    world = build(policy, seed, flat(["a", "b"], 100.0), {"a": gpus("a100", 1), "b": gpus("a100", 1)})
    clients = ClientPool(world, until=40.0)
    for client in range(6):
        clients.closed("ab"[client % 2], chats(ARENA, f"c{client}", seed), since=2.0)
    return judge(world, Window(10.0, 40.0), Objective(), drain_s=20.0)


def test_cells_have_their_confidence_over_seeds_and_a_seed_is_a_score() -> None:
    scores = [run("farhop", seed) for seed in (1, 2)]
    assert run("farhop", 1) == scores[0]
    found = cell(scores)
    assert found["requests_per_s"].n == 2
    assert found["requests_per_s"].mean == pytest.approx(sum(score.requests_per_s for score in scores) / 2)
    assert {"ttft_p90_ms", "e2e_p99_ms", "hit", "region.a.ttft_p50_ms", "region.b.waiting", "tenant.t.good_share"} <= (
        found.keys()
    )
    assert 0.2 < found["hit"].mean < 0.9
    assert msgspec.json.decode(msgspec.json.encode(scores[0]), type=Score) == scores[0]
    assert b'"half"' in msgspec.json.encode(found)
    with pytest.raises(ValueError, match="a cell of no run"):
        cell([])


def test_worlds_of_one_seed_get_the_same_requests_under_every_router() -> None:
    def asked(policy: str) -> list[tuple[float, str, int]]:
        world = build(policy, 3, flat(["a", "b"], 100.0), {"a": gpus("a100", 1), "b": gpus("a100", 1)})
        clients = ClientPool(world, until=20.0)
        for client in range(4):
            clients.closed("ab"[client % 2], chats(ARENA, f"c{client}", 3), since=2.0 + client)
        world.run(60.0)
        firsts: dict[int, tuple[float, str, int]] = {}
        for one in sorted(world.measures.records, key=lambda record: record.arrived_at):
            firsts.setdefault(one.session, (0.0, one.entry, one.prompt_tokens))
        return sorted(list(firsts.values())[:8])

    assert asked("farhop") == asked("skywalker") != []


@pytest.mark.parametrize(("since", "until"), [(5.0, 5.0), (-1.0, 5.0), (6.0, 5.0)])
def test_impossible_measurement_windows_are_refused(since: float, until: float) -> None:
    with pytest.raises(ValueError, match="give 0 <= since < until"):
        Window(since, until)
