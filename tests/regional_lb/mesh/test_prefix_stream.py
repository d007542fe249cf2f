"""The prefix stream over a real channel: snapshot, deltas, law, rate, slow readers, coming back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import grpc
import pytest
from farhop_wire import region_pb2, region_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import until
from worlds import law, regional, replica, request

from farhop.balance.machine import AttemptBegan, AttemptEnded, Forward, LawChanged, RequestArrived
from regional_lb.mesh import prefix_stream
from regional_lb.mesh.report import Reporter
from regional_lb.scheduler.flow import RegionalFlow
from topology.law import Law
from topology.model import Rule

CACHE = 10**7  # KV tokens: nothing is evicted


def told_by(flow: RegionalFlow, incarnation: int = 7, **more: Any) -> Reporter:
    clock = asyncio.get_running_loop().time
    return Reporter(
        flow,
        region="london",
        instance="r1",
        addresses=("h:1", "h:2", "h:3"),
        clock=clock,
        incarnation=incarnation,
        **more,
    )


@asynccontextmanager
async def calling(value: Reporter, options: Any = ()) -> AsyncIterator[region_pb2_grpc.RegionStub]:
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    region_pb2_grpc.add_RegionServicer_to_server(value, server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield region_pb2_grpc.RegionStub(channel)
    finally:
        await server.stop(None)
        await until(lambda: value.prefixes.readers == 0)


def asked(region: str = "tokyo", incarnation: int = 0, seq: int = 0, epoch: int = 1) -> region_pb2.PrefixesRequest:
    return region_pb2.PrefixesRequest(
        balancer="g", region=region, known_incarnation=incarnation, known_seq=seq, law_epoch=epoch
    )  # fmt: skip


class Reader:
    """What one stream told so far. `gaps` are messages that did not follow."""

    def __init__(self, stub: region_pb2_grpc.RegionStub, of: region_pb2.PrefixesRequest) -> None:
        self.call = stub.Prefixes(of, timeout=60.0)
        self.nodes: set[int] = set()
        self.heard: set[int] = set()
        self.seq = of.known_seq
        self.slices = self.deltas = self.snapshots = self.gaps = 0

    async def read(self) -> None:
        message = await self.call.read()
        assert message is not grpc.aio.EOF
        if message.HasField("slice"):
            if message.slice.slice == 0:
                self.nodes.clear()
            for path in message.slice.paths:
                assert path.parent == 0 or path.parent in self.nodes
                self.nodes.update(path.nodes)
            self.slices += 1
            self.snapshots += message.slice.last
        else:
            self.gaps += message.after != self.seq
            self.deltas += 1
            for change in message.changes:
                self.apply(change)
        self.heard |= self.nodes
        self.seq = message.seq

    def apply(self, change: region_pb2.PrefixChange) -> None:
        if change.HasField("stored"):
            assert change.stored.parent == 0 or change.stored.parent in self.nodes
            self.nodes.update(change.stored.nodes)
        elif change.HasField("evicted"):
            self.heard.update(change.evicted.nodes)
            self.nodes.difference_update(change.evicted.nodes)
        else:
            self.nodes.clear()

    async def anew(self, stub: region_pb2_grpc.RegionStub, epoch: int) -> Reader:
        """The stream ends, as the law it was asked under stands no more; another, which goes on."""
        assert await self.call.read() is grpc.aio.EOF
        again = Reader(stub, asked(incarnation=7, seq=self.seq, epoch=epoch))
        again.nodes |= self.nodes
        return again

    async def until(self, true: Any, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not true(self):
                await self.read()


def serve(flow: RegionalFlow, name: str, n_bytes: int = 2048, **fields: Any) -> set[int]:
    """The flow serves one request; what is in its chain."""
    made = request(name, n_bytes, **fields)
    (forward,) = (c for c in flow.handle(RequestArrived(made), 0.0) if isinstance(c, Forward))
    flow.handle(AttemptBegan(name, forward.attempt, 200), 0.0)
    flow.handle(AttemptEnded(name, forward.attempt, 200, None), 0.0)
    return set(made.chain)


def flow_of(**more: Any) -> RegionalFlow:
    return regional(replica("a", slots=10**6, kv_tokens=CACHE, prefill_tokens_max=10**9), **more)


def test_readers_at_one_position_share_one_immutable_message() -> None:
    flow = flow_of()
    publisher = prefix_stream.PrefixPublisher("r1", flow, lambda: 0.0, 7, 10**6)
    readers = [publisher.subscribe(asked(region)) for region in ("tokyo", "paris")]

    def told(steps: Any) -> list[region_pb2.PrefixDelta]:
        found = []
        for step in steps:
            if not isinstance(step, prefix_stream.Pause):
                found.append(step)
            elif step.seconds:
                return found
        raise AssertionError("a stream does not end by itself")

    for reader in readers:
        told(reader)  # the snapshot
    there = serve(flow, "x")
    flow.replicas.journal.evicted(11)
    (first,), (second,) = map(told, readers)
    assert first is second
    assert set(first.changes[0].stored.nodes) == there
    assert list(first.changes[-1].evicted.nodes) == [11]
    flow.replicas.journal.evicted(12)
    (third,) = told(readers[0])
    flow.replicas.journal.evicted(13)
    (behind,) = told(readers[1])
    assert list(first.changes[-1].evicted.nodes) == [11]
    assert [list(change.evicted.nodes) for change in third.changes] == [[12]]
    assert [list(change.evicted.nodes) for change in behind.changes] == [[12], [13]]
    assert (behind.after, behind.seq) == (third.after, third.seq + 1)


def test_stream_pauses_once_after_a_message_then_waits_for_changes() -> None:
    flow = flow_of()
    publisher = prefix_stream.PrefixPublisher("r1", flow, lambda: 0.0, 7, 10**6)
    steps = publisher.subscribe(asked())
    pauses = [step for step in (next(steps) for _ in range(4)) if isinstance(step, prefix_stream.Pause)]
    waits = [pause for pause in pauses if pause.seconds]
    assert waits[0] == prefix_stream.Pause(prefix_stream.IDLE_S, True, prefix_stream.BATCH_S)
    assert waits[1:] == [prefix_stream.Pause(prefix_stream.IDLE_S, True)] * len(waits[1:])


def test_law_change_during_the_last_message_ends_the_stream() -> None:
    flow = flow_of()
    steps = prefix_stream.PrefixPublisher("r1", flow, lambda: 0.0, 7, 10**6).subscribe(asked())
    assert next(step for step in steps if isinstance(step, prefix_stream.Pause) and step.wakes).rest_s
    serve(flow, "x")
    assert isinstance(next(steps), region_pb2.PrefixDelta)
    flow.handle(LawChanged(law(2, other=Rule(allow=("eu",)))), 1.0)
    assert list(steps) == []


def test_reader_with_another_map_gets_no_prefixes() -> None:
    flow = flow_of()
    serve(flow, "x")
    publisher = prefix_stream.PrefixPublisher("r1", flow, lambda: 0.0, 7, 10**6)

    def told(places: int) -> bool:
        ask = asked()
        ask.places = places
        return any(isinstance(step, region_pb2.PrefixDelta) for step in islice(publisher.subscribe(ask), 5))

    topology = flow.law.topology
    moved = replace(topology, regions=topology.regions | {"tokyo": replace(topology.regions["tokyo"], country="kr")})
    assert told(flow.law.places_of("tokyo"))
    assert told(0), "an older reader does not tell"
    assert not told(Law(moved).places_of("tokyo"))


@pytest.fixture
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told is told since something woke the stream."""
    monkeypatch.setattr(prefix_stream, "IDLE_S", 3600.0)


