"""The control port: it has its number before it answers, and a port that is taken is one line."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from farhop_wire import peers_pb2_grpc, region_pb2, region_pb2_grpc
from inprocess import until

from farhop.relay.http.listener import PortTakenError
from farhop.service.config.endpoints import Listen
from regional_lb.app import control_port
from regional_lb.app.control_port import ControlPort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def served(
    region: region_pb2_grpc.RegionServicer, numbers: list[int] | None = None
) -> AsyncIterator[tuple[ControlPort, grpc.aio.Channel]]:
    """A port and a channel to it. Closed however the test ends: gRPC's server raises where its loop is gone before it,
    in whatever pytest does by then."""
    port = ControlPort(Listen(port=0), None)
    try:
        number = port.listen()
        if numbers is not None:
            numbers.append(number)
        await port.start(region, peers_pb2_grpc.PeersServicer())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{number}") as channel:
            yield port, channel
    finally:
        await port.close()


class Region(region_pb2_grpc.RegionServicer):
    """Answers pings alone."""

    async def Ping(self, request: region_pb2.PingRequest, context: Any) -> region_pb2.PingReply:
        return region_pb2.PingReply()


async def test_control_port_answers_until_closed() -> None:
    async with served(Region()) as (port, channel):
        stub: Any = region_pb2_grpc.RegionStub(channel)  # type: ignore[no-untyped-call]
        assert await stub.Ping(region_pb2.PingRequest(), timeout=10.0) == region_pb2.PingReply()
        await port.close()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Ping(region_pb2.PingRequest(), timeout=10.0)


async def test_a_port_that_is_taken_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        port = ControlPort(Listen(port=number), None)
        with pytest.raises(
            PortTakenError, match=rf"control: cannot listen on 127\.0\.0\.1:{number}: .*; choose another"
        ):
            port.listen()
        await port.close()
    await ControlPort(Listen(port=0), None).close()  # it was never listening


class Broken(Region):
    """Its methods break with a text that is for nobody, and refuse with one that is."""

    async def Ping(self, request: region_pb2.PingRequest, context: Any) -> region_pb2.PingReply:
        raise KeyError("tenant-of-somebody")

    async def Reports(self, request: region_pb2.ReportsRequest, context: Any) -> AsyncIterator[region_pb2.Report]:
        yield region_pb2.Report(region="tokyo")
        raise OSError("/var/lib/farhop/tokyo")

    async def Law(self, request: region_pb2.LawExchange, context: Any) -> region_pb2.LawExchange:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sender: a printable name")
        raise AssertionError


async def test_method_error_is_internal_to_the_caller_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with served(Broken()) as (_, channel):
        stub: Any = region_pb2_grpc.RegionStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Law(region_pb2.LawExchange(), timeout=10.0)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "sender: a printable name"
        assert not caplog.records
        with pytest.raises(grpc.aio.AioRpcError) as broke:
            await stub.Ping(region_pb2.PingRequest(), timeout=10.0)
        reports = stub.Reports(region_pb2.ReportsRequest(), timeout=10.0)
        assert (await reports.read()).region == "tokyo"
        with pytest.raises(grpc.aio.AioRpcError) as cut_short:
            await reports.read()
        for error in (broke.value, cut_short.value):
            assert error.code() is grpc.StatusCode.INTERNAL
            assert error.details() == "internal error: this balancer's log says more"
        with pytest.raises(grpc.aio.AioRpcError) as absent:
            await channel.unary_unary("/farhop.Region/Nothing")(b"", timeout=10.0)
        assert absent.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "tenant-of-somebody" in caplog.text
    assert "/var/lib/farhop/tokyo" in caplog.text


class Leaving(Region):
    """As gRPC has it where the caller is gone by the time that it is refused: the call gets no answer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def Ping(self, request: region_pb2.PingRequest, context: Any) -> region_pb2.PingReply:
        self.asked.set()
        raise grpc.aio.InternalError('Failed "execute_batch"')


async def test_a_caller_that_leaves_during_its_answer_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """One connection had 2,000 stack traces logged a second."""
    region = Leaving()
    async with served(region) as (_, channel):
        stub: Any = region_pb2_grpc.RegionStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Ping(region_pb2.PingRequest(), timeout=10.0)
        await asyncio.wait_for(region.asked.wait(), 10.0)
        call.cancel()
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


class Waiting(Region):
    """Answers once it is told to."""

    def __init__(self) -> None:
        self.asked, self.may = 0, asyncio.Event()

    async def Ping(self, request: region_pb2.PingRequest, context: Any) -> region_pb2.PingReply:
        self.asked += 1
        await self.may.wait()
        return region_pb2.PingReply()


async def test_one_connection_has_so_many_calls_at_once_and_no_more() -> None:
    """200,000 calls, opened and reset at once, took the loop 4 s; those left open 100 MB."""
    region = Waiting()
    async with served(region) as (_, channel):
        stub: Any = region_pb2_grpc.RegionStub(channel)  # type: ignore[no-untyped-call]
        region.may.set()
        await stub.Ping(region_pb2.PingRequest(), timeout=60.0)  # the caller knows the bound, and lets the rest wait
        region.may.clear()
        region.asked = 0
        calls = [stub.Ping(region_pb2.PingRequest(), timeout=60.0) for _ in range(control_port.CALLS_MAX + 20)]
        await until(lambda: region.asked == control_port.CALLS_MAX)
        await asyncio.sleep(0.1)
        assert region.asked == control_port.CALLS_MAX
        region.may.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers.count(region_pb2.PingReply()) >= control_port.CALLS_MAX


async def test_idle_connections_are_bounded_by_their_share_of_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a bound 2,900 connections that answered nothing but pings took all of a balancer's 3,000."""
    monkeypatch.setattr(control_port, "CONNECTIONS_MAX", 8)
    async with served(Region(), numbers := []) as (_, channel):
        stub: Any = region_pb2_grpc.RegionStub(channel)  # type: ignore[no-untyped-call]
        await stub.Ping(region_pb2.PingRequest(), timeout=60.0)
        others = [await asyncio.open_connection("127.0.0.1", numbers[0]) for _ in range(20)]

        async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            try:
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
                return bool(await reader.read(9))
            except ConnectionError:
                return False

        were_taken = await asyncio.gather(*(taken(*one) for one in others))
        for _, writer in others:
            writer.close()
        assert were_taken.count(True) == 7
        assert await stub.Ping(region_pb2.PingRequest(), timeout=60.0) == region_pb2.PingReply()


async def test_a_request_that_is_too_large_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    """4 MiB of names of attempts held the loop for 60 ms."""
    read = list[int]()

    class Counting(Broken):
        async def Ping(self, request: region_pb2.PingRequest, context: Any) -> region_pb2.PingReply:
            read.append(len(request.attempts))
            return region_pb2.PingReply()

    async with served(Counting()) as (_, channel):
        stub: Any = region_pb2_grpc.RegionStub(channel)  # type: ignore[no-untyped-call]
        much = ["a"] * 200_000
        await stub.Ping(region_pb2.PingRequest(attempts=much[:10_000]), timeout=10.0)
        for asked in (
            lambda: stub.Ping(region_pb2.PingRequest(attempts=much), timeout=10.0),
            lambda: stub.Reports(region_pb2.ReportsRequest(balancer="x" * 300_000), timeout=10.0).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="at most 262144 bytes") as caught:
                await asked()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError, match="sender: a printable name"):  # a law is long
            await stub.Law(region_pb2.LawExchange(document=b"x" * 1_000_000), timeout=10.0)
    assert read == [10_000]
    assert caplog.records == []
