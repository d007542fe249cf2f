"""A query of death: what a body costs is counted in objects and bytes, and is bounded by its size."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
from relay_wire import post, until

from farhop.balance.bounds import ByteBudget
from farhop.relay.formats import bodies, cacheable, openai, resumption, shape
from farhop.relay.formats.field_guard import KNOWN
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError
from farhop.relay.formats.resumption import Unresumable
from farhop.relay.formats.text_resumption import TextProgress
from farhop.relay.http.body import ChunkedBody, FramingError
from farhop.relay.http.connection import LargeBodyQueue
from farhop.relay.http.exchange import Exchange
from farhop.relay.http.head import UNREAD
from farhop_lab.bench.hostile import crafted

SIZE = 1 << 18
made = cache(crafted)  # all of one size once
KINDS = {
    "/v1/chat/completions": Kind.CHAT,
    "/v1/completions": Kind.COMPLETION,
    "/v1/rerank": Kind.RERANK,
}
# A text of one wide character takes four bytes for each, and its copy in the chain's form one more; the items of a body
# of this size as much again.
PARSED_MAX = 14


def _peak(path: str, body: bytes) -> int:
    tracemalloc.start()
    try:
        with suppress(BodyError):  # refused or not: the time to find out is measured
            bodies.read(KINDS[path], body)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("what", list(crafted(4096)))
def test_reading_allocates_in_proportion_to_the_body(what: str) -> None:
    path, body = made(SIZE)[what]
    assert _peak(path, body) < PARSED_MAX * len(body) + (3 << 20), what


@pytest.mark.parametrize("item", [b"{}", b"[]", b'""', b"null", b'{"type":"text","text":""}'])
def test_a_megabyte_of_items_is_refused_before_any_is_built(item: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"u","content":[' + b",".join([item] * ((1 << 20) // len(item))) + b"]}]}"
    tracemalloc.start()
    try:
        with pytest.raises(BodyError, match="too many values"):
            bodies.read(Kind.CHAT, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * len(body)  # its objects were 100 MB


_FRACTIONS = b'{"model":"m","messages":[{"role":"u","content":"x"}],"tools":[[%b]]}'


def _cpu_s(body: bytes) -> float:
    began = time.process_time()
    bodies.read(Kind.CHAT, body)
    return time.process_time() - began


@pytest.mark.parametrize("hard", [b"9e307", b"5e-324", b"1.7976931348623157e308"])
def test_no_fraction_is_dearer_to_read_than_others(hard: bytes) -> None:
    """msgspec's own way took 200 times as long for such: 360 ms for a body of 256 KiB."""
    plain = _FRACTIONS % b",".join([b"0.5"] * 8000)
    body = _FRACTIONS % b",".join([hard] * 8000)
    ratio = min(_cpu_s(body) for _ in range(5)) / min(_cpu_s(plain) for _ in range(5))
    assert ratio < 20  # about 5, and the rest for other work here


@pytest.mark.parametrize("one", [b"0.5", b"9e307"])
def test_the_number_of_fractions_in_a_body_is_bounded(one: bytes) -> None:
    """16,000 of them took 3.6 times the CPU of a prompt as long as bodies may be."""
    for count in (shape.FRACTIONS_MAX, shape.FRACTIONS_MAX):  # each body has as many
        bodies.read(Kind.CHAT, _FRACTIONS % b",".join([one] * count))
    with pytest.raises(BodyError, match="with a fraction or an exponent: at most 8192"):
        bodies.read(Kind.CHAT, _FRACTIONS % b",".join([one] * (shape.FRACTIONS_MAX + 1)))


@pytest.mark.parametrize("beyond", [b"1e400", b"-1E+309", b"1" * 310 + b".5"])
@pytest.mark.parametrize("size", [0, 9000])  # on both sides of the bound on its size
def test_a_number_beyond_all_doubles_is_refused_wherever_it_stands(beyond: bytes, size: int) -> None:
    fields = b'{"model":"m","repetition_penalty":%b,"messages":[{"role":"u","content":"%b"}]}' % (beyond, b"x" * size)
    with pytest.raises(BodyError) as caught:
        bodies.read(Kind.CHAT, fields)
    assert (caught.value.detail, caught.value.param) == ("Number out of range", None)


