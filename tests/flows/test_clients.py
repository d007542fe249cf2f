"""What clients of today say, through both tiers in one process: paths that not every engine has, keys by another
header, residency in their words, probes of load balancers."""

from __future__ import annotations

from typing import Any

import pytest
from inprocess import MODEL, Answer, Engine, both, chat, head, send, tenant, topology

from farhop.balance.machine import RequestArrived

MESSAGES = "/v1/messages"


def message(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": text}], **more}


async def asked(port: int, path: str, body: Any, key: str = "sk-farhop-anywhere", **headers: str) -> Answer:
    return await send(port, chat(key, body, path, **headers))


async def test_a_path_that_no_engine_has_is_answered_so() -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        answer = await asked(up.entry, MESSAGES, message())
        assert answer.status == 501
        assert answer.json["type"] == "error"
        assert answer.json["error"]["code"] == "path_not_supported_by_engine"
        assert "/v1/chat/completions" in answer.json["error"]["message"]
        assert (await asked(up.client, MESSAGES, message())).status == 501
        embedded = await asked(up.entry, "/v1/embeddings", {"model": MODEL, "input": "hello"})
        assert (embedded.status, embedded.code) == (501, "path_not_supported_by_engine")
        assert "embeddings, scores and rankings take a model that is served for them" in embedded.body.decode()
        # That proves nothing about the engine's health, nor about other paths.
        assert (await asked(up.entry, "/v1/chat/completions", None)).status == 200
        await up.at_rest()


async def test_api_key_in_the_alternative_header_is_not_forwarded() -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        sent = chat(None, None, x_api_key="sk-farhop-anywhere", anthropic_version="2023-06-01")
        assert (await send(up.entry, sent)).status == 200
        headers, _ = engine.seen[-1]
        assert "x-api-key" not in headers
        assert headers["anthropic-version"] == "2023-06-01"
        wrong = await send(up.entry, chat("sk-wrong", None, x_api_key="sk-farhop-anywhere"))
        assert wrong.status == 401


@pytest.mark.parametrize("field", ["inference_geo", "data_residency"])
async def test_residency_in_a_body_narrows_and_is_refused_where_unknown(field: str) -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        for port in (up.entry, up.client):
            assert (await asked(port, "/v1/chat/completions", {**body, field: "us"})).status == 200
            assert (await asked(port, "/v1/chat/completions", {**body, field: "GLOBAL"})).status == 200
            away = await asked(port, "/v1/chat/completions", {**body, field: "eu"})
            assert (away.status, away.code) == (
                (503, "no_region_serving") if port == up.entry else (451, "unlawful_here")
            )
            unknown = await asked(port, "/v1/chat/completions", {**body, field: "mars"})
            assert (unknown.status, unknown.json["error"]["param"]) == (400, field)
            for wrong in (7, "", ["eu"], "e" * 65, "eu\n"):
                assert (await asked(port, "/v1/chat/completions", {**body, field: wrong})).status == 400
        assert len(engine.seen) == 4
        await up.at_rest()


async def test_large_body_is_restricted_like_a_small_one() -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello " * 60_000}], "inference_geo": "eu"}
        assert (await asked(up.entry, "/v1/chat/completions", body)).status == 503
        assert (await asked(up.client, "/v1/chat/completions", body)).status == 451
        assert not engine.seen
        assert (await asked(up.entry, "/v1/chat/completions", {**body, "inference_geo": "us"})).status == 200
        assert (await asked(up.entry, "/v1/chat/completions", {**body, "inference_geo": "mars"})).status == 400
        await up.at_rest()


@pytest.mark.parametrize("nested", ["extra_body", "nvext", "vllm_xargs"])
async def test_a_residency_field_that_would_be_ignored_is_refused(nested: str) -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], nested: {"inference_geo": "eu"}}
        refused = await asked(up.entry, "/v1/chat/completions", body)
        assert (refused.status, refused.json["error"]["param"]) == (400, "inference_geo")
        assert not engine.seen


@pytest.mark.parametrize(
    ("host", "status"),
    [("us.llm.example", 200), ("US.llm.example:8443", 200), ("eu.llm.example", 451), ("ae.api.llm.example", 400),
     ("jp.api.llm.example", 451), ("jp.llm.example", 200), ("eurosport.example", 200), ("eu", 200)],
)  # fmt: skip
async def test_host_name_selects_a_residency(host: str, status: int) -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        for port in (up.entry, up.client):
            answer = await send(port, chat().replace(b"host: farhop", b"host: " + host.encode()))
            assert answer.status == status
        assert len(engine.seen) == (2 if status == 200 else 0)


async def test_model_may_be_omitted_if_only_one_is_served() -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        assert (await asked(up.entry, "/v1/chat/completions", body)).status == 200
        assert engine.seen[-1][1]["model"] == MODEL
        assert (await asked(up.entry, "/v1/chat/completions", {**body, "model": None})).status == 200
        assert engine.seen[-1][1]["model"] == MODEL
        large = {"messages": [{"role": "user", "content": "hello " * 60_000}]}
        assert (await asked(up.entry, "/v1/chat/completions", large)).status == 200
        assert engine.seen[-1][1]["model"] == MODEL


