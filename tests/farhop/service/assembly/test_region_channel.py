"""The channel to a control port: its address, and that a long silence is noticed."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from farhop_wire import region_pb2, region_pb2_grpc
from regions import Region

from farhop.balance.machine import Address
from farhop.service.assembly.region_channel import address_of, channel, silence_s
from farhop.service.config.region_connections import RegionConnections

PROCESS = {"region": "virginia", "instance": "d1", "admin": {"port": 1}}


def test_addresses_are_parsed_and_the_silence_limit_follows_the_ping_interval() -> None:
    assert address_of("10.0.0.1:80") == Address("10.0.0.1", 80)
    assert address_of("[fd00::1]:80") == Address("fd00::1", 80)
    assert (silence_s(0.1), silence_s(3.0)) == (1.0, 6.0)


async def test_a_message_above_its_bound_is_not_read() -> None:
    """gRPC builds a message before anybody may judge it: 4 MiB of small fields held the loop for up to 0.3 s."""

    class Talkative(Region):
        async def Ping(self, request: Any, _context: Any) -> Any:
            return region_pb2.PingReply(nonce=request.nonce, quiet_ms=range(request.nonce))

    region = Talkative()
    await region.start()
    async with channel(RegionConnections.model_validate(PROCESS), "tokyo", region.address, None, 0.1) as way:
        stub = region_pb2_grpc.RegionStub(way)
        assert len((await stub.Ping(region_pb2.PingRequest(nonce=1000), timeout=20.0)).quiet_ms) == 1000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Ping(region_pb2.PingRequest(nonce=100_000), timeout=20.0)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await region.stop()


async def test_a_channel_leads_to_the_balancer_through_the_named_proxy(monkeypatch: Any) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the environment's is not asked
    region = Region()
    await region.start()
    ways = RegionConnections.model_validate(PROCESS)
    async with channel(ways, "tokyo", region.address, None, 0.1) as way:
        stub = region_pb2_grpc.RegionStub(way)
        assert (await stub.Ping(region_pb2.PingRequest(nonce=7), timeout=20.0)).nonce == 7
    ways = RegionConnections.model_validate({**PROCESS, "proxies": {"tokyo": "http://127.0.0.1:9"}})
    async with channel(ways, "tokyo", region.address, None, 0.1) as way:
        with pytest.raises(grpc.aio.AioRpcError):
            await region_pb2_grpc.RegionStub(way).Ping(region_pb2.PingRequest(nonce=8), timeout=20.0)
    await region.stop()
