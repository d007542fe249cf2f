"""Engines that nobody here wrote, as HTTP/1.x and server-sent events allow them to be, or do not: what such a one says
reaches the client of both tiers byte by byte, or is refused at once with its reason."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from inprocess import MODEL, PAGE, Answer, Engine, both, chat, send, streaming, tenant, topology

CLOSE = None  # instead of a piece: the engine closes the connection


class OddEngine(Engine):
    """Answers a GET as any engine does, and a POST with `pieces`, each in a segment of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: Sequence[bytes | None] = []

    @asynccontextmanager
    async def odd(self) -> AsyncIterator[OddEngine]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._come, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
                await reader.readexactly(int(fields.get(b"content-length", b"0")))
                if head.startswith(b"GET"):
                    known = {b"/health": b"", b"/metrics": PAGE.encode()}
                    page = known.get(head.split()[1])
                    writer.write(framed(page or b"", b"HTTP/1.1 200 OK" if page is not None else b"HTTP/1.1 404 No"))
                    continue
                for piece in self.pieces:
                    if piece is CLOSE:
                        return
                    writer.write(piece)
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the balancer closed the connection, as it may at any time
        finally:
            writer.close()


def framed(body: bytes, first: bytes = b"HTTP/1.1 200 OK", *more: bytes) -> bytes:
    """An answer with its length."""
    return b"\r\n".join((first, *more, b"content-length: %d" % len(body), b"", body))


def chunks(*parts: bytes, more: bytes = b"", trailers: bytes = b"") -> bytes:
    """A stream, each part a chunk."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n%b\r\n" % more
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n%b\r\n" % trailers


def event(text: str, begins: bytes = b"data: ", end: bytes = b"\n") -> bytes:
    """A chunk of a chat."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    document = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return begins + json.dumps(document).encode() + 2 * end


