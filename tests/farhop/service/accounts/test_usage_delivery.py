"""Usage records sent on over HTTP: all of them that may be, through outages, and each known by its id."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from inprocess import Engine, both, chat, send, tenant, topology, until

from farhop.accounts import segments
from farhop.accounts.usage import Reading
from farhop.balance.machine import LawChanged
from topology.law import Law

HERE_ALONE = {"residency": {"processing": {"allow": ["world"]}, "logging": {"allow": ["us"]}}}
WORLD = topology(tenant("noted-here", **HERE_ALONE))


@asynccontextmanager
async def taking(answer: Callable[[list[Any]], int]) -> AsyncIterator[str]:
    """Somebody who takes events, at this URL; `answer` says with which status."""

    async def take(request: web.Request) -> web.Response:
        assert request.content_type == "application/cloudevents-batch+json"
        return web.Response(status=answer(await request.json()))

    app = web.Application()
    app.router.add_post("/api/v1/events", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/api/v1/events"
    finally:
        await runner.cleanup()


KEYED = tenant("noted-here")
KEYED_HERE = {**KEYED, "keys": [{**KEYED["keys"][0], "within": ["us"]}]}


@pytest.mark.parametrize(
    "of_now", [tenant("noted-here", **HERE_ALONE), KEYED_HERE], ids=["the tenant's rule", "the key's places"]
)
async def test_what_waited_is_not_sent_where_the_law_of_then_let_it_and_that_of_now_does_not(
    of_now: dict[str, Any], tmp_path: Path
) -> None:
    got, answers = list[Any](), list[int]()

    def answer(batch: list[Any]) -> int:
        answers.append(503 if len(answers) < 1 else 200)
        if answers[-1] == 200:
            got.extend(batch)
        return answers[-1]

    world = topology(tenant("noted-here"))
    narrower = topology(of_now)
    async with taking(answer) as url, Engine().running() as engine:
        usage = {"usage": {"dir": str(tmp_path), "sync": "never", "http": {"url": url, "region": "tokyo"}}}
        async with both(engine, world, global_=usage) as running:
            for name in ("anywhere", "noted-here", "anywhere"):
                await send(running.entry, chat(f"sk-farhop-{name}"))
            await until(lambda: answers)  # and refused
            running.global_.relay.react(LawChanged(Law(replace(narrower, epoch=2))))
            assert running.global_.accounts is not None
            delivery = running.global_.accounts.delivery
            assert delivery is not None
            await until(lambda: delivery.delivered == 2 and delivery.kept_back == 1)
    assert [one["subject"] for one in got] == ["anywhere"] * 2
    assert len(list(Reading().events(line for _, line in segments.read(tmp_path)))) == 3  # here all are


async def test_sent_on_at_least_once_through_outages(tmp_path: Path) -> None:
    """What takes events answers 503, is gone, and refuses one as malformed: all others come, and are known by id."""
    got, answers = list[Any](), [503, 200]

    def answer(batch: list[Any]) -> int:
        status = answers.pop(0) if answers else 200
        if any(one["data"]["status"] == 400 for one in batch):
            status = 400
        if status == 200:
            got.extend(batch)
        return status

    async with taking(answer) as url:
        usage = {"usage": {"dir": str(tmp_path), "sync": "never", "http": {"url": url, "region": "tokyo"}}}
        async with Engine().running() as engine, both(engine, WORLD, regional=usage, global_=usage) as running:
            for _ in range(3):
                await send(running.entry, chat("sk-farhop-anywhere"))
            await send(running.entry, chat("sk-farhop-anywhere", b"{"))
            await send(running.entry, chat("sk-farhop-noted-here"))  # may not be recorded in Tokyo
            await send(running.entry, chat("sk-farhop-anywhere"))
            assert running.global_.accounts is not None
            delivery = running.global_.accounts.delivery
            assert delivery is not None
            await until(lambda: delivery.delivered == 4 and delivery.kept_back == 1)
            assert delivery.rejected == 1
            await until(lambda: (tmp_path / "virginia" / "g1" / "delivered").exists())
    assert {one["subject"] for one in got} == {"anywhere"}
    assert len({one["id"] for one in got}) == 4
    assert len(list(Reading().events(line for _, line in segments.read(tmp_path)))) == 6


@pytest.mark.parametrize("status", [302, 307, 308])
async def test_a_redirect_is_not_followed_and_delivers_nothing(status: int, tmp_path: Path) -> None:
    """The law was asked about the configured receiver, and a page that answers 200 to a GET has taken no record."""
    got, answers, elsewhere = list[Any](), [status, status], list[str]()

    async def take(request: web.Request) -> web.Response:
        code = answers.pop(0) if answers else 200
        if code == 200:
            got.extend(await request.json())
        return web.Response(status=code, headers={"Location": "/elsewhere"} if code != 200 else {})

    async def other(request: web.Request) -> web.Response:
        elsewhere.append(request.method)
        return web.Response()

    app = web.Application()
    app.router.add_post("/events", take)
    app.router.add_route("*", "/elsewhere", other)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/events"
        usage = {"usage": {"dir": str(tmp_path), "sync": "never", "http": {"url": url, "region": "tokyo"}}}
        async with Engine().running() as engine, both(engine, WORLD, global_=usage) as running:
            await send(running.entry, chat("sk-farhop-anywhere"))
            assert running.global_.accounts is not None
            delivery = running.global_.accounts.delivery
            assert delivery is not None
            await until(lambda: delivery.trouble or delivery.delivered)
            assert delivery.trouble == f"{url}: it answered {status}"
            await until(lambda: delivery.delivered)
    finally:
        await runner.cleanup()
    assert elsewhere == []
    assert [one["subject"] for one in got] == ["anywhere"]
