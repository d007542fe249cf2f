"""The client that asks by several ways in turn."""

from __future__ import annotations

import asyncio
import os

import pytest
from bench_runs import Refuses, listening

from farhop_lab.bench import bodies
from farhop_lab.bench.ttft_client import ClientError, Job, Way, run

BODY = bodies.streamed(512, 2, 1.0, 1)[0].decode()


async def test_each_way_is_gone_there_and_back_and_warm_ups_are_not_counted(engines: int) -> None:
    ways = [Way("a", "127.0.0.1", engines), Way("b", "127.0.0.1", engines, [os.getpid()])]
    rounds = await asyncio.to_thread(run, Job(ways, BODY, rounds=2, warm_ups=1, pause_s=0.0))
    assert [[sample.way for sample in one] for one in rounds] == [["a", "b", "b", "a"]] * 2
    for sample in (sample for one in rounds for sample in one):
        assert sample.ttft_ms > 0.0
        assert (sample.cpu_ms > 0.0) == (sample.way == "b")


async def test_unstreamed_answer_ends_the_run() -> None:
    async with listening(Refuses) as port:
        with pytest.raises(ClientError, match=r"refuses: instead of a stream came .*429 Too Many Requests"):
            await asyncio.to_thread(run, Job([Way("refuses", "127.0.0.1", port)], BODY, 1))
