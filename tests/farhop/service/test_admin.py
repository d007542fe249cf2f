"""The admin port of either tier, asked over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from inprocess import MODEL, Both, Engine, both, chat, send, streaming, topology, until

from farhop.relay.http.listener import PortTakenError
from farhop.service.admin import AdminServer
from farhop.service.decisions import Decisions
from farhop.telemetry.metrics import TierMetrics


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine().running() as running:
        yield running


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    async with both(engine, topology()) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def _urls(up: Both, path: str) -> tuple[str, str]:
    return (f"http://127.0.0.1:{up.global_admin}{path}", f"http://127.0.0.1:{up.regional_admin}{path}")


async def _json(answer: aiohttp.ClientResponse) -> Any:
    assert answer.content_type == "application/json"
    return await answer.json()


async def test_metrics_are_prometheus_text(up: Both, http: aiohttp.ClientSession) -> None:
    await send(up.entry, chat())
    for tier, url in zip(("global", "regional"), _urls(up, "/metrics"), strict=True):
        async with http.get(url) as answer:
            text = await answer.text()
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        (counted,) = [line for line in text.splitlines() if line.startswith("farhop_requests_total{")]
        assert f'tier="{tier}"' in counted
        assert 'reason="served"' in counted
        assert "farhop_prefix_trie_nodes" in text


async def test_alive_and_ready(up: Both, http: aiohttp.ClientSession, engine: Engine) -> None:
    for path in ("/healthz", "/readyz"):
        for url in _urls(up, path):
            async with http.get(url) as answer:
                assert answer.status == 200
    engine.healthy = False
    await until(lambda: not up.regional.tier_admin.ready())
    async with http.get(_urls(up, "/readyz")[1]) as answer:
        assert (answer.status, await answer.text()) == (503, "not ready\n")
    up.global_.tier_admin.stopping = True
    async with http.get(_urls(up, "/readyz")[0]) as answer:
        assert answer.status == 503
    async with http.get(_urls(up, "/healthz")[0]) as answer:
        assert answer.status == 200


async def test_the_status_of_both_tiers(up: Both, http: aiohttp.ClientSession) -> None:
    async with http.get(_urls(up, "/status")[0]) as answer:
        status = await _json(answer)
    (region,) = status["regions"]
    assert (status["tier"], region["region"], region["state"]) == ("global", "virginia", "up")
    assert region["instances"][0]["models"][MODEL]["replicas_ready"] == 1
    async with http.get(_urls(up, "/status")[1]) as answer:
        status = await _json(answer)
    (replica,) = status["replicas"]
    assert (status["tier"], replica["replica"], replica["state"]) == ("regional", "one", "up")
    assert replica["engine_waiting"] == 0


async def test_a_decision_can_be_looked_up_in_both_tiers(up: Both, http: aiohttp.ClientSession) -> None:
    served = await send(up.entry, chat(body=streaming("xyzzy-plugh")))
    for url in _urls(up, f"/decisions/{served.headers['x-farhop-decision']}"):
        async with http.get(url) as answer:
            record = await _json(answer)
        assert answer.status == 200
        assert record["outcome"] == "served"
        assert "xyzzy" not in repr(record)
    for url in _urls(up, "/decisions/0000000000000000"):
        async with http.get(url) as answer:
            assert answer.status == 404
            assert "no such decision" in (await _json(answer))["error"]


async def _explain(http: aiohttp.ClientSession, url: str, question: Any) -> tuple[int, Any]:
    data = question if isinstance(question, bytes) else msgspec.json.encode(question)
    async with http.post(url, data=data) as answer:
        return answer.status, await _json(answer)


def _question(**more: Any) -> dict[str, Any]:
    return {"body": streaming("xyzzy-plugh"), "tenant": "anywhere", **more}


async def test_explain_says_where_a_request_would_go(up: Both, http: aiohttp.ClientSession, engine: Engine) -> None:
    above, below = _urls(up, "/explain")
    status, told = await _explain(http, above, _question())
    assert (status, told["reasons"]["chosen"]) == (200, "virginia")
    assert "frankfurt" in told["reasons"]["not_serving"]
    status, told = await _explain(http, below, _question())
    assert (status, told["reasons"]["chosen"], told["unlawful"]) == (200, "one", None)
    assert engine.seen == []  # asking sends nothing and reserves nothing
    assert up.global_.flow.under_way == up.regional.flow.under_way == 0
    assert up.regional.flow.ledger.load("one").in_flight == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": MODEL, "input": "x"}),
        ("/rerank", {"model": MODEL, "query": "x", "documents": ["y"]}),
        (f"/v2/models/{MODEL}/generate", {"text_input": "x"}),
    ],
)
async def test_explain_knows_the_other_paths(up: Both, http: aiohttp.ClientSession, path: str, body: Any) -> None:
    for url, chosen in zip(_urls(up, "/explain"), ("virginia", "one"), strict=True):
        status, told = await _explain(http, url, _question(path=path, body=body))
        assert (status, told["reasons"]["chosen"]) == (200, chosen)


async def test_explain_says_what_the_law_excludes(up: Both, http: aiohttp.ClientSession) -> None:
    above, below = _urls(up, "/explain")
    _, told = await _explain(http, above, _question(tenant="eu-only"))
    assert told["reasons"]["chosen"] is None
    assert "allows only eu" in told["reasons"]["unlawful"]["virginia"]
    _, told = await _explain(http, above, _question(allow=["jp"]))
    assert "asked to stay within jp" in told["reasons"]["unlawful"]["virginia"]
    _, told = await _explain(http, below, _question(tenant="nobody"))
    assert "not in the topology" in told["unlawful"]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (b"", "Input data was truncated"),
        (b"not json", "JSON is malformed"),
        (b"\xff", "malformed"),
        (b"[]", "Expected `object`"),
        ({}, "missing required field `body`"),
        ({"body": {}}, "missing required field `tenant`"),
        ({"body": {}, "tenant": 5}, "Expected `str`"),
        (_question(body={}), "missing required field `messages`"),
        (_question(body="text"), "Expected `object`"),
        (_question(path="/v1/models"), "answers GET only"),
        (_question(path="/flush_cache"), "inference paths"),
        (_question(path="/v1/\u2603"), "inference paths"),
        (_question(allow="eu"), "Expected `array`"),
        (b'{"tenant": "a", "body": ' + b"[" * 200_000, "nested too deeply"),
    ],
)
async def test_a_question_that_makes_no_sense_is_told_why(
    up: Both, http: aiohttp.ClientSession, question: Any, message: str
) -> None:
    for url in _urls(up, "/explain"):
        status, told = await _explain(http, url, question)
        assert status == 400
        assert message in told["error"]
        assert "xyzzy" not in told["error"]


async def test_what_is_not_offered_is_not_there(up: Both, http: aiohttp.ClientSession) -> None:
    for url in _urls(up, "/v1/models"):
        async with http.get(url) as answer:
            assert answer.status == 404
    for url in _urls(up, "/explain"):
        async with http.get(url) as answer:
            assert answer.status == 405


async def test_a_taken_port_is_named(up: Both, engine: Engine) -> None:
    admin = AdminServer(up.global_.tier_admin, TierMetrics("global", "virginia", "g2"), Decisions())
    with pytest.raises(PortTakenError, match=rf"admin: cannot listen on 127.0.0.1:{up.entry}: .*; choose another port"):
        await admin.open("127.0.0.1", up.entry)
    await admin.close()