_VALUES = (
    b"null", b"true", b"0", b"5", b"-1", b"1.5", b"1e3", b'"a"', b'"6"', b"[]", b"{}", b"[1]", b"[null]", b"[{}]",
    b'{"a":1}', b'[{"type":{}}]', b'[{"role":5}]', b'[{"role":"user","content":[{"type":1.5}]}]', b"9" * 30,
)  # fmt: skip
_ASKED = {
    Kind.CHAT: (b"/v1/chat/completions", {b"messages": b'[{"role":"user","content":"x"}]', b"max_tokens": b"5"}),
    Kind.MESSAGES: (b"/v1/messages", {b"messages": b'[{"role":"user","content":"x"}]', b"max_tokens": b"5"}),
    Kind.COMPLETION: (b"/v1/completions", {b"prompt": b'"x"', b"max_tokens": b"5"}),
    Kind.EMBEDDINGS: (b"/v1/embeddings", {b"input": b'"x"'}),
}


@pytest.mark.parametrize("kind", _ASKED)
def test_any_value_of_any_field_in_an_accepted_body_is_handled(kind: Kind) -> None:
    """`logit_bias: 5` was a 500 where answers are given again."""
    path, asked = _ASKED[kind]
    for name in sorted(KNOWN):
        for value in _VALUES:
            fields = {b"model": b'"m"', b"temperature": b"0", b"stream": b"true", **asked, name.encode(): value}
            body = b"{%b}" % b",".join(b'"%b":%b' % field for field in fields.items())
            try:
                prompt = bodies.read(kind, body, path)
            except BodyError:
                continue
            body = openai.change(body, prompt, "salt").of(body)
            assert cacheable.asked(kind, path, b"", body, "", b"key", stream=prompt.stream)
            for text in (False, True):
                with suppress(Unresumable):
                    made = resumption.plan(path, body, text=text)
                    assert TextProgress(made, body, sends_usage=True).can_resume is False  # it has reported nothing


@pytest.mark.parametrize("count", [700, 16_000])
@pytest.mark.parametrize(
    "template",
    [
        b'{"model":"m","messages":[{"role":"u","content":[{"type":"image_url",%b}]}]}',
        b'{"model":"m","messages":[{"role":"u","content":"","tool_calls":[{"type":"function",%b}]}]}',
        b'{"model":"m","messages":[{"role":"u","content":"x"}],"tools":[{"type":"function",%b}]}',
        b'{"model":"m","messages":[{"role":"u","content":"x"}],%b}',
        b'{"model":"m","messages":[{"role":"u","content":"x"}],"vllm_xargs":{%b}}',
        b'{"model":"m","messages":[{"role":"u","content":"x"}],"nvext":{"a":[{%b}]}}',
    ],
)
def test_an_object_with_too_many_members_is_refused(template: bytes, count: int) -> None:
    """16,384 of them, a first one that belongs last before them, took 270 ms, and all other requests waited."""
    body = template % b",".join(b'"f%05d":1' % i for i in range(count))
    with pytest.raises(BodyError, match="too many members: at most 512"):
        bodies.read(Kind.CHAT, body)
    assert bodies.read(Kind.CHAT, template % b",".join(b'"f%05d":1' % i for i in range(400))).model == "m"


def test_many_small_objects_in_nvext_are_refused() -> None:
    hints = b",".join([b'{"a":1}'] * 600)
    with pytest.raises(BodyError, match="`nvext` has too many members"):
        bodies.read(Kind.CHAT, b'{"model":"m","messages":[{"role":"u","content":"x"}],"nvext":{"a":[%b]}}' % hints)


def test_tokens_may_be_biased_by_the_thousand() -> None:
    bias = b",".join(b'"%d":-100' % i for i in range(8000))
    body = b'{"model":"m","messages":[{"role":"u","content":"x"}],"temperature":0,"logit_bias":{%b}}' % bias
    assert bodies.read(Kind.CHAT, body).model == "m"
    assert cacheable.asked(Kind.CHAT, b"/", b"", body, "", None, stream=False) == "body"


