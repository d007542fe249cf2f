"""Routers by name."""

from __future__ import annotations

import pytest

from farhop_lab.sim.baselines.world import RouterWorld
from farhop_lab.sim.sites import Reporting, flat, gpus
from farhop_lab.sim.world import World
from farhop_lab.studies import routers
from farhop_lab.studies.ablations import ABLATIONS, TrielessGlobal, TrielessRegional
from global_lb.routing import policy as global_policy
from regional_lb.scheduler import policy as regional_policy


def build(name: str) -> World:
    sites = {"a": gpus("l4", 1)}
    return routers.build(name, 1, flat(["a", "b"]), sites, balancers={"a": 1, "b": 1}, reporting=Reporting())


def test_farhop_comes_first_then_its_ablations_then_the_published() -> None:
    names = routers.names()
    assert names[0] == "farhop"
    assert set(ABLATIONS) < set(names)
    assert {"skywalker", "region-local", "omniscient"} < set(names)
    assert len(names) == len(set(names))


def test_each_name_builds_its_router() -> None:
    assert type(build("farhop")) is World
    assert isinstance(build("skywalker"), RouterWorld)
    world = build("farhop-no-trie")
    assert isinstance(world.balancers["a"][0].flow, TrielessGlobal)
    assert isinstance(world.regions["a"].flow, TrielessRegional)
    with pytest.raises(LookupError):
        build("nobody")


def test_a_policy_is_simulated_in_its_tier_and_the_other_is_as_shipped() -> None:
    assert _policies(build("farhop-regional-least-load")) == ("predictive", "least-load")
    assert _policies(build("farhop-global-nearest")) == ("nearest", "predictive")
    assert {f"farhop-regional-{name}" for name in regional_policy.KNOWN} < set(routers.names())
    assert {f"farhop-global-{name}" for name in global_policy.KNOWN} < set(routers.names())
    for name in routers.POLICIES:
        build(name)


def _policies(world: World) -> tuple[str, str]:
    return world.balancers["a"][0].flow.routes.of("", "").policy.name, world.regions["a"].flow.policies.of("m").name
