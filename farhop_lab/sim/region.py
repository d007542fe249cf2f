"""One region in virtual time: its balancer's shipped machine, its replicas, and the reports it sends out.

Does what regional_lb's door, watcher and reporter do, in their words: the report is the live Reporter's own. Never
decides. A region that dies takes its machine, its queue and its engines with it, and returns empty, as a new process; a
balancer that restarts leaves the engines, which lose whom it had sent them.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from farhop.balance import outcome
from farhop.balance.chain import go_on, tail
from farhop.balance.machine import LawChanged
from farhop.relay import faults as words
from farhop.store import report as reports
from farhop_lab.sim.carrier import Carrier
from farhop_lab.sim.engines import Spoken, Timing
from farhop_lab.sim.hosts import Host
from farhop_lab.sim.measures import use_of
from farhop_lab.sim.statutes import Statutes
from regional_lb.report import LONGEST_GAP_S, LOOK_S, Reporter, moved
from regional_lb.signals import gpus
from regional_lb.view import ReplicaProbed, ReplicaSampled, Sample, ViewSwapped, view_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Forward, Usage
    from farhop.balance.outcome import Outcome
    from farhop.store.report import RegionReport
    from farhop_lab.sim.carrier import Journey
    from farhop_lab.sim.engines import Engine
    from farhop_lab.sim.scenery import Site
    from farhop_lab.sim.stage import Stage
    from farhop_lab.sim.streams import PrefixCall
    from farhop_lab.sim.timeline import Call
    from regional_lb.flow import RegionalFlow

SAMPLE_S = 0.1
ENGINES_EVERY = 5  # samples: as often as engines are scraped, since every look at one ends its leap
_ADDRESSES = ("sim:1", "sim:2", "sim:3")


class EngineAttempt:
    """One attempt at a replica, half a local round trip away."""

    __slots__ = (
        "_away_s", "_began_at", "_carrier", "_host", "_journey", "_place", "_sent_at", "_stage", "_watch",
        "answer_tokens", "id", "max_tokens", "number", "prompt",
    )  # fmt: skip

    def __init__(self, region: RegionProcess, journey: Journey, forward: Forward) -> None:
        self.number = forward.attempt
        self.id = f"{forward.id}#{forward.attempt}"
        self.prompt, self.answer_tokens = journey.prompt.text, journey.prompt.answer_tokens
        self.max_tokens = journey.request.max_tokens
        self._carrier, self._journey, self._stage = region.carrier, journey, region.stage
        self._host, self._away_s = region.hosts[forward.target], region.away_s
        self._place = region.name, forward.target
        timeline = region.stage.timeline
        self._sent_at, self._began_at = timeline.now, -inf
        streams, watching = journey.request.stream, region.stage.watching
        patience_s = watching.engine_first_byte_s if streams else watching.engine_whole_answer_s
        late = outcome.FIRST_BYTE_TIMEOUT if streams else outcome.WHOLE_ANSWER_TIMEOUT
        self._watch: Call = timeline.after(patience_s, self._give_up, late)
        timeline.after(self._away_s, self._arrive)

    def _arrive(self) -> None:
        if self._host.listens:
            self._host.take(self)
        else:
            self._lost(outcome.CONNECT_FAILED)

    def first(self) -> None:
        """See engines.Job."""
        self._began_at = self._stage.timeline.now
        self._watch.cancel()
        self._watch = self._stage.timeline.after(self._stage.watching.engine_between_bytes_s, self._quiet)
        self._tell(self._carrier.began, 200)

    def done(self, usage: Usage) -> None:
        """See engines.Job. What it said goes on from the prompt, as the relay would hear it."""
        self._watch.cancel()
        journey, said = self._journey, usage.text if isinstance(usage, Spoken) else b""
        end = tail(self.prompt, journey.request.chain, journey.prompt.seed)
        chain = go_on(end, said) if said else ()
        stage = self._stage
        if stage.timed is not None:
            stage.timed(*self._place, Timing(self._sent_at, self._began_at, stage.timeline.now, usage))
        self._tell(self._carrier.ended, 200, usage, chain, len(said))

    def refused(self, text: str) -> None:
        """See hosts.Guest. What an engine says of itself is read as the relay reads it."""
        self._watch.cancel()
        status = 500 if text else 503
        self._tell(self._carrier.began, status)
        self._tell(self._carrier.ended, status, None, (), 0, words.in_text(text.encode()))

    def broke(self, text: str) -> None:
        """See engines.Job. An answer that had begun ends with an error event."""
        if not text:
            self._lost(outcome.DIED_MID_STREAM if self._began_at > -inf else outcome.DIED_BEFORE_START)
        elif self._began_at > -inf:
            self._watch.cancel()
            self._tell(self._carrier.ended, 200, None, (), 0, words.in_text(text.encode()) or outcome.ENGINE_ERROR)
        else:
            self.refused(text)

    def _quiet(self) -> None:
        """Chunks are not simulated: they come all the time, unless the engine makes none."""
        stage, since = self._stage, self._host.quiet_since
        due = (stage.timeline.now if since is None else since) + stage.watching.engine_between_bytes_s
        if due <= stage.timeline.now:
            self._give_up(outcome.STALLED)
        else:
            self._watch = stage.timeline.at(due, self._quiet)

    def _give_up(self, reason: Outcome) -> None:
        self.abort()
        self._carrier.failed(self._journey, self, reason)

    def _lost(self, reason: Outcome) -> None:
        self._watch.cancel()
        self._tell(self._carrier.failed, reason)

    def _tell(self, act: Callable[..., None], *args: object) -> None:
        self._stage.timeline.after(self._away_s, act, self._journey, self, *args)

    def abort(self) -> None:
        """See carrier.Attempt."""
        self._watch.cancel()
        self._stage.timeline.after(self._away_s, self._host.abort, self.id)


class RegionProcess:
    """See the module's head. `make` builds its machine; `tell` sends a report to whoever listens."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        site: Site,
        make: Callable[[str, Random], RegionalFlow],
        tell: Callable[[RegionReport], None],
    ) -> None:
        self.stage, self.name, self.region, self.site = stage, name, name, site
        self.instance = "a"
        self.calls: dict[PrefixCall, None] = {}  # for its prefixes, in the order they came
        self.away_s = stage.wire.rtt_ms(name, name) / 2e3
        self.alive = False
        self.hosts: dict[str, Host] = {}
        self._hung: set[str] = set()  # replicas whose probe has not come back
        self._make, self._tell = make, tell
        self.incarnation = 0
        self._samples = 0
        self._seen: list[tuple[int, int, float]] = []
        self._ejections: dict[str, int] = {}
        stage.measures.use[name] = []
        self.rise()
        stage.every(SAMPLE_S, self._measure)

    # -- life

    @property
    def engines(self) -> dict[str, Engine]:
        """Its replicas' engines, by name."""
        return {name: host.engine for name, host in self.hosts.items()}

    def rise(self) -> None:
        """A new process; its replicas are idle and have empty caches unless they lived on. Harmless while it lives."""
        if self.alive:
            return
        stage = self.stage
        self.incarnation += 1
        self._ejections.clear()
        self.alive = True
        rng = stage.rng(f"region {self.name} {self.incarnation}")
        self.hosts = self.hosts or {r.name: Host(stage.timeline, self.site.engine) for r in self.site.named()}
        self._hung.clear()
        self._gpu_faults: dict[str, str] = {}
        self.flow = self._make(self.name, rng)
        self.statutes = Statutes(self.name, stage.law, lambda law: self.carrier.react(LawChanged(law)))
        stage.witness("born", self.name, self.name, None)
        self.carrier = Carrier(
            f"region {self.name}", self.flow, stage.timeline, rng.uniform(10.0, 1e5), stage.journal, self._attempt
        )
        self.reporter = Reporter(
            self.name, self.instance, _ADDRESSES, self.flow, self.carrier.clock, incarnation=self.incarnation,
            # What is under way is heard of all the time: chunks are not simulated.
            quiet_s=lambda _balancer, attempt: 0.0 if self.carrier.has(attempt) else None,
        )  # fmt: skip
        self._latest: RegionReport | None = None
        life = self.incarnation
        self.carrier.react(ViewSwapped(view_of(self.site.named())))
        self._look_at_gpus(life)
        self._scrape(life)
        self._probe(life)
        self._look(life)

    def die(self, *, engines: bool = True) -> None:
        """The process and its engines are gone, or it alone; whoever is connected notices."""
        if engines:
            self.hosts = {}
        if not self.alive:
            return
        self.alive = False
        for journey in self.carrier.die():
            journey.client.broke(outcome.DIED_BEFORE_START)
        for call in tuple(self.calls):
            call.cut()

    # -- requests

    def serve(self, journey: Journey) -> bool:
        """Take a request of a hop or of a client that came straight here; False if nobody is at home."""
        if not self.alive:
            return False
        request = journey.request
        if request.lawful is not None and self.name not in request.lawful:
            self.stage.journal.violated(f"{request.id} came to {self.name}, which its token does not allow")
        self.carrier.start(journey)
        return True

    def leave(self, request_id: str) -> None:
        """Its client is gone; harmless if it is over, or if nobody is at home."""
        if self.alive:
            self.carrier.client_left(request_id)

    def _attempt(self, journey: Journey, forward: Forward) -> EngineAttempt:
        request = journey.request
        self.stage.witness("computed", self.name, self.name, request)
        if self.name not in self.statutes.law.verdict(request.tenant, request.model, narrow=request.narrow).lawful:
            self.stage.journal.violated(f"{request.id} is processed in {self.name} against the law")
        return EngineAttempt(self, journey, forward)

    # -- watching

    def _lives(self, life: int) -> bool:
        """Whether what was scheduled in that life is still wanted."""
        return self.alive and life == self.incarnation

    def _scrape(self, life: int) -> None:
        if not self._lives(life):
            return
        for name, host in self.hosts.items():
            if not host.answers:
                continue
            waiting, running, usage = host.engine.metrics()
            self.carrier.react(ReplicaSampled(name, Sample(self.carrier.clock(), waiting, running, usage)))
        self.stage.timeline.after(self.stage.watching.scrape_s, self._scrape, life)

    def _probe(self, life: int) -> None:
        if not self._lives(life):
            return
        for name, host in self.hosts.items():
            if name in self._hung:
                continue
            if host.listens and not host.answers:
                self._hung.add(name)
                self.stage.timeline.after(self.stage.watching.probe_timeout_s, self._probe_late, life, name)
            else:
                self._probed(name, ok=host.answers and host.healthy)
        self.stage.timeline.after(self.stage.watching.probe_s, self._probe, life)

    def _probe_late(self, life: int, name: str) -> None:
        if self._lives(life):
            self._hung.discard(name)
            self._probed(name, ok=self.hosts[name].answers and self.hosts[name].healthy)

    def _probed(self, name: str, *, ok: bool) -> None:
        self.carrier.react(ReplicaProbed(name, ok=ok, fault=self._gpu_faults.get(name, "")))

    def _look_at_gpus(self, life: int) -> None:
        if not self._lives(life):
            return
        told = {name: gpus.fault((gpus.Gpu("0", "", host.xid),), ()) for name, host in self.hosts.items()}
        self._gpu_faults = {name: fault for name, fault in told.items() if fault}
        self.stage.timeline.after(self.stage.watching.gpus_s, self._look_at_gpus, life)

    # -- reporting

    def _look(self, life: int) -> None:
        if not self._lives(life):
            return
        stage, every_s = self.stage, self.stage.reporting.every_s
        self.reporter.prefixes.tidy()
        report = self.reporter.build()
        if every_s is not None:
            self._report(report)
            # In step with all others, also after a return.
            now = stage.timeline.now
            stage.timeline.at((now // every_s + 1) * every_s, self._look, life)
            return
        last = self._latest
        if last is None or moved(last, report) or report.clock_ms - last.clock_ms >= (LONGEST_GAP_S - LOOK_S) * 1e3:
            self._report(report)
        stage.timeline.after(LOOK_S, self._look, life)

    def _report(self, report: RegionReport) -> None:
        self._latest = report
        try:
            reports.check(report)
        except reports.ReportError as error:
            self.stage.journal.violated(f"the report of {self.name} would be refused: {error}")
            return
        self._tell(report)

    def _measure(self) -> None:
        now, most = 0, self.carrier.most_under_way()
        if self.alive:
            now = self.carrier.under_way
        if self._samples % ENGINES_EVERY == 0:
            self._seen = [host.engine.metrics() for host in self.hosts.values()]
            self._count_ejections()
        self._samples += 1
        slots = self.site.slots
        use = use_of(self.stage.timeline.now, now / slots, most / slots, self._seen if self.alive else [])
        self.stage.measures.use[self.name].append(use)

    def _count_ejections(self) -> None:
        for name, health in self.flow.health.items() if self.alive else ():
            times = health.ejections - self._ejections.get(name, 0)
            if times:
                self._ejections[name] = health.ejections
                self.stage.measures.ejected(self.name, name, times=times, healthy=self.hosts[name].whole)
