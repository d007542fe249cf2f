"""What is read in another process is what would be read here, and when it ends only its body is lost."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import MODEL, Both, Engine, both, chat, send, tenant, topology, until

import global_lb.app.serve
import regional_lb.mesh.report
from farhop.balance import outcome
from farhop.balance.prefix import chain
from farhop.relay.formats import bodies, openai
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError
from farhop.service.admission import ingress, large_bodies
from farhop.service.admission.large_bodies import LARGE_BYTES, Job, LargeBodyReader, ParsedBody, ReaderError, read
from farhop_lab.bench.hostile import crafted
from tests.conftest import unhindered

made = cache(crafted)  # all of one size once
KINDS = {"/v1/chat/completions": Kind.CHAT, "/v1/completions": Kind.COMPLETION, "/v1/rerank": Kind.RERANK}


def job(kind: Kind = Kind.CHAT, **more: Any) -> Job:
    return Job(kind, b"", b"", (), False, **more)


def text(size: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "word " * (size // 5)}], "max_tokens": 4, **more}


@pytest.fixture
def wire() -> Iterator[socket.socket]:
    """The other side as a thread: what goes over the wire is the same."""
    ours, its = socket.socketpair()
    serving = threading.Thread(target=large_bodies.serve, args=(its,))
    serving.start()
    yield ours
    ours.close()
    serving.join()
    its.close()


def asked(link: socket.socket, what: Job, body: bytes) -> ParsedBody:
    large_bodies.send_message(link, msgspec.msgpack.encode(what), body)
    return large_bodies.received_message(link, len(body))


@pytest.mark.parametrize("what", list(crafted(2048)))
def test_the_reader_process_returns_what_reading_in_process_gives(wire: socket.socket, what: str) -> None:
    path, body = made(40_000)[what]
    for scope in (None, "acme"):
        wanted = job(KINDS[path], scope=scope, hashed=True, signed=True, session_field="user")
        found = asked(wire, wanted, body)
        assert found == read(wanted, body)
        if found.prompt is None:
            refused = found.refusal()
            with pytest.raises(BodyError) as caught:
                bodies.read(KINDS[path], body)
            error = caught.value
            assert (refused.outcome, refused.detail, refused.param) == (error.outcome, error.detail, error.param)
            continue
        prompt = bodies.read(KINDS[path], body)
        assert found.prompt == prompt
        salt = openai.salt_of(KINDS[path], prompt, scope)
        assert found.change.of(body) == openai.change(body, prompt, salt).of(body)
        assert found.onward_sha256 == hashlib.sha256(found.change.of(body)).digest()


@pytest.mark.parametrize(
    "body",
    [
        msgspec.json.encode(text(100))[:-1] + b',"max_completion_tokens":' + b"9" * 400 + b"}",
        msgspec.json.encode(text(100) | {"model": "m" * (3 << 20)}),
        msgspec.json.encode(text(100) | {"cache_salt": "s" * (3 << 20)}),
        msgspec.json.encode(text(100) | {"u" * (3 << 20) + "_url": 1}),
    ],
    ids=["tokens", "model", "salt", "field"],
)
def test_no_value_of_a_body_is_too_large_for_the_wire(wire: socket.socket, body: bytes) -> None:
    assert asked(wire, job(), body) == read(job(), body)
    assert asked(wire, job(), msgspec.json.encode(text(100))).prompt is not None


@given(st.binary(max_size=80), st.sampled_from(Kind))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_large_body_gets_an_answer(body: bytes, kind: Kind) -> None:
    if kind not in (Kind.MODELS, Kind.VERSION):
        found = read(job(kind), body)
        assert found.prompt is not None or found.refusal().detail


def test_a_prompt_that_no_chain_covers_is_cut_and_counted_whole() -> None:
    body = msgspec.json.encode(text(5 << 20, user="u1", stream=True, stream_options={}, extra_thing=1))
    found, whole = read(job(session_field="user"), body), bodies.read(Kind.CHAT, body)
    prompt = found.prompt
    assert prompt is not None
    assert len(prompt.canonical) == chain.bytes_at(chain.DEPTH_MAX)
    assert chain.chain(prompt.canonical, 1) == chain.chain(whole.canonical, 1)
    assert len(prompt.canonical) + prompt.opaque_bytes == len(whole.canonical) + whole.opaque_bytes
    assert (found.session, found.unknown) == (b"u1", ["extra_thing"])
    assert msgspec.json.decode(found.change.whole)["stream_options"] == {"include_usage": True}


@pytest.fixture
async def apart() -> AsyncIterator[LargeBodyReader]:
    made = LargeBodyReader()
    yield made
    made.close()


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


async def test_the_process_has_one_thread(apart: LargeBodyReader) -> None:
    """NumPy's would each spin for 40 ms of CPU, once it is imported, for work that there is none of."""
    assert (await apart.later(job(), msgspec.json.encode(text(LARGE_BYTES)))).prompt is not None
    assert apart.process is not None
    assert _threads(apart.process.child.pid) == 1


