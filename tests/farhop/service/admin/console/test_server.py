"""The console over HTTP: access, what a resumed viewer gets, what other sites may not do, its bounds."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from farhop.balance.outcome import SERVED
from farhop.identity.operators import OPEN, Operator, Operators, digest_of
from farhop.service.admin.console import server as module
from farhop.service.admin.console.acts import ActError, Acts
from farhop.service.admin.console.delta import apply
from farhop.service.admin.console.server import BalancerSource
from farhop.service.admin.console.snapshot import LastSnapshot
from farhop.service.admin.server import AdminServer
from farhop.service.observability.decisions import Decisions
from farhop.telemetry.metrics import TierMetrics
from farhop_lab.memory_store import MemoryStore
from topology.law import Law
from topology.load import load, shipped

TOKENS = {who: (digest_of(who * 8), right) for who, right in (("mm", "metrics"), ("rr", "read"), ("aa", "act"))}
GUARD = {"x-farhop-console": "1"}
LAW = Law(load(shipped("three-regions")))


class _Source:
    """What is heard is a counter."""

    name = "a source"

    def __init__(self) -> None:
        self.looks = 0
        self.reading, self.read = asyncio.Event(), asyncio.Event()  # a look has begun to read, and may go on
        self.read.set()
        self.store = MemoryStore(Random(1))

    async def snapshots(self) -> Mapping[str, LastSnapshot]:
        self.looks += 1
        self.reading.set()
        await self.read.wait()
        word = {"tier": "global", "region": "tokyo", "under_way": self.looks, "regions": {"tokyo": {"state": "up"}}}
        return {"global tokyo": LastSnapshot(word, int(time.time() * 1e3))}

    def law(self) -> Law:
        return LAW

    async def decision(self, decision_id: str) -> dict[str, dict[str, Any]]:
        reasons = {"chosen": "tokyo", "candidates": [{"region": "tokyo", "score": 1.0}]}
        return {"global tokyo": {"reasons": reasons}} if decision_id == "known" else {}

    async def explain(self, question: bytes) -> dict[str, Any]:
        asked = msgspec.json.decode(question)
        if "tenant" not in asked:
            raise ActError(f"no such tenant: {question.decode()}", 400)
        drained = asked.get("drained", "")
        # The second best by its score is not where the machine would send it.
        scores = {"tokyo": 1.0, "virginia": 2.0, "frankfurt": 3.0}
        left = [{"region": name, "score": score} for name, score in scores.items() if name != drained]
        chosen = "frankfurt" if drained == "tokyo" else "tokyo"
        return {"global tokyo": {"reasons": {"chosen": chosen, "candidates": left}, "drained": drained}}

    def acts(self) -> Acts:
        async def statuses() -> tuple[dict[str, Any], ...]:
            return ({"regions": []},)

        return Acts(self.store, self.law, statuses, module.wall)

    def author(self, operator: Operator) -> str:
        return operator.name


@asynccontextmanager
async def port(operators: Operators, source: _Source) -> AsyncIterator[tuple[AdminServer, str]]:
    server = AdminServer(SimpleNamespace(), TierMetrics("global", "tokyo", "g1"), Decisions(), None, operators)  # type: ignore[arg-type]
    server.have(source)
    bound = await server.open("127.0.0.1", 0)
    try:
        yield server, f"http://127.0.0.1:{bound}"
    finally:
        await server.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cookie_jar=jar) as session:
        yield session


async def test_a_token_becomes_a_cookie_that_no_script_and_no_other_site_has(http: aiohttp.ClientSession) -> None:
    async with port(Operators(TOKENS), _Source()) as (_, base):
        async with http.get(f"{base}/console/of/past") as answer:
            assert answer.status == 401
        for token, status in (("x" * 16, 401), ("mm" * 8, 401), ("rr" * 8, 200)):
            async with http.post(f"{base}/console/of/login", json={"token": token}, headers=GUARD) as answer:
                assert answer.status == status
                assert token not in await answer.text()
        cookie = answer.headers["set-cookie"]
        assert all(word in cookie for word in ("HttpOnly", "SameSite=Strict", "Path=/console/", "Max-Age="))
        assert "rr" * 8 not in cookie
        async with http.get(f"{base}/console/of/past") as answer:
            assert answer.status == 200
        async with http.get(f"{base}/status") as answer:
            assert answer.status == 401  # the cookie is for the console only
        act = {"do": "drain", "target": "tokyo", "why": "x"}
        async with http.post(f"{base}/console/of/act", json=act, headers=GUARD) as answer:
            assert answer.status == 403
        async with http.post(f"{base}/console/of/logout", json={}, headers=GUARD) as answer:
            assert answer.status == 200
        async with http.get(f"{base}/console/of/past") as answer:
            assert answer.status == 401


async def test_without_viewers_the_source_is_hardly_read_and_a_new_viewer_gets_a_whole_snapshot(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNSEEN_S", 3600.0)
    source = _Source()
    async with port(OPEN, source) as (_, base):
        while not source.looks:
            await asyncio.sleep(0.01)
        async with http.get(f"{base}/console/of/events") as answer:
            async with asyncio.timeout(60.0):
                while source.looks < 3:
                    await answer.content.readline()


async def test_no_other_sites_page_acts(http: aiohttp.ClientSession) -> None:
    source = _Source()
    act = {"do": "undrain", "target": "tokyo", "why": "x"}
    async with port(OPEN, source) as (_, base):
        url = f"{base}/console/of/act"
        for headers in ({}, {**GUARD, "Origin": "https://evil.example"}, {**GUARD, "Host": "evil.example"},
                        {**GUARD, "Origin": "http://["}, {**GUARD, "Host": "[::1"}):  # fmt: skip
            async with http.post(url, json=act, headers=headers) as answer:
                assert answer.status == 403
        async with http.get(f"{base}/console/of/events", headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
        async with http.post(url, json=act, headers={**GUARD, "Origin": base}) as answer:
            assert (answer.status, (await answer.json())["author"]) == (200, "anonymous")
        for body, status in ((b"{", 400), (b"[" * 5000, 400), (b'{"do":"drop"}', 400), (b" " * 70_000, 400)):
            async with http.post(url, data=body, headers=GUARD) as answer:
                assert answer.status == status
                assert "error" in await answer.json()


async def test_the_page_loads_nothing_from_other_hosts(http: aiohttp.ClientSession) -> None:
    sizes = 0
    async with port(Operators(TOKENS), _Source()) as (_, base):
        for name in ("", "/", "/app.js", "/style.css", "/coast.json", "/icon.svg"):
            async with http.get(f"{base}/console{name}") as answer:
                text = await answer.text()
                assert answer.status == 200
                assert answer.headers["content-security-policy"].startswith("default-src 'self'")
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert not any(
                    word in text.replace("http://www.w3.org/", "") for word in ("http://", "https://", "<style")
                )
                sizes += int(answer.headers["content-length"])
            async with http.get(f"{base}/console{name}", headers={"If-None-Match": answer.headers["etag"]}) as again:
                assert again.status == 304
        async with http.get(f"{base}/console/..%2fconsole.py") as answer:
            assert answer.status == 404
    assert sizes < 150_000


async def _events(http: aiohttp.ClientSession, base: str, most: int, last: str = "") -> list[tuple[str, str, Any]]:
    """(id, kind, data) of the first events."""
    found, kept = [], dict[str, str]()
    async with http.get(f"{base}/console/of/events", headers={"Last-Event-ID": last} if last else {}) as answer:
        assert answer.content_type == "text/event-stream"
        async for line in answer.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            kept[name] = value
            if name == "data":
                found.append((kept["id"], kept["event"], msgspec.json.decode(value)))
            if len(found) == most:
                break
    return found


async def test_dropped_pictures_are_not_shown_and_viewers_start_again(http: aiohttp.ClientSession) -> None:
    source = _Source()
    async with port(OPEN, source) as (server, base):
        console = server.console
        assert console is not None
        assert console._task is not None
        console._task.cancel()  # nobody looks but this test
        await console.look()
        ((last, _, picture),) = await _events(http, base, 1)
        assert picture["balancers"]
        before = console.viewers  # one that has left is noticed when it is written to
        viewing = asyncio.create_task(_events(http, base, 1000))
        while console.viewers == before:
            await asyncio.sleep(0.01)
        source.reading, source.read = asyncio.Event(), asyncio.Event()
        looking = asyncio.create_task(console.look())
        await source.reading.wait()  # it has read what must not be kept any more
        console.forget()
        source.read.set()
        await asyncio.wait_for(viewing, 60.0)
        await looking
        async with http.get(f"{base}/console/of/past") as answer:
            assert (await answer.json())["chunks"] == []
        assert [(kind, picture) for _, kind, picture in await _events(http, base, 1, last)] == [("picture", {})]
        await console.look()
        ((_, kind, picture),) = await _events(http, base, 1, last)
        assert (kind, picture["balancers"]["global tokyo"]["under_way"]) == ("picture", source.looks)


async def test_a_resumed_viewer_gets_what_it_missed(http: aiohttp.ClientSession) -> None:
    source = _Source()
    async with port(OPEN, source) as (server, base):
        console = server.console
        assert console is not None
        ((first, kind, picture),) = await _events(http, base, 1)
        assert kind == "picture"
        for _ in range(3):
            await console.look()
        missed = await _events(http, base, 3, first)
        assert [kind for _, kind, _ in missed] == ["patch"] * 3
        for _, _, patch in missed:
            picture = apply(picture, patch)
        assert picture["balancers"]["global tokyo"]["under_way"] >= 4
        ((_, kind, _),) = await _events(http, base, 1, "other.1")
        assert kind == "picture"  # of another process: it starts from the beginning
        async with http.get(f"{base}/console/of/past") as answer:
            (chunk,) = (await answer.json())["chunks"]
        async with http.get(f"{base}/console/of/past/{chunk['number']}") as answer:
            assert (await answer.json())["picture"]["regions"]["tokyo"]["state"] == "up"
        async with http.get(f"{base}/console/of/past/99999") as answer:
            assert answer.status == 404


async def test_viewers_are_bounded_and_a_slow_one_is_disconnected(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VIEWERS_MAX", 2)
    async with port(OPEN, _Source()) as (server, base):
        console = server.console
        assert console is not None
        url = f"{base}/console/of/events"
        async with http.get(url) as one, http.get(url) as two:
            assert (one.status, two.status) == (200, 200)
            async with http.get(url) as answer:
                assert answer.status == 503
            assert console.viewers == 2
            viewer = next(iter(console._viewers))
            monkeypatch.setattr(viewer, "qsize", lambda: module.BEHIND_MAX)
            await console.look()
            assert (console.viewers, console.dropped) == (1, 1)
        async with asyncio.timeout(60.0):
            while console.viewers:
                await console.look()
                await asyncio.sleep(0.01)


async def test_the_console_answers_decision_explain_and_drill_requests(http: aiohttp.ClientSession) -> None:
    async with port(OPEN, _Source()) as (_, base):
        async with http.get(f"{base}/console/of/decision/known?drained=tokyo") as answer:
            document = await answer.json()
        assert document["what_if"]["global tokyo"]["moved"]
        async with http.get(f"{base}/console/of/decision/unknown") as answer:
            assert answer.status == 404
        async with http.post(f"{base}/console/of/explain", json={"question": {"a": 1}}, headers=GUARD) as answer:
            assert (answer.status, await answer.json()) == (400, {"error": 'no such tenant: {"a": 1}'})
        question = {"question": {"tenant": "t"}, "drained": "tokyo"}
        async with http.post(f"{base}/console/of/explain", json=question, headers=GUARD) as answer:
            found = (await answer.json())["what_if"]["global tokyo"]
        assert (found["moved"], found["chosen"], found["asked"]) == (True, "frankfurt", True)
        async with http.get(f"{base}/console/of/drills") as answer:
            assert (await answer.json())["history"] == []
        async with http.get(f"{base}/console/of/drills/offered") as answer:
            assert "`farhop console`" in (await answer.json())["why"]
        for run in ("none", "..%2f..%2fetc"):
            async with http.get(f"{base}/console/of/drills/{run}/report") as answer:
                assert answer.status == 404


async def test_a_balancer_s_own_rates_are_per_second_for_every_viewer() -> None:
    metrics = TierMetrics("global", "tokyo", "g1")

    def status() -> dict[str, Any]:
        return {"tier": "global", "region": "tokyo", "law_epoch": 1}

    async def explain(_body: bytes) -> dict[str, Any]:
        return {}

    source = BalancerSource(status, metrics, Decisions(), lambda: LAW, MemoryStore(Random(1)), explain)
    assert (await source.snapshot(1_000))["arcs"] == {}
    for _ in range(10):
        metrics.attempted("paris", SERVED)
    assert (await source.snapshot(2_000))["arcs"] == {"paris": {"ok": 10}}
    assert (await source.snapshot(2_010))["arcs"] == {"paris": {"ok": 10}}  # another page asks
    assert (await source.snapshot(3_000))["arcs"] == {"paris": {"ok": 5}}
    assert (await source.snapshot(4_000))["arcs"] == {}
    assert source.acts() is not None


def _light(colour: str) -> float:
    """Relative luminance, by WCAG 2.2."""
    digits = colour[1:] if len(colour) == 7 else "".join(one * 2 for one in colour[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_light(one), _light(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_every_colour_contrasts_with_what_it_stands_on(scheme: int) -> None:
    blocks = re.findall(r":root \{(.*?)\}", (module.PAGE / "style.css").read_text(), re.DOTALL)
    colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{3,6})", blocks[scheme]))
    spoken, drawn = ("text", "dim", "ok", "warn", "bad", "info", "none"), ("fill", "edge", "ok", "warn", "bad", "info")
    faint = [(name, on) for name in spoken for on in ("bg", "panel") if _contrast(colours[name], colours[on]) < 4.5]
    faint += [(name, on) for name in drawn for on in ("bg", "panel") if _contrast(colours[name], colours[on]) < 3.0]
    faint += [(name, "line") for name in ("fill", "warn", "bad") if _contrast(colours[name], colours["line"]) < 3.0]
    faint += [
        (name, "land")
        for name in ("ok", "warn", "bad", "info", "none")
        if _contrast(colours[name], colours["land"]) < 3.0
    ]
    assert faint == []
