"""The route receipt: if asked for and allowed, it shows the decision; it shows nothing of other tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from inprocess import HOP_KEY, Both, Engine, both, chat, head, send, streaming, tenant, topology

from global_lb.app import receipt as receipts
from topology.law import Law
from topology.law_document import document_of, map_of
from topology.load import of

ASKS = {"x-farhop-explain": "1"}


def seeing(name: str, **more: Any) -> dict[str, Any]:
    """A tenant whose key may see receipts."""
    made = tenant(name, **more)
    made["keys"][0]["explain"] = True
    return made


WORLD = topology(
    seeing("curious"),
    seeing("european", residency={"processing": {"allow": ["eu"]}, "entry": {"allow": ["world"]}}),
    seeing("american", residency={"processing": {"allow": ["us"]}}),
    tenant("secretive"),
)


@pytest.fixture
async def up(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Both]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with Engine().running() as engine, both(engine, WORLD) as running:
        yield running


async def asked(up: Both, who: str, **headers: str) -> tuple[int, Any]:
    answer = await send(up.entry, chat(f"sk-farhop-{who}", body=streaming("a-secret-prompt"), **headers))
    reply = answer.headers.get("x-farhop-receipt")
    assert reply is None or "a-secret-prompt" not in reply
    return answer.status, None if reply is None else msgspec.json.decode(reply)


async def test_a_receipt_is_given_if_allowed_and_requested(up: Both) -> None:
    status, answer = await asked(up, "curious", **ASKS)
    assert status == 200
    assert (answer["chosen"], answer["policy"], answer["unit"]) == ("virginia", "predictive", "ms")
    assert answer["candidates"][0]["region"] == "virginia"
    assert answer["candidates"][0]["score"] > 0
    assert answer["margin"] is None  # no other region serves
    assert set(answer["not_serving"]) == {"frankfurt", "tokyo"}
    assert answer["excluded_by_law"] == {}
    assert answer["law_epoch"] == up.global_.flow.law.epoch


async def test_what_the_law_excluded_is_counted_by_the_tenants_own_clause_and_not_named(up: Both) -> None:
    status, answer = await asked(up, "american", **ASKS)
    assert status == 200
    assert answer["excluded_by_law"] == {"tenant american: processing allows only us": 2}
    assert not {"frankfurt", "tokyo"} & set(msgspec.json.encode(answer).decode().split('"'))
    status, answer = await asked(up, "european", **ASKS)  # a refusal has one, too
    assert (status, answer["chosen"], answer["candidates"]) == (503, None, [])
    assert answer["not_serving"] == ["frankfurt"]


async def test_a_receipt_is_refused_without_permission_and_absent_unless_requested(up: Both) -> None:
    status, answer = await asked(up, "secretive", **ASKS)
    assert status == 200
    assert list(answer) == ["refused"]
    for headers in ({}, {"x-farhop-explain": "0"}, {"x-farhop-explain": "yes"}):
        assert (await asked(up, "curious", **headers))[1] is None


MODEL = st.sampled_from(["m", "llama\r\nset-cookie: a=b", "\u202emodel", "x" * 200])


@given(
    model=MODEL,
    rule=st.sampled_from([{"allow": ["eu"]}, {"allow": ["world"], "deny": ["jp"]}, {"allow": ["us", "jp"]}]),
    place=st.sampled_from([["us"], ["eu"], ["world"]]),
)
def test_places_of_others_and_of_models_are_never_named_and_the_header_is_one_line(model, rule, place):
    raw = {**map_of(WORLD), **document_of(WORLD)}
    raw["tenants"] = [
        seeing("mine", residency={"processing": {"allow": place}}),
        tenant("rival", residency={"processing": {"allow": ["jp"]}}),
    ]
    world = of({**raw, "models": {model: rule}}, "test")
    verdict = Law(world).verdict("mine", model)
    decision: Any = type("D", (), {"verdict": verdict})()
    found = receipts.excluded(decision)
    assert sum(found.values()) == len(verdict.excluded)
    text = str(found)
    assert "rival" not in text
    assert "jp" not in text
    for region in verdict.excluded:
        assert region not in text


def test_the_line_is_ascii_and_of_one_line():
    key = next(iter(WORLD.tenants["curious"].keys))
    request: Any = type("R", (), {"tenant": "curious", "key": key.name, "alias": ""})()
    route = type("P", (), {"policy": type("Q", (), {"name": "a\r\nx: y", "unit": "m\u00e9"})()})()
    verdict = Law(WORLD).verdict("curious", "m")
    fields = {"verdict": verdict, "ranked": (), "chosen": None, "ties": {}, "spilled_from": None, "absent": {}}
    decision: Any = type("D", (), {**fields, "route": route})()
    asking: Any = type("H", (), {"get": lambda _self, name: b"1" if name == receipts.EXPLAIN else None})()
    line = receipts.receipt(asking, request, None, decision, WORLD)
    assert line.startswith(b"x-farhop-receipt: {")
    assert line.endswith(b"}\r\n")
    assert line.count(b"\r\n") == 1
    assert line.isascii()
    assert receipts.receipt(asking, request, None, None, WORLD) == b""


def test_a_stream_ends_with_a_receipt_comment_for_keys_with_the_right():
    key = next(iter(WORLD.tenants["curious"].keys))
    request: Any = type("R", (), {"tenant": "curious", "key": key.name, "alias": ""})()
    asking: Any = type("H", (), {"get": lambda _self, name: b"1" if name == receipts.EXPLAIN else None})()
    silent: Any = type("H", (), {"get": lambda _self, _name: None})()
    went = [("tokyo", "connect_failed")]
    assert receipts.tail(asking, request, None, WORLD, went, 93.416) == (
        b': x-farhop-receipt {"ttft_ms":93.42,"before":[{"region":"tokyo","outcome":"connect_failed"}]}\n\n'
    )
    assert receipts.tail(silent, request, None, WORLD, went, 93.4) == b""
    stranger: Any = type("R", (), {"tenant": "curious", "key": "another"})()
    assert receipts.tail(asking, stranger, None, WORLD, went, 93.4) == b""


class Mute(Engine):
    """It answers with a stream of nothing."""

    async def _chat(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(headers={"Content-Type": "text/event-stream"})


async def test_an_empty_stream_has_no_receipt_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a length, and the next answer on the client's connection begins there."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    engine = Mute()
    async with engine.running(), both(engine, WORLD) as up:
        first = chat("sk-farhop-curious", streaming(), x_farhop_explain="1").replace(b"connection: close\r\n", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", up.entry)
        async with asyncio.timeout(60.0):
            writer.write(first + head("GET", "/v1/models", authorization="Bearer sk-farhop-curious"))
            wire = await reader.read()
        writer.close()
        begun, _, rest = wire.partition(b"\r\n\r\n")
        assert b"content-length: 0" in begun
        assert rest.startswith(b"HTTP/1.1 200 OK\r\n"), rest[:40]
