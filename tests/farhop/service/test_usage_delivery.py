"""Usage records sent on over HTTP: all of them that may be, through outages, and each known by its id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web
from inprocess import Engine, both, chat, send, tenant, topology, until

from farhop.accounts import segments
from farhop.accounts.usage import Reading

HERE_ALONE = {"residency": {"processing": {"allow": ["world"]}, "logging": {"allow": ["us"]}}}
WORLD = topology(tenant("noted-here", **HERE_ALONE))


async def test_sent_on_at_least_once_through_outages(tmp_path: Path) -> None:
    """What takes events answers 503, is gone, and refuses one as malformed: all others come, and are known by id."""
    got, answers = list[Any](), [503, 200]

    async def take(request: web.Request) -> web.Response:
        batch = await request.json()
        status = answers.pop(0) if answers else 200
        if any(one["data"]["status"] == 400 for one in batch):
            status = 400
        if status == 200:
            got.extend(batch)
        assert request.content_type == "application/cloudevents-batch+json"
        return web.Response(status=status)

    app = web.Application()
    app.router.add_post("/api/v1/events", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/api/v1/events"
    try:
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
    finally:
        await runner.cleanup()
    assert {one["subject"] for one in got} == {"anywhere"}
    assert len({one["id"] for one in got}) == 4
    assert len(list(Reading().events(line for _, line in segments.read(tmp_path)))) == 6
