"""An alias of several models, over both tiers: what the engine is asked for, and what the client sees."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from inprocess import HOP_KEY, MODEL, Both, Engine, both, chat, head, send, tenant, topology, until

from farhop.accounts import segments
from farhop.accounts.usage import Reading
from farhop.balance.machine import Command, Event, RequestArrived
from farhop.service.admin.server import Question
from farhop.store.contract import route_key
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import Limit, TenantLimits

MESSAGES = [{"role": "user", "content": "hello"}]
SEEING = tenant("curious")
SEEING["keys"][0]["explain"] = True
WORLD = topology(
    SEEING, tenant("careful", models={MODEL: {"allow": ["jp"]}}), tenant("barred", models={"auto": {"allow": ["jp"]}})
)
ROUTES = [{"model": "auto", "models": [{"model": "absent"}, {"model": MODEL}]}]


@pytest.fixture
async def up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Both]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with both(engine, WORLD) as running:
        await running.global_.store.put(route_key("virginia"), msgspec.json.encode(ROUTES))
        await until(lambda: running.global_.flow.routes.cascades)
        yield running
        await running.at_rest()


def asking(model: str = "auto", **more: object) -> dict[str, object]:
    return {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0.5, **more}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_gets_the_model_behind_the_alias_and_the_client_sees_both_names(
    up: Both, engine: Engine, stream: bool
) -> None:
    answer = await send(up.entry, chat("sk-farhop-curious", asking(stream=stream), x_farhop_explain="1"))
    assert answer.status == 200
    assert answer.headers["x-farhop-model"] == MODEL
    _, body = engine.seen[-1]
    assert {name: body[name] for name in ("model", "messages", "temperature")} == {
        "model": MODEL, "messages": MESSAGES, "temperature": 0.5,
    }  # fmt: skip
    receipt = msgspec.json.decode(answer.headers["x-farhop-receipt"])
    assert (receipt["asked_for"], receipt["model"]) == ("auto", MODEL)
    record = up.global_.decisions.get(answer.headers["x-farhop-decision"])
    assert record["reasons"]["notes"][0] == f"auto stands for {MODEL} (absent: not served)"


async def test_a_large_body_too_and_a_model_by_its_own_name_is_left_alone(up: Both, engine: Engine) -> None:
    large = [{"role": "user", "content": "hello " * 60_000}]
    answer = await send(up.entry, chat(body=asking() | {"messages": large}))
    assert (answer.status, engine.seen[-1][1]["model"]) == (200, MODEL)
    assert engine.seen[-1][1]["messages"] == large
    answer = await send(up.entry, chat(body=asking(MODEL)))
    assert answer.status == 200
    assert "x-farhop-model" not in answer.headers


async def test_an_alias_is_listed_for_tenants_that_may_use_one_of_its_models(up: Both) -> None:
    listed = {}
    for name in ("anywhere", "careful"):
        answer = await send(up.entry, head("GET", "/v1/models", authorization=f"Bearer sk-farhop-{name}"))
        listed[name] = [model["id"] for model in answer.json["data"]]
    assert listed == {"anywhere": sorted(["auto", MODEL]), "careful": []}


async def test_the_law_holds_for_the_model_and_for_the_name(up: Both, engine: Engine) -> None:
    for name in ("careful", "barred"):
        answer = await send(up.entry, chat(f"sk-farhop-{name}", asking()))
        assert answer.status >= 400
        assert answer.json["error"]["message"]
    assert engine.seen == []


async def test_advice_names_the_model_and_gives_no_address_where_the_name_is_unknown(up: Both) -> None:
    found = (await send(up.entry, chat(body=asking(), path="/v1/route"))).json
    assert (found["model"], found["url"], found["region"]) == (MODEL, None, "virginia")
    refused = await send(up.entry, chat("sk-farhop-barred", asking(), path="/v1/route"))
    assert refused.code == "no_region_serving"


async def test_explain_shows_the_models_of_a_name_within_its_law(up: Both) -> None:
    admin, body = up.global_.tier_admin, msgspec.Raw(msgspec.json.encode(asking()))
    fields = {name: admin.explain(admin.compose(Question(body, name)))["reasons"] for name in ("curious", "barred")}
    assert {name: reasons["chosen"] for name, reasons in fields.items()} == {"curious": "virginia", "barred": None}
    assert fields["curious"]["notes"][0] == f"auto stands for {MODEL} (absent: not served)"


async def test_path_without_a_json_model_is_refused_with_the_reason(up: Both) -> None:
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]}
    answer = await send(up.entry, chat(body=body, path="/v2/models/auto/infer"))
    assert answer.status == 400
    assert "name a model itself" in answer.body.decode()


async def prefixes_are_known_for_the_model_that_is_got(up: Both, gone: Engine) -> None:
    """Whoever falls back goes where the other model's cache has its prompt, as one who asked for that."""
    flow, arrived = up.global_.flow, list[RequestArrived]()
    handle = flow.handle

    def noted(event: Event, now: float) -> list[Command]:
        if isinstance(event, RequestArrived):
            arrived.append(event)
        return handle(event, now)

    long = [{"role": "user", "content": "a prompt that somebody has said before, and again " * 40}]
    flow.handle = noted  # type: ignore[method-assign]
    assert (await send(up.entry, chat(body=asking() | {"model": MODEL, "messages": long}))).status == 200
    gone.behaviour = "vanish"
    assert (await send(up.entry, chat(body=asking("large") | {"messages": long}))).status == 200
    gone.behaviour = "serve"
    flow.handle = handle  # type: ignore[method-assign]
    direct, refused, again = (one.request for one in arrived)
    assert [one.model for one in (direct, refused, again)] == [MODEL, "large", MODEL]
    assert again.chain == direct.chain != refused.chain
    assert again.chain


