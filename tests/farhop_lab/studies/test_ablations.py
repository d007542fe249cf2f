"""Each ablation takes away the part it is named for, and leaves a router that still serves."""

from __future__ import annotations

import pytest

from farhop_lab.sim.sites import Reporting, flat, gpus, station
from farhop_lab.sim.world import World
from farhop_lab.studies import routers
from farhop_lab.studies.ablations import ABLATIONS


def world(name: str, sites: dict[str, object], rtt_ms: float = 20.0) -> World:
    return routers.build(
        name,
        3,
        flat(list(sites), rtt_ms),
        sites,
        balancers=dict.fromkeys(sites, 1),
        reporting=Reporting(),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", ["farhop", *ABLATIONS])
def test_every_ablation_serves_all_requests_without_violations(name: str) -> None:
    it = world(name, {"a": gpus("l4", 2), "b": gpus("l4", 1)})
    it.stream(3.0, lambda: it.arrive("a", "t", 2000, prefix="x", max_tokens=40), since=2.0, until=12.0)
    measures = it.run(60.0)
    assert measures.outcomes.keys() == {"served"}
    assert measures.violations == 0


def hits(name: str) -> int:
    it = world(name, {"a": gpus("l4", 4)})
    for turn in range(15):
        it.at(2.0 + turn * 2.0, lambda turn=turn: it.arrive("a", "t", 8000, prefix=f"{turn % 5} s", max_tokens=8))
    return sum(record.cached_tokens for record in it.run(60.0).records)


def test_fewer_cached_tokens_are_found_without_the_trie() -> None:
    assert hits("farhop-no-trie") < 0.7 * hits("farhop")


def engine_waits(name: str) -> float:
    it = world(name, {"a": gpus("l4", 1)})
    for n in range(60):
        it.at(2.0, lambda n=n: it.arrive("a", "t", 8000, prefix=f"{n} s", max_tokens=200))
    it.run(6.0)
    return float(it.regions["a"].engines["gpu-0"].metrics()[0])


def test_requests_wait_in_the_engine_without_late_binding() -> None:
    assert engine_waits("farhop") <= 8
    assert engine_waits("farhop-no-late-binding") >= 20


def outstanding(name: str) -> float:
    it = world(name, {"a": station(2, 5.0), "b": station(2, 5.0)}, rtt_ms=900.0)
    it.run(3.0)
    for _ in range(8):
        it.arrive("a", "t")
    flow = it.balancers["a"][0].flow
    return sum(load.outstanding_bytes for load in flow.regions.loads.values())  # type: ignore[attr-defined]


def test_no_load_is_outstanding_without_unacknowledged_load() -> None:
    assert outstanding("farhop") == 8 * 1024
    assert outstanding("farhop-no-unacknowledged-load") == 0.0


def test_an_ablated_router_lacks_the_removed_score_term() -> None:
    plain, first, undrawn, fetching = (
        world(name, {"a": gpus("l4", 1)}).balancers["a"][0].flow.routes.of("t", "llama").policy  # type: ignore[attr-defined]
        for name in ("farhop", "farhop-no-tpot", "farhop-no-tie-draw", "farhop-no-bringing-home")
    )
    assert (plain.ties, plain.uncertain_waits) == (1.0, True)
    assert (undrawn.ties, undrawn.uncertain_waits) == (0.0, False)
    assert (plain.replicates_prefixes, fetching.replicates_prefixes, fetching.uncertain_waits) == (True, False, True)
    assert type(first) is not type(plain)
    assert first.shift(None) == 0.0
