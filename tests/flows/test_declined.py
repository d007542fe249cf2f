"""An engine that says that it takes no request now (it loads its model, or is full), or that it does not serve the
model (any more), did nothing for the one it refused: another replica, then another region, has it. If no other takes
it, the engine's own words are the answer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from inprocess import (
    HOP_KEY,
    MODEL,
    Both,
    Engine,
    as_on_the_map,
    both,
    chat,
    global_config,
    regional_config,
    send,
    streaming,
    tenant,
    topology,
    until,
)

from farhop.balance import outcome
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from global_lb.app.main import GlobalBalancer
from regional_lb.app.main import RegionalBalancer

WORLD = topology()
CASES = [(404, "model_not_served_by_engine"), (429, "engine_busy"), (503, "engine_unavailable")]
WORDS = {404: f"The model `{MODEL}` does not exist.", 429: "not now", 503: "not now"}


def refuses(engine: Engine, status: int) -> None:
    """Have it refuse from now on, in words of its own."""
    engine.behaviour, engine.status, engine.complaint = "error", status, WORDS[status]


def ready(above: GlobalBalancer) -> set[str]:
    """The regions that have a replica that may serve."""
    return {
        region["region"]
        for region in above.tier_admin.status()["regions"]
        if region["state"] == "up"
        and any(model["replicas_ready"] for one in region["instances"] for model in one["models"].values())
    }


async def failing_once_asked(up: Both, name: str, engine: Engine, body: Any) -> float:
    """The share of a replica's answers that failed, when it was first asked: if it is taken out its record is cleared.
    The client is served."""
    async with asyncio.timeout(60.0):
        while not engine.seen:
            assert (await send(up.entry, chat(body=body))).status == 200
    (found,) = (one for one in up.regional.tier_admin.status()["replicas"] if one["replica"] == name)
    return float(found["failing_share"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "code"), CASES)
async def test_what_one_replica_does_not_take_now_another_serves(
    engine: Engine, status: int, code: str, stream: bool
) -> None:
    async with Engine().running() as other:
        replicas = [
            {"url": f"http://{one.address}", "models": [MODEL], "name": name}
            for name, one in (("takes", engine), ("full", other))
        ]
        async with both(engine, WORLD, regional={"replicas": replicas}) as up:
            await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
            refuses(other, status)
            body = streaming() if stream else None
            failing = await failing_once_asked(up, "full", other, body)
            assert (failing > 0.0) is (status == 503)  # to be full is no failure
            for port in (up.entry, up.client):
                answers = [await send(port, chat(body=body)) for _ in range(8)]
                assert {answer.status for answer in answers} == {200}
            assert f'outcome="{code}"' in up.regional.metrics.render().decode()


@pytest.mark.parametrize(("status", "code"), CASES)
async def test_engine_s_own_words_are_the_answer_if_no_other_takes_it(engine: Engine, status: int, code: str) -> None:
    async with both(engine, WORLD) as up:
        refuses(engine, status)
        for port in (up.client, up.entry):
            engine.seen.clear()
            answer = await send(port, chat())
            assert (answer.status, answer.json["error"]["message"]) == (status, WORDS[status])
            assert answer.headers["x-farhop-decision"]
            assert len(engine.seen) == 1, "the same engine is not asked again at once"
        assert f'outcome="{code}"' in up.regional.metrics.render().decode()


@pytest.mark.parametrize("status", WORDS)
async def test_what_no_engine_of_one_region_takes_now_another_region_serves(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    as_on_the_map(monkeypatch)
    cluster = MemoryCluster()
    async with AsyncExitStack() as stack:
        engines = {region: await stack.enter_async_context(Engine().running()) for region in ("virginia", "frankfurt")}
        for seed, (region, engine) in enumerate(engines.items()):
            below = RegionalBalancer(
                regional_config(engine, region, instance=f"r-{region}"), WORLD,
                Random(seed), MemoryStore(Random(seed + 10), cluster),
            )  # fmt: skip
            stack.push_async_callback(below.close)
            await below.open()
        above = GlobalBalancer(global_config(), WORLD, Random(7), MemoryStore(Random(17), cluster))
        stack.push_async_callback(above.close)
        entry = int((await above.open()).split("clients on 127.0.0.1:")[1].split(",")[0])
        await until(lambda: ready(above) == set(engines))
        refuses(engines["virginia"], status)
        answers = [await send(entry, chat()) for _ in range(6)]
        assert {(answer.status, answer.headers["x-farhop-region"]) for answer in answers} == {(200, "frankfurt")}
        assert engines["virginia"].seen
        refuses(engines["frankfurt"], status)
        answer = await send(entry, chat())
        assert (answer.status, answer.json["error"]["message"]) == (status, WORDS[status])
        if status == 404:
            engines["virginia"].status = 401  # our key is refused: it may well serve the model
            assert (await send(entry, chat())).status == 503


async def test_engine_started_again_with_another_model_is_asked_at_once_what_it_serves(engine: Engine) -> None:
    async with Engine().running() as other:
        other.models = [{"id": MODEL}]
        replicas = [
            {"url": f"http://{engine.address}", "models": [MODEL], "name": "stays"},
            {"url": f"http://{other.address}", "models": [], "name": "changes"},
        ]
        seldom = {"probe_s": 0.05, "scrape_s": 0.05, "models_s": 86400.0}
        async with both(engine, WORLD, regional={"replicas": replicas, "watch": seldom}) as up:

            def of(name: str) -> set[str]:
                known = up.regional.flow.replicas.view.replicas.get(name)
                return set() if known is None else set(known.models)

            await until(lambda: of("changes") == {MODEL})
            await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
            other.models = [{"id": "another"}]
            refuses(other, 404)
            while of("changes") != {"another"}:
                assert (await send(up.entry, chat())).status == 200
            asked = len(other.seen)
            assert asked
            assert {(await send(up.client, chat())).status for _ in range(8)} == {200}
            assert len(other.seen) == asked
            other.models, other.behaviour = [{"id": MODEL}], "serve"  # after it was not ready it is asked, too
            other.healthy = False
            await until(lambda: any(r["state"] != "up" for r in up.regional.tier_admin.status()["replicas"]))
            other.healthy = True
            await until(lambda: of("changes") == {MODEL})


@pytest.mark.parametrize("names", [("lacks", "loads"), ("loads", "lacks")])
async def test_model_that_one_engine_lacks_and_another_does_not_take_now_is_no_missing_model(
    engine: Engine, names: tuple[str, str]
) -> None:
    """In whichever order they are asked."""
    async with Engine().running() as other:
        places = {"lacks": engine.address, "loads": other.address}
        replicas = [{"url": f"http://{places[name]}", "models": [MODEL], "name": name} for name in names]
        in_turn = {"replicas": replicas, "policy": {"name": "round-robin"}}
        async with both(engine, WORLD, regional=in_turn) as up:
            await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
            refuses(engine, 404)
            refuses(other, 503)
            assert [(await send(port, chat())).status for port in (up.entry, up.client)] == [503, 503]
            assert engine.seen
            assert other.seen


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_path_that_one_engine_lacks_is_asked_for_at_another(engine: Engine, path: str) -> None:
    """There is none that all engines have: one that embeds has none for chats."""
    body = {"model": MODEL, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    async with Engine().running() as other:
        replicas = [
            {"url": f"http://{one.address}", "models": [MODEL], "name": name}
            for name, one in (("has", engine), ("lacks", other))
        ]
        async with both(engine, WORLD, regional={"replicas": replicas}) as up:
            await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
            other.behaviour, other.status, other.complaint = "error", 404, "Not Found"
            assert {(await send(up.client, chat(body=body, path=path))).status for _ in range(8)} == {200}
            assert other.seen
            engine.behaviour, engine.status, engine.complaint = "error", 404, "Not Found"
            for port in (up.client, up.entry):
                answer = await send(port, chat(body=body, path=path))
                assert (answer.status, answer.code) == (501, "path_not_supported_by_engine")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_web_page_from_an_engine_s_address_is_no_answer(engine: Engine, stream: bool) -> None:
    body = streaming() if stream else None
    async with Engine().running() as other:
        replicas = [
            {"url": f"http://{one.address}", "models": [MODEL], "name": name}
            for name, one in (("engine", engine), ("proxy", other))
        ]
        async with both(engine, WORLD, regional={"replicas": replicas}) as up:
            await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
            other.behaviour = "page"
            for port in (up.entry, up.client):
                assert {(await send(port, chat(body=body))).status for _ in range(6)} == {200}
            assert other.seen
            engine.behaviour = "page"
            answer = await send(up.client, chat(body=body))
            assert (answer.status, answer.code) == (502, "no_engine_there")
            assert "no_engine_there" in (await send(up.entry, chat(body=body))).json["error"]["message"]
            (region,) = (one for one in up.global_.tier_admin.status()["regions"] if one["region"] == "virginia")
            assert region["other_answered_age_s"] is None  # it was the region that said so


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", ["<html><h1>502 Bad Gateway</h1></html>", "Bad Gateway", ""])
async def test_a_proxy_that_got_no_answer_from_its_engine_has_none_for_the_client(
    engine: Engine, words: str, stream: bool
) -> None:
    """nginx's page, Traefik's line, Caddy's nothing. As where the engine's own connection ends without an answer."""
    body = streaming() if stream else None
    async with Engine().running() as other:
        replicas = [
            {"url": f"http://{one.address}", "models": [MODEL], "name": name}
            for name, one in (("engine", engine), ("proxy", other))
        ]
        async with both(engine, WORLD, regional={"replicas": replicas}) as up:
            await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
            other.behaviour, other.status, other.complaint = "no engine", 502, words
            assert await failing_once_asked(up, "proxy", other, body) > 0.0
            for port in (up.entry, up.client):
                assert {(await send(port, chat(body=body))).status for _ in range(6)} == {200}
            assert 'outcome="upstream_died_before_first_byte"' in up.regional.metrics.render().decode()


@pytest.mark.parametrize(("status", "words"), [(502, '{"error":{"message":"no"}}'), (500, ""), (504, "<html></html>")])
async def test_an_engine_s_own_failure_and_a_proxy_that_waited_in_vain_are_asked_for_nowhere_else(
    engine: Engine, status: int, words: str
) -> None:
    async with Engine().running() as other:
        replicas = [
            {"url": f"http://{one.address}", "models": [MODEL], "name": name}
            for name, one in (("one", engine), ("other", other))
        ]
        async with both(engine, WORLD, regional={"replicas": replicas}) as up:
            await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
            for one in (engine, other):
                one.behaviour, one.status, one.complaint = "no engine", status, words
            assert (await send(up.client, chat())).status == status
            assert len(engine.seen) + len(other.seen) == 1


async def test_a_refused_request_has_the_next_process_there_say_what_it_serves_before_it_gets_work() -> None:
    """Where the law has rules of models, and no connection rests there whose end would tell."""
    world = topology(tenant("ruled", models={"secret": {"deny": ["us"]}}))
    async with AsyncExitStack() as place:
        engine = await place.enter_async_context(Engine().running())
        engine.models = [{"id": MODEL}]
        seldom = {"probe_s": 0.05, "scrape_s": 0.05}
        async with both(engine, world, regional={"watch": seldom}) as up:
            seen = up.regional.watcher._observed["one"]
            await until(lambda: seen.able)
            for task in seen.tasks:
                task.cancel()  # nobody but requests looks there from now on
            up.regional.watcher._pool.on_closed = lambda _address, _rested_s: None
            await asyncio.wait(seen.tasks)
            assert seen.able
            seen.models_doubted.clear()
            up.regional.flow.replicas.recheck_engine("one", outcome.MODEL_NOT_SERVED)
            assert not seen.models_doubted.is_set()  # only when the machine's event is over
            await until(seen.models_doubted.is_set)
            await place.aclose()
            assert (await send(up.client, chat())).status >= 500
            await until(lambda: not seen.able)
            assert not seen.models_known
