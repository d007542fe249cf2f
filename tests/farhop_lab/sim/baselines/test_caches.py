"""What engines hold is seen block by block, and routers that see it keep documents apart."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import TYPE_CHECKING

import pytest

from farhop_lab.sim.baselines.caches import EngineCaches
from farhop_lab.sim.baselines.world import build
from farhop_lab.sim.clients import ClientPool
from farhop_lab.sim.sites import flat, gpus
from farhop_lab.sim.study import Objective, Score, Window, judge
from farhop_lab.workloads.program import Ask, one
from tests.farhop_lab.sim.baselines.pools import BLOCK, L4, Pool, words

if TYPE_CHECKING:
    from farhop_lab.workloads.program import Programs


def test_the_blocks_of_a_prompt_but_for_what_its_last_token_needs() -> None:
    pool = Pool(2)
    caches, text = EngineCaches(pool.pools), words(1, 4 * BLOCK)
    pool.holds(pool.names[1], text)
    held = []
    for name in pool.names:
        gpu = caches.gpu(name, pool.state)
        assert gpu is not None
        held.append(gpu.core.kv.match(caches.names(pool.ask(text), gpu)))
    assert held == [0, 3]
    too_long = pool.ask(words(2, L4.max_model_len + 1))
    gpu = caches.gpu(pool.names[0], pool.state)
    assert gpu is not None
    assert caches.names(too_long, gpu) == []


def questions(client: str) -> Programs:
    """Of 60 tokens about one of forty documents of 1,500, as ToolBench and LooGLE are to Preble."""
    rng = Random(client)
    while True:
        text = words(f"document {rng.randrange(40)}", 1500) + words(rng.random(), 60)
        yield one(Ask(prompt=text, answer_tokens=40))


@cache
def score(name: str) -> Score:
    world = build(name, 1, flat(["us"], 0.0), {"us": gpus("l4", 4)})
    clients = ClientPool(world, until=90.0)
    for n in range(24):
        clients.closed("us", questions(f"client {n}"), since=0.05 * n)
    return judge(world, Window(30.0, 90.0), Objective(), drain_s=60.0)


@pytest.mark.parametrize("name", ["dynamo", "aibrix", "kvaware", "preble", "prefixaware"])
def test_documents_that_do_not_all_fit_one_gpu_are_kept_apart(name: str) -> None:
    """Preble claims 1.5 to 14.5 times the latency of a round robin away on such work, the others fewer figures."""
    blind, theirs = score("central-round-robin"), score(f"central-{name}")
    assert theirs.whole.hit > blind.whole.hit + 0.1
    assert theirs.requests_per_s > 1.1 * blind.requests_per_s
