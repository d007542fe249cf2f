"""A link's live control over real connections: delay, freeze, blackhole, cut, heal; gRPC through it."""

from __future__ import annotations

import asyncio
import socket
import time
from random import Random
from typing import Any

import grpc
import pytest
from farhop_wire import region_pb2, region_pb2_grpc

from farhop_lab.wan.link import Link, LinkError, LinkState
from farhop_lab.wan.tunnel import LinkLimits

EARLY_S = 0.0005


async def test_a_frozen_link_answers_nothing_and_does_once_thawed(lab: Any) -> None:
    link = await lab.link(delay_ms=5)
    address, accepted = await lab.far()
    link.freeze()
    near = await lab.connect(link, address)
    assert await near.silent(0.1)
    assert accepted.empty()
    link.heal()
    assert await near.head() == (200, "")


async def test_client_that_gave_up_during_a_freeze_stays_closed(lab: Any, until: Any) -> None:
    link = await lab.link(delay_ms=5)
    address, accepted = await lab.far()
    link.freeze()
    near = await lab.connect(link, address)
    await until(lambda: link.stats().accepted == 1)
    near.reset()
    await until(lambda: link.stats().connections == 0)
    link.heal()
    await asyncio.sleep(0.03)
    assert accepted.empty()


async def test_frozen_stream_continues_complete_and_in_order(lab: Any) -> None:
    link = await lab.link(delay_ms=10, jitter_ms=5)
    near, far = await lab.pair(link)
    near.writer.write(b"1")
    assert await far.exactly(1) == b"1"
    link.freeze()
    for word in (b"2", b"3", b"4"):
        near.writer.write(word)
        far.writer.write(word)
        await asyncio.sleep(0.005)
    near.writer.write_eof()
    assert await far.silent(0.1)
    assert await near.silent(0.05)
    assert link.stats().connections == 1
    link.heal()
    began = time.monotonic()
    assert await far.read_to_end() == b"234"  # its end has waited too
    assert time.monotonic() - began > 0.005 - EARLY_S  # sent again: a one-way delay
    far.writer.write(b"5")
    far.writer.close()
    assert await near.read_to_end() == b"2345"


async def test_a_reset_while_frozen_is_noticed_after(lab: Any, until: Any) -> None:
    link = await lab.link(delay_ms=5)
    near, far = await lab.pair(link)
    link.freeze()
    far.reset()
    assert await near.silent(0.05)
    link.heal()
    with pytest.raises(ConnectionResetError):
        await near.read_to_end()
    await until(lambda: link.stats().connections == 0)


async def test_a_frozen_link_stops_reading_at_its_buffer_bound(lab: Any, until: Any) -> None:
    link = await lab.link(delay_ms=1, limits=LinkLimits(frozen_bytes_max=100_000))
    near, far = await lab.pair(link)
    link.freeze()
    near.writer.write(bytes(32 * 2**20))
    (tunnel,) = link.path.tunnels
    await until(lambda: not tunnel.near.reading)
    assert tunnel.out.queued_bytes < 100_000 + 300_000
    link.heal()
    assert await far.exactly(32 * 2**20) == bytes(32 * 2**20)


async def test_blackholed_connections_stay_dead_and_new_ones_work(lab: Any) -> None:
    link = await lab.link(delay_ms=2)
    near, far = await lab.pair(link)
    link.blackhole()
    near.writer.write(b"lost")
    link.heal()
    assert await far.silent(0.05)
    near.reset()
    assert await far.silent(0.05)
    other, _ = await lab.pair(link)
    other.writer.close()


async def test_cut_resets_both_ends_and_refuses_after_the_delay(
    lab: Any, until: Any, crossings: list[tuple[str, float]]
) -> None:
    link = await lab.link(delay_ms=40)
    near, far = await lab.pair(link)
    link.cut()
    for end in (near, far):
        with pytest.raises(ConnectionResetError):
            await end.read_to_end()
    await until(lambda: link.stats().connections == 0)
    crossings.clear()
    began = time.monotonic()
    status, text = await (await lab.connect(link, "127.0.0.1:9")).head()
    assert time.monotonic() - began > 0.040 - EARLY_S
    assert status == 502
    assert "cut" in text
    assert crossings == [("answer", 0.04), ("end", 0.04)]
    link.heal()
    await lab.pair(link)


@pytest.mark.parametrize("under_way", ["wish", "answer"])
async def test_cut_while_connecting_is_502_and_the_far_side_is_reset(lab: Any, until: Any, under_way: str) -> None:
    link = await lab.link(delay_ms=100)
    address, accepted = await lab.far()
    near = await lab.connect(link, address)
    await until(lambda: link.stats().accepted == 1 if under_way == "wish" else not accepted.empty())
    link.cut()
    assert (await near.head())[0] == 502
    if not accepted.empty():
        with pytest.raises(ConnectionResetError):
            await accepted.get_nowait().read_to_end()
    await asyncio.sleep(0.03)
    found = near.writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    assert found == 0  # it ended with the answer, and was not reset on top
    near.writer.close()
    await until(lambda: link.stats().connections == 0)


async def test_a_cut_of_what_is_frozen_resets(lab: Any) -> None:
    link = await lab.link(delay_ms=2)
    near, far = await lab.pair(link)
    link.freeze()
    near.writer.write(b"lost")
    link.cut()
    for end in (near, far):
        with pytest.raises(ConnectionResetError):
            await end.read_to_end()


