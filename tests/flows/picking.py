"""A regional balancer with a picker in this process, over engines of ours; and streams of it without a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import msgspec
from farhop_wire import ext_proc_pb2 as wire
from inprocess import MODEL, Engine, regional_config, topology, until

from farhop_lab.memory_store import MemoryCluster, MemoryStore
from regional_lb.app.main import RegionalBalancer
from regional_lb.picker.server import PickerServer
from regional_lb.picker.stream import GatewayStream
from topology.model import Topology

CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True})
DUPLEX, NONE = wire.FULL_DUPLEX_STREAMED, wire.NONE


class Stage:
    """What runs: `engines` are its replicas a, b, ... in turn."""

    def __init__(
        self, balancer: RegionalBalancer, engines: list[Engine], port: int, ends: list[AsyncExitStack]
    ) -> None:
        self.balancer, self.engines, self.port, self._ends = balancer, engines, port, ends

    @property
    def picker(self) -> PickerServer:
        assert self.balancer.listeners.picker is not None
        return self.balancer.listeners.picker

    @property
    def held(self) -> tuple[int, ...]:
        """Reservations, requests in flight, bytes, request slots and streams: all 0 at rest."""
        one = self.balancer
        flow = (len(one.flow.replicas.ledger), one.flow.under_way, one.metrics.in_flight)
        return (*flow, one.plane.budget.used_bytes, one.plane.requests.used, self.picker.streams)

    async def kill(self) -> None:
        """Have the picker break off, without a word to anybody."""
        await self.picker.break_off()

    async def reopen(self) -> None:
        """Have the picker come back on its port."""
        config = self.balancer.config.picker
        assert config is not None
        await self.picker.open("127.0.0.1", self.port)

    async def stop(self, engine: int) -> None:
        """Let one of the engines end, its port with it."""
        await self._ends[engine].aclose()

    async def at_rest(self) -> None:
        """Until nothing is held, which must come to be."""
        await until(lambda: not any(self.held))

    def stream(self) -> GatewayStream:
        """A stream that no gateway has, with a picker's parts behind it."""
        return GatewayStream(self.picker, lambda: None, asyncio.get_running_loop().time)


@asynccontextmanager
async def stage(
    engines: int = 2, slots: int = 64, cluster: MemoryCluster | None = None, world: Topology | None = None, **more: Any
) -> AsyncIterator[Stage]:
    """It, with all of its replicas up. FARHOP_TEST_HOP must be set."""
    async with AsyncExitStack() as stack:
        ends = [await stack.enter_async_context(AsyncExitStack()) for _ in range(engines)]
        ours = [await end.enter_async_context(Engine().running()) for end in ends]
        replicas = [
            {"url": f"http://{one.address}", "models": [MODEL], "name": name, "slots": slots}
            for name, one in zip("abcdefgh", ours, strict=False)
        ]
        picker = {"port": 0, **more.pop("picker", {})}
        config = regional_config(ours[0], replicas=replicas, picker=picker, **more)
        store = MemoryStore(Random(2), cluster or MemoryCluster())
        balancer = RegionalBalancer(config, world or topology(), Random(1), store)
        line = await balancer.open()
        stack.push_async_callback(balancer.close)
        await until(lambda: all(one["state"] == "up" for one in balancer.tier_admin.status()["replicas"]))
        yield Stage(balancer, ours, int(line.split("gateways on 127.0.0.1:")[1].split(",")[0]), ends)


def headers(*given: tuple[str, bytes]) -> wire.HttpHeaders:
    """Of an HTTP message, as Envoy tells them."""
    return wire.HttpHeaders(headers=wire.HeaderMap(headers=[wire.HeaderValue(key=k, raw_value=v) for k, v in given]))


def asked(
    key: str = "sk-farhop-anywhere", *more: tuple[str, bytes], modes: tuple[int, int] | None = (DUPLEX, DUPLEX)
) -> wire.ProcessingRequest:
    """The head of a chat request, with the modes of both bodies."""
    message = wire.ProcessingRequest(
        request_headers=headers(
            (":method", b"POST"),
            (":path", b"/v1/chat/completions"),
            (":authority", b"farhop"),
            (":scheme", b"http"),
            ("authorization", f"Bearer {key}".encode()),
            ("content-type", b"application/json"),
            *more,
        )
    )
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    return message


def body(text: bytes, *, last: bool = True) -> wire.ProcessingRequest:
    """A piece of the request's body."""
    return wire.ProcessingRequest(request_body=wire.HttpBody(body=text, end_of_stream=last))


def answered(status: bytes = b"200", *more: tuple[str, bytes], served: str = "") -> wire.ProcessingRequest:
    """The head of the engine's answer."""
    message = wire.ProcessingRequest(response_headers=headers((":status", status), *more))
    if served:
        lb = message.metadata_context.filter_metadata["envoy.lb"]
        lb.fields["x-gateway-destination-endpoint-served"].string_value = served
    return message


def response_piece(text: bytes, *, last: bool = True) -> wire.ProcessingRequest:
    """A piece of the engine's answer."""
    return wire.ProcessingRequest(response_body=wire.HttpBody(body=text, end_of_stream=last))


def sent(stream: GatewayStream) -> list[wire.ProcessingResponse]:
    """What the stream has for its gateway since it was asked last."""
    found = [wire.ProcessingResponse.FromString(one) for one in stream.outbox]
    stream.outbox.clear()
    stream.sent()
    return found


def text_of(value: list[wire.ProcessingResponse], *, of_request: bool) -> tuple[bytes, int]:
    """The body in these, and how often it ends."""
    found, ends = b"", 0
    for one in value:
        if one.WhichOneof("response") == ("request_body" if of_request else "response_body"):
            part = (one.request_body if of_request else one.response_body).response.body_mutation.streamed_response
            assert len(part.body) <= 62_000
            found, ends = found + part.body, ends + part.end_of_stream
    return found, ends


def mutated(changed: wire.HeaderMutation, given: dict[str, bytes]) -> dict[str, bytes]:
    """These headers as a gateway changes them."""
    now = {name: value for name, value in given.items() if name not in changed.remove_headers}
    return now | {one.header.key: one.header.raw_value for one in changed.set_headers}
