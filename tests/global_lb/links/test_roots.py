"""The way to a root: where the configuration lets it be, by a channel that is opened anew after a failure."""

import grpc
import pytest
from farhop_wire import region_pb2, region_pb2_grpc

from farhop.store.documents.limits import RootClaim
from global_lb.app.config import GlobalConfig
from global_lb.links.roots import Roots

ASKED = region_pb2.BorrowRequest(holder="global tokyo/g1")


def config(monkeypatch: pytest.MonkeyPatch) -> GlobalConfig:
    monkeypatch.setenv("FARHOP_TEST_HOP", "x" * 32)
    hop = {"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k1"}
    return GlobalConfig.model_validate(
        {"region": "tokyo", "instance": "g1", "admin": {"port": 0}, "listen": {"port": 0}, "hop": hop}
    )


def claim(address: str) -> RootClaim:
    return RootClaim(region="virginia", instance="r1", address=address, seq=1, first_lease=1, marks={})


class Root(region_pb2_grpc.RegionServicer):
    """Answers with a lease."""

    async def Borrow(self, request: region_pb2.BorrowRequest, context: object) -> region_pb2.BorrowReply:
        return region_pb2.BorrowReply(lease=7)


async def test_a_limit_root_is_asked_at_its_address_and_again_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.aio.server()
    region_pb2_grpc.add_RegionServicer_to_server(Root(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = config(monkeypatch)
    roots = Roots(lambda: made, None)
    try:
        assert (await roots.borrow(claim(f"127.0.0.1:{port}"), ASKED)).lease == 7
        with pytest.raises(grpc.aio.AioRpcError):
            await roots.borrow(claim("127.0.0.1:1"), ASKED)
        assert (await roots.borrow(claim(f"127.0.0.1:{port}"), ASKED)).lease == 7
        for address in ("nowhere", "192.0.2.1:1"):
            with pytest.raises(OSError, match=r"address|region_hosts"):
                await roots.borrow(claim(address), ASKED)
    finally:
        await roots.close()
        await server.stop(None)
