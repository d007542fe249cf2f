"""When a channel counts as broken: by lost pings alone, asked for sooner where something gives reason to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from inprocess import HOP_KEY, until
from regions import Region, put, told, watching

from farhop.balance.machine import Address
from global_lb.distance import Distances
from global_lb.link import address_of
from tests.conftest import soonest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(autouse=True)
def _calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    monkeypatch.setattr(Distances, "moving", lambda *_: False)  # a busy machine's pings would, and come sooner for it


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    made = Region()
    await made.start()
    yield made
    await made.stop()


def test_addresses() -> None:
    assert address_of("10.0.0.1:80") == Address("10.0.0.1", 80)
    assert address_of("[fd00::1]:80") == Address("fd00::1", 80)


async def test_a_broken_stream_has_the_channel_asked_at_once(region: Region) -> None:
    """Pings are 20 s apart here: what has it asked is that the stream of reports ended."""
    async with watching(ping_s=20.0) as (watcher, store, heard):
        given_up: list[Address] = []
        watcher._broken = given_up.append
        await put(store, told(control_address=region.address))
        await until(lambda: ("tokyo", True) in heard.channels and region.readers > 0)
        began = time.monotonic()
        await region.stop()
        await until(lambda: heard.channels[-1] == ("tokyo", False))
        assert time.monotonic() - began < 8.0  # SILENCE alone would take 8 s at least
        assert set(given_up) == {Address("10.0.0.1", 80)}  # where requests go, not where pings go


async def test_a_silent_channel_is_asked_before_its_next_ping_is_due(region: Region) -> None:
    async with watching(ping_s=1.0) as (_, store, heard):
        await put(store, told(control_address=region.address))
        await until(lambda: ("tokyo", True) in heard.channels)

        async def four() -> float:
            began, asked = time.monotonic(), len(region.pinged)
            await until(lambda: len(region.pinged) >= asked + 4)
            return time.monotonic() - began

        await soonest(four, 4 * 0.8)  # every 0.5 s and not every second
