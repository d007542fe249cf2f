from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hpack import Encoder
from inprocess import until
from picking import CHAT, asked, body, sent, stage

from regional_lb.picker import http2, server
from regional_lb.picker.server import LIVENESS, READINESS, SERVICE

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_is_answered_by_the_names_of_the_protocol() -> None:
    async with stage(1) as one, grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def health_of(service: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)

        assert [await health_of(name) for name in ("", LIVENESS, READINESS, SERVICE)] == [SERVING] * 4
        with pytest.raises(grpc.aio.AioRpcError, match="there is no service 'other' here"):
            await health_of("other")
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        one.picker.stopping = True  # it drains: alive, but it accepts nothing more
        assert [await health_of(name) for name in (LIVENESS, READINESS, SERVICE)] == [SERVING, NOT_SERVING, NOT_SERVING]
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_draining_answers_waiting_requests_and_keeps_nothing() -> None:
    async with stage(1, slots=1, queue={"wait_s": 60}) as one:
        first, second = one.stream(), one.stream()
        for stream in (first, second):
            one.picker.open_streams.add(stream)
            stream.take(asked())
            stream.take(body(CHAT))
        assert sent(second) == []  # it waits
        await one.picker.emptied(0.0)
        for stream in (first, second):
            stream.expel()
        assert sent(second)[0].immediate_response.status.code == 503
        assert first.is_over
        one.picker.open_streams.clear()
        await until(lambda: not any(one.held))


async def test_status_warns_of_gateways_that_fail_open() -> None:
    async with stage(1, picker={"failure_mode": "FailOpen"}) as one:
        (found,) = one.balancer.tier_admin.status()["picker"]["trouble"]
        assert found.startswith("picker.failure_mode is FailOpen: while no picker answers, gateways send requests past")
        assert one.picker.fails_open([])
    async with stage(1) as one:
        assert one.balancer.tier_admin.status()["picker"]["trouble"] == []
        assert not one.picker.fails_open([])
        (found,) = one.picker.status(["kubernetes gpus pool llama"])["trouble"]
        assert found.startswith("kubernetes gpus pool llama says FailOpen")


class Peer:
    """A connection of one that writes frames as it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer, self._encoder = reader, writer, Encoder()

    def head(self, stream: int, path: str = f"/{SERVICE}/Process") -> bytes:
        fields = [(":method", "POST"), (":path", path), ("content-type", "application/grpc")]
        return http2.frame(http2.HEADERS, http2.END_HEADERS, stream, self._encoder.encode(fields))

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def next(self, kind: int) -> bytes:
        """The payload of the next frame of this kind."""
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3]))
            if head[3] == kind:
                return payload


@asynccontextmanager
async def peer(port: int) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    made = Peer(reader, writer)
    made.send(http2.PREFACE, http2.settings({}))
    try:
        yield made
    finally:
        writer.transport.abort()


def message(of: bytes) -> bytes:
    return b"\0" + len(of).to_bytes(4) + of


async def test_bytes_after_a_message_that_is_too_long_are_no_request_and_keep_no_slot() -> None:
    """It was one, and its slot and bytes were never given back: 20,000 of them were the end of service."""
    async with stage(1) as one, peer(one.port) as odd:
        odd.send(odd.head(1), http2.frame(http2.DATA, 0, 1, b"\0\x7f\xff\xff\xff"))
        odd.send(http2.frame(http2.DATA, 0, 1, message(asked().SerializeToString())))
        odd.send(http2.frame(http2.DATA, 0, 1, message(body(CHAT[:9], last=False).SerializeToString())))
        odd.send(http2.frame(http2.PING, 0, 0, b"12345678"))
        await odd.next(http2.PING)
        assert not any(one.held)


async def test_requests_that_are_open_are_bounded_over_all_connections() -> None:
    async with stage(1, limits={"requests_max": 4}) as one, peer(one.port) as first, peer(one.port) as second:
        first.send(*[first.head(1 + 2 * n) for n in range(4)])
        await until(lambda: one.picker.streams == 4)
        second.send(second.head(1))
        assert b"the limit of open requests is reached here" in await second.next(http2.HEADERS)
        first.send(http2.reset(1, 8))
        await until(lambda: one.picker.streams == 3)
        second.send(second.head(3))
        await until(lambda: one.picker.streams == 4)
    assert one.picker.streams == 0


async def test_a_connection_that_brings_nothing_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_CONNECTIONS_MAX", 2)
    monkeypatch.setattr(server, "GIVES_WAY_S", 0.0)
    async with stage(1) as one, peer(one.port) as busy, peer(one.port) as idle:
        busy.send(busy.head(1))
        idle.send(idle.head(1, "/grpc.health.v1.Health/Watch"))
        await until(lambda: one.picker.streams == 1)
        async with peer(one.port) as late:
            late.send(late.head(1))
            await until(lambda: one.picker.streams == 2)
            await idle.next(http2.GOAWAY)
            async with peer(one.port) as refused:
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await refused.next(http2.GOAWAY)
            assert one.picker.streams == 2  # a connection that carries requests stays


FLOODS: dict[str, Callable[[Peer, int], bytes]] = {
    "resets": lambda peer, n: peer.head(1 + 2 * n) + http2.reset(1 + 2 * n, 8),
    "settings": lambda _peer, _n: http2.settings({http2.INITIAL_WINDOW_SIZE: 9}),
}


@pytest.mark.parametrize("what", FLOODS)
async def test_other_connections_are_answered_during_a_flood(what: str) -> None:
    async with stage(1) as one, grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(3):
            async with peer(one.port) as rude:
                rude.send(*[FLOODS[what](rude, n) for n in range(20_000)])
                assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
                assert (await rude.next(http2.GOAWAY))[4:8] == http2.ENHANCE_YOUR_CALM.to_bytes(4)
        await until(lambda: not any(one.held))
