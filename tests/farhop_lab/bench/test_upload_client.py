"""The client that sends large requests on the shipped pool's connections."""

from __future__ import annotations

import pytest
from bench_runs import Refuses, listening

from farhop_lab.bench.upload_client import BESIDE, COOL, KEPT, NEW, RESTED, Job, measure


async def test_each_kind_of_connection_is_timed_as_often_as_requested(engines: int) -> None:
    ms = await measure(Job("127.0.0.1", engines, 50_000, 2, 0.0))
    assert {kind: len(times) for kind, times in ms.items()} == dict.fromkeys((NEW, COOL, KEPT, BESIDE, RESTED), 2)
    assert min(min(times) for times in ms.values()) > 0.0


async def test_an_answer_that_is_none_ends_the_run() -> None:
    async with listening(Refuses) as port:
        with pytest.raises(RuntimeError, match="answered with 429"):
            await measure(Job("127.0.0.1", port, 50_000, 1, 0.0))
