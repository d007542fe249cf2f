"""One region in virtual time: its balancer's shipped machine, its replicas, and the reports it sends.

Does what regional_lb's ingress, watcher and reporter do; the report is the live Reporter's own. Never decides. A region
that dies loses its machine, queue and engines, and returns empty, as a new process; a balancer that restarts leaves the
engines running, which lose the balancer's requests, and begins with what its disk has of the prompts that they cache.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Protocol

from farhop.balance import outcome
from farhop.balance.machine import LawChanged
from farhop.balance.prefix.chain import extend_chain, tail
from farhop.relay.upstream import engine_faults
from farhop.store.documents import report as reports
from farhop.store.documents.document import DocumentError
from farhop_lab.engine.core.text import token_count
from farhop_lab.sim.engines import Timing, UsageWithText
from farhop_lab.sim.law_client import LawClient
from farhop_lab.sim.measures import use_of
from farhop_lab.sim.relay import SimulatedRelay
from farhop_lab.sim.replicas import ReplicaProcess
from regional_lb.engines.signals import gpus
from regional_lb.fleet.view import ReplicaProbed, ReplicaSampled, Sample, ViewSwapped, view_of
from regional_lb.mesh.report import LEASE_S, LOOK_S, Reporter
from regional_lb.mesh.warm_restart import EVERY_S
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop_wire.region_pb2 import PrefixDelta

    from farhop.balance.machine import Forward, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop.store.documents.report import RegionReport
    from farhop_lab.sim.context import SimContext
    from farhop_lab.sim.engines import Engine
    from farhop_lab.sim.relay import ActiveRequest
    from farhop_lab.sim.sites import Site
    from farhop_lab.sim.timeline import Call
    from global_lb.links.prefix_streams import Content
    from regional_lb.scheduler.flow import RegionalFlow

SAMPLE_S = 0.1
ENGINES_EVERY = 5  # samples: as often as engines are scraped, since each look at one ends its leap
ON_DISK_MAX = 5_000  # prompts, of those that ended last
_ADDRESSES = ("sim:1", "sim:2", "sim:3")


class PrefixConsumer(Protocol):
    """A global balancer's call for the region's prefixes, open until either end is gone."""

    @property
    def here(self) -> str:
        """The global balancer's region."""

    def cut(self) -> None:
        """The region closes the call, or its process died."""

    def give_up(self) -> None:
        """The balancer closes the call."""


