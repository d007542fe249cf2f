"""A whole simulated world: both tiers' shipped machines, wires, engines, faults and arrivals, from one seed.

    world = World(7, flat(["paris", "tokyo"], 200.0), {"paris": station(8, 2.0), "tokyo": station(8, 2.0)})
    world.stream(5.0, lambda: world.arrive("paris", "t"))
    world.at(30.0, world.kill, "paris")
    world.run(60.0)

Invariant: the same seed, world and calls give the same run, event for event (`digest`), in every process. Reads no
clock; a minute costs what its events cost. Violations (see `measures`) must stay 0.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from farhop.balance import chain, outcome
from farhop.balance.health import LivenessConfig
from farhop.balance.machine import Request
from farhop_lab.sim.balancer import BalancerProcess
from farhop_lab.sim.carrier import Journey, Prompt
from farhop_lab.sim.measures import Fate
from farhop_lab.sim.region import RegionProcess
from farhop_lab.sim.scenery import MODEL, Reporting, Watching
from farhop_lab.sim.stage import Stage
from global_lb import flow as global_flow
from global_lb.view import RegionForced
from regional_lb import flow as regional_flow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from farhop.balance.machine import Answer, Flow, Usage
    from farhop.balance.outcome import Outcome
    from farhop.store.report import RegionReport
    from farhop_lab.sim.carrier import Carrier
    from farhop_lab.sim.measures import Measures
    from farhop_lab.sim.scenery import Site
    from topology.law import Law
    from topology.model import Topology

DEADLINE_S = 600.0
ENTERED_MAX = 100_000  # how many of the last arrivals can still be told to leave


class Arrival:
    """One request as its sender sees it. `direct`: it came to its region's own client listener."""

    __slots__ = ("_arrived_at", "_began_at", "_measures", "_timeline", "carrier", "direct", "entry", "journey")

    def __init__(
        self, stage: Stage, request: Request, prompt: Prompt, entry: str, carrier: Carrier, *, direct: bool
    ) -> None:
        self._timeline, self._measures = stage.timeline, stage.measures
        self.entry, self.carrier, self.direct = entry, carrier, direct
        self.journey = Journey(request, prompt, self)
        self._arrived_at = stage.timeline.now
        self._began_at: float | None = None
        self._measures.came(request.id)

    def began(self, _status: int) -> None:
        """See carrier.Client."""
        self._began_at = self._timeline.now

    def ended(self, status: int, _usage: Usage | None) -> None:
        """See carrier.Client."""
        self.over(outcome.SERVED if status < 400 else outcome.ENGINE_ERROR)

    def refused(self, answer: Answer) -> None:
        """See carrier.Client."""
        self.over(answer.outcome)

    def broke(self, reason: Outcome) -> None:
        """See carrier.Client."""
        started = self._began_at is not None
        self.over(outcome.DIED_MID_STREAM if started and reason is outcome.DIED_BEFORE_START else reason)

    def over(self, reason: Outcome) -> None:
        """Its fate is sealed."""
        request, journey, began_at = self.journey.request, self.journey, self._began_at
        where = self.entry if self.direct else journey.target
        self._measures.went(
            Fate(
                id=request.id,
                tenant=request.tenant,
                entry=self.entry,
                region=where if began_at is not None else "",
                outcome=reason.reason,
                arrived_at=self._arrived_at,
                ended_at=self._timeline.now,
                ttft_ms=None if began_at is None else (began_at - self._arrived_at) * 1e3,
                attempts=journey.attempts,
                direct=self.direct,
            )
        )


