"""Where answers given again meet the balancer: its routes, its stop, deadlines, receipts, metrics, kept connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from inprocess import HOP_KEY, MODEL, Both, Engine, both, chat, head, send, topology, until

from global_lb.routing.policy import RouteConfig
from global_lb.routing.routes import RoutesChanged

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
ROUTES = [{"keep_answers_s": 60.0, "coalesce": True}]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Both]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with engine.running(), both(engine, topology(), global_={"routes": ROUTES}) as made:
        yield made
        engine.release.set()
        await made.at_rest()
        await until(lambda: made.global_.answer_cache.cache.store.taken == 0)


async def test_requests_pass_the_answer_cache_only_while_a_route_uses_it(up: Both) -> None:
    balancer = up.global_
    assert balancer.ingress.relay is balancer.answer_cache
    balancer.relay.react(RoutesChanged({("", ""): RouteConfig()}))
    assert balancer.ingress.relay is balancer.relay
    balancer.relay.react(RoutesChanged({("", ""): RouteConfig(), ("t", "m"): RouteConfig(coalesce=True)}))
    assert balancer.ingress.relay is balancer.answer_cache
    assert "x-farhop-cache" not in (await send(up.entry, chat(body=BODY))).headers  # another's route
    balancer.relay.react(RoutesChanged({}))
    assert (await send(up.entry, chat(body=BODY))).headers["x-farhop-cache"] == "miss"


async def test_a_follower_has_its_own_deadline(up: Both, engine: Engine) -> None:
    engine.behaviour = "wait"
    leads = asyncio.create_task(send(up.entry, chat(body=BODY)))
    await until(lambda: len(engine.seen) == 1)
    late = await send(up.entry, chat(body=BODY, x_farhop_timeout_ms="50"))
    assert (late.status, late.code, late.headers["x-farhop-cache"]) == (504, "deadline_exceeded", "bypass")
    engine.release.set()
    assert (await leads).status == 200
    assert len(engine.seen) == 1


async def test_requests_waiting_for_a_shared_answer_are_answered_when_the_balancer_stops(
    up: Both, engine: Engine
) -> None:
    engine.behaviour = "wait"
    asked = [asyncio.create_task(send(up.entry, chat(body=BODY))) for _ in range(3)]
    await until(lambda: up.global_.metrics.in_flight == 3 and len(engine.seen) == 1)
    await up.global_.listener.close(0.0)
    answers = await asyncio.gather(*asked)
    assert [(answer.status, answer.code) for answer in answers] == [(503, "stopping")] * 3


async def test_shared_streams_are_ended_when_the_balancer_stops(up: Both, engine: Engine) -> None:
    engine.behaviour = "pause"
    asked = [asyncio.create_task(send(up.entry, chat(body=BODY | {"stream": True}))) for _ in range(3)]
    await until(lambda: up.global_.metrics.in_flight == 3 and len(engine.seen) == 1)
    await until(lambda: all(active.exchange.started for active in up.global_.relay.live.values()))
    await up.global_.listener.close(0.0)
    answers = await asyncio.gather(*asked)
    assert all(b'"stopping"' in answer.body or b'"upstream_died' in answer.body for answer in answers)


async def test_a_request_for_a_receipt_shares_no_answer(up: Both, engine: Engine) -> None:
    for _ in range(2):
        explained = await send(up.entry, chat(body=BODY, x_farhop_explain="1"))
        assert (explained.headers["x-farhop-cache"], "x-farhop-receipt" in explained.headers) == ("bypass", True)
    assert len(engine.seen) == 2


async def test_a_connection_is_kept_over_hits_and_pipelined_ones_come_in_turn(up: Both) -> None:
    await send(up.entry, chat(body=BODY))
    one = chat(body=BODY).replace(b"connection: close\r\n", b"")
    answer = await send(up.entry, one + one + chat(body=BODY))
    assert (answer.body.count(b"HTTP/1.1 200 OK"), answer.body.count(b"x-farhop-cache: hit")) == (2, 2)


async def test_the_answer_caches_hits_and_misses_are_in_the_metrics(up: Both) -> None:
    for _ in range(3):
        await send(up.entry, chat(body=BODY))
    page = (await send(up.global_admin, head("GET", "/metrics"))).body.decode()
    lines = {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in page.splitlines()
        if "answer_cache" in line and line[0] != "#"
    }
    own = 'tier="global",region="virginia"'

    def value(name: str, labels: str = "") -> float:
        (found,) = [n for of, n in lines.items() if of.startswith(f"farhop_answer_cache_{name}{{") and labels in of]
        return found

    assert own.split(",")[0] in next(iter(lines))
    assert value("requests_total", 'outcome="hit"') == 2
    assert value("requests_total", 'outcome="miss"') == 1
    assert value("saved_tokens_total", 'kind="completion"') == 6
    assert value("answers") == 1
    assert 0 < value("bytes", 'what="kept"') < value("bytes_max")


@pytest.mark.parametrize("option", [{"keep_answers_s": 1.0}, {"coalesce": True}])
def test_a_redirect_and_an_answer_given_again_exclude_each_other(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))}: does not go with `answer: redirect`"):
        RouteConfig(answer="redirect", **option)