async def test_a_reader_process_that_stalls_or_dies_fails_one_body_and_is_replaced(
    apart: LargeBodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = msgspec.json.encode(text(LARGE_BYTES))
    assert (await apart.later(job(), body)).prompt is not None
    assert apart.process is not None
    first = apart.process.child.pid
    assert not [line for line in _environment(first) if b"FARHOP" in line]  # no keys
    os.kill(first, signal.SIGSTOP)
    apart.process.link.settimeout(0.2)
    with pytest.raises(ReaderError, match="ended over one of"):
        await apart.later(job(), body)
    assert (await apart.later(job(), body)).prompt is not None
    assert apart.process is not None
    assert apart.process.child.pid != first
    assert apart.counts == {"read": 2, "here": 0, "failed": 1}


async def test_tenants_take_turns_and_a_cancelled_body_has_none(
    apart: LargeBodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred bodies of one tenant are not before the one of another."""
    go, order = threading.Event(), list[bytes]()

    def ask(_job: Job, body: bytes) -> ParsedBody:
        assert go.wait(60.0)
        order.append(body)
        if body == b"crowd 2":
            raise ReaderError("it died")
        return ParsedBody(None, detail=body.decode())

    monkeypatch.setattr(apart, "_ask", ask)
    crowd = [apart.later(job(), b"crowd %d" % number, "crowd") for number in range(5)]
    one, other, left = (apart.later(job(), name.encode(), name) for name in ("one", "other", "left"))
    left.cancel()
    crowd[3].cancel()
    again = apart.later(job(), b"one again", "one")
    go.set()
    found = await asyncio.gather(*crowd, one, other, again, return_exceptions=True)
    assert order == [b"crowd 0", b"crowd 1", b"one", b"other", b"crowd 2", b"one again", b"crowd 4"]
    assert isinstance(found[2], ReaderError)
    assert isinstance(found[3], asyncio.CancelledError)
    assert (await other).detail == "other"


async def test_a_cancelled_large_body_does_not_delay_the_next_one(
    apart: LargeBodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def ask(_job: Job, body: bytes) -> ParsedBody:
        begun.set()
        assert go.wait(60.0)
        return ParsedBody(None, detail=body.decode())

    monkeypatch.setattr(apart, "_ask", ask)
    first, second = apart.later(job(), b"first"), apart.later(job(), b"second")
    await asyncio.to_thread(begun.wait, 60.0)
    first.cancel()
    go.set()
    assert (await second).detail == "second"


async def test_where_no_process_can_be_started_a_thread_reads(
    apart: LargeBodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert (await apart.later(job(), msgspec.json.encode(text(1000)))).prompt is not None
    assert apart.counts["here"] == 1


async def test_closing_does_not_wait_for_a_stalled_reader_process(apart: LargeBodyReader) -> None:
    await apart.later(job(), msgspec.json.encode(text(1000)))
    assert apart.process is not None
    child = apart.process.child
    os.kill(child.pid, signal.SIGSTOP)
    waiting = [apart.later(job(), msgspec.json.encode(text(1000))) for _ in range(3)]
    await asyncio.sleep(0.05)
    took_s = unhindered()
    apart.close()
    assert took_s() < large_bodies.PATIENCE_S / 2
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, ReaderError | asyncio.CancelledError) for one in ended)
    assert child.returncode is not None


# -- through both tiers


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine().running() as made:
        yield made


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    async with both(engine, topology(tenant("t"))) as made:
        yield made


@pytest.mark.parametrize("region", ["now", "older"])
async def test_large_bodies_go_through_both_tiers_as_small_ones_do(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, region: str
) -> None:
    # If a token is bound to a hash, the hash is computed in the other process.
    monkeypatch.setattr(global_lb.app.serve, "hashlib", None)
    monkeypatch.setattr(ingress, "hashlib", None)
    if region == "older":  # its reports do not say that it checks the MAC of a body
        monkeypatch.setattr(regional_lb.mesh.report, "hop_token", SimpleNamespace(READ=0))
    async with both(engine, topology(tenant("t"))) as up:
        assert up.global_.reader.signs() == (region == "older")
        await through_both(up, engine)


async def test_a_body_of_thousands_of_parts_is_read_there_too_however_short_it_is(up: Both, engine: Engine) -> None:
    """200 KB of pictures held either loop for 20 ms."""
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = text(10) | {"messages": [{"role": "user", "content": [picture] * 2000}]}
    answer = await send(up.entry, chat("sk-farhop-t", body))
    assert answer.status == 200, answer.body
    seen = engine.seen[-1][1]
    assert {name: seen[name] for name in body} == body
    assert (up.global_.plane.large.counts["read"], up.regional.plane.large.counts["read"]) == (1, 1)
    refused = await send(up.client, chat(body=body | {"model": 7}))
    assert (refused.status, refused.json["error"]["param"]) == (400, "model")
    await up.at_rest()


async def test_an_agents_body_is_read_on_the_loop(up: Both) -> None:
    """64 tools and 300 messages, half of them with a call of a tool."""
    arguments = {f"a{i}": {"type": "string", "description": "what it is for"} for i in range(6)}
    function = {"name": "f", "description": "x" * 200, "parameters": {"type": "object", "properties": arguments}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a1":"{[,"}'}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "y" * 300}]
    body = text(10) | {"messages": turns * 150, "tools": [{"type": "function", "function": function}] * 64}
    assert (await send(up.entry, chat("sk-farhop-t", body))).status == 200
    assert (up.global_.plane.large.counts["read"], up.regional.plane.large.counts["read"]) == (0, 0)


async def test_a_mark_of_utf_8_is_taken_off_a_large_body_too(up: Both, engine: Engine) -> None:
    body = text(300_000)
    for entry in (up.entry, up.client):
        answer = await send(entry, chat("sk-farhop-t", bodies.BOM + msgspec.json.encode(body)))
        assert answer.status == 200, answer.body
        seen = engine.seen[-1][1]
        assert {name: seen[name] for name in body} == body
    assert up.global_.plane.large.counts["read"] == 1


async def through_both(up: Both, engine: Engine) -> None:
    body = text(300_000, stream=True)
    answer = await send(up.entry, chat("sk-farhop-t", body))
    assert answer.status == 200
    assert b"[DONE]" in answer.body
    assert b"usage" not in answer.body
    ((_, seen),) = engine.seen
    assert seen.pop("stream_options") == {"include_usage": True}
    seen.pop("cache_salt", None)
    assert seen == body
    assert (up.global_.plane.large.counts["read"], up.regional.plane.large.counts["read"]) == (1, 1)
    refused = await send(up.client, chat(body=text(300_000) | {"model": 7}))
    assert (refused.status, refused.code) == (400, "invalid_field")
    assert refused.json["error"]["param"] == "model"
    await up.at_rest()


async def test_a_client_that_leaves_while_its_large_body_is_read_is_counted_and_nothing_sent(
    up: Both, engine: Engine
) -> None:
    assert (await send(up.client, chat(body=text(300_000)))).status == 200  # the process is there
    assert up.regional.plane.large.process is not None
    child = up.regional.plane.large.process.child.pid
    os.kill(child, signal.SIGSTOP)
    _, writer = await asyncio.open_connection("127.0.0.1", up.client)
    writer.write(chat(body=text(300_000)))
    plane = up.regional.plane
    await until(lambda: plane.large._thread._work_queue.qsize() == 0 and plane.budget.used_bytes > 300_000)
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await up.at_rest()
    os.kill(child, signal.SIGCONT)
    assert (await send(up.client, chat(body=text(300_000)))).status == 200
    assert len(engine.seen) == 2


async def test_a_body_that_ends_the_reader_is_answered_and_ends_nothing_else(
    up: Both, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context["exception"]))

    def dies(*_: object) -> ParsedBody:
        raise EOFError

    with monkeypatch.context() as patched:
        patched.setattr(large_bodies.ParserProcess, "ask", dies)
        answer = await send(up.client, chat(body=text(300_000)))
    assert (answer.status, answer.code) == (500, outcome.INTERNAL.reason)
    assert isinstance(errors.pop(), ReaderError)
    assert (await send(up.client, chat(body=text(300_000)))).status == 200
    await up.at_rest()
    assert errors == []
