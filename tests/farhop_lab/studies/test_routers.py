"""Routers by name."""

from __future__ import annotations

import pytest

from farhop_lab.sim.baselines.world import RouterWorld
from farhop_lab.sim.sites import Reporting, flat, gpus
from farhop_lab.sim.world import World
from farhop_lab.studies import routers
from farhop_lab.studies.ablations import ABLATIONS, TrielessGlobal, TrielessRegional


def build(name: str) -> World:
    sites = {"a": gpus("l4", 1)}
    return routers.build(name, 1, flat(["a", "b"]), sites, balancers={"a": 1, "b": 1}, reporting=Reporting())


def test_farhop_comes_first_then_its_ablations_then_the_published() -> None:
    names = routers.names()
    assert names[0] == "farhop"
    assert set(ABLATIONS) < set(names)
    assert {"skywalker", "region-local", "omniscient"} < set(names)
    assert len(names) == len(set(names))


def test_each_name_builds_what_it_says() -> None:
    assert type(build("farhop")) is World
    assert isinstance(build("skywalker"), RouterWorld)
    world = build("farhop-no-trie")
    assert isinstance(world.balancers["a"][0].flow, TrielessGlobal)
    assert isinstance(world.regions["a"].flow, TrielessRegional)
    with pytest.raises(LookupError):
        build("nobody")
