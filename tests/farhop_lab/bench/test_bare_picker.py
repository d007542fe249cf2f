from __future__ import annotations

from farhop_wire import ext_proc_pb2 as wire
from picking import answered, asked, body, response_piece, text_of

from farhop_lab.bench.bare import Job
from farhop_lab.bench.bare_picker import BarePicker


class Gateway:
    """Says these in turn, and keeps what it is told."""

    def __init__(self, *messages: wire.ProcessingRequest) -> None:
        self._messages, self.received = list(messages), list[wire.ProcessingResponse]()

    async def read(self) -> object:
        return self._messages.pop(0) if self._messages else None

    async def write(self, message: bytes) -> None:
        self.received.append(wire.ProcessingResponse.FromString(message))


async def test_bare_picker_names_the_next_endpoint_and_returns_the_request() -> None:
    picker = BarePicker(Job(0, [("127.0.0.2", 1), ("127.0.0.3", 1)]))
    for host in ("127.0.0.2", "127.0.0.3", "127.0.0.2"):
        gateway = Gateway(asked(), body(b"a" * 70_000, last=False), body(b"b"), answered(), response_piece(b"one"))
        await picker.process(None, gateway)
        lb = gateway.received[0].dynamic_metadata.fields["envoy.lb"].struct_value
        assert lb.fields["x-gateway-destination-endpoint"].string_value == f"{host}:1"
        assert text_of(gateway.received, of_request=True) == (b"a" * 70_000 + b"b", 1)
        assert text_of(gateway.received, of_request=False) == (b"one", 1)
