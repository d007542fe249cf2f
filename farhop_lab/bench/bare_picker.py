"""The baseline of pickers: the minimum that an ext_proc server on grpcio must do (ours does not use grpcio).

It takes a whole body, names the next endpoint in turn, and returns the body; nothing else. `python -m
farhop_lab.bench.bare_picker '{"port": 9001, "targets": [["127.0.0.2", 9000]]}'`. Never a product: no limits, identity,
choice or accounting, and it does not look at answers.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from typing import Any

import grpc
import msgspec
import uvloop
from farhop_wire import ext_proc_pb2 as wire

from farhop_lab.bench.bare import Job
from regional_lb.picker import messages
from regional_lb.picker.server import SERVICE


class BarePicker:
    """The one method."""

    def __init__(self, job: Job) -> None:
        self._turn = itertools.cycle([f"{host}:{port}" for host, port in job.targets])

    async def process(self, _messages: Any, context: Any) -> None:
        """One request."""
        body: list[bytes] = []
        while isinstance(message := await context.read(), wire.ProcessingRequest):
            what = message.WhichOneof("request")
            if what == "request_body":
                body.append(message.request_body.body)
                if message.request_body.end_of_stream:
                    await context.write(messages.chosen(next(self._turn), b""))
                    pieces = list(messages.pieces(b"".join(body)))
                    for at, piece in enumerate(pieces, 1):
                        await context.write(messages.piece(piece, of_request=True, last=at == len(pieces)))
            elif what == "response_headers":
                await context.write(messages.answered(b""))
            elif what == "response_body":
                chunk = message.response_body
                await context.write(messages.piece(chunk.body, of_request=False, last=chunk.end_of_stream))


async def serve(job: Job) -> None:
    """Until SIGTERM."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    method = grpc.stream_stream_rpc_method_handler(
        BarePicker(job).process,
        request_deserializer=wire.ProcessingRequest.FromString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": method}),))
    server.add_insecure_port(f"127.0.0.1:{job.port}")
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop(0.0)


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Job)))
