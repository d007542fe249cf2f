"""The histories that are kept, and how each is recorded: simulated runs in which some machines are recorded.

Two deviations from ordinary worlds: clocks tick on codec.GRID, and the hashes of prompts' blocks are small numbers.
Machines, network and arrivals are the shipped ones; each machine has its own random generator.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from xxhash import xxh3_64_intdigest

from farhop.balance.prefix import chain
from farhop_lab.chaos import schedule as schedules
from farhop_lab.chaos import workload
from farhop_lab.histories import names
from farhop_lab.histories.codec import GRID, made_up
from farhop_lab.histories.recorder import HistoryRecorder, RecordingSession
from farhop_lab.scenarios.load import find, shipped_names
from farhop_lab.sim.faults import FaultInjector
from farhop_lab.sim.relay import SimulatedRelay
from farhop_lab.sim.sites import Watching, flat, gpus
from farhop_lab.sim.world import World
from farhop_lab.studies import ablations, routers
from farhop_lab.studies.cell import Key, prepared, rare_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from random import Random

    from topology.law import Law

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests" / "histories"
SUFFIX = ".history"
LIVE = "live-"  # of live processes: such a file cannot be recorded again automatically
SEEDS = ROOT / "tests" / "seeds" / "chaos"
STEERED_EVERY_S = 3.0
OVERLOAD = "overload"  # all of its regions: a request that one releases waits in another
_TAPED = "farhop-taped"


class RecordedMachines:
    """Makes a world's machines and records some of them: `which` by tier and region, "" for all."""

    def __init__(self, which: Collection[tuple[str, str]], calls_max: int) -> None:
        self._which, self._max = which, calls_max
        self.session = RecordingSession()
        self.made: dict[int, int] = {}

    def regional(self, region: str, law: Law, _rng: Random) -> Any:
        """See World."""
        return self._watched(region, names.of_region(region, law, self._seed(names.REGIONAL, region)))

    def entry(self, region: str, law: Law, _rng: Random) -> Any:
        """See World."""
        age_s, seed = Watching().report_age_s, self._seed(names.GLOBAL, region)
        return self._watched(region, names.of_entry(region, law, seed, age_s))

    def _seed(self, tier: str, region: str) -> str:
        return f"history {tier} {region}"

    def _watched(self, region: str, genesis: tuple[Any, ...]) -> Any:
        flow, tier = names.made(genesis), genesis[0]
        if not {(tier, region), (tier, "")} & set(self._which):
            return flow
        return self.session.add(
            HistoryRecorder(f"{tier} {region} {len(self.session.recorders)}", genesis, self.made, self._max), flow
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Worlds that are made and run within it are recorded."""
        clock, digest = SimulatedRelay.clock, xxh3_64_intdigest
        labels: dict[int, int] = {}

        def on_grid(relay: SimulatedRelay) -> float:
            return ceil(clock(relay) * GRID) / GRID

        def labelled(data: Any, seed: int = 0) -> int:
            real = digest(data, seed)
            label = labels.get(real)
            if label is None:
                label = labels[real] = made_up(len(labels))
                self.made[label] = len(labels) - 1
            return label

        makers = ablations.Makers(make_global=lambda _: self.entry, make_regional=lambda _: self.regional)
        with ExitStack() as stack:
            stack.enter_context(patch.object(SimulatedRelay, "clock", on_grid))
            stack.enter_context(patch.object(chain, "xxh3_64_intdigest", labelled))
            for one in self.session.patches():
                stack.enter_context(one)
            stack.enter_context(patch.dict(ablations.ABLATIONS, {_TAPED: makers}))
            stack.enter_context(rare_collections())
            yield


def _scenario(
    name: str,
    seconds: float,
    which: Collection[tuple[str, str]],
    calls_max: int,
    also: Callable[[World], None] = lambda _: None,
) -> list[HistoryRecorder]:
    machines = RecordedMachines(which, calls_max)
    scenario = find(name, routers.names())
    with machines.recording():
        world, _clients = prepared(scenario, Key(name, _TAPED, scenario.doc.loads[0], 0))
        world.journal.violations_only()
        also(world)
        world.run(seconds)
    return machines.session.recorders


def _chaos(path: Path, seconds: float, which: Collection[tuple[str, str]], calls_max: int) -> list[HistoryRecorder]:
    schedule = schedules.decode(path.read_text(), path.name)
    machines = RecordedMachines(which, calls_max)
    with machines.recording():
        region_names = schedule.names
        world = World(
            schedule.seed,
            flat(region_names, workload.RTT_MS),
            {name: gpus(workload.GPU.name, schedule.replicas, seed=schedule.seed) for name in region_names},
            stood_s=workload.STOOD_S,
            make_global=machines.entry,
            make_regional=machines.regional,
        )
        world.journal.violations_only()
        FaultInjector(world, workload.TENANT).plan(schedule.faults)
        workload.OpenLoad(world, schedule)
        world.run(min(seconds, schedule.mended_s + 5.0))
    return machines.session.recorders


def _steered(world: World) -> None:
    """Every policy of both tiers in turn, with operators' overrides meanwhile."""
    for n, choices in enumerate(names.every_choice()):
        for region in world.regions.values():
            world.at(n * STEERED_EVERY_S, region.relay.react, choices)
    for n, event_of in enumerate(names.every_route(sorted(world.regions))):
        for first, *_ in world.balancers.values():
            world.at(n * STEERED_EVERY_S, _react, first, event_of)


def _react(process: Any, event_of: Callable[[float], Any]) -> None:
    process.relay.react(event_of(process.relay.clock()))


def catalogue() -> dict[str, Callable[[], list[HistoryRecorder]]]:
    """The recordings by name."""
    every = {(names.GLOBAL, ""), (names.REGIONAL, "")}
    found: dict[str, Callable[[], list[HistoryRecorder]]] = {}
    others = [name for name in shipped_names() if name != OVERLOAD]
    for n, name in enumerate(others):
        sites = sorted(find(name, routers.names()).doc.sites)
        which = {(names.GLOBAL, sites[n % len(sites)]), (names.REGIONAL, sites[(n + 1) % len(sites)])}
        found[f"scenario-{name}"] = partial(_scenario, name, 60.0, which, 2500)
    found[f"scenario-{OVERLOAD}"] = partial(_scenario, OVERLOAD, 45.0, {(names.REGIONAL, "")}, 2500)
    found["steered"] = partial(
        _scenario, "loss", 45.0, {(names.GLOBAL, "tokyo"), (names.REGIONAL, "tokyo")}, 8000, _steered
    )
    for path in sorted(SEEDS.glob("*.yaml")):
        found[f"chaos-{path.stem}"] = partial(_chaos, path, 120.0, every, 3000)
    return found