async def test_the_delay_changes_while_running_and_never_reorders(lab: Any) -> None:
    link = await lab.link(delay_ms=30, jitter_ms=10)
    near, far = await lab.pair(link)
    sent = b""
    for i in range(40):
        word = f"{i:04d}".encode()
        near.writer.write(word)
        sent += word
        link.set(delay_ms=(30, 1, 12, 0)[i % 4], jitter_ms=i % 3)
        await asyncio.sleep(0.001)
    assert await far.exactly(len(sent)) == sent
    link.set(delay_ms=0, jitter_ms=0)
    assert link.stats().out_bytes == len(sent)


async def _crossing(near: Any, far: Any, size: int) -> float:
    """How long so many bytes take."""
    began = time.monotonic()
    near.writer.write(bytes(size))
    await far.exactly(size)
    return time.monotonic() - began


async def test_a_delay_set_live_is_the_delay_that_is_measured(lab: Any, crossings: list[tuple[str, float]]) -> None:
    link = await lab.link(delay_ms=2)
    near, far = await lab.pair(link)
    for delay_ms in (5, 20):
        link.set(delay_ms=delay_ms)
        crossings.clear()
        assert await _crossing(near, far, 1) > delay_ms / 1000 - EARLY_S
        assert crossings == [("bytes", delay_ms / 1000)]


async def test_bandwidth_bounds_throughput(lab: Any, crossings: list[tuple[str, float]]) -> None:
    link = await lab.link(delay_ms=1, bandwidth_mbps=80)  # 10 MB/s
    near, far = await lab.pair(link)
    assert await _crossing(near, far, 1_000_000) > 0.095
    link.set(bandwidth_mbps=float("inf"))
    crossings.clear()
    await _crossing(near, far, 1_000_000)
    assert set(crossings) == {("bytes", 0.001)}


async def test_closing_breaks_what_is_open_and_frees_the_port(lab: Any) -> None:
    link = await lab.link(delay_ms=1)
    near, far = await lab.pair(link)
    port = link.port
    await link.close()
    await link.close()
    for end in (near, far):
        with pytest.raises(ConnectionResetError):
            await end.read_to_end()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises(LinkError, match="start it first"):
        _ = link.url


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"delay_ms": -1}, "delay_ms"),
        ({"delay_ms": float("nan")}, "delay_ms"),
        ({"jitter_ms": float("inf")}, "jitter_ms"),
        ({"bandwidth_mbps": 0}, "bandwidth_mbps"),
    ],
)
def test_settings_that_no_link_has_are_named(settings: dict[str, float], named: str) -> None:
    link = Link("a>b", 1.0, rng=Random(1))
    with pytest.raises(LinkError, match=f"a>b: {named}"):
        link.set(**settings)


def test_a_link_that_is_not_started_can_be_broken_and_counts_nothing() -> None:
    link = Link("a>b", 1.0, rng=Random(1))
    link.cut()
    assert link.stats().state is LinkState.CUT
    link.heal()
    assert link.stats().connections == 0


# -- gRPC, as the tiers speak it


class Servicer(region_pb2_grpc.RegionServicer):
    async def Ping(self, request: Any, context: Any) -> region_pb2.PingReply:
        return region_pb2.PingReply()

    async def Reports(self, request: Any, context: Any) -> Any:
        for seq in range(1, 6):
            yield region_pb2.Report(seq=seq)


def by_name(link: Link) -> list[tuple[str, Any]]:
    return [("grpc.http_proxy", link.url), ("grpc.enable_http_proxy", 1)]


def by_address(link: Link) -> list[tuple[str, Any]]:
    return [
        ("grpc.address_http_proxy", f"127.0.0.1:{link.port}"),
        ("grpc.address_http_proxy_enabled_addresses", "127.0.0.0/8,::1/128"),
    ]


@pytest.fixture
async def service() -> Any:
    server = grpc.aio.server()
    region_pb2_grpc.add_RegionServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
def _no_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_exceptions")
@pytest.mark.parametrize("options", [by_name, by_address])
async def test_grpc_goes_through_and_takes_its_time(lab: Any, service: str, options: Any) -> None:
    link = await lab.link(delay_ms=20)
    async with grpc.aio.insecure_channel(service, options=options(link)) as channel:
        stub = region_pb2_grpc.RegionStub(channel)
        for trips in (2, 1):  # CONNECT, then the call; then the call alone
            began = time.monotonic()
            await stub.Ping(region_pb2.PingRequest(), timeout=60)
            assert time.monotonic() - began > trips * (0.040 - EARLY_S)
        assert [report.seq async for report in stub.Reports(region_pb2.ReportsRequest(), timeout=60)] == [1, 2, 3, 4, 5]
        link.freeze()
        with pytest.raises(grpc.aio.AioRpcError) as silent:
            await stub.Ping(region_pb2.PingRequest(), timeout=0.15)
        assert silent.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        link.heal()
        await stub.Ping(region_pb2.PingRequest(), timeout=60)
        link.cut()
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await stub.Ping(region_pb2.PingRequest(), timeout=60)
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
    assert link.stats().established == 1


@pytest.mark.parametrize(("options", "through"), [(by_name, 0), (by_address, 1)])
async def test_no_proxy_bypasses_a_link_configured_by_name_and_not_one_by_address(
    lab: Any, service: str, monkeypatch: pytest.MonkeyPatch, options: Any, through: int
) -> None:
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    link = await lab.link(delay_ms=1)
    async with grpc.aio.insecure_channel(service, options=options(link)) as channel:
        await region_pb2_grpc.RegionStub(channel).Ping(region_pb2.PingRequest(), timeout=60)
    assert link.stats().established == through