@pytest.mark.parametrize("size", [1, 2, 7])
def test_tiny_chunks_of_a_body_are_joined_not_kept_one_by_one(size: int) -> None:
    """However small the pieces in which a body comes, an object for each would be 20 times its bytes."""
    exchange = Exchange(SimpleNamespace(is_hop=False), UNREAD)  # type: ignore[arg-type]
    for _ in range(20_000):
        exchange.gather(b"x" * size)
    assert len(exchange._parts or ()) <= 1 + 20_000 * size // (16 * 1024)
    assert exchange.gathered() == b"x" * 20_000 * size
    assert exchange.gathered() == b""


def test_tiny_chunks_of_one_read_are_one_piece() -> None:
    made, parts = ChunkedBody(of_request=True), list[bytes]()
    made.feed(b"2\r\nab\r\n" * 5000, parts)
    assert b"".join(parts) == b"ab" * 5000
    assert len(parts) < 10


def test_tiny_chunks_of_many_sizes_end_before_they_cost_much() -> None:
    made, parts, turns = ChunkedBody(of_request=True), list[bytes](), 0
    with pytest.raises(FramingError, match="too many chunks"):
        for _ in range(100_000):
            turns += 1
            made.feed(b"1\r\na\r\n2\r\nbc\r\n", parts)
    assert turns < 2000


@pytest.mark.parametrize("cut", range(1, 23))
def test_runs_of_chunks_are_read_the_same_however_they_are_cut(cut: int) -> None:
    wire = b"2\r\nab\r\n" * 40 + b"3\r\n\r\n2\r\n" + b"1\r\nx\r\n" * 30 + b"10\r\n" + b"y" * 16 + b"\r\n0\r\n\r\nrest"
    made, parts, rest = ChunkedBody(of_request=True), list[bytes](), None
    for at in range(0, len(wire), 97 + cut):
        rest = made.feed(wire[at : at + 97 + cut], parts) if rest is None else rest + wire[at : at + 97 + cut]
    assert b"".join(parts) == b"ab" * 40 + b"\r\n2" + b"x" * 30 + b"y" * 16
    assert rest == b"rest"


async def test_memory_for_parsing_a_body_is_taken_from_the_budget(stage: Any) -> None:
    """What parsing takes beside a body is taken from the budget while it is read."""
    s = await stage(budget_bytes=1 << 20)
    assert (await s.ask(post(b"x" * 100_000))).status == 200
    assert (await s.ask(post(b"x" * 400_000))).status == 503
    assert isinstance(s.budget, ByteBudget)


async def test_large_bodies_are_read_one_in_a_turn_of_the_loop() -> None:
    loop, done = asyncio.get_running_loop(), list[str]()
    queue = LargeBodyQueue(loop)
    for name in ("a", "b", "c"):
        queue.add(partial(done.append, name))
    seen = []
    while len(done) < 3:
        await asyncio.sleep(0)
        seen.append(len(done))
    assert done == ["a", "b", "c"]
    assert seen == [1, 2, 3]  # others came between them


async def test_a_client_that_leaves_before_its_body_is_read_is_counted_once(stage: Any) -> None:
    s = await stage()
    held: list[Any] = []
    s.listener.large_bodies.add = held.append
    c = await s.client()
    await c.send(post(b"x" * 100_000))
    await until(lambda: held)
    c.abort()
    await until(lambda: s.handler.abandoned)
    held[0]()
    assert (s.handler.abandoned, s.handler.exchanges) == ([("client_left", 0)], [])


@pytest.mark.parametrize("part", [b"{}", b'{"type":"image_url","image_url":{"url":"data:,"}}', b'{"type":"text"}'])
def test_the_number_of_media_parts_in_a_body_is_bounded(part: bytes) -> None:
    """In 200 KB there were 4,000 of them, which took four times the CPU of a megabyte of prompt."""
    message = b'{"role":"u","content":[%b]}'
    for count in (openai.MEDIA_MAX // 2, openai.MEDIA_MAX // 2 + 1):
        messages = b",".join([message % b",".join([part] * count)] * 2)
        body = b'{"model":"m","messages":[%b]}' % messages
        if count * 2 <= openai.MEDIA_MAX:
            assert bodies.read(Kind.CHAT, body).opaque_bytes
            continue
        with pytest.raises(BodyError, match="too many parts that are no text: at most 2048"):
            bodies.read(Kind.CHAT, body)
    texts = b",".join([b'{"type":"text","text":"x"}'] * 3000)
    assert bodies.read(Kind.CHAT, b'{"model":"m","messages":[%b]}' % (message % texts)).model == "m"
