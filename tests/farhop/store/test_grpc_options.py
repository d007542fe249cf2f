"""The flow control of gRPC connections, read from their frames (RFC 9113): no measuring, and an open window."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from farhop_wire import region_pb2, region_pb2_grpc
from regions import Region, a_report

from farhop.store.grpc_options import FIXED_WINDOW, WINDOW_BYTES

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, ACK, INITIAL_WINDOW_SIZE = 4, 6, 1, 4
REPORTS = 5


class Frames:
    """Passes a connection on, and reads the frames that the client sends: (type, flags, payload)."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bytes]] = []
        self._rest = b""

    def read(self, data: bytes) -> None:
        self._rest += data
        self._rest = self._rest.removeprefix(PREFACE)
        while len(self._rest) >= 9:
            length = int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < 9 + length:
                break
            self.seen.append((self._rest[3], self._rest[4], self._rest[9 : 9 + length]))
            self._rest = self._rest[9 + length :]

    def asked(self) -> int:
        return sum(kind == PING and not flags & ACK for kind, flags, _ in self.seen)

    def windows(self) -> list[int]:
        payloads = [payload for kind, flags, payload in self.seen if kind == SETTINGS and not flags & ACK]
        settings = [struct.unpack_from(">HI", payload, at) for payload in payloads for at in range(0, len(payload), 6)]
        return [value for name, value in settings if name == INITIAL_WINDOW_SIZE]


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    made = Region()
    await made.start()
    yield made
    await made.stop()


class Side(asyncio.Protocol):
    """One side of a connection that is passed on."""

    def __init__(self, spy: Callable[[bytes], None]) -> None:
        self._spy, self.other, self.transport = spy, asyncio.get_running_loop().create_future(), asyncio.Transport()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.transport.pause_reading()  # until there is a receiver to pass it on to

    def meet(self, other: Side) -> None:
        self.other.set_result(other)
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._spy(data)
        self.other.result().transport.write(data)


@asynccontextmanager
async def _between(frames: Frames, address: str) -> AsyncIterator[str]:
    """An address that leads to another, with all read by `frames` on its way there."""
    loop, (host, port), sides = asyncio.get_running_loop(), address.split(":"), list[Side]()

    async def onward(near: Side) -> None:
        _, far = await loop.create_connection(lambda: Side(lambda _: None), host, int(port))
        near.meet(far)
        far.meet(near)
        sides.extend((near, far))

    class Near(Side):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            tasks.append(loop.create_task(onward(self)))

    tasks = list[asyncio.Task[None]]()
    async with await loop.create_server(lambda: Near(frames.read), "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*tasks)
        for side in sides:
            side.transport.abort()


@pytest.mark.parametrize("fixed", [True, False])
async def test_messages_are_not_answered_with_pings_and_the_window_is_open_at_once(region: Region, fixed: bool) -> None:
    frames = Frames()
    options = (("grpc.use_local_subchannel_pool", 1), *(FIXED_WINDOW if fixed else ()))
    async with _between(frames, region.address) as address, grpc.aio.insecure_channel(address, options) as channel:
        stream = region_pb2_grpc.RegionStub(channel).Reports(region_pb2.ReportsRequest(balancer="here"))
        for seq in range(1, REPORTS + 1):
            await region.say(a_report(seq=seq))
            message = await stream.read()
            assert message.seq == seq
        stream.cancel()
    assert (frames.asked() == 0) == fixed  # as gRPC is made, some of these messages are followed by one
    assert WINDOW_BYTES in frames.windows()  # by itself it is as wide; without measuring alone it would be 64 KiB
