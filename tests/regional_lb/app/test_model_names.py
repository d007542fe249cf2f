"""Names at a region's own port: what the entry of the region calls so, of the models that are here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from inprocess import HOP_KEY, MODEL, Both, Engine, both, chat, head, send, tenant, topology, until
from worlds import request

from farhop.balance import outcome
from farhop.service.admin.server import Question
from farhop.store.contract import route_key
from farhop_lab.world.ports import free_ports

MESSAGES = [{"role": "user", "content": "hello"}]
WORLD = topology(
    tenant("careful", models={MODEL: {"allow": ["jp"]}}), tenant("barred", models={"auto": {"allow": ["jp"]}})
)
ROUTES = [
    {"model": "auto", "models": [{"model": "absent"}, {"model": MODEL}]},
    {
        "model": "brief",
        "models": [{"model": "small", "prompt_bytes_max": 4}, {"model": MODEL, "usd_max": 1}, {"model": "other"}],
    },
    {"policy": "nearest"},
]  # fmt: skip


@pytest.fixture
async def up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Both]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with both(engine, WORLD) as running:
        await put(running, ROUTES)
        yield running
        await running.at_rest()


async def put(up: Both, routes: list[dict[str, Any]] | None) -> None:
    if routes is None:
        await up.regional.store.delete(route_key("virginia"))
    else:
        await up.regional.store.put(route_key("virginia"), msgspec.json.encode(routes))
    wanted = {one["model"] for one in routes or () if one.get("models")}
    await until(lambda: {name for _, name in up.regional.model_names.in_force} == wanted)


def asking(model: str = "auto", **more: object) -> dict[str, object]:
    return {"model": model, "messages": MESSAGES, "max_tokens": 8, **more}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_name_works_at_both_ports(up: Both, engine: Engine, stream: bool) -> None:
    for port in (up.client, up.entry):
        answer = await send(port, chat(body=asking(stream=stream)))
        assert (answer.status, answer.headers["x-farhop-model"], engine.seen[-1][1]["model"]) == (200, MODEL, MODEL)
    answer = await send(up.client, chat(body=asking(MODEL)))
    assert (answer.status, "x-farhop-model" in answer.headers) == (200, False)


async def test_an_alias_without_its_route_is_an_unknown_model(up: Both) -> None:
    assert (await send(up.client, chat(body=asking()))).status == 200
    listed = await send(up.client, head("GET", "/v1/models", authorization="Bearer sk-farhop-anywhere"))
    assert [model["id"] for model in listed.json["data"]] == sorted(["auto", "brief", MODEL])
    await put(up, None)
    answer = await send(up.client, chat(body=asking()))
    assert answer.status == 404
    assert up.regional.listeners.client_ingress.reader.names is None, "then nothing is looked up"


async def test_the_law_holds_for_the_model_and_for_the_name(up: Both, engine: Engine) -> None:
    for name in ("careful", "barred"):
        answer = await send(up.client, chat(f"sk-farhop-{name}", asking()))
        assert answer.status >= 400
        assert "virginia" in answer.json["error"]["message"]
    assert engine.seen == []


async def test_model_unlawful_at_arrival_is_never_a_fallback(up: Both) -> None:
    for name, models in (("anywhere", {"absent", MODEL}), ("careful", {"absent"})):
        found = up.regional.model_names.resolved(request("a", tenant=name, model="auto"), ())
        assert found is not None
        assert {found.model, *found.fallbacks} == models


@pytest.mark.parametrize("operation", ["generate", "generate_stream", "infer"])
async def test_a_path_that_names_the_model_itself_cannot_ask_for_another(
    up: Both, engine: Engine, operation: str
) -> None:
    texts = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
    body = {"inputs": [texts]} if operation == "infer" else {"text_input": "hi"}
    for port in (up.client, up.entry):
        answer = await send(port, chat(body=body, path=f"/v2/models/auto/{operation}"))
        assert answer.status == 400
        assert "stands for other models, which this path cannot ask for" in answer.json["error"]
    assert engine.seen == []


async def test_absurd_routes_leave_those_before_them(up: Both) -> None:
    await up.regional.store.put(
        route_key("virginia"), msgspec.json.encode([{"model": "auto", "models": [{"model": "x", "tools": True}]}])
    )
    await until(lambda: up.regional.model_names.documents.problems)
    assert (await send(up.client, chat(body=asking()))).status == 200


async def test_explain_shows_the_models_of_a_name_in_this_region(up: Both) -> None:
    admin = up.regional.tier_admin
    explained = admin.explain(admin.compose(Question(msgspec.Raw(msgspec.json.encode(asking())), "anywhere")))
    assert explained["notes"] == [f"auto stands for {MODEL} (absent: not served)"]
    assert (explained["model"], explained["reasons"]["chosen"]) == (MODEL, "one")
    explained = admin.explain(admin.compose(Question(msgspec.Raw(msgspec.json.encode(asking("brief"))), "anywhere")))
    assert explained["notes"] == ["brief stands for other (none is served)"], "no price book, no money"
    explained = admin.explain(admin.compose(Question(msgspec.Raw(msgspec.json.encode(asking(MODEL))), "anywhere")))
    assert explained["notes"] == []
    names = admin.status()["overrides"]["model names"]
    assert [one["model"] for one in names] == ["auto", "brief"]


async def test_the_first_with_room_and_else_the_first_that_is_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    routes = [{"model": "auto", "models": [{"model": "large"}, {"model": MODEL}]}]
    async with Engine().running() as busy:
        replicas = [
            {"url": f"http://{busy.address}", "models": ["large"], "name": "two", "slots": 1},
            {"url": f"http://{engine.address}", "models": [MODEL], "name": "one", "slots": 1},
        ]
        async with both(engine, WORLD, regional={"replicas": replicas, "routes": routes}) as up:
            view = lambda: up.regional.flow.replicas.view.by_model.keys()  # noqa: E731
            await until(lambda: {"large", MODEL} <= view())
            busy.behaviour = engine.behaviour = "wait"
            first = asyncio.create_task(send(up.client, chat(body=asking())))
            await until(lambda: busy.seen)
            second = asyncio.create_task(send(up.client, chat(body=asking())))
            await until(lambda: engine.seen)
            admin = up.regional.tier_admin
            explained = admin.explain(admin.compose(Question(msgspec.Raw(msgspec.json.encode(asking())), "anywhere")))
            assert explained["notes"] == ["auto stands for large (no other has room)"]
            busy.release.set()
            engine.release.set()
            answers = await asyncio.gather(first, second)
            assert [one.headers["x-farhop-model"] for one in answers] == ["large", MODEL]
            await up.at_rest()


async def test_what_broke_for_its_model_is_answered_by_another_instead_of_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica breaks after it was chosen: the client hears of the model that answered, and of no failure."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    routes = [{"model": "large", "models": [{"model": "large"}, {"model": MODEL}]}]
    async with Engine().running() as broken:
        replicas = [
            {"url": f"http://{broken.address}", "models": ["large"], "name": "two"},
            {"url": f"http://{engine.address}", "models": [MODEL], "name": "one"},
        ]
        async with both(engine, WORLD, regional={"replicas": replicas, "routes": routes}) as up:
            await until(lambda: {"large", MODEL} <= up.regional.flow.replicas.view.by_model.keys())
            broken.behaviour = "vanish"
            answer = await send(up.client, chat(body=asking("large")))
            assert (answer.status, answer.headers["x-farhop-model"]) == (200, MODEL)
            assert engine.seen[-1][1]["model"] == MODEL
            record = up.regional.decisions.get(answer.headers["x-farhop-decision"])
            assert record is not None
            assert (record["asked_for"], record["model"], record["outcome"]) == ("large", MODEL, "served")
            targets = [one["target"] for one in record["attempts"]]
            assert (set(targets[:-1]), targets[-1]) == ({"two"}, "one")
            await up.at_rest()


async def test_a_request_that_may_have_killed_engines_of_two_models_is_not_sent_to_a_third(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor when it is asked again: whichever model its name is then, it is the same request."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    routes = [{"model": "auto", "models": [{"model": "large"}, {"model": "middle"}, {"model": MODEL}]}]
    async with Engine().running() as first, Engine().running() as second:
        replicas = [
            {"url": f"http://{one.address}", "models": [model], "name": model}
            for one, model in ((first, "large"), (second, "middle"), (engine, MODEL))
        ]
        # These engines live on: one that is scraped in between would be acquitted.
        watch = {"probe_s": 0.05, "scrape_s": 30.0}
        async with both(engine, WORLD, regional={"replicas": replicas, "routes": routes, "watch": watch}) as up:
            await until(lambda: {"large", "middle", MODEL} <= up.regional.flow.replicas.view.by_model.keys())
            healths, now = up.regional.flow.replicas.health, up.regional.clock.now
            await until(lambda: all(one.read(now()).state == "up" for one in healths.values()))  # others are skipped
            first.behaviour = second.behaviour = "vanish"
            for _ in range(2):
                answer = await send(up.client, chat(body=asking()))
                assert answer.json["error"]["code"] == outcome.ENDED_TWO_PROCESSES.reason
            assert first.seen
            assert second.seen
            assert engine.seen == []
            await up.at_rest()


async def test_a_request_forwarded_for_a_model_keeps_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry chose the model; the region's names are for those who come by themselves."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    (port,) = free_ports(1)
    client = {"port": port, "url": f"http://127.0.0.1:{port}"}
    regional = {"routes": [{"model": MODEL, "models": [{"model": "absent"}]}], "client": client}
    async with both(engine, WORLD, regional=regional, global_={"routes": [{"answer": "redirect"}]}) as up:
        assert (await send(up.client, chat(body=asking(MODEL)))).status == 404, "it stands for what is not here"
        redirect = await send(up.entry, chat(body=asking(MODEL)))
        assert redirect.status == 307
        body = msgspec.json.encode(asking(MODEL))
        target = redirect.headers["location"].removeprefix(client["url"])
        answer = await send(up.client, head("POST", target, content_length=str(len(body))) + body)
        assert (answer.status, engine.seen[-1][1]["model"]) == (200, MODEL)
        await up.at_rest()
