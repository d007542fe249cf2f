"""How many requests per second of CPU the simulator handles. Never a test.

Small worlds are the ready-made `arena` (chats, closed loop) with other sites and `agentic` (contexts to 100k tokens) as
it is, under farhop and under a router that costs hardly anything, which leaves engines, clients and network. The large
one is an open loop: 60 regions of 100 GPUs, requests at 20 of them, which have a global balancer each. Counted are
requests concluded after a warm-up; a world that is too much for this machine ends early and reports how far it came.
One process, one thread; CPU time, since machines are shared.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_lab.scenarios import load
from farhop_lab.sim import huge_pages
from farhop_lab.sim.baselines import world as worlds
from farhop_lab.sim.sites import flat, gpus
from farhop_lab.studies import cell
from farhop_lab.studies.cell import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from farhop_lab.sim.world import World

CHATS, AGENTS = "arena", "agentic"
CLIENTS_PER_REPLICA = 30  # as in the scenario
FARHOP, CHEAP = "farhop", "spill-least-load"
REGIONS, REPLICAS_EACH, BALANCERS = 60, 100, 20
RATE_PER_S = 4_000.0
PROMPTS = 50
SINCE_S, UNTIL_S = 15.0, 60.0
AGENTS_UNTIL_S = 180.0  # agents send a fifth as often
LARGE_SINCE_S, LARGE_UNTIL_S = 1.0, 11.0
STEP_S = 0.25  # of virtual time between two looks at the clock
LIMIT_S = 50.0  # of CPU, for one world


class Size(msgspec.Struct, frozen=True):
    """A world to be measured: with this many replicas in all, under this router; 0 replicas: the large one."""

    router: str
    replicas: int = 0
    scenario: str = CHATS


QUICK = (Size(FARHOP, 12), Size(CHEAP, 12), Size(FARHOP, 6, AGENTS), Size(CHEAP, 6, AGENTS))
SIZES = (*QUICK, Size(FARHOP, 36), Size(CHEAP, 36), Size(FARHOP))


class Row(msgspec.Struct, frozen=True):
    """One world: requests concluded and virtual seconds passed in the CPU time used, after the warm-up."""

    what: str
    router: str
    requests: int
    simulated_s: float
    cpu_s: float
    violations: int

    @property
    def per_s(self) -> float:
        """Requests per second of CPU."""
        return self.requests / self.cpu_s if self.cpu_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return msgspec.structs.asdict(self) | {"requests_per_cpu_s": self.per_s}


def measure(sizes: Sequence[Size] = SIZES, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """All rows, one after the other."""
    rows = []
    for size in sizes:
        what = f"{size.scenario}, 3 regions, {size.replicas} replicas"
        if not size.replicas:
            what = f"{REGIONS} regions x {REPLICAS_EACH} replicas, {BALANCERS} global balancers"
        progress(f"{what}, {size.router}")
        rows.append(_large(what, size) if not size.replicas else _small(what, size))
    return rows


def _small(what: str, size: Size) -> Row:
    scenario = load.find(size.scenario, worlds.names())
    until, times = AGENTS_UNTIL_S, 1.0
    if size.scenario == CHATS:
        each = {"replicas": size.replicas // 3}
        sites = {name: site.model_copy(update=each) for name, site in scenario.doc.sites.items()}
        scenario, until = scenario.but(sites=sites), UNTIL_S
        times = CLIENTS_PER_REPLICA * size.replicas / sum(sum(work.clients.values()) for work in scenario.doc.work)
    scenario = scenario.but(duration_s=until, warm_up_s=SINCE_S)
    world, _clients = cell.prepared(scenario, Key(size.scenario, size.router, times, 1))
    return _timed(what, size.router, world, SINCE_S, until)


def _large(what: str, size: Size) -> Row:
    names = [f"r{number}" for number in range(REGIONS)]
    entries = names[:: REGIONS // BALANCERS]
    wires = {(a, b): 5.0 + 3.0 * (j - i) for i, a in enumerate(names) for j, b in enumerate(names) if i < j}
    sites = {name: gpus("h100", REPLICAS_EACH) for name in names}
    world = worlds.build(size.router, 1, flat(names, wires), sites, balancers=dict.fromkeys(entries, 1))
    for entry in entries:
        ask = partial(_ask, world, entry, world.rng(f"work of {entry}"))
        world.stream(RATE_PER_S / BALANCERS, ask, until=LARGE_UNTIL_S)
    return _timed(what, size.router, world, LARGE_SINCE_S, LARGE_UNTIL_S)


def _ask(world: World, entry: str, rng: Random) -> None:
    """A prompt of 300 tokens, one of 50 of its region, and a short answer, so that a second of warm-up is enough."""
    prefix = f"{entry} {rng.randrange(PROMPTS)}"
    world.arrive(entry, "t", 1_200, prefix=prefix, max_tokens=64, answer_tokens=24)


def _timed(what: str, router: str, world: World, since: float, until: float) -> Row:
    """Let its time pass, within its limit of CPU time."""
    world.journal.violations_only()
    with cell.rare_collections():
        begun = time.process_time()
        while world.now < since and time.process_time() - begun < LIMIT_S / 2.0:
            world.run(min(since, world.now + STEP_S))
        huge_pages.ask()  # as a long run does
        concluded, at, warm = world.measures.concluded, world.now, time.process_time()
        while world.now < until and time.process_time() - begun < LIMIT_S:
            world.run(min(until, world.now + STEP_S))
        cpu_s = time.process_time() - warm
    measures = world.measures
    return Row(what, router, measures.concluded - concluded, world.now - at, cpu_s, measures.violations)