WHOLE = json.dumps({"id": "c1", "choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 1}}).encode()
STREAM = event("a") + event("b") + b"data: [DONE]\n\n"
ZIPPED = gzip.compress(WHOLE, mtime=0)
OK, JSON = b"HTTP/1.1 200 OK", b"content-type: application/json"
PLAIN = framed(WHOLE, OK, JSON)
CRLF = event("a", end=b"\r\n") + event("b", end=b"\r\n") + b"data: [DONE]\r\n\r\n"
BARE = event("a", b"data:") + event("b", b"data:") + b"data:[DONE]\n\n"
NOTES = (
    b": ping\n\nretry: 9\nid: 1\nevent: message\n" + event("a") + b":\n\n: keep\n" + event("b") + b"data: [DONE]\n\n"
)
LINES = b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
LONG = event("x" * (1 << 20)) + b"data: [DONE]\n\n"

PASSED: dict[str, tuple[Sequence[bytes | None], bytes]] = {
    "header by header": ([line + b"\n" for line in PLAIN.split(b"\n")[:-1]] + [WHOLE], WHOLE),
    "byte by byte": ([*map(bytes, zip(PLAIN))], WHOLE),
    "a stream byte by byte": ([*map(bytes, zip(chunks(STREAM)))], STREAM),
    "trailers": ([chunks(STREAM, more=b"trailer: x-sum\r\n", trailers=b"x-sum: 1\r\n")], STREAM),
    "chunk extensions": ([chunks(STREAM).replace(b"\r\n" + STREAM, b";a=b\r\n" + STREAM)], STREAM),
    "a chunk size with zeros": ([chunks(STREAM).replace(b"%x\r\n" % len(STREAM), b"000%x\r\n" % len(STREAM))], STREAM),
    "interim answers": ([b"HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 103 Hint\r\nlink: </a>\r\n\r\n", PLAIN], WHOLE),
    "HTTP/1.0": ([b"HTTP/1.0 200 OK\r\n" + JSON + b"\r\n\r\n" + WHOLE, CLOSE], WHOLE),
    "HTTP/1.0, a stream": ([b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", STREAM, CLOSE], STREAM),
    "no reason phrase": ([framed(WHOLE, b"HTTP/1.1 200", JSON)], WHOLE),
    "gzip that nobody asked for": ([framed(ZIPPED, OK, JSON, b"content-encoding: gzip")], ZIPPED),
    "a length too short": ([PLAIN + b"more", CLOSE], WHOLE),
    "an end, and more chunks": ([chunks(STREAM) + b"1\r\nx\r\n0\r\n\r\n"], STREAM),
    "CR LF": ([chunks(CRLF)], CRLF),
    "CR alone": ([chunks(STREAM.replace(b"\n", b"\r"))], STREAM.replace(b"\n", b"\r")),
    "no space": ([chunks(BARE)], BARE),
    "comments, names, ids": ([chunks(*NOTES.splitlines(keepends=True))], NOTES),
    "data of several lines": ([chunks(LINES)], LINES),
    "a byte order mark": ([chunks(b"\xef\xbb\xbf" + STREAM)], b"\xef\xbb\xbf" + STREAM),
    "empty lines": ([chunks(b"\n\n\n", STREAM)], b"\n\n\n" + STREAM),
    "no UTF-8": ([chunks(STREAM.replace(b'"a"', b'"\xff"'))], STREAM.replace(b'"a"', b'"\xff"')),
    "an event of a megabyte": ([chunks(LONG)], LONG),
    "a whole answer to who asked for a stream": ([PLAIN], WHOLE),
}
REFUSED: dict[str, Sequence[bytes | None]] = {
    "a length of no digits": [framed(WHOLE, OK, JSON).replace(b"length: ", b"length: +")],
    "two lengths": [framed(WHOLE, OK, b"content-length: 1")],
    "a length, and chunks": [chunks(STREAM, more=b"content-length: 9\r\n")],
    "a coding that nobody asked for": [chunks(STREAM).replace(b": chunked", b": gzip, chunked")],
    "another protocol": [b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n"],
    "lines that end with LF": [PLAIN.replace(b"\r\n", b"\n")],
    "chunks whose lines end with LF": [chunks().removesuffix(b"0\r\n\r\n") + b"1\nx\n0\n\n"],
    "a header over two lines": [framed(WHOLE, OK, b"x-a: b\r\n c")],
    "a space before the colon": [framed(WHOLE, OK, b"x-a : b")],
    "a zero byte": [framed(WHOLE, OK, b"x-a: \0")],
    "a status of its own": [framed(b"", b"HTTP/1.1 999 Odd")],
    "TLS": [b"\x16\x03\x01\x02\x00", CLOSE],
    "HTTP/0.9": [WHOLE, CLOSE],
    "nothing": [CLOSE],
    "a head without end": [b"HTTP/1.1 200 OK\r\n", CLOSE],
    "a megabyte of one header": [framed(WHOLE, OK, b"x-a: " + b"a" * (1 << 20))],
    "headers without end": [framed(WHOLE, OK, *(b"x-%d: a" % n for n in range(300)))],
}


async def test_unusual_engine_answers_pass_or_are_refused_with_a_reason() -> None:
    """The time of `send` is the bound: what is not whole in it was waited for."""

    async def asked(name: str, pieces: Sequence[bytes | None]) -> Answer:
        engine.pieces = pieces
        try:
            streams = b"event-stream" in b"".join(filter(None, pieces))
            return await send(up.entry, chat(body=streaming() if streams else None))
        except TimeoutError:
            pytest.fail(f"{name}: no answer", pytrace=False)

    async with OddEngine().odd() as engine, both(engine, topology(), regional={"watch": {"probe_s": 0.05}}) as up:
        for name, (pieces, body) in PASSED.items():
            answer = await asked(name, pieces)
            assert (name, answer.status, answer.body == body) == (name, 200, True), answer.body[:400]
        for name, pieces in REFUSED.items():
            answer = await asked(name, pieces)
            assert answer.status in (502, 503), (name, answer.body[:400])
            assert "virginia: upstream_" in answer.json["error"]["message"], name
        await up.at_rest()


ROOT = {"id": MODEL, "root": "secret"}
LISTED = [
    [ROOT], [ROOT, {"id": None}], [ROOT, {"object": "model"}], [ROOT, "x"], [ROOT, {"id": "other", "parent": 3}],
    [{"id": MODEL, "root": "fine"}, ROOT],
    [{"id": MODEL, "parent": ["secret"]}],
    [{"id": MODEL, "root": {"a": "secret"}}],
]  # fmt: skip


@pytest.mark.parametrize("listed", LISTED)
async def test_no_oddity_of_a_listing_hides_from_the_law_what_a_model_is_based_on(
    engine: Engine, listed: list[Any]
) -> None:
    """The tenant's law forbids here whatever is based on one model."""
    engine.models = listed
    world = topology(tenant("careful", models={"secret": {"deny": ["us"]}}))
    async with both(engine, world) as up:
        assert (await send(up.client, chat(key="sk-farhop-careful"))).status == 451
        answer = await send(up.entry, chat(key="sk-farhop-careful"))
        assert answer.status in (451, 503), answer.body  # 503: elsewhere it would be lawful
        assert engine.seen == []
