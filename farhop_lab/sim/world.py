"""A whole simulated world: both tiers' shipped machines, network, engines, faults and arrivals, from one seed.

    world = World(7, flat(["paris", "tokyo"], 200.0), {"paris": station(8, 2.0), "tokyo": station(8, 2.0)})
    world.stream(5.0, lambda: world.arrive("paris", "t"))
    world.at(30.0, world.kill, "paris")
    world.run(60.0)

Invariant: the same seed, world and calls give the same run, event for event (`digest`), in every process. Reads no
clock. Violations (see `measures`) must stay 0.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from farhop.balance import outcome
from farhop.balance.health.region import LivenessConfig
from farhop.balance.machine import Request
from farhop.balance.prefix import chain
from farhop.service.authentication.authenticator import Caller
from farhop_lab.sim.arrival import Arrival
from farhop_lab.sim.balancer import BalancerProcess
from farhop_lab.sim.context import SimContext
from farhop_lab.sim.entry import ADDRESSES_MAX, ClientEntry
from farhop_lab.sim.law_client import elsewhere
from farhop_lab.sim.measures import RequestRecord
from farhop_lab.sim.region import RegionProcess
from farhop_lab.sim.relay import ActiveRequest, Prompt
from farhop_lab.sim.sites import MODEL, Reporting, Watching
from global_lb.fleet.view import RegionForced
from global_lb.routing import flow as global_flow
from regional_lb.scheduler import flow as regional_flow
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from random import Random

    from farhop.balance.machine import Flow
    from farhop.relay.answers import Reply
    from farhop.store.documents.report import RegionReport
    from farhop_lab.sim.engines import Timing
    from farhop_lab.sim.entry import EntryProcess
    from farhop_lab.sim.measures import Measures
    from farhop_lab.sim.relay import EntryPoint
    from farhop_lab.sim.replicas import ReplicaProcess
    from farhop_lab.sim.sites import Site
    from topology.law import Law
    from topology.model import Tenant, Topology

DEADLINE_S = 600.0
REDIRECTS_MAX = 4


class World:
    """See the module's head. `sites` are the regions with a regional balancer; `balancers` is the number of global
    balancers by region, one in each if it is left out. `make_global` and `make_regional` build other machines than the
    shipped ones, for control experiments. At second 0 the world has run for `stood_s`; if that is 0, no process knows
    another one then. `observer` is called for prompts and laws with the region, the process and the request or
    document: a prompt is `read`, `sent` to a region, `computed` there; a process is `born`, a law `heard`. `timed` is
    called for every answer with the region, the replica and its true timing there. ValueError for a region that the
    topology lacks.
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
        stood_s: float = 0.0,
        make_global: Callable[[str, Law, Random], Flow] | None = None,
        make_regional: Callable[[str, Law, Random], regional_flow.RegionalFlow] | None = None,
        keep_journal: bool = False,
        observer: Callable[[str, str, str, Any], None] | None = None,
        timed: Callable[[str, str, Timing], None] | None = None,
    ) -> None:
        counts = balancers if balancers is not None else dict.fromkeys(topology.regions, 1)
        if unknown := sorted({*sites, *counts} - topology.regions.keys()):
            raise ValueError(f"regions: {', '.join(unknown)} not in the topology; add them there")
        context = self._context = SimContext(
            seed, topology, reporting, watching, stood_s=stood_s, keep_journal=keep_journal
        )
        context.observer, context.timed = observer or context.observer, timed
        self.timeline, self.wire, self.measures = context.timeline, context.wire, context.measures
        self.journal = context.journal
        self.lost: dict[str, float] = {}
        self.drained: dict[str, tuple[str, float | None]] = {}  # in etcd: the reason and the end
        self.etcd_silent = False
        self._reports: dict[str, RegionReport] = {}  # in etcd: each region's last
        self._law_in_etcd, self._revision = b"", 0
        self._dice, self._dice_law = context.rng("reports"), context.rng("laws")
        self._streams = self._arrivals = 0
        self._turn = dict.fromkeys(counts, 0)
        self.entered: dict[str, Arrival] = {}  # arrivals that are not concluded
        self.last_entry = ""  # the entry of the last request
        self._scopes: dict[str, int] = {}
        make = make_regional or self._regional
        self.regions = {
            name: RegionProcess(
                context, name, site, lambda region, rng: make(region, context.law, rng), self._on_report
            )
            for name, site in sites.items()
        }
        make_one = make_global or self._global
        self.balancers = {
            region: [
                BalancerProcess(context, region, f"g{n}", self.regions, lambda at, rng: make_one(at, context.law, rng))
                for n in range(count)
            ]
            for region, count in counts.items()
        }
        self._all_balancers = [balancer for those in self.balancers.values() for balancer in those]
        self.entries = {  # entries for clients without a balancer in their region
            region: ClientEntry(region, context.wire, context.timeline, partial(self._addresses, region))
            for region in topology.regions
        }

    # -- the shipped machines, configured as in the shipped processes

    def _regional(self, region: str, law: Law, rng: Random) -> regional_flow.RegionalFlow:
        def weight(tenant: str) -> float:
            known = flow.law.topology.tenants.get(tenant)
            return known.weight if known is not None else 1.0

        flow = regional_flow.RegionalFlow(regional_flow.FlowConfig(region), law, rng, weight)
        return flow

    def _global(self, region: str, law: Law, rng: Random) -> global_flow.GlobalFlow:
        liveness = LivenessConfig(report_age_s=self._context.watching.report_age_s)
        config = global_flow.FlowConfig(region, liveness=liveness)
        flow = global_flow.GlobalFlow(config, law, rng, lambda tenant: flow.law.patience_s(tenant))
        return flow

    # -- time

    @property
    def now(self) -> float:
        """Seconds since clients may come; negative before that."""
        return self.timeline.now

    @property
    def topology(self) -> Topology:
        """Its regions, prices and tenants."""
        return self._context.topology

    @property
    def law(self) -> Law:
        """The law of the topology."""
        return self._context.law

    @property
    def replicas(self) -> dict[str, int]:
        """Replicas by region."""
        return {name: region.site.replicas for name, region in self.regions.items()}

    @property
    def digest(self) -> str:
        """A digest of all machines' events and commands: the same for the same seed, world and calls."""
        return self.journal.digest

    def at(self, at: float, act: Callable[..., object], *args: Any) -> None:
        """Call it at `at`."""
        self.timeline.at(at, act, *args)

    def near_s(self, entry: str) -> float:
        """A round trip between the clients of a region and its balancers, in seconds."""
        return self.wire.rtt_ms(entry, entry) / 1e3

    def rng(self, part: str) -> Random:
        """A random generator for a part of this world: named, and derived from its seed."""
        return self._context.rng(part)

    def run(self, until: float) -> Measures:
        """Let time pass up to `until`."""
        self.timeline.run(until)
        return self.measures

    def stream(
        self, per_s: float, act: Callable[[], object], *, since: float = 0.0, until: float, even: bool = False
    ) -> None:
        """Call it `per_s` times a second, at random times (Poisson) or evenly spaced. Each stream has its own random
        generator, so worlds of one seed see the same arrivals whatever their machines decide.
        """
        if not per_s > 0.0:
            raise ValueError(f"per_s: {per_s!r} is no rate; give more than 0 a second")
        self._streams += 1
        rng = self._context.rng(f"stream {self._streams}")

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
        prefix: str = "",
        max_tokens: int | None = 256,
        answer_tokens: int | None = None,
        deadline_s: float = DEADLINE_S,
        direct: bool = False,
        text: bytes | None = None,
        session: int = 0,
        tools: bool = False,
        ttft_s: float | None = None,
        retries: int = 0,
        on_done: Callable[[RequestRecord, bytes], None] | None = None,
    ) -> str:
        """A streaming request arrives at a global balancer of its region (they take turns), or `direct`ly at the
        regional one. `text` is its prompt; without it `prompt_bytes` are made up, and `prefix` names them: equal names
        share their prefix, "" shares with no other. `ttft_s`: the TTFT objective that its client states; `retries`: how
        often the client retries (`sim.arrival`). `on_done` gets its record and the answer, maybe before this returns.
        Returns its id.
        """
        balancer = None if direct else self._next_balancer(entry)
        known = self._tenants(entry, balancer).get(tenant)
        priority = known.priority if known is not None else 0
        who = Caller(tenant, deadline_s, "", True, priority, entry_region=entry, ttft_s=ttft_s)
        text = text or self._text(prefix, prompt_bytes)
        prompt = Prompt(text, answer_tokens)
        return self._enter(entry, balancer, who, prompt, max_tokens, session, tools, on_done, retries)

    def ask(
        self,
        entry: str,
        key: str,
        prompt_bytes: int = 1024,
        *,
        allow: str = "",
        prefix: str = "",
        answer_tokens: int | None = None,
        direct: bool = False,
    ) -> str | Reply:
        """As `arrive`, by API key and with authentication; follows a redirect. Returns its id, or the refusal."""
        redirects = 0
        while True:
            balancer = None if direct else self._turn_of(entry)
            law_client = (self.regions[entry] if balancer is None else balancer).law_client
            caller = law_client.caller(key, allow)
            if isinstance(caller, Caller):
                return self._enter(
                    entry, balancer, caller, Prompt(self._text(prefix, prompt_bytes), answer_tokens), 256
                )
            origin = elsewhere(caller)
            named = [r.name for r in self._context.topology.regions.values() if origin in r.entry]
            if not named or redirects == REDIRECTS_MAX:
                return caller
            entry, redirects = named[0], redirects + 1

    def _enter(
        self,
        entry: str,
        balancer: EntryPoint | None,
        who: Caller,
        prompt: Prompt,
        max_tokens: int | None,
        session: int = 0,
        tools: bool = False,
        on_done: Callable[[RequestRecord, bytes], None] | None = None,
        retries: int = 0,
    ) -> str:
        """The body has been read. `balancer` is asked first; None: one of the region."""
        self._arrivals += 1
        request_id, text = f"r{self._arrivals}", prompt.text
        prompt.seed = self._scope(who.tenant)
        first = Request(
            id=request_id,
            tenant=who.tenant,
            model=MODEL,
            prompt_bytes=len(text),
            body_bytes=len(text) + 200,
            chain=chain.chain(text, prompt.seed),
            deadline=0.0,
            priority=who.priority,
            max_tokens=max_tokens,
            stream=True,
            key=who.key,
            entry_region=who.entry_region,
            narrow=who.narrow,
            session=session,
            tools=tools,
        )

        def ask(arrival: Arrival, one_id: str) -> None:
            asked = balancer if one_id == request_id or balancer is None else self._next_balancer(entry)
            self._ask(arrival, replace(first, id=one_id), who, prompt, asked)

        def over(record: RequestRecord, answer: bytes) -> None:
            self.entered.pop(request_id, None)  # its prompt may be large
            if on_done is not None:
                on_done(record, answer)

        arrival = Arrival(
            self._context, request_id, who.tenant, entry, ask, over, direct=balancer is None, retries=retries
        )
        self.entered[request_id] = arrival
        self.last_entry = entry
        arrival.go()
        return request_id

    def _ask(self, arrival: Arrival, request: Request, who: Caller, prompt: Prompt, asked: EntryPoint | None) -> None:
        """One try at this balancer, or another if it accepts no clients; None: one of the region."""
        entry = arrival.entry
        if isinstance(asked, BalancerProcess) and not asked.listens:
            asked = self.entries[entry]
        arrival.relay = self.regions[entry].relay if asked is None else asked.relay
        now = arrival.relay.clock()
        by = None if who.ttft_s is None else now + who.ttft_s
        request = replace(request, deadline=now + who.deadline_s, first_token_by=by)
        self._context.observer("read", entry, entry if asked is None else asked.name, request)
        arrival.active = ActiveRequest(request, prompt, arrival)
        if asked is not None:
            arrival.relay.start(arrival.active)
        elif not self.regions[entry].serve(arrival.active):
            arrival.broke(outcome.CONNECT_FAILED)

    def _tenants(self, entry: str, balancer: EntryPoint | None) -> Mapping[str, Tenant]:
        """The tenants as known where the request is sent."""
        process = self.regions[entry] if balancer is None else balancer
        if isinstance(process, BalancerProcess | RegionProcess):
            return process.law_client.law.topology.tenants
        return self._context.topology.tenants

    def _text(self, prefix: str, n_bytes: int) -> bytes:
        return _text(prefix or f"r{self._arrivals + 1}", n_bytes)

    def _scope(self, tenant: str) -> int:
        """The seed of a tenant's prefix chains."""
        seed = self._scopes.get(tenant)
        if seed is None:
            seed = self._scopes[tenant] = chain.seed_of(MODEL, "", "", tenant)
        return seed

    def leave(self, request_id: str) -> None:
        """Its client disconnects; does nothing if it is over."""
        arrival = self.entered.get(request_id)
        if arrival is not None:
            arrival.leave()

    def _next_balancer(self, entry: str) -> EntryPoint:
        return self._turn_of(entry)

    def _addresses(self, region: str, request: Request) -> Iterable[EntryProcess]:
        """What the shipped DNS answers clients of a region: one balancer of each region that their tenant may enter."""
        lawful = self.law.verdict(request.tenant, "", Scope.ENTRY).lawful
        there = [name for name in self._context.nearest(region, lawful) if self.balancers.get(name)]
        return (self._turn_of(name) for name in there[:ADDRESSES_MAX])

    def _turn_of(self, entry: str) -> BalancerProcess:
        here = self.balancers.get(entry)
        if not here:
            raise ValueError(f"entry: no global balancer is in {entry!r}; give it one or arrive `direct`ly")
        turn = self._turn[entry] = (self._turn[entry] + 1) % len(here)
        # If a connection is refused, the client tries the next address.
        return next((one for one in here[turn:] + here[:turn] if one.listens), here[turn])

    # -- the law

    def publish_law(self, document: bytes, lag_s: float = 0.0, deaf: Collection[str] = ()) -> None:
        """Put this document into etcd (b"": none). Each process learns of it within `lag_s`; those named in `deaf` have
        lost etcd and do not.
        """
        self._law_in_etcd, self._revision = document, self._revision + 1
        for process in self._processes():
            if process.name not in deaf:
                after_s = self._dice_law.uniform(0.0, lag_s)
                self.timeline.after(after_s, self._deliver_law, process, document, self._revision)

    def _processes(self) -> list[BalancerProcess | RegionProcess]:
        return [*self._all_balancers, *self.regions.values()]

    def _deliver_law(self, process: BalancerProcess | RegionProcess, document: bytes, revision: int) -> None:
        if process.alive and not self.etcd_silent:
            self._context.observer("heard", process.region, process.name, document)
            process.law_client.apply(document, revision)

    def _list_law(self, process: BalancerProcess | RegionProcess) -> None:
        """The law that a process reads from etcd when it starts or reconnects."""
        if process.alive and not self.etcd_silent:
            self._context.observer("heard", process.region, process.name, self._law_in_etcd)
            process.law_client.apply(self._law_in_etcd, self._revision, anew=True)

    def _list_drains(self, balancer: BalancerProcess) -> None:
        """The operators' drains that a process reads from etcd when it starts or reconnects."""
        if not balancer.alive or self.etcd_silent:
            return
        for region in self.regions:
            why, ends_at = self.drained.get(region, ("", -inf))
            until = None if ends_at is None else balancer.relay.clock() + (ends_at - self.now)
            stands = ends_at is None or ends_at > self.now
            balancer.relay.react(RegionForced(region, stands, why, until if stands else None))

    def _list_reports(self, balancer: BalancerProcess) -> None:
        """The regions' reports that a process reads from etcd when it starts."""
        if self.etcd_silent:
            return
        for name, report in self._reports.items():
            if self.regions[name].is_listed:
                balancer.links.on_report(report)

    # -- faults

    def kill(self, region: str) -> None:
        """The region's balancer and engines die at once; connections are refused."""
        self.regions[region].die()

    def revive(self, region: str) -> None:
        """It comes back, empty, as a new process."""
        process = self.regions[region]
        if not process.alive:
            process.rise()
            self._list_law(process)

    def kill_regional(self, region: str) -> None:
        """Its balancer alone dies; engines keep running. `revive` starts it again."""
        self.regions[region].die(engines=False)

    def kill_global(self, region: str, place: int = 0) -> None:
        """A global balancer dies at once; connections are refused. Does nothing while it is dead."""
        self.balancers[region][place].die()

    def start_global(self, region: str, place: int = 0) -> None:
        """It comes back as a new process that knows only what is in etcd. Does nothing while it runs."""
        before = self.balancers[region][place]
        if before.alive:
            return
        self.balancers[region][place] = process = before.successor()
        process.cut_off |= before.cut_off
        self._all_balancers = [balancer for those in self.balancers.values() for balancer in those]
        self._list_law(process)
        self._list_drains(process)
        self._list_reports(process)

    def process(self, region: str, replica: str) -> ReplicaProcess:
        """A replica's process, to inject faults. KeyError for one that does not exist, or whose region is dead."""
        return self.regions[region].processes[replica]

    def stop_etcd(self) -> None:
        """etcd is down until `start_etcd`: no process learns of changes there, and one that starts knows nothing of it.
        Reports continue over gRPC alone.
        """
        self.etcd_silent = True

    def start_etcd(self) -> None:
        """etcd is back, and all processes list it anew. Does nothing while it is up."""
        if self.etcd_silent:
            self.etcd_silent = False
            for process in self._processes():
                self._list_law(process)
            for balancer in self._all_balancers:
                self._list_drains(balancer)

    def freeze(self, a: str, b: str) -> None:
        """Nothing gets through between two regions; connections stay open."""
        self.wire.freeze(a, b)

    def blackhole(self, a: str, b: str) -> None:
        """As freeze, but present connections are dead, and what is sent meanwhile never arrives: requests already there
        get no answer through.
        """
        self.wire.blackhole(a, b)

    def cut(self, a: str, b: str) -> None:
        """Connections between two regions break at once, and are refused until it heals."""
        self.wire.blackhole(a, b)
        for balancer, region in self._across(a, b):
            balancer.cut(region)
        self._break_calls(a, b)

    def heal(self, a: str, b: str) -> None:
        """The link works again; messages that waited on a frozen one arrive."""
        if self.wire.swallows(a, b):
            self._break_calls(a, b)
        self.wire.heal(a, b)
        for balancer, region in self._across(a, b):
            balancer.cut_off.discard(region)

    def _across(self, a: str, b: str) -> list[tuple[BalancerProcess, str]]:
        return [(one, b) for one in self.balancers.get(a, ())] + [(one, a) for one in self.balancers.get(b, ())]

    def _break_calls(self, a: str, b: str) -> None:
        """Break the prefix streams between two regions, at both ends."""
        for here, there in ((a, b), (b, a)):
            for call in tuple(self.regions[there].calls) if there in self.regions else ():
                if call.here == here:
                    call.give_up()
                    call.cut()

    def lose_reports(self, region: str, share: float) -> None:
        """This share (0..1) of the region's reports is lost, for each listener independently."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share: {share!r} is not within 0 and 1")
        self.lost[region] = share

    def drain(self, region: str, why: str = "drill", for_s: float | None = None) -> None:
        """An operator drains a region at every global balancer."""
        self.drained[region] = why, None if for_s is None else self.now + for_s
        for balancer in self._listening():
            until = None if for_s is None else balancer.relay.clock() + for_s
            balancer.relay.react(RegionForced(region, True, why, until))

    def undrain(self, region: str) -> None:
        """The drain is lifted."""
        self.drained.pop(region, None)
        for balancer in self._listening():
            balancer.relay.react(RegionForced(region, False))

    def _listening(self) -> list[BalancerProcess]:
        """Global balancers that are connected to etcd."""
        return [] if self.etcd_silent else [balancer for balancer in self._all_balancers if balancer.alive]

    # -- reports

    def _on_report(self, report: RegionReport) -> None:
        self.timeline.after(self._context.reporting.delay_s, self._send, report)

    def _send(self, report: RegionReport) -> None:
        if not self.etcd_silent:
            self._reports[report.region] = report
        lost = self.lost.get(report.region, self._context.reporting.lost)
        for balancer in self._all_balancers:
            if lost <= 0.0 or self._dice.random() >= lost:
                self.wire.send(report.region, balancer.region, balancer.links.on_report, report)


def _text(name: str, n_bytes: int) -> bytes:
    """A prompt of this size that shares nothing with that of another name."""
    line = f"{name} says hello. ".encode()
    return (line * (n_bytes // len(line) + 1))[:n_bytes]
