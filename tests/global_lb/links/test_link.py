"""When a channel counts as broken: by lost pings alone, asked for sooner where something gives reason to."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from inprocess import HOP_KEY, until
from regions import Region, a_report, put, watching

from farhop.balance.machine import Address
from farhop.service.assembly.region_channel import address_of
from global_lb.fleet.distances import Distances
from global_lb.links.link import IDLE, IDLE_S, IDLE_SILENCE, apply_quiet_ms
from tests.conftest import soonest, unhindered

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


class Upstreams:
    """The relay as a watcher sees it, with attempts that are silent."""

    def __init__(self, *silent: Silent) -> None:
        self.told: list[tuple[Address, bool]] = []
        self.silent = silent
        self.used = True

    def channel(self, address: Address, up: bool) -> None:
        self.told.append((address, up))

    def quiet(self, address: Address) -> Sequence[Silent]:
        return self.silent if address == Address("10.0.0.1", 80) else ()

    def in_use(self, address: Address, within_s: float) -> bool:
        assert within_s == IDLE_S
        return self.used or address != Address("10.0.0.1", 80)


class Silent:
    def __init__(self, name: str) -> None:
        self.id = name
        self.heard: list[float | None] = []

    def on_inquiry_answer(self, asked_at: float, quiet_s: float | None, rtt_s: float) -> None:
        assert asked_at > 0.0
        assert rtt_s >= 0.0
        self.heard.append(quiet_s)


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    assert address_of("10.0.0.1:80") == Address("10.0.0.1", 80)
    assert address_of("[fd00::1]:80") == Address("fd00::1", 80)


async def test_a_broken_stream_has_the_channel_asked_at_once(region: Region) -> None:
    """Pings are 20 s apart here: what has it asked is that the stream of reports ended."""
    async with watching(ping_s=20.0) as (watcher, store, found):
        upstreams = watcher.upstreams = Upstreams()
        await put(store, a_report(control_address=region.address))
        await until(lambda: ("tokyo", True) in found.channels and region.readers > 0)
        took_s = unhindered()
        await region.stop()
        await until(lambda: found.channels[-1] == ("tokyo", False))
        assert took_s() < 8.0  # SILENCE alone would take 8 s at least
        # On the path of requests, not on that of pings.
        assert upstreams.told == [(Address("10.0.0.1", 80), True), (Address("10.0.0.1", 80), False)]


async def test_a_silent_channel_is_asked_before_its_next_ping_is_due(region: Region) -> None:
    async with watching(ping_s=1.0) as (_, store, found):
        await put(store, a_report(control_address=region.address))
        await until(lambda: ("tokyo", True) in found.channels)

        async def four() -> float:
            began, asked = time.monotonic(), len(region.pinged)
            await until(lambda: len(region.pinged) >= asked + 4)
            return time.monotonic() - began

        await soonest(four, 4 * 0.8)  # every 0.5 s instead of every second


@pytest.mark.parametrize(("speaks", "gap"), [(False, IDLE_SILENCE), (True, 0.8 * IDLE)])
async def test_a_region_that_nothing_is_sent_to_is_asked_less_often(region: Region, speaks: bool, gap: float) -> None:
    """While its reports come only as often as pings are due there, else when one of them is missed. No bound above: a
    busy machine is late."""
    ping_s = 0.2
    async with watching(ping_s=ping_s) as (watcher, store, heard):
        upstreams = watcher.upstreams = Upstreams()
        upstreams.used = False
        await put(store, a_report(control_address=region.address))
        await until(lambda: ("tokyo", True) in heard.channels)
        loop, asked = asyncio.get_running_loop(), list[float]()
        for seq in itertools.count(2):
            if len(region.pinged) > len(asked):
                asked += [loop.time()] * (len(region.pinged) - len(asked))
            if len(asked) >= 5:
                break
            if speaks:
                await region.say(a_report(control_address=region.address, seq=seq))
            await asyncio.sleep(0.02)
    assert asked[-1] - asked[1] >= 0.95 * 3 * gap * ping_s  # the first failure is the one that found it


async def test_a_region_that_falls_silent_just_after_its_first_request_is_asked_as_soon_as_any(region: Region) -> None:
    """That request, and not when the last ping was, says how long its silence may last."""
    ping_s = 2.0
    async with watching(ping_s=ping_s) as (watcher, store, heard):
        upstreams = watcher.upstreams = Upstreams()
        upstreams.used = False
        await put(store, a_report(control_address=region.address))
        await until(lambda: ("tokyo", True) in heard.channels)

        async def first_asked() -> float:
            upstreams.used = False
            await region.say(a_report(control_address=region.address, seq=len(region.pinged) + 2))
            asked = len(region.pinged)
            await until(lambda: len(region.pinged) > asked)  # it is idle like a normal idle link
            began = time.monotonic()
            await asyncio.sleep(0.1 * ping_s)
            upstreams.used = True
            watcher.on_use(Address("10.0.0.1", 80))
            await until(lambda: len(region.pinged) > asked + 1)
            return time.monotonic() - began

        await soonest(first_asked, 0.8 * IDLE_SILENCE * ping_s)


async def test_pings_ask_about_silent_attempts(region: Region) -> None:
    region.known = {"here/1": 1500}
    here, lost = Silent("here/1"), Silent("lost/1")
    async with watching() as (watcher, store, _):
        watcher.upstreams = Upstreams(here, lost)
        await put(store, a_report(control_address=region.address))
        await until(lambda: len(here.heard) >= 2)
    assert set(here.heard) == {1.5}
    assert set(lost.heard) == {None}


def test_inquiry_answer_that_omits_attempts_is_ignored() -> None:
    one, two = Silent("a/1"), Silent("b/1")
    apply_quiet_ms((one, two), (), 1.0, 0.1)  # an older build
    apply_quiet_ms((one, two), (3,), 1.0, 0.1)
    assert (one.heard, two.heard) == ([], [])
