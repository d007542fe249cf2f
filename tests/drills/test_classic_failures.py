"""The six classic failures of balancers before GPUs: each shown under a naive set-up, and its absence here.

Live: emulated engines twenty times as fast as an L4, real HTTP, a real regional balancer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from random import Random

import pytest
from classic import NAIVE, Load, blind, gpus, l4, region
from inprocess import MODEL, until

from farhop_lab.engine.core.faults import Fault
from regional_lb.app.main import RegionalBalancer
from regional_lb.scheduler import overdue

# A balancer that rarely probes does not take a late answer, on a slow machine, for a sick engine.
QUIET = {"watch": {"probe_s": 3600.0, "scrape_s": 3600.0}}
# Nor does a client that waits for it.
PATIENT = {"watch": {"probe_s": 0.1, "scrape_s": 0.05, "timeout_s": 30.0}}
# Engines and balancer share one loop here: a timeout shorter than a pause of the loop takes all of them for dead.
STEADY = {"watch": {"probe_s": 0.1, "scrape_s": 0.05, "timeout_s": 5.0}}


# -- a hot spot under long generations


async def _hot_spot(naive: bool) -> int:
    """Every fourth answer is long, and turns by rote give all of those to one replica: how many the busiest got."""
    async with gpus(*[l4(8.0, kv_blocks=200) for _ in range(4)]) as engines:
        found, config = (blind(engines), NAIVE | PATIENT) if naive else ({}, PATIENT)
        async with region(engines, found, **config) as (balancer, url), Load(url) as load, asyncio.TaskGroup() as group:
            loop = asyncio.get_running_loop()
            began = loop.time()
            for n in range(48):
                kind, tokens = ("long", 200) if n % 4 == 0 else ("short", 4)
                group.create_task(load.ask(kind, 20, tokens))
                # A request that finds an open connection overtakes one that does not; and engines go on meanwhile.
                await until(lambda n=n: sum(gpu.asked for gpu in engines) + len(balancer.flow.queue) > n)
                await asyncio.sleep(max(0.0, began + 0.04 * (n + 1) - loop.time()))
    assert {one.status for one in load.asked} == {200}
    return max(Counter(one.replica for one in load.asked if one.kind == "long").values())


@pytest.mark.long
async def test_long_generations_make_no_hot_spot() -> None:
    assert await _hot_spot(naive=True) == 12
    assert await _hot_spot(naive=False) <= 7


# -- retry storm


class Dying:
    """A port whose connections end as soon as something was asked: an engine that crashes on every request."""

    def __init__(self) -> None:
        self.asked = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readline()
            if asked.startswith(b"GET /health"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.asked += asked.startswith(b"POST")
            writer.close()

        async with await asyncio.start_server(come, "127.0.0.1", 0) as server:
            yield server.sockets[0].getsockname()[1]


async def test_engines_that_die_are_not_stormed_with_retries() -> None:
    """All eight replicas, green to every probe, drop whatever they are asked; 200 requests come at once."""
    async with AsyncExitStack() as stack:
        dying = [Dying() for _ in range(8)]
        ports = [await stack.enter_async_context(one.running()) for one in dying]
        replicas = [{"url": f"http://127.0.0.1:{port}", "models": [MODEL], "name": f"d{port}"} for port in ports]
        _, url = await stack.enter_async_context(region((), replicas=replicas))
        load = await stack.enter_async_context(Load(url))
        await asyncio.gather(*(load.ask("chat", 2, 4) for _ in range(200)))
        assert {one.status for one in load.asked} <= {502, 503}
        ours = sum(one.asked for one in dying)

        directs = [await stack.enter_async_context(Load(f"http://127.0.0.1:{port}")) for port in ports]

        async def naive() -> None:  # the behaviour of a balancer that tries every replica before it gives up
            for direct in directs:
                assert (await direct.ask("chat", 2, 4)).status == 0

        await asyncio.gather(*(naive() for _ in range(200)))
        stormed = sum(one.asked for one in dying) - ours
    assert stormed == 1600
    assert ours <= 2.3 * 200  # one more for each, and a fifth of a second one (DESIGN: retry budget)


# -- KV thrash


async def _thrash(naive: bool) -> float:
    """Nine conversations, of which each of three caches holds five: the share of prompt tokens that were cached."""
    async with gpus(*[l4(8.0, kv_blocks=260) for _ in range(3)]) as engines:
        found, config = (blind(engines), NAIVE | PATIENT) if naive else ({}, PATIENT)
        async with region(engines, found, **config) as (_, url), Load(url) as load:
            order = Random(1)
            for turn in range(6):
                talks = order.sample(range(9), 9)
                for talk in talks:
                    assert (await load.ask("chat", 200 + 10 * turn, 4, prefix=f"talk{talk}")).status == 200
        counters = [gpu.replica.core.counters for gpu in engines]
        return sum(c.prefix_hits for c in counters) / sum(c.prefix_queries for c in counters)


@pytest.mark.long
async def test_conversations_do_not_drive_each_other_out_of_the_caches() -> None:
    ours, naive = await _thrash(naive=False), await _thrash(naive=True)
    assert naive < 0.5
    assert ours > naive + 0.2


# -- partition between the balancer and a part of its replicas


async def _partition(naive: bool) -> int:
    """One of three replicas cannot be reached while 60 requests come: how many are swallowed."""
    async with gpus(*[l4() for _ in range(3)]) as engines:
        found, config = (blind(engines), NAIVE | QUIET) if naive else ({}, STEADY)
        async with region(engines, found, **config) as (_, url), Load(url) as load:
            engines[1].frozen.set()
            asked = []
            for _ in range(60):
                asked.append(asyncio.create_task(load.ask("chat", 20, 8, within_s=60.0)))
                await asyncio.sleep(0.02)
            await until(lambda: sum(one.done() for one in asked) >= (40 if naive else 60))
            swallowed = [one for one in asked if not one.done()]
            for one in swallowed:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            engines[1].frozen.clear()
    assert {one.status for one in load.asked} == {200}
    return len(swallowed)


@pytest.mark.long
async def test_an_unreachable_target_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _partition(naive=False) == 0
    monkeypatch.setattr(overdue, "CONFIRM_S", inf)  # a naive balancer waits for its time-outs
    assert await _partition(naive=True) == 20


# -- green health over a dead GPU


async def _dead_green(naive: bool) -> int:
    """One of three engines takes what it is sent and answers nothing, while its health page says 200: how many of 30
    requests are swallowed."""
    async with gpus(*[l4() for _ in range(3)]) as engines:
        found, config = (blind(engines), NAIVE | QUIET) if naive else ({"probe": {"generate_s": 1.0}}, STEADY)
        async with region(engines, found, **config) as (_, url), Load(url) as load:
            engines[1].replica.faults.command(Fault("dead-green"))
            asked = []
            for _ in range(30):
                asked.append(asyncio.create_task(load.ask("chat", 20, 8, within_s=60.0)))
                await asyncio.sleep(0.02)
            await until(lambda: sum(one.done() for one in asked) >= (20 if naive else 30))
            swallowed = [one for one in asked if not one.done()]
            for one in swallowed:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    assert {one.status for one in load.asked} == {200}
    return len(swallowed)


async def test_a_green_health_page_over_a_dead_gpu_swallows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _dead_green(naive=False) == 0
    monkeypatch.setattr(overdue, "CONFIRM_S", inf)
    assert await _dead_green(naive=True) == 10


# -- cold-start herd

LONG = 1200  # tokens: none of them ends before all are there, however late this machine is


async def _herd(naive: bool) -> int:
    """Three replicas work on 8 long answers each when a fourth comes up: how many of the next 8 requests it is sent."""
    async with gpus(*[l4(1.0) for _ in range(4)]) as engines:
        engines[3].replica.faults.command(Fault("stuck"))
        config = {
            "policy": "least-load",
            "health": {"slow_start_s": 0.0 if naive else 60.0},
            # On a busy machine everything on this loop may stand still for a while: no replica is to be down for that,
            # since one that comes back would be eased in, too.
            "watch": {"probe_s": 0.1, "scrape_s": 0.05, "timeout_s": 2.0},
        }
        async with region(engines, {"slots": 16}, up=3, **config) as (balancer, url), Load(url) as load:
            asked = [asyncio.create_task(load.ask("long", 5, LONG, within_s=60.0)) for _ in range(24)]
            await until(lambda: sum(load_of(balancer, n) for n in range(3)) == 24)
            engines[3].replica.faults.command(None)
            await until(lambda: balancer.flow.replicas.health["gpu-3"].read(balancer.clock.now()).state == "up")
            asked += [asyncio.create_task(load.ask("next", 5, LONG, within_s=60.0)) for _ in range(8)]
            await until(lambda: sum(load_of(balancer, n) for n in range(4)) == 32)
            herd = load_of(balancer, 3)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    return herd


def load_of(balancer: RegionalBalancer, number: int) -> int:
    return balancer.flow.replicas.ledger.load(f"gpu-{number}").in_flight


async def test_a_replica_that_comes_up_is_not_run_over() -> None:
    assert await _herd(naive=True) == 8
    assert await _herd(naive=False) <= 2  # of 16 slots a tenth, to begin with
