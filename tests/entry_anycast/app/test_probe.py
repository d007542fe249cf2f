"""The probe of an entry, against a real listener."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from entry_anycast.announcing.machine import Fitness, Probed
from entry_anycast.app.config import Probe
from entry_anycast.app.probe import Prober
from farhop_lab.world.ports import free_ports


async def test_it_tells_fit_leaving_and_dead() -> None:
    answers = iter([200, 503, 307])

    async def ready(_request: web.Request) -> web.Response:
        return web.Response(status=next(answers))

    application = web.Application()
    application.router.add_get("/readyz", ready)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    told: list[Probed] = []
    enough = asyncio.Event()

    def tell(one: Probed) -> None:
        told.append(one)
        if len(told) == 3:
            asyncio.get_running_loop().create_task(runner.cleanup())
        if one.fitness is Fitness.DEAD:
            enough.set()

    config = Probe(url=f"http://127.0.0.1:{port}/readyz", every_s=0.02, timeout_s=5.0)
    probing = asyncio.create_task(Prober(config, tell).run())
    async with asyncio.timeout(20.0):
        await enough.wait()
    probing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await probing
    assert [one.fitness for one in told[:3]] == [Fitness.FIT, Fitness.LEAVING, Fitness.LEAVING]
    assert told[1].why == "it answers 503"
    assert told[-1].fitness is Fitness.DEAD
    assert told[-1].why
