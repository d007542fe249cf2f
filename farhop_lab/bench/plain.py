"""A plain proxy on aiohttp, as one would write it in an afternoon: the cost of a Python gateway without optimisation.

`python -m farhop_lab.bench.plain '{"port": 9001, "targets": [["127.0.0.2", 9000]]}'`. Never a product.
"""

from __future__ import annotations

import itertools
import signal
import sys
from asyncio import Event, get_running_loop

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from farhop_lab.bench.bare import Job

_DROPPED = {"host", "connection", "keep-alive", "transfer-encoding", "content-length"}


def application(targets: list[tuple[str, int]], session: aiohttp.ClientSession) -> web.Application:
    """Requests go to the targets in turn, and answers pass piece by piece."""
    turn = itertools.cycle(targets)

    async def relay(request: web.Request) -> web.StreamResponse:
        host, port = next(turn)
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _DROPPED]
        body = await request.read()
        url = f"http://{host}:{port}{request.path_qs}"
        async with session.request(request.method, url, headers=headers, data=body) as answer:
            passed_on = [(name, value) for name, value in answer.headers.items() if name.lower() not in _DROPPED]
            if answer.content_length is not None:
                return web.Response(status=answer.status, headers=dict(passed_on), body=await answer.read())
            passed = web.StreamResponse(status=answer.status, headers=dict(passed_on))
            await passed.prepare(request)
            async for piece in answer.content.iter_any():
                await passed.write(piece)
            await passed.write_eof()
            return passed

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{tail:.*}", relay)
    return app


async def serve(job: Job) -> None:
    """Serve until SIGTERM."""
    stop = Event()
    get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        runner = web.AppRunner(application(job.targets, session), access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", job.port, backlog=4096).start()
        print(f"plain proxy on {job.port}", flush=True)
        await stop.wait()
        await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Job)))