async def test_a_stream_begins_with_a_snapshot_and_goes_on_with_changes() -> None:
    flow = flow_of()
    there = serve(flow, "x")
    async with calling(told_by(flow)) as stub:
        reader = Reader(stub, asked())
        await reader.until(lambda r: r.snapshots)
        assert reader.nodes == there
        more = serve(flow, "y")
        await reader.until(lambda r: r.nodes == there | more)
        flow.replicas.trie.clear("a")
        await reader.until(lambda r: not r.nodes)
        assert (reader.snapshots, reader.gaps) == (1, 0)


async def test_a_stream_with_nothing_to_send_looks_while_there_is_something_to_sweep_only() -> None:
    flow = regional(replica("a", kv_tokens=CACHE), replica("b", kv_tokens=CACHE))
    for name in ("a", "b"):  # the other holds them all: it is not announced that one of them no longer does
        for path in range(100):
            flow.replicas.trie.insert(name, range(1 + 100 * path, 101 + 100 * path))
    steps = told_by(flow).prefixes.subscribe(asked())

    def rests() -> float:
        return next(step.seconds for step in steps if isinstance(step, prefix_stream.Pause) and step.wakes)

    assert rests() == prefix_stream.IDLE_S
    flow.replicas.trie.clear("a")
    assert rests() == prefix_stream.LOOK_S
    looks = 1
    while rests() == prefix_stream.LOOK_S:
        looks += 1
    assert looks <= 10_000 / prefix_stream.SWEEP_NODES
    assert not flow.replicas.trie.sweeping
    steps.close()


