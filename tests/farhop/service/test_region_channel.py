"""The channel to a control port: where it leads, and that what is silent for too long is noticed."""

from __future__ import annotations

import grpc
import pytest
from farhop_wire import region_pb2, region_pb2_grpc
from regions import Region

from farhop.balance.machine import Address
from farhop.service.region_channel import address_of, channel, silence_s
from farhop.service.region_connections import RegionConnections

PROCESS = {"region": "virginia", "instance": "d1", "admin": {"port": 1}}


def test_addresses_and_silence() -> None:
    assert address_of("10.0.0.1:80") == Address("10.0.0.1", 80)
    assert address_of("[fd00::1]:80") == Address("fd00::1", 80)
    assert (silence_s(0.1), silence_s(3.0)) == (1.0, 6.0)


async def test_it_leads_to_the_balancer_and_through_a_proxy_where_one_is_named() -> None:
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
