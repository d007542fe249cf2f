"""A balancer that restarts expects what it expected before, from its first request on: with a peer and alone.

Conversations over emulated engines: what is believed to be cached is held against what the engine found, each time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from inprocess import HOP_KEY, MODEL, chat, common, global_config, send, serving, topology, until

from farhop_lab.memory_store import MemoryCluster, MemoryStore
from global_lb.app.main import GlobalBalancer
from regional_lb.app.config import RegionalConfig
from regional_lb.app.main import RegionalBalancer
from tests.drills.classic import Gpu, l4

TALKS, TURN_BYTES, ANSWER_TOKENS = 8, 6000, 8
WORSE = 1.2
ROUND = 0.01  # of the hits: both tiers count in bytes, an engine in blocks of tokens


class Stage:
    """Three engines, balancers of one region over them, and one above; each can be ended and started again."""

    def __init__(self, gpus: list[Gpu], folder: Path) -> None:
        self._gpus, self._folder, self._cluster = gpus, folder, MemoryCluster()
        self._world = topology()
        self.regionals: dict[str, RegionalBalancer] = {}
        self.above: GlobalBalancer | None = None
        self.ports: dict[str, int] = {}
        self._seed = 0

    def _store(self) -> MemoryStore:
        self._seed += 1
        return MemoryStore(Random(self._seed), self._cluster)

    async def start(self, name: str, **more: Any) -> RegionalBalancer:
        document = {
            **common("virginia", name),
            **{port: {"port": 0} for port in ("tier", "control", "client")},
            "watch": {"probe_s": 0.05, "scrape_s": 0.05, "rise": 1},
            "replicas": [
                {"url": f"http://127.0.0.1:{gpu.port}", "models": [MODEL], "name": f"gpu-{at}", "engine": "vllm"}
                for at, gpu in enumerate(self._gpus)
            ],
            **more,
        }
        made = RegionalBalancer(RegionalConfig.model_validate(document), self._world, Random(1), self._store())
        line = await made.open()
        self.regionals[name] = made
        self.ports[name] = int(next(word for word in line.split(", ") if "clients" in word).rsplit(":", 1)[1])
        await until(lambda: all(h.read(made.clock.now()).state == "up" for h in made.flow.replicas.health.values()))
        return made

    async def stop(self, name: str) -> None:
        await self.regionals.pop(name).close()

    async def start_above(self) -> GlobalBalancer:
        made = self.above = GlobalBalancer(global_config(), self._world, Random(3), self._store())
        line = await made.open()
        self.ports["above"] = int(line.split("clients on 127.0.0.1:")[1].split(",")[0])
        return made

    async def stop_above(self) -> None:
        above, self.above = self.above, None
        assert above is not None
        await above.close()

    async def close(self) -> None:
        if self.above is not None:
            await self.stop_above()
        for name in tuple(self.regionals):
            await self.stop(name)

    async def turn(self, through: str, number: int, believed: Callable[[], tuple[float, float]]) -> float:
        """The next turn of all conversations: by what share of what was found the belief was wrong, over all."""
        wrong = found = 0.0
        for talk in range(TALKS):
            text = "".join(f"talk {talk} turn {n} " + f"{talk}w{n} " * (TURN_BYTES // 5) for n in range(number + 1))
            before = believed()
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": ANSWER_TOKENS}
            answer = await send(self.ports[through], chat(body=body), within_s=60.0)
            assert answer.status == 200, answer.body
            await until(lambda before=before: believed() != before or number == 0)
            predicted, actual = (now - was for now, was in zip(believed(), before, strict=True))
            wrong, found = wrong + abs(predicted - actual), found + actual
        assert number == 0 or found > 0
        return wrong / found if found else 0.0


def of_region(flow: Any) -> Callable[[], tuple[float, float]]:
    return lambda: (flow.learning.predicted_tokens, flow.learning.actual_tokens)


def of_world(flow: Any) -> Callable[[], tuple[float, float]]:
    def read() -> tuple[float, float]:
        hits = flow.regions.hits.get("virginia")
        return (hits.predicted_tokens, hits.actual_tokens) if hits is not None else (0.0, 0.0)

    return read


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with AsyncExitStack() as stack:
        gpus = [await stack.enter_async_context(Gpu(l4(100.0), seed).running()) for seed in range(3)]
        made = Stage(gpus, tmp_path)
        stack.push_async_callback(made.close)
        yield made


async def test_a_restarted_regional_balancer_learns_from_its_peer(stage: Stage) -> None:
    await stage.start("r1")
    peer = await stage.start("r2")
    before = await _talk(stage, "r1", stage.regionals["r1"].flow)
    flow = stage.regionals["r1"].flow
    await until(lambda: peer.flow.replicas.trie.nodes == flow.replicas.trie.nodes)
    # The peer knows speeds and lengths from its own measurements.
    await stage.turn("r2", 3, of_region(peer.flow))
    await stage.stop("r1")
    again = await stage.start("r1")
    learned, expected = (one.flow.replicas.estimates.learned().output_tokens for one in (again, peer))
    assert learned == pytest.approx(expected, rel=0.2)
    await _as_before(stage, "r1", of_region(again.flow), before)
    assert any(again.flow.replicas.speeds[name].sampled_at is not None for name in again.flow.replicas.speeds)


async def test_a_restarted_regional_balancer_without_peers_learns_from_its_disk(stage: Stage, tmp_path: Path) -> None:
    kept = {"state_dir": str(tmp_path)}
    first = await stage.start("r1", **kept)
    before = await _talk(stage, "r1", first.flow)
    learned = first.flow.replicas.estimates.learned()
    await stage.stop("r1")
    again = await stage.start("r1", **kept)
    assert again.flow.replicas.trie.nodes == first.flow.replicas.trie.nodes
    assert again.flow.replicas.estimates.learned().output_tokens == pytest.approx(learned.output_tokens, rel=0.2)
    await _as_before(stage, "r1", of_region(again.flow), before)


async def test_a_restarted_global_balancer_learns_from_its_regions(stage: Stage) -> None:
    """It has no other state of the world: alone or not is the same to it."""
    await stage.start("r1")
    first = await stage.start_above()
    await until(lambda: serving(first))
    for number in range(3):
        before = await stage.turn("above", number, of_world(first.flow))
    await stage.stop_above()
    again = await stage.start_above()
    assert again.flow.regions.trie.nodes > 0  # before any request was let in
    expected = stage.regionals["r1"].flow.replicas.estimates.learned().output_tokens
    assert again.flow.estimates.learned().output_tokens == pytest.approx(expected, rel=0.2)
    await _as_before(stage, "above", of_world(again.flow), before)


async def _talk(stage: Stage, name: str, flow: Any) -> float:
    for number in range(3):
        before = await stage.turn(name, number, of_region(flow))
    return before


async def _as_before(stage: Stage, through: str, believed: Callable[[], tuple[float, float]], before: float) -> None:
    after = await stage.turn(through, 4, believed)
    print(f"{through}: off by {before:.4f} of what was found before the restart, {after:.4f} after it")
    assert after <= WORSE * before + ROUND
