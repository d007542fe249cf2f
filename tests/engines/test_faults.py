"""Real engines that freeze, die and come back: what the clients of both tiers see of it. Of each kind there is."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import real
from inprocess import Answer, Both, chat, until
from real import RealEngine, send, settled, status, tiers

from farhop_lab.world.fork_server import run_queue_s
from regional_lb.scheduler.overdue import OverdueRequests

pytestmark = pytest.mark.engines

MOVED_S = 1.0  # a request that has not begun moves within this time after it is overdue


@dataclass
class Own:
    """Two engines of a kind that nobody else uses, without KV events. `again`: one like the first, at its port."""

    kind: str
    engines: list[RealEngine]
    again: Callable[[int], RealEngine]


@pytest.fixture(scope="module", params=["vllm", "llama"])
def own(request: pytest.FixtureRequest, logs: Path) -> Iterator[Own]:
    """Of two vLLMs the second tells nothing of what was cached."""
    if request.param == "vllm":
        request.getfixturevalue("shared").stop()
        started = [real.vllm(logs, tells=False), real.vllm(logs, tells=False, details=False)]
        made = Own("vllm", started, lambda port: real.vllm(logs, port=port, tells=False))
    else:
        if not real.LLAMA.exists():
            pytest.skip(f"llama-server is {real.MISSING}")
        made = Own("llama", [real.llama(logs), real.llama(logs)], lambda port: real.llama(logs, port=port))
    try:
        for engine in made.engines:
            engine.ready()
        yield made
    finally:
        for engine in made.engines:
            engine.stop()


def before(own: Own, *engines: RealEngine) -> Any:
    """Both tiers before some of them."""
    return tiers(*engines, tokenizer=own.kind == "vllm")


async def ask(both: Both, text: str) -> Answer:
    body = {"model": "tiny", "max_tokens": 4, "stream": True, "messages": [{"role": "user", "content": text}]}
    return await send(both.entry, chat(body=body, content_type="application/json"))


def text(seed: int, words: int = 120) -> str:
    rng = random.Random(seed)
    return " ".join(str(rng.randrange(1000)) for _ in range(words))


@dataclass
class Moves:
    """What is overdue, and when it moves, by the clock of who decides; less what this process waited for a core.

    Of each request that moved, `expected_s` is when its answer was expected, and `late_s` how long it was overdue
    until it was sent anew.
    """

    requests: OverdueRequests
    expected_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    _sent: dict[str, tuple[str, float, float, float]] = field(default_factory=dict)
    _overdue_at: dict[str, float] = field(default_factory=dict)
    _waited: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._send, self._find = self.requests.sent, self.requests.overdue
        self.requests.sent, self.requests.overdue = self.sent, self.overdue  # type: ignore[method-assign]

    def sent(self, replica: str, request_id: str, expected_ms: float, now: float) -> None:
        """As OverdueRequests has it."""
        self._send(replica, request_id, expected_ms, now)
        earlier = self._sent.get(request_id)
        if earlier is not None and earlier[0] != replica:
            _, sent_at, due_s, expected_s = earlier
            self._waited.append((now, run_queue_s(os.getpid())))
            overdue_at = self._overdue_at.get(request_id, sent_at + due_s)  # below 0 if it did not wait that long
            self.expected_s.append(expected_s)
            self.late_s.append(now - overdue_at - self._kept_since(overdue_at))
        due_s = self.requests.waiting[replica][request_id][1]
        self._sent[request_id] = replica, now, due_s, expected_ms / 1e3

    def overdue(self, now: float) -> list[tuple[str, str]]:
        """As OverdueRequests has it."""
        self._waited.append((now, run_queue_s(os.getpid())))
        found = self._find(now)
        for replica, request_id in found:
            _, sent_at, due_s, _ = self._sent[request_id]
            alive_at = self.requests.alive_at.get(replica, sent_at)
            self._overdue_at.setdefault(request_id, max(sent_at, alive_at) + due_s)
        return found

    def _kept_since(self, at: float) -> float:
        begins = max((waited_s for when, waited_s in self._waited if when <= at), default=self._waited[0][1])
        return self._waited[-1][1] - begins


async def test_a_request_that_a_frozen_engine_never_began_is_answered_by_another(own: Own) -> None:
    async with before(own, *own.engines) as both:
        healthy: list[float] = []
        for seed in range(40):
            began = time.monotonic()
            await ask(both, text(seed, 20))
            healthy.append(time.monotonic() - began)
        moves = Moves(both.regional.flow.overdue_requests)
        own.engines[0].signal(signal.SIGSTOP)
        try:
            for seed in range(40, 200):
                answer = await ask(both, text(seed, 20))
                assert (answer.status, b"[DONE]" in answer.body) == (200, True)
                if seed >= 60 and moves.late_s:
                    break
        finally:
            own.engines[0].signal(signal.SIGCONT)
    assert moves.late_s, "nothing was sent to the engine that was frozen"
    assert max(moves.late_s) <= MOVED_S, moves
    # Overdue: a healthy engine would have done it by now, judging by the others: no later than the slowest of them.
    assert max(moves.expected_s) <= max(healthy), (moves, healthy)


async def test_a_restarted_engine_is_known_to_hold_nothing(own: Own) -> None:
    async with before(own, own.engines[0]) as both:
        for _ in range(2):
            assert (await ask(both, text(1))).status == 200
        await settled(both)
        assert both.regional.flow.replicas.trie.bytes_held("e0") > 0
        port = int(own.engines[0].url.rpartition(":")[2])
        own.engines[0].stop()
        own.engines[0] = own.again(port)
        await asyncio.to_thread(own.engines[0].ready)
        await until(lambda: both.regional.flow.replicas.trie.bytes_held("e0") == 0, 60.0)
        await real.all_up(both, 60.0)
        assert (await ask(both, text(1))).status == 200


async def test_an_engine_that_does_not_report_cached_tokens_is_named(own: Own) -> None:
    async with before(own, own.engines[1]) as both:
        assert (await ask(both, text(2))).status == 200
        await settled(both)
        assert status(both)[0]["reports_cached_tokens"] is (own.kind == "llama")


async def test_a_killed_engine_loses_nothing_that_had_not_begun(own: Own) -> None:
    async with before(own, *own.engines) as both:
        asked = [asyncio.create_task(ask(both, text(seed, 400))) for seed in range(100, 116)]
        await until(lambda: both.regional.flow.under_way > 0)
        own.engines[1].signal(signal.SIGKILL)
        answers = await asyncio.gather(*asked)
        assert [(answer.status, answer.body) for answer in answers if answer.status != 200] == []
        broken = [answer for answer in answers if b"[DONE]" not in answer.body]
        assert all(b"error" in answer.body for answer in broken)  # begun there: their stream ends with the reason
        await until(lambda: status(both)[1]["state"] != "up", 30.0)
        assert (await ask(both, text(200))).status == 200