async def test_model_is_required_if_several_are_served() -> None:
    replica = {"models": [MODEL, "other"], "name": "one"}
    async with Engine().running() as engine:
        replica["url"] = f"http://{engine.address}"
        async with both(engine, topology(), regional={"replicas": [replica]}) as up:
            body = {"messages": [{"role": "user", "content": "hello"}]}
            refused = await asked(up.entry, "/v1/chat/completions", body)
            assert (refused.status, refused.json["error"]["param"]) == (400, "model")


async def test_health_probes_show_a_status_and_nothing_else() -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        for port in (up.entry, up.client):
            for path in ("/health", "/ready", "/v2/health/live", "/v2/health/ready"):
                answer = await send(port, head("GET", path))
                assert (answer.status, answer.body) == (200, b"")
                assert not any(name.startswith("x-farhop") for name in answer.headers)
            assert (await send(port, head("POST", "/health"))).status == 405
        up.global_.tier_admin.stopping = up.regional.tier_admin.stopping = True
        for port in (up.entry, up.client):
            for ready, alive in (("/ready", "/health"), ("/v2/health/ready", "/v2/health/live")):
                assert (await send(port, head("GET", ready))).status == 503
                assert (await send(port, head("GET", alive))).status == 200
        assert (await send(up.tier, head("GET", "/health"))).status == 404
        assert up.global_.metrics.in_flight == 0


async def test_entry_without_a_lawful_region_is_not_ready() -> None:
    world = topology(tenant("only", residency={"processing": {"allow": ["jp"]}}))
    tenants = {"only": world.tenants["only"]}
    from dataclasses import replace

    async with Engine().running() as engine, both(engine, replace(world, tenants=tenants)) as up:
        assert (await send(up.entry, head("GET", "/ready"))).status == 503
        assert (await send(up.entry, head("GET", "/health"))).status == 200


async def test_the_version_is_shown_to_authorised_callers() -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        assert (await send(up.entry, head("GET", "/version"))).status == 401
        found = await send(up.entry, head("GET", "/version", authorization="Bearer sk-farhop-anywhere"))
        assert found.status == 200
        assert found.json["version"]


@pytest.mark.parametrize(
    ("fields", "headers", "priority"),
    [
        ({}, {}, 3),
        ({"service_tier": "auto"}, {}, 3),
        ({"service_tier": "flex"}, {}, 1),
        ({"service_tier": "priority"}, {"x_llm_d_slo_ttft_ms": "10"}, 7),
        ({}, {"x_llm_d_inference_objective": "flex"}, 1),
        ({}, {"x_llm_d_slo_ttft_ms": "400"}, 6),
        ({}, {"x_llm_d_slo_ttft_ms": "600"}, 3),
        ({}, {"x_llm_d_slo_ttft_ms": "soon"}, 3),
    ],
)
async def test_service_tier_has_the_priority_of_the_tenants_policy(
    fields: dict[str, Any], headers: dict[str, str], priority: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {"priority": 3, "tiers": {"flex": 1, "priority": 7}, "objectives": [{"ttft_ms": 500, "priority": 6}]}
    async with Engine().running() as engine, both(engine, topology(tenant("tiered", **policy))) as up:
        seen: list[int] = []
        for balancer in (up.global_, up.regional):
            handle = balancer.relay.flow.handle

            def noted(event: Any, now: float, handle: Any = handle) -> Any:
                if isinstance(event, RequestArrived):
                    seen.append(event.request.priority)
                return handle(event, now)

            monkeypatch.setattr(balancer.relay.flow, "handle", noted)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}
        assert (await asked(up.entry, "/v1/chat/completions", body, "sk-farhop-tiered", **headers)).status == 200
        assert seen == [priority, priority]
        del seen[:]
        assert (await asked(up.entry, "/v1/chat/completions", body, **headers)).status == 200
        assert seen == [0, 0], "without such a policy nothing is worth more"


@pytest.mark.parametrize(("header", "within_s"), [("20000", 20.0), ("0", None), ("soon", None), ("", None)])
async def test_first_token_objective_of_a_client_reaches_both_tiers(
    header: str, within_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all tenants, whatever their policy; in the region it is what is left of it, less the way there and back."""
    async with Engine().running() as engine, both(engine, topology()) as up:
        seen: list[float | None] = []
        for balancer in (up.global_, up.regional):
            handle = balancer.relay.flow.handle

            def noted(event: Any, now: float, handle: Any = handle) -> Any:
                if isinstance(event, RequestArrived):
                    by = event.request.first_token_by
                    seen.append(None if by is None else by - now)
                return handle(event, now)

            monkeypatch.setattr(balancer.relay.flow, "handle", noted)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        headers = {"x_llm_d_slo_ttft_ms": header} if header else {}
        assert (await asked(up.entry, "/v1/chat/completions", body, **headers)).status == 200
        assert (await asked(up.client, "/v1/chat/completions", body, **headers)).status == 200
        entry, hop, direct = seen
        if within_s is None:
            assert seen == [None, None, None]
        else:
            assert entry is not None
            assert hop is not None
            assert direct is not None
            assert within_s / 2 < hop < entry <= within_s
            assert within_s / 2 < direct <= within_s
