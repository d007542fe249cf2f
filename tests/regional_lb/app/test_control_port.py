"""The control port: it has its number before it answers, and a port that is taken is one line."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import pytest
from farhop_wire import peers_pb2_grpc, region_pb2, region_pb2_grpc

from farhop.relay.http.listener import PortTakenError
from farhop.service.endpoints import Listen
from regional_lb.app.control_port import ControlPort


class Region(region_pb2_grpc.RegionServicer):
    """Answers pings alone."""

    async def Ping(self, request: region_pb2.PingRequest, context: Any) -> region_pb2.PingReply:
        return region_pb2.PingReply()


async def test_it_answers_where_it_said_that_it_listens_until_it_is_closed() -> None:
    port = ControlPort(Listen(port=0), None)
    number = port.listen()
    await port.start(Region(), peers_pb2_grpc.PeersServicer())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{number}") as channel:
        stub: Any = region_pb2_grpc.RegionStub(channel)  # type: ignore[no-untyped-call]
        assert await stub.Ping(region_pb2.PingRequest(), timeout=10.0) == region_pb2.PingReply()
        await port.close()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Ping(region_pb2.PingRequest(), timeout=10.0)
    await port.close()


async def test_a_port_that_is_taken_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        port = ControlPort(Listen(port=number), None)
        with pytest.raises(
            PortTakenError, match=rf"control: cannot listen on 127\.0\.0\.1:{number}: .*; choose another"
        ):
            port.listen()
        await port.close()
    await ControlPort(Listen(port=0), None).close()  # it never listened
