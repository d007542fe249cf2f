"""The probe of an entry, against a real listener."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import pytest
from aiohttp import web

from entry_anycast.announcing.machine import Fitness, Probed
from entry_anycast.app.config import Probe
from entry_anycast.app.probe import Prober
from farhop_cli import certs
from farhop_lab.world.ports import free_ports


async def test_a_probe_distinguishes_ready_draining_and_dead_entries() -> None:
    answers = iter([200, 204, 503, 307])

    async def ready(_request: web.Request) -> web.Response:
        return web.Response(status=next(answers))

    application = web.Application()
    application.router.add_get("/readyz", ready)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    seen: list[Probed] = []
    enough = asyncio.Event()

    def tell(one: Probed) -> None:
        seen.append(one)
        if len(seen) == 4:
            asyncio.get_running_loop().create_task(runner.cleanup())
        if one.fitness is Fitness.DEAD:
            enough.set()

    config = Probe(url=f"http://127.0.0.1:{port}/readyz", every_s=0.02, timeout_s=60.0)
    probing = asyncio.create_task(Prober(config, tell).run())
    async with asyncio.timeout(20.0):
        await enough.wait()
    probing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await probing
    assert [one.fitness for one in seen[:4]] == [Fitness.FIT, Fitness.FIT, Fitness.LEAVING, Fitness.LEAVING]
    assert seen[2].why == "it answers 503"
    assert seen[-1].fitness is Fitness.DEAD
    assert seen[-1].why


async def test_an_entry_that_accepts_a_connection_and_does_not_answer_is_silent() -> None:
    done: asyncio.Future[Probed] = asyncio.get_running_loop().create_future()
    with socket.create_server(("127.0.0.1", 0)) as hung:
        config = Probe(url=f"http://127.0.0.1:{hung.getsockname()[1]}/readyz", timeout_s=0.05)
        probing = asyncio.create_task(Prober(config, done.set_result).run())
        async with asyncio.timeout(20.0):
            one = await done
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    assert (one.fitness, one.silent) == (Fitness.DEAD, True)


async def test_a_private_authority_is_trusted_if_configured_and_the_name_is_checked(tmp_path) -> None:
    certs.init(tmp_path, "farhop.internal")
    certs.issue(tmp_path, "global", "paris", [], 90, "farhop.internal")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "global-paris.pem", tmp_path / "global-paris.key")
    application = web.Application()

    async def ready(_request: web.Request) -> web.Response:
        return web.Response()

    application.router.add_get("/readyz", ready)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=server).start()
    ca_file = str(tmp_path / "ca.pem")

    async def found(host: str, **more: str) -> Fitness:
        done: asyncio.Future[Probed] = asyncio.get_running_loop().create_future()
        config = Probe(url=f"https://{host}:{port}/readyz", every_s=0.02, timeout_s=10.0, **more)
        probing = asyncio.create_task(Prober(config, lambda one: done.done() or done.set_result(one)).run())
        try:
            return (await done).fitness
        finally:
            probing.cancel()

    assert await found("127.0.0.1") is Fitness.FIT, "on this machine a certificate proves nothing"
    assert await found("127.0.0.1", ca_file=ca_file, server_name="paris.global.farhop.internal") is Fitness.FIT
    assert await found("127.0.0.1", ca_file=ca_file, server_name="tokyo.global.farhop.internal") is Fitness.DEAD
    await runner.cleanup()
    with pytest.raises(OSError, match="No such file"):
        Prober(Probe(url="https://x/readyz", ca_file=str(tmp_path / "none.pem")), lambda _: None)
