from __future__ import annotations

import asyncio

from bench_runs import listening, passed

from farhop_lab.bench import bare


async def test_bare_relay_passes_requests_and_streams_and_keeps_connections(engines: int) -> None:
    pool, tasks = bare.Pool([("127.0.0.1", engines)]), set[asyncio.Task[None]]()
    async with listening(lambda: bare.Client(pool, tasks)) as port:
        whole = await passed(port, of_requests=11)
        streams = await passed(port, of_chunks=21, chunks=20, interval_ms=5.0, window_s=0.2)
        for upstream in pool.idle:
            assert upstream.transport is not None
            upstream.transport.close()
    assert sum(window.errors for window in whole + streams) == 0
    assert len(pool.idle) <= 4  # no more than there were clients at once


async def test_a_connection_is_free_when_its_answer_is_over(engines: int) -> None:
    pool, tasks = bare.Pool([("127.0.0.1", engines)]), set[asyncio.Task[None]]()
    async with listening(lambda: bare.Client(pool, tasks)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        (upstream,) = pool.idle
        assert pool.taken() is upstream
        assert pool.taken() is None
        assert upstream.transport is not None
        upstream.transport.close()
        writer.close()
