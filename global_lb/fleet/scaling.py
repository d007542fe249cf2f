"""How many replicas each region should have so that any one region may be lost, and which pilot lights are awake.

A region reports what its own load needs; this adds what it would take on if any one of the others were lost (the worst
case), spread evenly, with all replicas taken as equal. If a pilot-light region serves the model, that one covers the
loss instead: asleep it should have its minimum, awake what the others lack. It is woken if an active region that served
cannot be used or has no replica ready any more, or if all active ones together need more than they may have. Never
starts or stops anything.
"""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance.estimate.window_max import WindowMax
from farhop.balance.health.pilot_light import PilotConfig, PilotLight, PilotState
from farhop.balance.scaling import NOTHING, share_of_the_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from global_lb.fleet.view import Region, View

LOOK_S = 0.5
UNREADY_S = 2.0  # a region without a replica for this long is lost; a balancer that just began has not seen its own
HELD_S = 300.0  # how long the load of all regions is remembered: a dead one reports none any more


class Figures(msgspec.Struct, frozen=True):
    """A region's report of replicas of a model: those that its load needs, those that it alone needs, and those that
    are ready.
    """

    load: float
    needed: int
    ready: int
    least: int
    most: int

    def clamp(self, replicas: int) -> int:
        """The number of replicas, limited to the region's own bounds."""
        return max(self.least, min(replicas, self.most))

    @property
    def down(self) -> bool:
        """Whether none is ready, though some should be: scaled to zero it would need none."""
        return not self.ready and max(self.needed, self.least) > 0


def figures(region: Region) -> Iterator[tuple[str, Figures]]:
    """By model; the highest figure if instances differ. Those of older builds report none."""
    summed: dict[str, Figures] = {}
    for instance in region.instances:
        for model, c in instance.models.items() if not instance.draining else ():
            if not c.replicas_max:
                continue
            k = summed.get(model, Figures(0.0, 0, 0, 0, 0))
            summed[model] = Figures(
                max(k.load, c.load_replicas), max(k.needed, c.replicas_needed), k.ready + c.replicas_ready,
                max(k.least, c.replicas_min), max(k.most, c.replicas_max),
            )  # fmt: skip
    yield from summed.items()


class Scaling:
    """See the module's docstring. `desired` is by region and model; `pilots` are by region; `due`: when to `look`
    again.
    """

    def __init__(self, pilots: Mapping[str, PilotConfig] | None = None) -> None:
        self.pilots = {name: PilotLight(config) for name, config in (pilots or {}).items()}
        self.desired: dict[tuple[str, str], int] = {}
        self._warm: dict[tuple[str, str], float] = {}  # of pilots: what is there of what is wanted
        self._served: dict[str, set[str]] = {}  # by model: regions that could be used for it once
        self._down_since: dict[tuple[str, str], float] = {}  # by region and model
        self._totals: dict[str, WindowMax] = {}  # by model: what all regions carried
        self.due = -inf

    def configure(self, pilots: Mapping[str, PilotConfig]) -> None:
        """Replace the pilot lights. Regions that remain pilot lights keep their state."""
        for gone in self.pilots.keys() - pilots.keys():
            del self.pilots[gone]
        for name, config in pilots.items():
            self.pilots.setdefault(name, PilotLight(config)).configure(config)
        self.due = -inf

    def asleep(self, region: str) -> bool:
        """Whether it is a pilot light that burns low."""
        pilot = self.pilots.get(region)
        return pilot is not None and pilot.state is PilotState.ASLEEP

    def admitted_share(self, region: str, model: str) -> float:
        """The share (0..1) of requests for the region that it may be sent; 1 if it is not a pilot light."""
        pilot = self.pilots.get(region)
        return 1.0 if pilot is None else pilot.admitted_share(self._warm.get((region, model), 0.0))

    def look(self, view: View, usable: Callable[[str], bool], on_map: Collection[str], now: float) -> list[str]:
        """See how things are, if it is time to; the pilot lights whose state is another now. `on_map`: the regions
        that there are: who left the map is not missed."""
        if now < self.due:
            return []
        self.due = now + LOOK_S
        by_model: dict[str, dict[str, Figures]] = {}
        for name, region in view.regions.items():
            if name in on_map and usable(name):
                for model, of in figures(region):
                    by_model.setdefault(model, {})[name] = of
        self._down_since = {
            (name, model): self._down_since.get((name, model), now)
            for model, regions in by_model.items() for name, f in regions.items() if f.down
        }  # fmt: skip
        why = self._why(by_model, on_map, now)
        self.desired.clear()
        for model, regions in by_model.items():
            self._write(model, regions, bool(why), now)
        return [name for name, pilot in self.pilots.items() if pilot.look(why, self._warmest(name), now)]

    def _why(self, by_model: Mapping[str, Mapping[str, Figures]], on_map: Collection[str], now: float) -> str:
        """Why pilot lights are needed; "" if they are not."""
        why = ""
        for model in self._served.keys() | by_model.keys():
            regions = {name: f for name, f in by_model.get(model, {}).items() if name not in self.pilots}
            served = self._served.setdefault(model, set())
            served.update(regions)
            missing = sorted((served & set(on_map)) - regions.keys() - self.pilots.keys())
            if missing:
                return f"{missing[0]} cannot be used for {model}"
            down = [name for name in sorted(regions) if now - self._down_since.get((name, model), now) >= UNREADY_S]
            if down:
                return f"{down[0]} has no replica ready for {model}"
            needed, most = sum(f.needed for f in regions.values()), sum(f.most for f in regions.values())
            if regions and needed > most:
                why = f"{model} needs {needed} replicas where there may be {most}"
        return why

    def _write(self, model: str, regions: Mapping[str, Figures], needed: bool, now: float) -> None:
        active = {name: f for name, f in regions.items() if name not in self.pilots}
        pilots = [name for name in regions if name in self.pilots]
        shares = dict.fromkeys(active, 0.0) if pilots else share_of_the_lost({n: f.load for n, f in active.items()})
        for name, f in active.items():
            together = ceil(f.load + shares[name] - NOTHING)
            self.desired[name, model] = f.clamp(max(f.needed, together if f.load + shares[name] > NOTHING else 0))
        carried = sum(f.load for f in regions.values())
        total = self._totals.setdefault(model, WindowMax()).take(carried, now, HELD_S)
        there = (max(f.ready, min(f.needed, f.most)) for f in active.values() if not f.down)
        lacking = max(0.0, total - sum(there))
        for name in pilots:
            f, awake = regions[name], needed or not self.asleep(name)
            wanted = f.clamp(max(f.needed, ceil(lacking / len(pilots) - NOTHING))) if awake else f.least
            self.desired[name, model] = wanted
            self._warm[name, model] = min(1.0, f.ready / wanted) if wanted else 1.0

    def _warmest(self, region: str) -> float:
        """The share of the region's wanted replicas that are ready, for the model that lacks most."""
        return min((share for (name, _), share in self._warm.items() if name == region), default=0.0)

    def by_region(self) -> dict[str, dict[str, int]]:
        """The desired replicas, by region and model."""
        desired: dict[str, dict[str, int]] = {}
        for (region, model), replicas in sorted(self.desired.items()):
            desired.setdefault(region, {})[model] = replicas
        return desired

    def status(self, region: str) -> dict[str, Any] | None:
        """The state of a pilot light, for operators (`why` it was woken, "" asleep); None if the region is none."""
        pilot = self.pilots.get(region)
        if pilot is None:
            return None
        why = pilot.why if pilot.state is not PilotState.ASLEEP else ""
        return {"state": pilot.state, "why": why, "warm_share": self._warmest(region)}
