"""One region in virtual time: its balancer's shipped machine, its replicas, and the reports it sends out.

Does what regional_lb's door, watcher and reporter do, in their words: the report is the live Reporter's own. Never
decides. A region that dies takes its machine, its queue and its engines with it, and returns empty, as a new process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance import outcome
from farhop.balance.chain import go_on, tail
from farhop.balance.machine import LawChanged
from farhop.store import report as reports
from farhop_lab.sim.carrier import Carrier
from farhop_lab.sim.engines import Spoken
from farhop_lab.sim.measures import use_of
from farhop_lab.sim.statutes import Statutes
from regional_lb.report import LONGEST_GAP_S, LOOK_S, Reporter, moved
from regional_lb.view import ReplicaProbed, ReplicaSampled, Sample, ViewSwapped, view_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Forward, Usage
    from farhop.store.report import RegionReport
    from farhop_lab.sim.carrier import Journey
    from farhop_lab.sim.engines import Engine
    from farhop_lab.sim.scenery import Site
    from farhop_lab.sim.stage import Stage
    from farhop_lab.sim.streams import PrefixCall
    from regional_lb.flow import RegionalFlow

SAMPLE_S = 0.1
ENGINES_EVERY = 5  # samples: as often as engines are scraped, since every look at one ends its leap
_ADDRESSES = ("sim:1", "sim:2", "sim:3")


class EngineAttempt:
    """One attempt at a replica, half a local round trip away."""

    __slots__ = (
        "_away_s", "_carrier", "_engine", "_journey", "_timeline", "answer_tokens", "id", "max_tokens", "number",
        "prompt",
    )  # fmt: skip

    def __init__(self, region: RegionProcess, journey: Journey, forward: Forward) -> None:
        self.number = forward.attempt
        self.id = f"{forward.id}#{forward.attempt}"
        self.prompt, self.answer_tokens = journey.prompt.text, journey.prompt.answer_tokens
        self.max_tokens = journey.request.max_tokens
        self._carrier, self._journey, self._timeline = region.carrier, journey, region.stage.timeline
        self._engine, self._away_s = region.engines[forward.target], region.away_s
        self._timeline.after(self._away_s, self._arrive)

    def _arrive(self) -> None:
        if not self._engine.submit(self):
            self._timeline.after(self._away_s, self._carrier.began, self._journey, self, 503)
            self._timeline.after(self._away_s, self._carrier.ended, self._journey, self, 503, None)

    def first(self) -> None:
        """See engines.Job."""
        self._timeline.after(self._away_s, self._carrier.began, self._journey, self, 200)

    def done(self, usage: Usage) -> None:
        """See engines.Job. What it said goes on from the prompt, as the relay would hear it."""
        journey, said = self._journey, usage.text if isinstance(usage, Spoken) else b""
        end = tail(self.prompt, journey.request.chain, journey.prompt.seed)
        chain = go_on(end, said) if said else ()
        self._timeline.after(self._away_s, self._carrier.ended, journey, self, 200, usage, chain, len(said))

    def abort(self) -> None:
        """See carrier.Attempt."""
        self._timeline.after(self._away_s, self._engine.abort, self.id)


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
        self._make, self._tell = make, tell
        self.incarnation = 0
        self._samples = 0
        self._seen: list[tuple[int, int, float]] = []
        stage.measures.use[name] = []
        self.rise()
        stage.every(SAMPLE_S, self._measure)

    # -- life

    def rise(self) -> None:
        """A new process, its replicas idle and with empty caches. Harmless while it lives."""
        if self.alive:
            return
        stage = self.stage
        self.incarnation += 1
        self.alive = True
        rng = stage.rng(f"region {self.name} {self.incarnation}")
        self.engines: dict[str, Engine] = {r.name: self.site.engine(stage.timeline) for r in self.site.named()}
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
        self._scrape(life)
        self._probe(life)
        self._look(life)

    def die(self) -> None:
        """The process and its engines are gone; whoever is connected notices."""
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
        for name, engine in self.engines.items():
            waiting, running, usage = engine.metrics()
            self.carrier.react(ReplicaSampled(name, Sample(self.carrier.clock(), waiting, running, usage)))
        self.stage.timeline.after(self.stage.watching.scrape_s, self._scrape, life)

    def _probe(self, life: int) -> None:
        if not self._lives(life):
            return
        for name in self.engines:
            self.carrier.react(ReplicaProbed(name, ok=True))
        self.stage.timeline.after(self.stage.watching.probe_s, self._probe, life)

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
            self._seen = [engine.metrics() for engine in self.engines.values()]
        self._samples += 1
        slots = self.site.slots
        use = use_of(self.stage.timeline.now, now / slots, most / slots, self._seen if self.alive else [])
        self.stage.measures.use[self.name].append(use)
