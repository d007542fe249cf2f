"""The client's counts, against an upstream whose answers are known."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from bench_runs import Refuses, listening, sent

from farhop_lab.bench import client


class HangsUp(Refuses):
    """Closes instead of answering."""

    def data_received(self, data: bytes) -> None:
        self.transport.close()


async def test_windows_follow_each_other(engines: int) -> None:
    found = await sent(engines, windows=2)
    assert len(found.windows) == 2
    for window in found.windows:
        assert window.seconds > 0.19
        assert window.requests > 10
        assert 0.0 < window.cpu_s < 10.0 * window.seconds
        assert window.rss_bytes > 1_000_000
        assert window.errors == 0


async def test_chunks_of_streams_are_counted(engines: int) -> None:
    found = await sent(engines, connections=8, chunks=1000, interval_ms=10.0, window_s=0.3)
    (window,) = found.windows
    assert window.streams == 8
    assert window.requests == 0  # none has ended
    assert 8 <= window.chunks < 8 * 1000


async def test_idle_streams_are_open_and_silent(engines: int) -> None:
    before, after = (await sent(engines, mode="idle", connections=10, chunks=10, interval_ms=60_000.0)).windows
    assert (before.streams, after.streams) == (0, 10)
    assert after.chunks == 10  # the first of each


async def test_an_open_loop_keeps_its_rate(engines: int) -> None:
    began = time.monotonic()
    found = await sent(engines, mode="open", rate_per_s=300.0, window_s=0.3)
    assert 0.0 < found.p50_ms <= found.p99_ms
    (window,) = found.windows
    assert 0 < window.requests <= 300.0 * (time.monotonic() - began) + 1  # requests that the ramp missed are caught up


async def test_an_open_loop_counts_what_is_never_answered() -> None:
    async with listening(asyncio.Protocol) as port:
        found = await sent(port, mode="open", rate_per_s=200.0, connections=2, window_s=0.3)
    assert found.windows[0].requests == 0
    assert found.p99_ms > 50.0


@pytest.mark.parametrize("server", [Refuses, HangsUp])
async def test_wrong_answers_are_errors(server: type[asyncio.Protocol]) -> None:
    async with listening(server) as port:
        found = await sent(port, connections=1, ramp_s=0.0)
    assert found.windows[0].errors > 0


async def test_a_closed_port() -> None:
    async with listening(asyncio.Protocol) as port:
        pass
    load = client.Load(
        client.Job(
            mode="closed", host="127.0.0.1", port=port, pids=[os.getpid()], connections=2, ramp_s=0.0, window_s=0.1,
            windows=1,
        )
    )  # fmt: skip
    await load.connect()
    assert load.errors == 2


def test_numbered_prompts_differ() -> None:
    job = client.Job(
        mode="closed", host="h", port=1, pids=[], connections=1, ramp_s=0.0, window_s=0.1, windows=1, first=100
    )
    load = client.Load(job)
    made = [load.next_request() for _ in range(200)]
    assert len(set(made)) == 200
    assert b"0000000101" in made[0]
    assert len({len(request) for request in made}) == 1
