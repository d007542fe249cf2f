"""Following one address: who answers there, what ends a stream, and how it begins anew."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from inprocess import HOP_KEY, until
from peer_stage import Other, stage

from regional_lb.peers import follow


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    monkeypatch.setattr(follow, "SILENT_S", 0.4)


async def test_a_silent_stream_is_given_up_and_goes_on_from_where_it_was() -> None:
    async with stage(other := Other(cached_seq=11)) as here:
        assert here.one()["connected"]
        other.more.put_nowait({"cached_seq": 12})
        other.silent = True
        await until(lambda: len(other.asked) > 1)
        assert (other.asked[0].known_incarnation, other.asked[0].known_cached_seq) == (0, 0)
        assert (other.asked[1].known_incarnation, other.asked[1].known_cached_seq) == (5, 12)
        other.silent = False
        await until(lambda: here.one()["connected"])


async def test_a_gap_or_what_is_absurd_begins_the_stream_anew() -> None:
    async with stage(other := Other()) as here:
        for fields, why in (
            ({"seq": 99}, "peer_gap"),
            ({"queued": {f"m{n}": 1 for n in range(300)}}, "peer_too_many"),
            ({"instance": "r8"}, "peer_misplaced"),
            ({"incarnation": 6}, "peer_misplaced"),
        ):
            n_asked = len(other.asked)
            other.more.put_nowait(fields)
            await until(lambda n=n_asked: len(other.asked) > n)
            assert here.refused[why] >= 1
        await until(lambda: here.one()["connected"])
        assert here.one("r8") == {}


async def test_another_regions_balancer_is_not_believed() -> None:
    other = Other()
    other.region = "tokyo"
    async with stage(other) as here:
        await until(lambda: here.refused["peer_misplaced"] > 0)
        assert here.owned == 3


async def test_ourselves_and_an_older_build_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Other("r1", incarnation=7)
    older = grpc.aio.server()
    port = older.add_insecure_port("127.0.0.1:0")
    await older.start()
    try:
        await mirror.start()
        addresses = [mirror.address, f"127.0.0.1:{port}"]
        async with stage(peers={"addresses": addresses}) as here:
            assert here.peers.warm
            assert (here.peers.up, here.owned, dict(here.refused), here.troubles) == (0, 3, {}, [])
            await asyncio.sleep(0)
            assert len(mirror.asked) == 1
    finally:
        await mirror.stop()
        await older.stop(None)


async def test_a_namesake_is_told_of_and_not_followed() -> None:
    async with stage(peers={"addresses": ["127.0.0.1:1"]}) as here:
        async with _running(Other("r1", incarnation=8)) as other:
            here.peers._met("r3", other.address, proven=True)
            await until(lambda: here.troubles)
        assert "give each its own" in here.troubles[0]
        assert here.refused["peer_namesake"] == 1
        assert here.owned == 3


async def test_one_peer_at_two_addresses_is_followed_once() -> None:
    async with stage(other := Other(), peers={"addresses": []}) as here, _running(Other()) as twin:
        here.peers._met("r3", twin.address, proven=True)
        await until(lambda: twin.asked)
        await until(lambda: here.peers._links[twin.address].settled)
        assert here.peers.up == 1
        assert here.one()["control"] == other.address


class _running:  # noqa: N801 - reads as a word
    def __init__(self, other: Other) -> None:
        self._other = other

    async def __aenter__(self) -> Other:
        await self._other.start()
        return self._other

    async def __aexit__(self, *_: object) -> None:
        await self._other.stop()
