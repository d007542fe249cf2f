from __future__ import annotations

import aiohttp
from aiohttp import web
from bench_runs import passed

from farhop_lab.bench import plain


async def test_plain_proxy_passes_requests_and_streams(engines: int) -> None:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        runner = web.AppRunner(plain.application([("127.0.0.1", engines)], session), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            whole = await passed(port, of_requests=6)
            streams = await passed(port, of_chunks=21, chunks=20, interval_ms=5.0, window_s=0.2)
        finally:
            await runner.cleanup()
    assert sum(window.errors for window in whole + streams) == 0