@pytest.mark.usefixtures("nobody_looks")
async def test_changes_are_sent_at_once() -> None:
    flow = flow_of()
    async with calling(told_by(flow)) as stub:
        reader, there = Reader(stub, asked()), set[int]()
        await reader.until(lambda r: r.snapshots)
        for name in ("x", "y", "z"):
            await asyncio.sleep(4 * prefix_stream.BATCH_S)  # nothing was announced for a while
            there |= serve(flow, name)
            async with asyncio.timeout(60.0):
                while reader.nodes != there:
                    await reader.read()
        reader.call.cancel()


async def test_a_reader_that_comes_back_goes_on_where_it_was() -> None:
    flow = flow_of()
    async with calling(told_by(flow)) as stub:
        first = Reader(stub, asked())
        await first.until(lambda r: r.snapshots)
        there = serve(flow, "x")
        await first.until(lambda r: r.nodes == there)
        first.call.cancel()
        missed = serve(flow, "y")
        again = Reader(stub, asked(incarnation=7, seq=first.seq))
        await again.until(lambda r: r.nodes == missed)
        assert (again.slices, again.gaps) == (0, 0)


@pytest.mark.parametrize("known", [(6, None), (7, 10**9)])
async def test_another_incarnation_or_a_seq_of_nowhere_gets_a_snapshot(known: tuple[int, int | None]) -> None:
    flow = flow_of()
    found = told_by(flow)
    there = serve(flow, "x")
    async with calling(found) as stub:
        first = Reader(stub, asked())
        await first.until(lambda r: r.snapshots)
        again = Reader(stub, asked(incarnation=known[0], seq=first.seq if known[1] is None else known[1]))
        await again.until(lambda r: r.snapshots)
        assert again.nodes == there


async def test_an_idle_publisher_forgets_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_stream, "KEEP_S", 0.05)
    flow = flow_of()
    found = told_by(flow)

    def at_rest() -> bool:
        found.prefixes.tidy()
        return flow.replicas.trie.observer is None

    async with calling(found) as stub:
        first = Reader(stub, asked())
        await first.until(lambda r: r.snapshots)
        assert not at_rest()
        first.call.cancel()
        await until(at_rest)


async def test_an_unknown_region_gets_nothing() -> None:
    flow = flow_of()
    serve(flow, "x")
    async with calling(told_by(flow)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Prefixes(asked("atlantis"), timeout=60.0).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_slow_reader_starts_again_and_ends_with_the_true_state() -> None:
    """Tiny buffers, a reader that does not read, and a journal that is soon overrun."""
    flow = flow_of()
    flow.replicas.journal.entries_max = 8
    options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.http2.write_buffer_size", 1))
    async with calling(told_by(flow, prefix_nodes_per_s=10**7), options) as stub:
        reader = Reader(stub, asked())
        await reader.until(lambda r: r.snapshots)
        there: set[int] = set()
        for n in range(400):
            there |= serve(flow, f"r{n}", 65_536)
            if n % 10 == 0:
                await asyncio.sleep(0)
        at_rest = asyncio.get_running_loop().time() + 0.3
        await until(lambda: asyncio.get_running_loop().time() > at_rest)
        await reader.until(lambda r: r.nodes == there)
        assert reader.snapshots >= 2


async def test_the_rate_is_bounded_and_the_loop_is_not_held() -> None:
    flow = flow_of()
    there: set[int] = set()
    for n in range(60):
        there |= serve(flow, f"r{n}", 65_536)
    clock = asyncio.get_running_loop().time
    async with calling(told_by(flow, prefix_nodes_per_s=2000)) as stub:
        began = clock()
        reader = Reader(stub, asked())
        await reader.until(lambda r: r.snapshots)
        assert reader.nodes == there
        assert clock() - began >= (len(there) - 2000 - prefix_stream.SLICE_NODES) / 2000
        assert reader.slices >= 2


@pytest.mark.usefixtures("nobody_looks")
async def test_a_changed_law_takes_everything_back() -> None:
    flow = flow_of()
    serve(flow, "x")
    async with calling(told_by(flow)) as stub:
        reader = Reader(stub, asked())
        await reader.until(lambda r: r.snapshots)
        assert reader.nodes
        flow.handle(LawChanged(law(2, other=Rule(allow=("eu",)))), 1.0)
        again = await reader.anew(stub, 2)
        await again.until(lambda r: not r.nodes)
        there = serve(flow, "again", prefix="x")
        await again.until(lambda r: r.nodes == there)
        assert (again.snapshots, again.gaps) == (0, 0)


EVERYWHERE = frozenset({"frankfurt", "london", "tokyo"})
TENANTS = {"anyone": EVERYWHERE, "european": EVERYWHERE - {"tokyo"}, "other": EVERYWHERE}
NARROW = {(): EVERYWHERE, (("eu", "uk"),): EVERYWHERE - {"tokyo"}, (("uk",),): frozenset({"london"})}
SERVED = st.tuples(st.sampled_from(sorted(TENANTS)), st.integers(0, 3), st.sampled_from(sorted(NARROW)))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(SERVED, max_size=10), st.sampled_from([200, 10_000]))
def test_no_node_reaches_a_balancer_outside_the_law_of_all_its_tenants(served: Any, kv_tokens: int) -> None:
    async def run() -> None:
        flow = regional(replica("a", slots=10**6, kv_tokens=kv_tokens, prefill_tokens_max=10**9))
        may: dict[int, set[str]] = {}
        last: set[int] = set()
        async with calling(told_by(flow)) as stub:
            readers = {region: Reader(stub, asked(region)) for region in ("frankfurt", "london", "tokyo")}
            for reader in readers.values():
                await reader.until(lambda r: r.snapshots)
            for n, (tenant, text, narrow) in enumerate(served):
                last = serve(flow, f"q{n}", 512, prefix=f"text {text}", tenant=tenant, narrow=narrow)
                for node in last:
                    may.setdefault(node, set()).update(TENANTS[tenant] & NARROW[narrow])
            last = serve(flow, "last", 512)
            for reader in readers.values():
                await reader.until(lambda r: last <= r.nodes)
        for region, reader in readers.items():
            assert reader.heard - last <= {node for node, regions in may.items() if region in regions}

    asyncio.run(run())


