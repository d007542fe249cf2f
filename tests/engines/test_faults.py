"""Real engines that freeze, die and come back: what the clients of both tiers see of it."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import real
from inprocess import Answer, Both, chat, until
from real import RealEngine, send, status, tiers, told

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def own(logs: Path) -> Iterator[list[RealEngine]]:
    """Two engines that nobody else uses, without KV events; the second tells nothing of what was cached."""
    if not real.VLLM.exists():
        pytest.skip(f"vLLM is {real.MISSING}")
    started = [real.vllm(logs, tells=False), real.vllm(logs, tells=False, details=False)]
    try:
        for engine in started:
            engine.ready()
        yield started
    finally:
        for engine in started:
            engine.stop()


async def ask(both: Both, text: str) -> Answer:
    body = {"model": "tiny", "max_tokens": 4, "stream": True, "messages": [{"role": "user", "content": text}]}
    return await send(both.entry, chat(body=body, content_type="application/json"))


def text(seed: int, words: int = 120) -> str:
    rng = random.Random(seed)
    return " ".join(str(rng.randrange(1000)) for _ in range(words))


async def test_what_a_frozen_engine_never_began_is_answered_by_another(own: list[RealEngine]) -> None:
    async with tiers(*own) as both:
        for seed in range(40):
            await ask(both, text(seed, 20))
        own[0].signal(signal.SIGSTOP)
        try:
            waited: list[float] = []
            for seed in range(40, 60):
                began = time.monotonic()
                answer = await ask(both, text(seed, 20))
                waited.append(time.monotonic() - began)
                assert answer.status == 200
            doubted_s = both.regional.flow._doubts.factor * 0.1
            print("longest", max(waited), "factor", both.regional.flow._doubts.factor)
            assert max(waited) < 1.0 + doubted_s + 2.0 * sorted(waited)[len(waited) // 2]
        finally:
            own[0].signal(signal.SIGCONT)


async def test_a_restarted_engine_is_known_to_hold_nothing(own: list[RealEngine], logs: Path) -> None:
    async with tiers(own[0]) as both:
        for _ in range(2):
            assert (await ask(both, text(1))).status == 200
        await told(both)
        assert both.regional.flow.trie.bytes_held("e0") > 0
        port = int(own[0].url.rpartition(":")[2])
        own[0].stop()
        own[0] = real.vllm(logs, port=port, tells=False)
        await asyncio.to_thread(own[0].ready)
        await until(lambda: both.regional.flow.trie.bytes_held("e0") == 0, 60.0)
        await real.all_up(both, 60.0)
        assert (await ask(both, text(1))).status == 200


async def test_an_engine_that_tells_nothing_of_what_was_cached_is_named(own: list[RealEngine]) -> None:
    async with tiers(own[1]) as both:
        assert (await ask(both, text(2))).status == 200
        await told(both)
        assert status(both)[0]["reports_cached_tokens"] is False


async def test_a_killed_engine_loses_nothing_that_had_not_begun(own: list[RealEngine]) -> None:
    async with tiers(*own) as both:
        asked = [asyncio.create_task(ask(both, text(seed, 400))) for seed in range(100, 116)]
        await asyncio.sleep(0.05)
        own[1].signal(signal.SIGKILL)
        answers = await asyncio.gather(*asked)
        assert [(answer.status, answer.body) for answer in answers if answer.status != 200] == []
        broken = [answer for answer in answers if b"[DONE]" not in answer.body]
        assert all(b"error" in answer.body for answer in broken)  # begun there: their stream ends with the reason
