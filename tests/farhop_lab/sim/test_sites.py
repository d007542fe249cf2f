from __future__ import annotations

import pytest

from farhop_lab.sim.engines import Gpu, Station
from farhop_lab.sim.sites import MODEL, flat, gpus, station
from farhop_lab.sim.timeline import Timeline
from topology.law import Law
from topology.model import Rule


def test_a_station_shares_its_slots_among_its_replicas() -> None:
    site = station(100, 8.0, replicas=4)
    assert site.slots == 100
    assert [(r.name, r.slots) for r in site.named()] == [(f"gpu-{n}", 25) for n in range(4)]
    assert len({r.address for r in site.named()}) == 4
    engine = site.engine(Timeline())
    assert isinstance(engine, Station)
    assert all(MODEL in replica.models for replica in site.named())


def test_a_balancer_may_be_configured_with_other_bounds_than_there_are() -> None:
    assert station(10, 1.0, reported_slots=1000).slots == 1000


def test_slots_that_cannot_be_shared_evenly() -> None:
    with pytest.raises(ValueError, match="multiple"):
        station(10, 1.0, replicas=3)


def test_gpus_are_configured_as_their_profile_is() -> None:
    site = gpus("l4", 2)
    assert isinstance(site.engine(Timeline()), Gpu)
    assert site.replica.prefill_ms_per_token == 0.59
    with pytest.raises(LookupError, match="h100"):
        gpus("abacus", 2)


def test_a_flat_world_has_one_round_trip_time_or_one_for_each_pair() -> None:
    assert flat(["a", "b", "c"], 70.0).rtt_ms("c", "a") == 70.0
    assert flat(["a", "b"], {("a", "b"): 12.0}).rtt_ms("b", "a") == 12.0


def test_a_flat_world_has_its_tenants_law() -> None:
    law = Law(flat(["a", "b"], tenants={"bound": Rule(("a",))}))
    assert law.verdict("bound", MODEL).lawful == {"a"}
    assert Law(flat(["a", "b"])).verdict("t", MODEL).lawful == {"a", "b"}