class EngineAttempt:
    """One attempt at a replica, half a local round trip away."""

    __slots__ = (
        "_active",
        "_away_s",
        "_began_at",
        "_context",
        "_place",
        "_process",
        "_region",
        "_relay",
        "_sends_ids",
        "_sent_at",
        "_watch",
        "answer_tokens",
        "id",
        "max_tokens",
        "number",
        "prompt",
    )  # fmt: skip

    def __init__(self, region: RegionProcess, active: ActiveRequest, forward: Forward) -> None:
        self.number = forward.attempt
        self.id = f"{forward.id}#{forward.attempt}"
        came, asked = token_count(active.generated), active.prompt.answer_tokens
        self.prompt, self.answer_tokens = active.prompt.text + active.generated, None if asked is None else asked - came
        self.max_tokens = None if active.request.max_tokens is None else active.request.max_tokens - came
        self._sends_ids = region.flow.replicas.view.replicas[forward.target].token_ids
        self._region, self._relay, self._active, self._context = region, region.relay, active, region.context
        self._process, self._away_s = region.processes[forward.target], region.away_s
        self._place = region.name, forward.target
        timeline = region.context.timeline
        self._sent_at, self._began_at = timeline.now, -inf
        streams, watching = active.request.stream, region.context.watching
        patience_s = watching.engine_first_byte_s if streams else watching.engine_whole_answer_s
        late = outcome.FIRST_BYTE_TIMEOUT if streams else outcome.WHOLE_ANSWER_TIMEOUT
        self._watch: Call = timeline.after(patience_s, self._give_up, late)
        timeline.after(self._away_s, self._arrive)

    def _arrive(self) -> None:
        if self._process.listens:
            self._process.take(self)
        else:
            self._lost(outcome.CONNECT_FAILED)

    def first(self) -> None:
        """See engines.Job."""
        self._began_at = self._context.timeline.now
        self._watch.cancel()
        self._watch = self._context.timeline.after(self._context.watching.engine_between_bytes_s, self._quiet)
        self._act(self._relay.began, 200)

    def done(self, usage: Usage) -> None:
        """See engines.Job. Its text continues from the prompt, as the relay would read it."""
        self._watch.cancel()
        active, generated = self._active, usage.text if isinstance(usage, UsageWithText) else b""
        if active.generated:  # as if it had never broken
            came, generated = token_count(active.generated), active.generated + generated
            used = usage.prompt_tokens - came, usage.completion_tokens + came
            usage = UsageWithText(*used, usage.cached_tokens, text=generated)
        end = tail(active.prompt.text, active.request.chain, active.prompt.seed)
        chain = extend_chain(end, generated) if generated else ()
        context = self._context
        if context.timed is not None:
            context.timed(*self._place, Timing(self._sent_at, self._began_at, context.timeline.now, usage))
        self._region.ended(self._place[1], chain or active.request.chain, active.request)
        self._act(self._relay.ended, 200, usage, chain, len(generated))

    def refused(self, status: int, text: str = "") -> None:
        """See replicas.RefusableJob. The engine's error message is read as the relay reads it."""
        self._watch.cancel()
        self._act(self._relay.began, status)
        self._act(self._relay.ended, status, None, (), 0, engine_faults.in_text(text.encode()))

    def broke(self, text: str) -> None:
        """See engines.Job. An answer that had begun ends with an error event."""
        if not text:
            self._lost(outcome.DIED_MID_STREAM if self._began_at > -inf else outcome.DIED_BEFORE_START)
        elif self._began_at > -inf:
            self._watch.cancel()
            self._act(self._relay.ended, 200, None, (), 0, engine_faults.in_text(text.encode()) or outcome.ENGINE_ERROR)
        else:
            self.refused(500, text)

    def _quiet(self) -> None:
        """Chunks are not simulated: they come all the time, unless the engine generates none."""
        context, since = self._context, self._process.quiet_since
        due = (context.timeline.now if since is None else since) + context.watching.engine_between_bytes_s
        if due <= context.timeline.now:
            self._give_up(outcome.STALLED)
        else:
            self._watch = context.timeline.at(due, self._quiet)

    def _give_up(self, reason: Outcome) -> None:
        self.abort()
        self._relay.failed(self._active, self, reason)

    def _lost(self, reason: Outcome) -> None:
        self._watch.cancel()
        self._act(self._relay.failed, reason)

    def _act(self, act: Callable[..., None], *args: object) -> None:
        self._context.timeline.after(self._away_s, act, self._active, self, *args)

    def so_far(self) -> bytes | None:
        """See relay.Attempt."""
        if not self._sends_ids or not self._active.request.stream:
            return None
        generated = self._process.generated(self.id)
        left = self.max_tokens if self.answer_tokens is None else self.answer_tokens
        return generated if generated and (left is None or token_count(generated) < left) else None

    def abort(self) -> None:
        """See relay.Attempt."""
        self._watch.cancel()
        self._context.timeline.after(self._away_s, self._process.abort, self.id)


