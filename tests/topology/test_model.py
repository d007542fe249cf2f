from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from topology.model import WORLD, Key, Region, Rule, Tenant, Topology

FRANKFURT = Region("frankfurt", "Frankfurt", "de", frozenset({"eu", "eea"}), 50.11, 8.68)
TOKYO = Region("tokyo", "Tokyo", "jp", frozenset(), 35.68, 139.65)
REGIONS = {"frankfurt": FRANKFURT, "tokyo": TOKYO}


def test_round_trip_times_are_symmetric_whichever_way_they_were_given() -> None:
    world = Topology("w", 1, REGIONS, rtt={("tokyo", "frankfurt"): 230.0})
    assert world.rtt_ms("tokyo", "frankfurt") == world.rtt_ms("frankfurt", "tokyo") == 230.0


def test_the_round_trip_time_of_a_region_to_itself_is_the_local_one() -> None:
    assert Topology("w", 1, REGIONS).rtt_ms("tokyo", "tokyo") == 1.0
    assert Topology("w", 1, REGIONS, local_rtt_ms=0.3).rtt_ms("tokyo", "tokyo") == 0.3


@pytest.mark.parametrize("pair", [("tokyo", "frankfurt"), ("tokyo", "atlantis"), ("atlantis", "atlantis")])
def test_an_unknown_pair_is_an_error_naming_it(pair: tuple[str, str]) -> None:
    with pytest.raises(LookupError, match=f"'{pair[0]}' and '{pair[1]}'"):
        Topology("w", 1, REGIONS).rtt_ms(*pair)


def test_two_times_for_one_pair_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two round-trip times.*230.*231"):
        Topology("w", 1, REGIONS, rtt={("tokyo", "frankfurt"): 230.0, ("frankfurt", "tokyo"): 231.0})


def test_a_key_hash_finds_its_tenant_and_key() -> None:
    key = Key("ci", "a" * 64)
    tenant = Tenant("acme", (Key("other", "b" * 64), key))
    world = Topology("w", 1, REGIONS, {"acme": tenant})
    assert world.key("a" * 64) == (tenant, key)
    assert world.key("c" * 64) is None


def test_one_hash_for_two_keys_is_refused() -> None:
    tenants = {name: Tenant(name, (Key("k", "a" * 64),)) for name in ("one", "two")}
    with pytest.raises(ValueError, match="one/k and two/k"):
        Topology("w", 1, REGIONS, tenants)


def test_ancestors_are_every_place_around_a_region() -> None:
    world = Topology("w", 1, REGIONS)
    assert world.ancestors("frankfurt") == {"frankfurt", "de", "eu", "eea", WORLD}
    assert world.ancestors("atlantis") == frozenset()


def test_the_world_cannot_be_changed_under_a_decision() -> None:
    regions = dict(REGIONS)
    world = Topology("w", 1, regions, {"t": Tenant("t", models={"m": Rule(("eu",))})})
    regions.clear()
    assert set(world.regions) == {"frankfurt", "tokyo"}
    with pytest.raises(TypeError):
        world.regions["tokyo"] = FRANKFURT  # type: ignore[index]
    with pytest.raises(TypeError):
        world.tenants["t"].models["m"] = Rule(("world",))  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        world.epoch = 2  # type: ignore[misc]


def test_a_replaced_world_indexes_its_own_parts() -> None:
    world = Topology("w", 1, REGIONS, {"t": Tenant("t", (Key("k", "a" * 64),))})
    later = replace(world, epoch=2, tenants={})
    assert (later.epoch, later.key("a" * 64)) == (2, None)
    assert world.key("a" * 64) is not None