class World:
    """See the module's head. `sites` are the regions that have a balancer of their own; `balancers` gives how many
    global balancers stand in a region, one in each if it is left out. `make_global` and `make_regional` build other
    machines than the shipped ones, for control experiments. ValueError for a region that the topology lacks.
    """

    def __init__(
        self,
        seed: int,
        topology: Topology,
        sites: Mapping[str, Site],
        *,
        balancers: Mapping[str, int] | None = None,
        reporting: Reporting = Reporting(),  # noqa: B008 - frozen
        watching: Watching = Watching(),  # noqa: B008 - frozen
        make_global: Callable[[str, Law, Random], Flow] | None = None,
        make_regional: Callable[[str, Law, Random], regional_flow.RegionalFlow] | None = None,
        keep_journal: bool = False,
    ) -> None:
        counts = balancers if balancers is not None else dict.fromkeys(topology.regions, 1)
        if unknown := sorted({*sites, *counts} - topology.regions.keys()):
            raise ValueError(f"regions: {', '.join(unknown)} not in the topology; add them there")
        stage = self._stage = Stage(seed, topology, reporting, watching, keep_journal=keep_journal)
        self.timeline, self.wire, self.measures = stage.timeline, stage.wire, stage.measures
        self.journal = stage.journal
        self._lost: dict[str, float] = {}
        self._dice = stage.rng("reports")
        self._streams = self._arrivals = 0
        self._turn = dict.fromkeys(counts, 0)
        self._entered: OrderedDict[str, Arrival] = OrderedDict()
        make = make_regional or self._regional
        self.regions = {
            name: RegionProcess(stage, name, site, lambda region, rng: make(region, stage.law, rng), self._told)
            for name, site in sites.items()
        }
        make_one = make_global or self._global
        self.balancers = {
            region: [
                BalancerProcess(stage, region, f"g{n}", self.regions, lambda at, rng: make_one(at, stage.law, rng))
                for n in range(count)
            ]
            for region, count in counts.items()
        }
        self._everybody = [balancer for those in self.balancers.values() for balancer in those]

    # -- the shipped machines, configured as their mains do

    def _regional(self, region: str, law: Law, rng: Random) -> regional_flow.RegionalFlow:
        tenants = self._stage.topology.tenants
        config = regional_flow.FlowConfig(region)
        return regional_flow.RegionalFlow(config, law, rng, lambda name: tenants[name].weight if name in tenants else 1)

    def _global(self, region: str, law: Law, rng: Random) -> global_flow.GlobalFlow:
        liveness = LivenessConfig(report_age_s=self._stage.watching.report_age_s)
        config = global_flow.FlowConfig(region, liveness=liveness)
        return global_flow.GlobalFlow(config, law, rng, self._patience_s)

    def _patience_s(self, tenant: str) -> float:
        known = self._stage.topology.tenants.get(tenant)
        if known is None or known.residency is None or known.residency.on_exhausted != "wait":
            return 0.0
        return known.residency.wait_max_s

    # -- time

    @property
    def now(self) -> float:
        """Seconds since the world began."""
        return self.timeline.now

    @property
    def digest(self) -> str:
        """Of all that any machine was told and said: the same for the same seed, world and calls."""
        return self.journal.digest

    def at(self, at: float, act: Callable[..., object], *args: Any) -> None:
        """Do it at `at`."""
        self.timeline.at(at, act, *args)

    def run(self, until: float) -> Measures:
        """Let time pass up to `until`."""
        self.timeline.run(until)
        return self.measures

    def stream(
        self, per_s: float, act: Callable[[], object], *, since: float = 0.0, until: float, even: bool = False
    ) -> None:
        """Do it `per_s` times a second, at moments of chance (Poisson) or evenly spaced. Each stream has dice of its
        own, so that two worlds of one seed see the same arrivals whatever their machines decide."""
        if not per_s > 0.0:
            raise ValueError(f"per_s: {per_s!r} is no rate; give more than 0 a second")
        self._streams += 1
        rng = self._stage.rng(f"stream {self._streams}")

        def next_after(at: float) -> None:
            following = at + (1.0 / per_s if even else rng.expovariate(per_s))
            if following < until:
                self.timeline.at(following, come, following)

        def come(at: float) -> None:
            act()
            next_after(at)

        next_after(since)

    # -- requests

    def arrive(
        self,
        entry: str,
        tenant: str,
        prompt_bytes: int = 1024,
        *,
        says: str = "",
        max_tokens: int | None = 256,
        answer_tokens: int | None = None,
        deadline_s: float = DEADLINE_S,
        direct: bool = False,
    ) -> str:
        """A streaming request arrives at a global balancer of its region (they take turns), or `direct`ly at the
        region's own. `says` names its text: equal names share their prefix, "" shares with nobody. Returns its id."""
        self._arrivals += 1
        request_id = f"r{self._arrivals}"
        text = _text(says or request_id, prompt_bytes)
        balancer = None if direct else self._next_balancer(entry)
        carrier = self.regions[entry].carrier if balancer is None else balancer.carrier
        known = self._stage.topology.tenants.get(tenant)
        request = Request(
            id=request_id,
            tenant=tenant,
            model=MODEL,
            prompt_bytes=prompt_bytes,
            body_bytes=prompt_bytes + 200,
            chain=chain.chain(text, chain.seed_of(MODEL, "", "", tenant)),
            deadline=carrier.clock() + deadline_s,
            priority=known.priority if known is not None else 0,
            max_tokens=max_tokens,
            stream=True,
            entry_region=entry,
        )
        arrival = Arrival(self._stage, request, Prompt(text, answer_tokens), entry, carrier, direct=direct)
        self._entered[request_id] = arrival
        if len(self._entered) > ENTERED_MAX:
            self._entered.popitem(last=False)
        if balancer is not None:
            carrier.start(arrival.journey)
        elif not self.regions[entry].serve(arrival.journey):
            arrival.over(outcome.CONNECT_FAILED)
        return request_id

    def leave(self, request_id: str) -> None:
        """Its client goes away; harmless if it is over."""
        arrival = self._entered.get(request_id)
        if arrival is not None and arrival.carrier.client_left(request_id):
            arrival.over(outcome.CLIENT_LEFT)

    def _next_balancer(self, entry: str) -> BalancerProcess:
        here = self.balancers.get(entry)
        if not here:
            raise ValueError(f"entry: no global balancer stands in {entry!r}; give it one or arrive `direct`ly")
        self._turn[entry] = (self._turn[entry] + 1) % len(here)
        return here[self._turn[entry]]

    # -- faults

    def kill(self, region: str) -> None:
        """The region's balancer and engines die at once; connections to it are refused."""
        self.regions[region].die()

    def revive(self, region: str) -> None:
        """It comes back, empty, as a new process."""
        self.regions[region].rise()

    def freeze(self, a: str, b: str) -> None:
        """Nothing gets through between two regions; connections stand."""
        self.wire.freeze(a, b)

    def heal(self, a: str, b: str) -> None:
        """The link works again; what waited in it arrives."""
        self.wire.heal(a, b)

    def lose_reports(self, region: str, share: float) -> None:
        """That share (0..1) of the region's reports arrives nowhere, each listener's lost by itself."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share: {share!r} is not within 0 and 1")
        self._lost[region] = share

    def drain(self, region: str, why: str = "drill", for_s: float | None = None) -> None:
        """An operator drains a region at every global balancer."""
        for balancer in self._everybody:
            until = None if for_s is None else balancer.carrier.clock() + for_s
            balancer.carrier.react(RegionForced(region, True, why, until))

    def undrain(self, region: str) -> None:
        """The drain is lifted."""
        for balancer in self._everybody:
            balancer.carrier.react(RegionForced(region, False))

    # -- reports on their way

    def _told(self, report: RegionReport) -> None:
        self.timeline.after(self._stage.reporting.delay_s, self._send, report)

    def _send(self, report: RegionReport) -> None:
        lost = self._lost.get(report.region, self._stage.reporting.lost)
        for balancer in self._everybody:
            if lost <= 0.0 or self._dice.random() >= lost:
                self.wire.send(report.region, balancer.region, balancer.hearing.report, report)


def _text(name: str, n_bytes: int) -> bytes:
    """A prompt of this size that shares nothing with another name's."""
    line = f"{name} says hello. ".encode()
    return (line * (n_bytes // len(line) + 1))[:n_bytes]