class RegionProcess:
    """See the module's head. `make` builds its machine; `on_report` is called with each report that it sends."""

    def __init__(
        self,
        context: SimContext,
        name: str,
        site: Site,
        make: Callable[[str, Random], RegionalFlow],
        on_report: Callable[[RegionReport], None],
    ) -> None:
        self.context, self.name, self.region, self.site = context, name, name, site
        self.instance = "a"
        self.calls: dict[PrefixConsumer, None] = {}  # prefix subscribers, in the order they came
        # The last prefix message, and its parsed content.
        self.told: tuple[PrefixDelta | None, Content | str] = (None, "")
        self.away_s = context.wire.rtt_ms(name, name) / 2e3
        self.alive = False
        self.processes: dict[str, ReplicaProcess] = {}
        self._hung: set[str] = set()  # replicas whose probe has not come back
        self._make, self.on_report = make, on_report
        self.incarnation = 0
        # When a prompt was sent, or its answer ended: when, at which replica, its text so far, and whose it is.
        self._on_disk: deque[tuple[float, str, tuple[int, ...], Request]] = deque(maxlen=ON_DISK_MAX)
        self._died_at = -inf
        self._samples = 0
        self._seen: list[tuple[int, int, float]] = []
        self._ejections: dict[str, int] = {}
        context.measures.use[name] = []
        self.rise()
        context.every(SAMPLE_S, self._measure)

    # -- life cycle

    @property
    def engines(self) -> dict[str, Engine]:
        """Its replicas' engines, by name."""
        return {name: process.engine for name, process in self.processes.items()}

    def rise(self) -> None:
        """Start a new process; its replicas are idle with empty caches unless they kept running. Does nothing while it
        runs.
        """
        if self.alive:
            return
        context = self.context
        self.incarnation += 1
        self._ejections.clear()
        self.alive = True
        rng = context.rng(f"region {self.name} {self.incarnation}")
        self.processes = self.processes or {
            r.name: ReplicaProcess(context.timeline, self.site.engine) for r in self.site.named()
        }
        self._hung.clear()
        self._gpu_faults: dict[str, str] = {}
        self.flow = self._make(self.name, rng)
        self.law_client = LawClient(self.name, context.law, lambda law: self.relay.react(LawChanged(law)))
        context.observer("born", self.name, self.name, None)
        self.relay = SimulatedRelay(
            f"region {self.name}", self.flow, context.timeline, rng.uniform(10.0, 1e5), context.journal, self._attempt
        )
        self.reporter = Reporter(
            self.flow, region=self.name, instance=self.instance, addresses=_ADDRESSES,
            clock=self.relay.clock, incarnation=self.incarnation,
            # Requests under way are never silent: chunks are not simulated.
            quiet_s=lambda _balancer, attempt: 0.0 if self.relay.has(attempt) else None,
        )  # fmt: skip
        life = self.incarnation
        self.relay.react(ViewSwapped(view_of(self.site.named())))
        self._warm()
        self._look_at_gpus(life)
        self._scrape(life)
        self._probe(life)
        self._look(life)

    def _warm(self) -> None:
        """Begin with what the disk has, which was written at the longest interval before the death."""
        hints = self.flow.law.request_verdict
        for at, replica, chain, request in self._on_disk:
            if at <= self._died_at - EVERY_S:
                self.flow.replicas.caches(replica, chain, hints(request, Scope.HINTS))

    def ended(self, replica: str, chain: tuple[int, ...], request: Request) -> None:
        """An answer ended at the replica, which now has this cached."""
        self._on_disk.append((self.context.timeline.now, replica, chain, request))

    @property
    def is_listed(self) -> bool:
        """Whether its report is in etcd: it lives, or did until its lease's time ago."""
        return self.alive or self.context.timeline.now - self._died_at < LEASE_S

    def die(self, *, engines: bool = True) -> None:
        """The process and its engines die, or the process alone; connected clients notice."""
        if engines:
            self.processes = {}
            self._on_disk.clear()
        if not self.alive:
            return
        self.alive, self._died_at = False, self.context.timeline.now
        for active in self.relay.die():
            active.last_word().broke(outcome.DIED_BEFORE_START)
        for call in tuple(self.calls):
            call.cut()

    # -- requests

    def serve(self, active: ActiveRequest) -> bool:
        """Take a request from a hop or directly from a client; False if no process runs."""
        if not self.alive:
            return False
        request = active.request
        if request.lawful is not None and self.name not in request.lawful:
            self.context.journal.violated(f"{request.id} came to {self.name}, which its token does not allow")
        self.relay.start(active)
        return True

    def leave(self, request_id: str) -> None:
        """Its client is gone; does nothing if the request is over or no process runs."""
        if self.alive:
            self.relay.client_left(request_id)

    def _attempt(self, active: ActiveRequest, forward: Forward) -> EngineAttempt:
        request = active.request
        self.context.observer("computed", self.name, self.name, request)
        if self.name not in self.law_client.law.verdict(request.tenant, request.model, narrow=request.narrow).lawful:
            self.context.journal.violated(f"{request.id} is processed in {self.name} against the law")
        self._on_disk.append((self.context.timeline.now, forward.target, request.chain, request))
        return EngineAttempt(self, active, forward)

    # -- probes and scrapes

    def _lives(self, life: int) -> bool:
        """Whether the process that scheduled this still runs."""
        return self.alive and life == self.incarnation

    def _scrape(self, life: int) -> None:
        if not self._lives(life):
            return
        for name, process in self.processes.items():
            if not process.answers:
                continue
            waiting, running, usage = process.engine.metrics()
            self.relay.react(ReplicaSampled(name, Sample(self.relay.clock(), waiting, running, usage)))
        self.context.timeline.after(self.context.watching.scrape_s, self._scrape, life)

    def _probe(self, life: int) -> None:
        if not self._lives(life):
            return
        for name, process in self.processes.items():
            if name in self._hung:
                continue
            if process.listens and not process.answers:
                self._hung.add(name)
                self.context.timeline.after(self.context.watching.probe_timeout_s, self._probe_late, life, name)
            else:
                self._probed(name, ok=process.answers and process.healthy)
        self.context.timeline.after(self.context.watching.probe_s, self._probe, life)

    def _probe_late(self, life: int, name: str) -> None:
        if self._lives(life):
            self._hung.discard(name)
            self._probed(name, ok=self.processes[name].answers and self.processes[name].healthy)

    def _probed(self, name: str, *, ok: bool) -> None:
        self.relay.react(ReplicaProbed(name, ok=ok, fault=self._gpu_faults.get(name, "")))

    def _look_at_gpus(self, life: int) -> None:
        if not self._lives(life):
            return
        faults = {name: gpus.fault((gpus.Gpu("0", "", process.xid),), ()) for name, process in self.processes.items()}
        self._gpu_faults = {name: fault for name, fault in faults.items() if fault}
        self.context.timeline.after(self.context.watching.gpus_s, self._look_at_gpus, life)

    # -- reporting

    def _look(self, life: int) -> None:
        if not self._lives(life):
            return
        context, every_s = self.context, self.context.reporting.every_s
        if every_s is None:
            if (report := self.reporter.look()) is not None:
                self._report(report)
            context.timeline.after(LOOK_S, self._look, life)
            return
        self.reporter.prefixes.tidy()
        self.flow.scaling.look(self.relay.clock())
        self._report(self.reporter.build())
        # Aligned with all other regions, also after a restart.
        now = context.timeline.now
        context.timeline.at((now // every_s + 1) * every_s, self._look, life)

    def _report(self, report: RegionReport) -> None:
        try:
            reports.check(report)
        except DocumentError as error:
            self.context.journal.violated(f"the report of {self.name} would be refused: {error}")
            return
        self.on_report(report)

    def _measure(self) -> None:
        now, most = 0, self.relay.most_under_way()
        if self.alive:
            now = self.relay.under_way
        if self._samples % ENGINES_EVERY == 0:
            self._seen = [process.engine.metrics() for process in self.processes.values()]
            self._count_ejections()
        self._samples += 1
        slots = self.site.slots
        use = use_of(self.context.timeline.now, now / slots, most / slots, self._seen if self.alive else [])
        self.context.measures.use[self.name].append(use)

    def _count_ejections(self) -> None:
        for name, health in self.flow.replicas.health.items() if self.alive else ():
            times = health.ejections - self._ejections.get(name, 0)
            if times:
                self._ejections[name] = health.ejections
                self.context.measures.ejected(self.name, name, times=times, healthy=self.processes[name].whole)
