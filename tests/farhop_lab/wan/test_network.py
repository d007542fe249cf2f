"""All links of a world: round-trip times, speed-up, and breaking a region or a pair."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farhop_lab.wan.link import LinkError, LinkState
from farhop_lab.wan.network import Network

RTT_MS = {("virginia", "frankfurt"): 91.0, ("virginia", "tokyo"): 166.0, ("tokyo", "frankfurt"): 230.0}


def states(network: Network) -> dict[str, LinkState]:
    return {link.name: link.state for link in network.links.values() if link.state is not LinkState.OPEN}


def test_every_ordered_pair_has_a_link_and_no_region_one_to_itself() -> None:
    network = Network(RTT_MS, 2.0, speedup=10)
    assert len(network.links) == 6
    assert network.rtt_ms("frankfurt", "tokyo") == pytest.approx(23.0)
    assert network.rtt_ms("tokyo", "tokyo") == pytest.approx(0.2)
    with pytest.raises(LinkError, match="two different regions"):
        network.link("tokyo", "tokyo")
    with pytest.raises(LinkError, match="'paris'"):
        network.rtt_ms("tokyo", "paris")


@pytest.mark.parametrize(
    ("rtt_ms", "named"),
    [
        ({("a", "b"): 1.0, ("b", "c"): 1.0}, "a to c: no round-trip time"),
        ({("a", "b"): 1.0, ("b", "a"): 2.0}, "given twice"),
        ({("a", "b"): 0.0}, "not above 0"),
    ],
)
def test_a_world_whose_round_trip_times_do_not_hold_is_refused(
    rtt_ms: dict[tuple[str, str], float], named: str
) -> None:
    with pytest.raises(LinkError, match=named):
        Network(rtt_ms)


def test_a_speed_up_is_above_zero() -> None:
    with pytest.raises(LinkError, match="speedup"):
        Network(RTT_MS, speedup=0)


def test_a_region_or_a_pair_is_broken_and_healed() -> None:
    network = Network(RTT_MS)
    network.freeze("tokyo")
    assert set(states(network)) == {"tokyo>virginia", "virginia>tokyo", "tokyo>frankfurt", "frankfurt>tokyo"}
    network.heal("tokyo", "virginia")
    assert set(states(network)) == {"tokyo>frankfurt", "frankfurt>tokyo"}
    network.heal("tokyo")
    network.cut("virginia", "frankfurt")
    assert states(network) == {"virginia>frankfurt": LinkState.CUT, "frankfurt>virginia": LinkState.CUT}
    network.heal("virginia")
    assert states(network) == {}
    with pytest.raises(LinkError, match="no region 'paris'"):
        network.cut("paris")


async def test_distances_are_those_of_the_world_divided_by_the_speed(
    lab: Any, crossings: list[tuple[str, float]]
) -> None:
    address, _ = await lab.far()
    async with Network(RTT_MS, speedup=5, jitter_share=0.0) as network:
        ports = [link.port for link in network.links.values()]
        assert len(set(ports)) == 6

        async def connecting() -> list[tuple[str, float]]:
            crossings.clear()
            near = await lab.connect(network.link("tokyo", "frankfurt"), address)
            assert await near.head() == (200, "")
            return list(crossings)

        way_s = pytest.approx(network.rtt_ms("tokyo", "frankfurt") / 2e3, abs=1e-6)
        assert await connecting() == [("open", way_s), ("answer", way_s)]
        network.set_rtt("frankfurt", "tokyo", 50.0)
        assert network.rtt_ms("tokyo", "frankfurt") == pytest.approx(10.0)
        assert await connecting() == [("open", 0.005), ("answer", 0.005)]
        network.blackhole("tokyo")
        assert await (await lab.connect(network.link("virginia", "tokyo"), address)).silent(0.05)
    for port in ports:
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_the_same_seed_gives_the_same_jitter() -> None:
    drawn = [
        [Network(RTT_MS, seed=seed).link("tokyo", "virginia")._rng.random() for _ in range(2)] for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