async def test_where_a_model_is_refused_its_client_gets_the_next(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The large model's engine is gone, which its region does not know yet: it refuses, and the small one answers."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    small = {"url": f"http://{engine.address}", "models": [MODEL], "name": "one"}
    routes = [{"model": "large", "models": [{"model": "large"}, {"model": MODEL}]}]
    async with Engine().running() as gone:
        large = {"url": f"http://{gone.address}", "models": ["large"], "name": "two"}
        regional = {"replicas": [large, small], "watch": {"probe_s": 30.0, "scrape_s": 30.0}}
        accounts = {"usage": {"dir": str(tmp_path), "sync": "never"}}
        async with both(engine, WORLD, regional=regional, global_={"routes": routes, **accounts}) as up:
            flow = up.global_.flow
            await until(lambda: {"large", MODEL} <= set(flow.regions.view.models(frozenset({"virginia"}))))
            first = await send(up.entry, chat(body=asking("large")))
            assert (first.status, gone.seen[-1][1]["model"]) == (200, "large")
            await prefixes_are_known_for_the_model_that_is_got(up, gone)
            gone.behaviour = "vanish"
            for stream in (False, True):
                answer = await send(up.entry, chat("sk-farhop-curious", asking("large", stream=stream)))
                assert (answer.status, answer.headers["x-farhop-model"]) == (200, MODEL)
                assert engine.seen[-1][1]["model"] == MODEL
                record = up.global_.decisions.get(answer.headers["x-farhop-decision"])
                assert record["reasons"]["notes"][0].startswith(f"large stands for {MODEL} (large: ")
            await up.at_rest()
    reading = Reading()
    used = [one.data for one in reading.events(line for _, line in segments.read(tmp_path))]
    assert [one.model for one in used] == ["large", *[MODEL] * 4]
    assert reading.doubles == 0


async def test_the_limit_of_a_model_that_is_fallen_back_to_counts_though_the_first_one_has_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    small = {"url": f"http://{engine.address}", "models": [MODEL], "name": "one"}
    routes = [{"model": "large", "models": [{"model": "large"}, {"model": MODEL}]}]
    limits = TenantLimits(
        tenant="curious", home="virginia", limits=(Limit(model=MODEL, requests_per_day=2),), author="ann", why="test",
        at=datetime.now(UTC),
    )  # fmt: skip
    async with Engine().running() as gone:
        large = {"url": f"http://{gone.address}", "models": ["large"], "name": "two"}
        regional = {"replicas": [large, small], "watch": {"probe_s": 30.0, "scrape_s": 30.0}}
        async with both(engine, WORLD, regional=regional, global_={"routes": routes}) as up:
            await up.global_.store.put(limits.place, documents.encode(limits))
            flow, limiter = up.global_.flow, up.global_.limiter
            await until(lambda: limiter.tenants and limiter.status()["lent_by"]["virginia"]["root"])
            await until(lambda: {"large", MODEL} <= set(flow.regions.view.models(frozenset({"virginia"}))))
            gone.behaviour = "vanish"
            found = [await send(up.entry, chat("sk-farhop-curious", asking("large"))) for _ in range(3)]
            assert [one.status for one in found] == [200, 200, 429]
            await up.at_rest()
