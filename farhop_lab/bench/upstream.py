"""Stands for the engines in a benchmark: a uvloop server that answers at once, or streams chunks at a set interval.

`python -m farhop_lab.bench.upstream '{"port": 9000, "hosts": ["127.0.0.2"]}'`. It reads no more of a request than it
must; its cost is not measured, but it shares the machine with what is. For benchmarks only.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from functools import partial
from typing import cast

import httptools
import msgspec
import uvloop

from farhop.identity.hop_token import HEADER as HOP_HEADER
from farhop_lab.bench import pages
from farhop_lab.bench.bodies import MODEL

METRICS = f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{MODEL}"}} 1.0
vllm:num_requests_waiting{{model_name="{MODEL}"}} 0.0
vllm:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.1
vllm:prefix_cache_queries_total{{model_name="{MODEL}"}} 1000000.0
vllm:prefix_cache_hits_total{{model_name="{MODEL}"}} 700000.0
"""
MODELS = msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})
BYTES_PER_TOKEN = 4
_STREAM = re.compile(rb'"stream":\s*true')
_ORDER = re.compile(rb"chunks=(\d+) interval_ms=([\d.]+)")
_DELAY = re.compile(rb" delay_ms=([\d.]+)")
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\n%bcontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)  # fmt: skip
_WHOLE_HEAD = b"HTTP/1.1 200 OK\r\n%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n"


class Job(msgspec.Struct, frozen=True):
    """Where to listen. With `page_bytes` its metrics page has about that size, as a real engine's. At the hosts in
    `regions` it answers a global balancer in that region's name."""

    port: int
    hosts: list[str]
    page_bytes: int = 0
    regions: dict[str, str] = {}


def answer(prompt_tokens: int | str, cached_tokens: int | str) -> str:
    """A whole answer, in vLLM's format."""
    usage = (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":16,"total_tokens":{prompt_tokens},'
        f'"prompt_tokens_details":{{"cached_tokens":{cached_tokens}}}}}'
    )
    text = "This is what an engine might have written, had there been one behind the proxy."
    return (
        f'{{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"{MODEL}",'
        f'"choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"stop"}}],'
        f'"usage":{usage}}}'
    )


def _event(text: str) -> bytes:
    data = (
        f'data: {{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
        f'"model":"{MODEL}",{text}}}\n\n'
    )
    return _chunk(data.encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_PIECE = _event('"choices":[{"index":0,"delta":{"content":" word"}}]')  # about 150 bytes
# The same if token ids are wanted, in vLLM's format.
_ASKED = b'"return_token_ids":true'
_CHOICES = '"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null,"token_ids":[1234]}]'
_PIECE_WITH_ID = _event(_CHOICES)
_DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection of a proxy, with one request at a time."""

    def __init__(self, metrics: bytes = METRICS.encode(), region: str = "") -> None:
        self._metrics = metrics
        self._region = f"x-farhop-region: {region}\r\n".encode() if region else b""
        self._names_region = False  # the request is a global balancer's
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.close()

    # -- httptools callbacks

    def on_url(self, url: bytes) -> None:
        """The request's path begins."""
        self._url, self._body, self._names_region = url, [], False

    def on_header(self, name: bytes, _value: bytes) -> None:
        """One of its headers."""
        self._names_region |= name == HOP_HEADER

    def on_body(self, data: bytes) -> None:
        """A piece of its body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """The request is complete: answer."""
        body = b"".join(self._body)
        if (delay := _DELAY.search(body)) is not None:
            # To 0.1 ms, while the loop's timers have whole ones; there are no other clients.
            time.sleep(float(delay[1]) / 1e3)
        if self._url == b"/metrics":
            self._whole(self._metrics, b"text/plain; version=0.0.4")
        elif self._url.startswith(b"/v1/models"):
            self._whole(MODELS)
        elif not body:  # /health, and other requests of a router
            self._whole(b'{"model_path":"%b"}' % MODEL.encode())
        elif _STREAM.search(body):
            self._stream(body)
        else:
            tokens = len(body) // BYTES_PER_TOKEN
            self._whole(answer(tokens, tokens * 7 // 10).encode())

    # -- answers

    @property
    def _named(self) -> bytes:
        return self._region if self._names_region else b""

    def _whole(self, body: bytes, kind: bytes = b"application/json") -> None:
        self._write(_WHOLE_HEAD % (self._named, kind, len(body)) + body)

    def _stream(self, body: bytes) -> None:
        order = _ORDER.search(body)
        chunks, pace_s = (int(order[1]), float(order[2]) / 1e3) if order else (200, 0.02)
        tokens = len(body) // BYTES_PER_TOKEN
        first = piece = _PIECE
        if _ASKED in body:
            prompt = ",".join(["1234"] * tokens)
            first, piece = _event(f'{_CHOICES},"prompt_token_ids":[{prompt}]'), _PIECE_WITH_ID
        self._write(_STREAM_HEAD % self._named + first)
        self._timer = self._loop.call_later(pace_s, self._next, chunks - 1, pace_s, tokens, piece)

    def _next(self, left: int, pace_s: float, tokens: int, piece: bytes) -> None:
        if left > 0:
            self._write(piece)
            self._timer = self._loop.call_later(pace_s, self._next, left - 1, pace_s, tokens, piece)
            return
        self._timer = None
        usage = (
            f'"choices":[],"usage":{{"prompt_tokens":{tokens},"completion_tokens":200,"total_tokens":{tokens + 200}}}'
        )
        self._write(_event(usage) + _DONE)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def serve(job: Job) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    page = pages.page("vllm", job.page_bytes) if job.page_bytes else METRICS.encode()
    servers = [
        await loop.create_server(partial(Connection, page, job.regions.get(host, "")), host, job.port, backlog=4096)
        for host in job.hosts
    ]
    print(f"upstream on {job.port}", flush=True)
    await stop.wait()
    for server in servers:
        server.close()


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Job)))