@pytest.mark.usefixtures("nobody_looks")
async def test_what_a_cleared_replica_held_is_sent_though_nothing_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhop.balance.prefix.trie.TURN_NODES", 10)
    monkeypatch.setattr("regional_lb.mesh.prefix_stream.SWEEP_NODES", 7)
    flow = regional(replica("a", kv_tokens=CACHE), replica("b", kv_tokens=CACHE))
    async with calling(told_by(flow)) as stub:
        reader = Reader(stub, asked())
        await reader.until(lambda r: r.snapshots)
        for n in range(1, 30):
            flow.replicas.journal.insert("a", (1, 100 + n), None)
        flow.replicas.journal.insert("b", (1, 2), None)
        await reader.until(lambda r: {1, 2, 129} <= r.nodes)
        flow.replicas.trie.clear("a")
        assert flow.replicas.trie.nodes > 20
        await reader.until(lambda r: r.nodes == {1, 2})
    assert flow.replicas.trie.nodes == 2


@pytest.mark.usefixtures("nobody_looks")
async def test_a_law_that_takes_nothing_away_costs_no_hint() -> None:
    flow = flow_of(under=law(2))
    there = serve(flow, "x")
    async with calling(told_by(flow)) as stub:
        reader = Reader(stub, asked(epoch=2))
        await reader.until(lambda r: r.nodes == there)
        flow.handle(LawChanged(law(3, newcomer=Rule(allow=("eu",)))), 1.0)
        more = serve(flow, "y")
        wider = await reader.anew(stub, 3)
        assert wider.nodes == there
        await wider.until(lambda r: r.nodes == there | more)
        assert (wider.snapshots, wider.gaps) == (0, 0)
        flow.handle(LawChanged(law(4, anyone=Rule(allow=("eu", "uk")))), 2.0)
        narrower = await wider.anew(stub, 4)
        await narrower.until(lambda r: not r.nodes)


async def test_a_balancer_under_an_older_law_gets_nothing_from_one_under_a_newer() -> None:
    """Neither what its own forbids, nor what a law after both would have to take back."""
    flow = flow_of(under=law(2))
    serve(flow, "x")
    async with calling(told_by(flow)) as stub:
        assert await Reader(stub, asked(epoch=1)).call.read() is grpc.aio.EOF


@pytest.mark.usefixtures("nobody_looks")
async def test_a_balancer_under_a_newer_law_gets_nothing_from_one_under_an_older() -> None:
    flow = flow_of(under=law(2))
    serve(flow, "x")
    wants = asked()
    wants.law_epoch = 3
    async with calling(told_by(flow)) as stub:
        reader = Reader(stub, wants)
        first = asyncio.create_task(reader.read())
        await asyncio.sleep(4 * prefix_stream.BATCH_S)
        assert not first.done()
        flow.handle(LawChanged(law(3, other=Rule(allow=("eu",)))), 1.0)
        allowed = serve(flow, "y")
        await first
        await reader.until(lambda r: r.nodes == allowed)
        assert reader.heard == allowed  # older prefixes are announced to no reader until they come again
