"""No healthy replica is taken out for how it does beside its peers, whatever it is asked; one that is slow is, and is
back when it is well.

The Azure code trace is not shipped: its lengths are drawn from its quantiles, in Poisson arrivals. Where
FARHOP_AZURE_CODE_TRACE names the file (AzureLLMInferenceTrace_code.csv, 2023, plain or gzipped), they are its rows'.
"""

from __future__ import annotations

import os
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from farhop.balance.health.reading import State
from farhop_lab.engine.core.faults import Fault
from farhop_lab.scenarios import load as scenarios
from farhop_lab.sim.clients import ClientPool
from farhop_lab.sim.sites import flat, gpus
from farhop_lab.sim.world import World
from farhop_lab.studies import cell, routers
from farhop_lab.workloads import load, places, traces
from tests.conftest import further

if TYPE_CHECKING:
    from collections.abc import Iterator

# Lengths in the Azure LLM inference trace, code, 2023 (github.com/Azure/AzurePublicDataset, CC-BY; 8,819 requests,
# whose prompts and answers do not correlate): the length that this share of them does not exceed.
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
PROMPTS = (3, 75, 147, 385, 770, 1075, 1469, 1909, 2433, 3193, 5194, 7315, 7436, 7437)
ANSWERS = (6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 252, 1899)
A100_PER_S = 4.5  # one A100 serves this much of it: 2,048 tokens take 0.19 s of prefill, a step's share and overhead
# Simulated time until the usual speeds are known, and a few seconds more; the others need 27.
SECONDS = {
    "arena": 24.0, "diurnal": 60.0, "fidelity": 35.0, "gorgo": 24.0, "overload": 40.0, "tree-2": 24.0,
    "tree-mixed": 40.0, "wildchat": 36.0,
}  # fmt: skip


def lengths(rng: Random) -> Iterator[tuple[int, int]]:
    """Prompt and answer, in tokens, without end."""
    if path := os.environ.get("FARHOP_AZURE_CODE_TRACE"):
        rows = load.azure(Path(path))
        start = rng.randrange(len(rows))
        yield from ((row.input_tokens, row.output_tokens) for row in islice(cycle(rows), start, None))
    while True:
        yield _drawn(PROMPTS, rng), _drawn(ANSWERS, rng)


def _drawn(quantiles: tuple[int, ...], rng: Random) -> int:
    share = rng.random()
    at = next(n for n, more in enumerate(SHARES[1:]) if share <= more)
    part = (share - SHARES[at]) / (SHARES[at + 1] - SHARES[at])
    return round(quantiles[at] + part * (quantiles[at + 1] - quantiles[at]))


def coding(of_capacity: float, seconds: float, seed: int = 1) -> World:
    """Two A100 of one region, asked at this share of what they can do for so long."""
    world = World(seed, flat(["paris"]), {"paris": gpus("a100", 2)}, stood_s=cell.STOOD_S)
    rng = Random(f"azure {seed}")
    at, rows = 0.0, []
    for prompt, answer in lengths(rng):
        at += rng.expovariate(2 * A100_PER_S * of_capacity)
        if at >= seconds:
            break
        rows.append(traces.AzureRow(at, prompt, answer))
    clients = ClientPool(world, until=seconds)
    clients.open(traces.azure(rows, places.uniform(["paris"], "1"), traces.Limits(context_tokens=16_000)))
    return world


def judged(world: World) -> int:
    """Of how many replicas it is known how fast they usually are, so that they might have been found slow."""
    records = [
        r for region in world.regions.values() for r in region.flow.replicas.health_tracker.outliers.records.values()
    ]
    return sum(record.usual is not None for record in records)


@pytest.mark.parametrize("name", further(scenarios.shipped_names(), "arena", "diurnal", "overload"))
def test_no_healthy_replica_is_ejected_in_a_shipped_scenario(name: str) -> None:
    scenario = scenarios.find(name, routers.names())
    seconds = SECONDS.get(name, 27.0)
    at_s = (fault.model_copy(update={"at_s": fault.at_s / 20.0}) for fault in scenario.doc.faults)
    scenario = scenario.but(duration_s=seconds, faults=list(at_s))
    world, _ = cell.prepared(scenario, cell.Key(name, "farhop", min(1.0, scenario.doc.loads[-1]), 1))
    world.journal.violations_only()
    measures = world.run(seconds)
    assert measures.ejections == {}
    assert measures.concluded > 50
    assert judged(world) > 0


@pytest.mark.parametrize("of_capacity", further([0.5, 0.9, 1.2], 0.9))
def test_no_healthy_replica_is_ejected_under_the_azure_code_trace(of_capacity: float) -> None:
    world = coding(of_capacity, 40.0)
    measures = world.run(40.0)
    assert measures.ejections == {}
    assert judged(world) == 2


def test_five_times_slower_replica_is_ejected_within_20_s_and_back_within_30_s_of_recovery() -> None:
    world = coding(0.5, 85.0, seed=2)
    world.at(25.0, lambda: world.process("paris", "gpu-0").command(Fault("slow", factor=5.0)))
    world.at(50.0, lambda: world.process("paris", "gpu-0").command(None))
    measures = world.run(45.0)
    assert set(measures.ejections) == {("paris", "gpu-0")}
    region = world.regions["paris"]
    world.run(80.0)
    health = region.flow.replicas.health["gpu-0"].read(region.relay.clock())
    assert health.state is State.UP
    before = measures.ejections.total()
    world.run(85.0)
    assert (measures.ejections.total(), measures.ejections_healthy) == (before, 0)
