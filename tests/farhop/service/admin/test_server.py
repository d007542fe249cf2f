"""The admin port of either tier, asked over HTTP."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import structlog
from inprocess import MODEL, Both, Engine, both, chat, send, streaming, topology, until

from farhop.identity.operators import Operators, digest_of
from farhop.relay.http.listener import PortTakenError
from farhop.relay.http.tls import ListenerTls
from farhop.service.admin import server as admin_module
from farhop.service.admin.server import AdminServer
from farhop.service.config import certificates
from farhop.service.observability.decisions import Decisions
from farhop.service.process.clock import wall
from farhop.telemetry import logs
from farhop.telemetry.metrics import TierMetrics
from farhop_lab.world.certs import Authority, Pair
from topology import load


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


async def test_pages_of_other_sites_learn_nothing_and_do_nothing(up: Both, http: aiohttp.ClientSession) -> None:
    page = {"Accept-Language": "en"}
    for path in ("/status", "/law", "/metrics"):
        (url, _) = _urls(up, path)
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {**page, "Host": "evil.example:80"},
                        {"Origin": "http://["}, {**page, "Host": "["}):  # fmt: skip
            async with http.get(url, headers=headers) as answer:
                assert (answer.status, list(await _json(answer))) == (403, ["error"])
        for headers in (page, {"Host": "balancer.fleet.svc:9090"}):  # a browser by the address, others by a name
            async with http.get(url, headers=headers) as answer:
                assert answer.status == 200
    (url, _) = _urls(up, "/log-level")
    async with http.post(url, json={"level": "debug"}, headers={**page, "Origin": "https://evil.example"}) as answer:
        assert answer.status == 403
    (url, _) = _urls(up, "/metrics")
    async with http.get(url) as answer:
        assert 'farhop_admin_requests_refused_total{reason="other_site"' in await answer.text()


async def test_healthz_and_readyz_report_liveness_and_readiness(
    up: Both, http: aiohttp.ClientSession, engine: Engine
) -> None:
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


async def test_explain_shows_the_region_a_request_would_go_to(
    up: Both, http: aiohttp.ClientSession, engine: Engine
) -> None:
    above, below = _urls(up, "/explain")
    status, explained = await _explain(http, above, _question())
    assert (status, explained["reasons"]["chosen"]) == (200, "virginia")
    assert "frankfurt" in explained["reasons"]["not_serving"]
    status, explained = await _explain(http, above, _question(drained="virginia"))
    assert (status, explained["reasons"]["chosen"], explained["drained"]) == (200, None, "virginia")
    assert explained["reasons"]["not_serving"]["virginia"] == "left out, as if it were drained"
    status, explained = await _explain(http, below, _question())
    assert (status, explained["reasons"]["chosen"], explained["unlawful"]) == (200, "one", None)
    assert engine.seen == []  # asking sends nothing and reserves nothing
    assert up.global_.flow.under_way == up.regional.flow.under_way == 0
    assert up.regional.flow.replicas.ledger.load("one").in_flight == 0


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
        status, explained = await _explain(http, url, _question(path=path, body=body))
        assert (status, explained["reasons"]["chosen"]) == (200, chosen)


async def test_explain_shows_regions_the_law_excludes(up: Both, http: aiohttp.ClientSession) -> None:
    above, below = _urls(up, "/explain")
    _, explained = await _explain(http, above, _question(tenant="eu-only"))
    assert explained["reasons"]["chosen"] is None
    assert "allows only eu" in explained["reasons"]["unlawful"]["virginia"]
    _, explained = await _explain(http, above, _question(allow=["jp"]))
    assert "asked to stay within jp" in explained["reasons"]["unlawful"]["virginia"]
    _, explained = await _explain(http, below, _question(tenant="nobody"))
    assert "not in the topology" in explained["unlawful"]


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
        (_question(path="/v1/models"), "answers GET, HEAD only"),
        (_question(path="/flush_cache"), "inference paths"),
        (_question(path="/v1/\u2603"), "inference paths"),
        (_question(allow="eu"), "Expected `array`"),
        (b'{"tenant": "a", "body": ' + b"[" * 200_000, "nested too deeply" if sys.version_info < (3, 14) else ""),
    ],
)
async def test_a_question_that_makes_no_sense_is_answered_why(
    up: Both, http: aiohttp.ClientSession, question: Any, message: str
) -> None:
    for url in _urls(up, "/explain"):
        status, explained = await _explain(http, url, question)
        assert status == 400
        assert message in explained["error"]
        assert "xyzzy" not in explained["error"]


async def test_paths_and_methods_not_offered_are_answered_404_or_405(up: Both, http: aiohttp.ClientSession) -> None:
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


# -- who may


TOKENS = {who: (digest_of(who * 8), right) for who, right in (("mm", "metrics"), ("rr", "read"), ("aa", "act"))}
ASKED = [
    *(("GET", path) for path in ("/metrics", "/status", "/law", "/topology", "/config", "/decisions", "/decisions/0")),
    ("POST", "/explain"),
    ("POST", "/log-level"),
]


class _Desk:
    """A tier that tells nothing."""

    stopping = False

    def ready(self) -> bool:
        return True

    def notice(self) -> str:
        return "hub etcd-1.internal is silent"

    def status(self) -> dict[str, Any]:
        return {}

    law = topology = status


@asynccontextmanager
async def admin_port(operators: Operators, tls: ListenerTls | None = None) -> AsyncIterator[str]:
    admin = AdminServer(_Desk(), TierMetrics("global", "paris", "g1"), Decisions(), tls, operators)  # type: ignore[arg-type]
    port = await admin.open("127.0.0.1", 0)
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    finally:
        await admin.close()


async def _statuses(http: aiohttp.ClientSession, base: str, who: str) -> list[int]:
    headers = {"Authorization": f"Bearer {who * 8}"} if who else {}
    found = []
    for method, path in ASKED:
        async with http.request(method, base + path, headers=headers, data=b"{}" if method == "POST" else None) as one:
            found.append(one.status)
            assert one.status != 401 or one.headers["www-authenticate"].startswith("Bearer ")
    return found


async def test_each_route_needs_its_right_and_health_none(http: aiohttp.ClientSession) -> None:
    async with admin_port(Operators(TOKENS)) as base:
        for path in ("/healthz", "/readyz"):
            async with http.get(base + path) as answer:
                assert answer.status == 200
                assert "etcd-1" not in await answer.text()  # fields that name hosts are for readers with access only
        for who in ("", "xx"):
            assert await _statuses(http, base, who) == [401] * 9
        assert await _statuses(http, base, "mm") == [200] + [403] * 8
        assert await _statuses(http, base, "rr") == [200, 200, 200, 200, 200, 200, 404, 400, 403]
        assert await _statuses(http, base, "aa") == [200, 200, 200, 200, 200, 200, 404, 400, 400]
        async with http.get(f"{base}/metrics", headers={"Authorization": f"Bearer {'mm' * 8}"}) as answer:
            page = await answer.text()
        assert re.search(r'admin_requests_refused_total{[^}]*reason="unknown"[^}]*} 18', page)
        assert re.search(r'admin_requests_refused_total{[^}]*reason="right"[^}]*} 9', page)


async def test_off_loopback_without_authentication_no_act_is_allowed(http: aiohttp.ClientSession) -> None:
    async with admin_port(Operators(anonymous="read")) as base:
        assert await _statuses(http, base, "") == [200, 200, 200, 200, 200, 200, 404, 400, 403]


async def test_a_certificate_of_the_authority_reads_and_a_named_operator_acts(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    own = authority.issue("own")
    context = certificates.load(
        certificates.Files(True, own.cert_file, own.key_file, authority.ca_file), wall()
    ).context
    refused: list[str] = []
    listener = ListenerTls(lambda: context, 5.0, refused.append)
    operators = Operators(named={"alice": "act"}, trust_domain="ex.org", certified=True)

    async def ask(base: str, pair: Pair | None) -> list[int]:
        files = certificates.Files(False, pair and pair.cert_file, pair and pair.key_file, authority.ca_file)
        spoken = certificates.load(files, wall()).context
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=spoken)) as http:
            return await _statuses(http, base, "")

    async with admin_port(operators, listener) as base:
        alice, bob = (authority.issue(n, (f"spiffe://ex.org/farhop/operator/{n}",)) for n in ("alice", "bob"))
        assert await ask(base, alice) == [200, 200, 200, 200, 200, 200, 404, 400, 400]
        assert await ask(base, bob) == [200, 200, 200, 200, 200, 200, 404, 400, 403]
        for pair in (None, stranger.issue("mallory", ("spiffe://ex.org/farhop/operator/alice",))):
            with pytest.raises(aiohttp.ClientError):
                await ask(base, pair)
    assert refused


async def test_log_names_the_operator_of_a_changed_log_level(http: aiohttp.ClientSession) -> None:
    out = io.StringIO()
    before = structlog.get_config()
    try:
        logs.configure("global", "paris", "g1", "warning", out)
        async with admin_port(Operators(TOKENS)) as base:
            headers = {"Authorization": f"Bearer {'aa' * 8}"}
            for level, status in (("loud", 400), ("debug", 200)):
                async with http.post(f"{base}/log-level", json={"level": level}, headers=headers) as answer:
                    assert answer.status == status
            logs.get("x").debug("now it is told")
    finally:
        structlog.configure(**before)
        logging.getLogger().handlers.clear()
    assert "now it is told" in out.getvalue()
    assert '"operator":"token aa"' in out.getvalue()
    assert "aaaa" not in out.getvalue()


async def test_connections_and_what_is_slow_are_bounded(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(admin_module, "HEAD_S", 0.2)
    async with admin_port(Operators(TOKENS)) as base:
        port = int(base.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, _ in silent:  # the third at once, the others after they have been silent for long enough
            async with asyncio.timeout(60.0):
                assert await reader.read(1) == b""
        async with http.get(f"{base}/healthz") as answer:
            assert answer.status == 200
        for _, writer in silent:
            writer.transport.abort()


@pytest.mark.parametrize("says", [b"", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["nothing", "once"])
async def test_idle_connections_do_not_keep_others_from_the_admin_port(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    """Else a kubelet would find no process alive."""
    monkeypatch.setattr(admin_module, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(admin_module, "GIVES_WAY_S", 0.05)
    async with admin_port(Operators(TOKENS)) as base:
        host, port = "127.0.0.1", int(base.rpartition(":")[2])
        strangers = [await asyncio.open_connection(host, port) for _ in range(3)]
        for reader, writer in strangers:
            writer.write(says)
            if says:
                async with asyncio.timeout(60.0):
                    await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        for _ in range(3):
            async with http.get(f"{base}/healthz", headers={"Connection": "close"}) as answer:
                assert answer.status == 200
        for _, writer in strangers:
            writer.transport.abort()


async def test_a_body_that_does_not_come_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_module, "BODY_S", 0.1)
    async with admin_port(Operators()) as base:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
        writer.write(b"POST /explain HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        async with asyncio.timeout(60.0):
            assert (await reader.readline()).split()[1] == b"408"
        writer.transport.abort()


async def test_the_last_decisions_are_listed_newest_first(up: Both, http: aiohttp.ClientSession) -> None:
    sent = [(await send(up.entry, chat())).headers["x-farhop-decision"] for _ in range(3)]
    for url in _urls(up, "/decisions?most=2"):
        async with http.get(url) as answer:
            found = await _json(answer)
        assert [one["decision"] for one in found["decisions"]] == sent[:0:-1]
    async with http.get(_urls(up, "/decisions?most=x")[0]) as answer:
        assert answer.status == 400


async def test_the_topology_shown_is_the_one_in_force(up: Both, http: aiohttp.ClientSession) -> None:
    for url, flow in zip(_urls(up, "/topology"), (up.global_.flow, up.regional.flow), strict=True):
        async with http.get(url) as answer:
            assert load.of(await _json(answer), url) == flow.law.topology
