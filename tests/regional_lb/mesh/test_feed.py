"""The answering side: whole at first, then what changed, and caches from where the reader was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from farhop_wire import peers_pb2, peers_pb2_grpc
from worlds import regional, replica, request

from farhop.balance.ledger import Reservation
from farhop.balance.machine import RequestArrived
from regional_lb.mesh.feed import SLICE_NODES, PeerFeed
from regional_lb.scheduler.deferred import Deferral
from regional_lb.scheduler.flow import RegionalFlow


@asynccontextmanager
async def feeding() -> AsyncIterator[tuple[RegionalFlow, PeerFeed, peers_pb2_grpc.PeersStub, list[tuple[str, str]]]]:
    flow = regional(replica("g1"), replica("g2"), instance="r1")
    assert flow.replicas.shares is not None
    met: list[tuple[str, str]] = []
    feed = PeerFeed(
        flow, flow.replicas.shares, 7, asyncio.get_running_loop().time, lambda *who, proven: met.append(who)
    )
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    peers_pb2_grpc.add_PeersServicer_to_server(feed, server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield flow, feed, peers_pb2_grpc.PeersStub(channel), met
    finally:
        await server.stop(None)


def asking(**fields: Any) -> peers_pb2.FollowRequest:
    return peers_pb2.FollowRequest(**{"region": "london", "instance": "r2", "control_address": "h:1", **fields})


async def until_said(stream: Any, true: Any) -> peers_pb2.PeerUpdate:
    async with asyncio.timeout(60.0):
        while True:
            update = await stream.read()
            if true(update):
                return update


async def test_a_stream_begins_whole_goes_on_with_changes_and_lives_when_nothing_happens() -> None:
    async with feeding() as (flow, feed, stub, met):
        flow.replicas.ledger.reserve("q", Reservation("g1", 30, 40))
        stream = stub.Follow(asking())
        first = await stream.read()
        assert (first.region, first.instance, first.incarnation, first.seq) == ("london", "r1", 7, 1)
        assert {load.replica for load in first.loads} == {"g1", "g2"}
        assert met == [("r2", "h:1")]
        one = next(load for load in first.loads if load.replica == "g1")
        assert (one.known, one.in_flight, one.prefill_tokens, one.kv_tokens, one.taken) == (True, 1, 30, 40, 0)
        flow.replicas.ledger.reserve("p", Reservation("g1", 1, 2))
        flow.replicas.ledger.release("q")
        second = await stream.read()
        assert ([load.replica for load in second.loads], second.seq) == (["g1"], 2)
        assert (second.loads[0].in_flight, second.loads[0].kv_tokens, second.loads[0].taken) == (1, 2, 1)
        heartbeat = await stream.read()
        assert (list(heartbeat.loads), heartbeat.seq) == ([], 3)
        for n in range(6):
            flow.handle(RequestArrived(request(f"q{n}")), 0.0)
        queued = await until_said(stream, lambda update: update.queued)
        assert dict(queued.queued) == {"llama": len(flow.queue)}
        # Who waits by choice is in nobody's way.
        flow.deferred.add(next(iter(flow.queue.by_id)), Deferral("llama", "g1", 1.0))
        fewer = await until_said(stream, lambda update: update.queued["llama"] < len(flow.queue))
        assert dict(fewer.queued) == {"llama": len(flow.queue) - 1}
        feed.draining = True
        assert (await until_said(stream, lambda update: update.draining)).queued
        stream.cancel()


async def test_cached_prefixes_are_sent_in_slices_from_the_readers_position() -> None:
    async with feeding() as (flow, _feed, stub, _met):
        assert flow.replicas.shares is not None
        replicas, chains = flow.replicas, [request(f"p{n}", 200_000).chain for n in range(60)]
        for chain in chains:
            replicas.caches("g1", chain)
        assert sum(map(len, chains)) > 2 * SLICE_NODES
        stream = stub.Follow(asking())
        seen: list[tuple[int, ...]] = []
        while True:
            update = await stream.read()
            seen += [tuple(path.nodes) for path in update.cached]
            assert sum(len(path.nodes) for path in update.cached) < SLICE_NODES + len(chains[0])
            if update.caught_up:
                break
        assert seen == chains
        stream.cancel()
        replicas.caches("g2", chains[0])
        for known, expected in (((7, update.cached_seq), 1), ((6, update.cached_seq), 61), ((7, 10**6), 61)):
            again = stub.Follow(asking(known_incarnation=known[0], known_cached_seq=known[1]))
            count = 0
            while True:
                fresh = await again.read()
                count += len(fresh.cached)
                if fresh.caught_up:
                    break
            assert count == expected
            again.cancel()


async def test_a_reader_of_another_region_is_refused() -> None:
    async with feeding() as (_flow, feed, stub, met):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(stub.Follow(asking(region="tokyo"))))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert met == []
        assert feed.readers == 0
