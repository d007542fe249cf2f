"""Baseline routers and their engines in virtual time, with the network between them.

A router calls engines of its own region and of others, or routers of others, over the world's wire; requests of its
clients come, and their answers go, over it, too. Invariants: a call that was given up gets no more callbacks; bytes are
counted once per crossing, each way. Never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome
from farhop.balance.machine import Tokens
from farhop_lab.sim.baselines.router import BalancerSeen, EnginesSeen, Sample, WireMeasured
from farhop_lab.sim.entry import RemoteRequest
from farhop_lab.sim.measures import use_of
from farhop_lab.sim.region import ENGINES_EVERY, SAMPLE_S
from farhop_lab.sim.relay import ActiveRequest, SimulatedRelay
from farhop_lab.sim.replicas import ReplicaProcess
from farhop_lab.sim.wire import answer_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from farhop.balance.machine import Answer, Forward, Usage
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.baselines.router import Router
    from farhop_lab.sim.context import SimContext
    from farhop_lab.sim.engines import Engine
    from farhop_lab.sim.sites import Site


class ProbeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How often a router probes engines and other routers, and pings. Seconds; `rtt_s` None: never. An `oracle` is told
    how long each answer will be, as its `max_tokens`.
    """

    probe_s: float = 1.0
    rtt_s: float | None = None
    oracle: bool = False


class EnginePool:
    """A region's replicas, by the routers' names for them; there is no balancer of ours before them."""

    def __init__(self, context: SimContext, name: str, site: Site) -> None:
        self.context, self.name, self.site = context, name, site
        self.alive = False
        self.calls: dict[str, EngineCall] = {}
        self._samples = 0
        self._seen: list[tuple[int, int, float]] = []
        context.measures.use[name] = []
        self.rise()
        context.every(SAMPLE_S, self._measure)

    def rise(self) -> None:
        """Start idle engines with empty caches. Does nothing while they run."""
        if not self.alive:
            self.alive = True
            self.processes = {
                f"{self.name}/{r.name}": ReplicaProcess(self.context.timeline, self.site.engine)
                for r in self.site.named()
            }

    @property
    def engines(self) -> dict[str, Engine]:
        """The replicas' present engines."""
        return {name: process.engine for name, process in self.processes.items()}

    def process(self, replica: str) -> ReplicaProcess:
        """A replica's process, to inject faults. KeyError for one that does not exist, and while all are dead."""
        if not self.alive:
            raise KeyError(replica)
        return self.processes[f"{self.name}/{replica}"]

    def die(self) -> None:
        """They die; connected clients notice."""
        self.alive = False
        calls, self.calls = list(self.calls.values()), {}
        for call in calls:
            call.cut()

    def samples(self) -> dict[str, Sample] | None:
        """Metrics of those that are ready, as in any router's health checks: one that is missing gets no more requests.
        None if all are dead.
        """
        if not self.alive:
            return None
        ready = (
            (name, process.engine) for name, process in self.processes.items() if process.answers and process.healthy
        )
        return {name: Sample(*engine.metrics()) for name, engine in ready}

    def _measure(self) -> None:
        share = len(self.calls) / self.site.slots
        if self._samples % ENGINES_EVERY == 0:
            self._seen = [process.engine.metrics() for process in self.processes.values()]
        self._samples += 1
        engines = self._seen if self.alive else []
        self.context.measures.use[self.name].append(use_of(self.context.timeline.now, share, share, engines))


class EngineCall:
    """One attempt at an engine, in any region."""

    __slots__ = (
        "_active",
        "_active",
        "_far",
        "_over",
        "_router",
        "_target",
        "answer_tokens",
        "id",
        "max_tokens",
        "number",
        "prompt",
    )

    def __init__(self, router: RouterProcess, active: ActiveRequest, forward: Forward, far: EnginePool) -> None:
        self._router, self._active, self._target, self._far = router, active, forward.target, far
        self.number, self.id = forward.attempt, f"{forward.id}#{forward.attempt}"
        self.prompt, self.answer_tokens = active.prompt.text, active.prompt.answer_tokens
        self.max_tokens = active.request.max_tokens
        self._over = False
        wire = router.context.wire
        wire.carry(router.region, far.name, active.request.body_bytes)
        if wire.rtt_ms(router.region, far.name) > 0.0:
            wire.send(router.region, far.name, self._arrive)
        else:
            self._arrive()  # at once: a request at the same moment must find it there

    def _arrive(self) -> None:
        far = self._far
        if far.alive and (process := far.processes[self._target]).listens:
            far.calls[self.id] = self
            process.take(self)
        else:
            self._back(self._router.relay.failed, outcome.CONNECT_FAILED)

    def _back(self, act: Callable[..., None], *args: object) -> None:
        self._router.context.wire.send(self._far.name, self._router.region, act, self._active, self, *args)

    def first(self) -> None:
        """See engines.Job."""
        if not self._over:
            self._back(self._router.relay.began, 200)

    def done(self, usage: Usage) -> None:
        """See engines.Job."""
        if not self._over:
            self._over = True
            del self._far.calls[self.id]
            self._router.context.wire.carry(self._far.name, self._router.region, answer_bytes(usage))
            self._back(self._router.relay.ended, 200, usage)

    def broke(self, _text: str) -> None:
        """See engines.Job."""
        if not self._over:
            self._far.calls.pop(self.id, None)
            self.cut()

    def refused(self, status: int, _text: str = "") -> None:
        """See replicas.RefusableJob."""
        if not self._over:
            self._over = True
            del self._far.calls[self.id]
            self._back(self._router.relay.began, status)
            self._back(self._router.relay.ended, status, None)

    def cut(self) -> None:
        """The engine died."""
        self._over = True
        self._back(self._router.relay.failed, outcome.DIED_BEFORE_START)

    def so_far(self) -> bytes | None:
        """See relay.Attempt. No rival continues a stream."""
        return None

    def abort(self) -> None:
        """See relay.Attempt."""
        self._router.context.wire.send(self._router.region, self._far.name, self._stop)

    def _stop(self) -> None:
        self._over = True
        if self._far.calls.pop(self.id, None) is not None:
            self._far.processes[self._target].abort(self.id)


class PeerCall:
    """One attempt at another region's router, which sees it as forwarded."""

    __slots__ = ("_active", "_remote", "_router", "number")

    def __init__(self, router: RouterProcess, active: ActiveRequest, forward: Forward, peer: RouterProcess) -> None:
        self._router, self._active, self.number = router, active, forward.attempt
        request = msgspec.structs.replace(
            active.request,
            id=f"{forward.id}/{forward.attempt}",
            issuer=router.region,
        )
        self._remote = RemoteRequest(
            router.context.wire, peer, router.region, router.relay.clock(), request, active.prompt, self
        )
        self._remote.go()

    def began(self, status: int) -> None:
        """See relay.Client."""
        self._router.relay.began(self._active, self, status)

    def ended(self, status: int, usage: Usage | None) -> None:
        """See relay.Client."""
        self._router.relay.ended(self._active, self, status, usage)

    def refused(self, answer: Answer) -> None:
        """See relay.Client."""
        self._router.relay.refused(self._active, self, answer.outcome, answer.wait_ms)

    def broke(self, reason: Outcome) -> None:
        """See relay.Client."""
        self._router.relay.failed(self._active, self, reason)

    def so_far(self) -> bytes | None:
        """See relay.Attempt. No rival continues a stream."""
        return None

    def abort(self) -> None:
        """See relay.Attempt."""
        self._remote.leave()


class RouterProcess:
    """One baseline router in its region. `make` builds its machine; `peers` are those it may know, itself included."""

    def __init__(
        self,
        context: SimContext,
        region: str,
        probes: ProbeConfig,
        pools: Mapping[str, EnginePool],
        peers: Mapping[str, RouterProcess],
        make: Callable[[str, Random], Router],
    ) -> None:
        self.context, self.region = context, region
        self._probes, self._pools, self._peers, self._make = probes, pools, peers, make
        self.alive = False
        self.incarnation = 0

    @property
    def listens(self) -> bool:
        """See entry.EntryProcess."""
        return self.alive

    def rise(self) -> None:
        """Start a new process that knows nothing. Does nothing while it runs."""
        if self.alive:
            return
        self.alive = True
        self.incarnation += 1
        context, life = self.context, self.incarnation
        rng = context.rng(f"router {self.region} {life}")
        self.flow = self._make(self.region, rng)
        self.relay = SimulatedRelay(
            f"router {self.region}", self.flow, context.timeline, rng.uniform(10.0, 1e5), context.journal, self._attempt
        )
        self._probe(life)
        if self._probes.rtt_s is not None:
            self._ping(life, self._probes.rtt_s)

    def die(self) -> None:
        """The process dies; connected clients notice."""
        if self.alive:
            self.alive = False
            for active in self.relay.die():
                active.last_word().broke(outcome.DIED_BEFORE_START)

    def take(self, active: ActiveRequest) -> None:
        """A request arrives; a router of this kind reads its text. Who runs one keeps the law beside it: by the regions
        that may compute a request its engines are chosen."""
        prompt, request = active.prompt, active.request
        exact = prompt.answer_tokens if self._probes.oracle else None
        active.request = msgspec.structs.replace(
            request,
            tokens=Tokens(prompt.text),
            max_tokens=exact or request.max_tokens,
            lawful=self.context.law.verdict(request.tenant, request.model, narrow=request.narrow).lawful,
        )
        self.relay.start(active)

    def _attempt(self, active: ActiveRequest, forward: Forward) -> EngineCall | PeerCall:
        target = self.flow.state.targets[forward.target]
        if target.balancer:
            return PeerCall(self, active, forward, self._peers[target.region])
        return EngineCall(self, active, forward, self._pools[target.region])

    # -- probes

    def _lives(self, life: int) -> bool:
        return self.alive and life == self.incarnation

    def _probe(self, life: int) -> None:
        if not self._lives(life):
            return
        wire, state = self.context.wire, self.flow.state
        for region in state.by_region:
            wire.send(self.region, region, self._asked, region, life)
        for peer in state.peers:
            wire.send(self.region, peer, self._asked_peer, peer, life)
        self.context.timeline.after(self._probes.probe_s, self._probe, life)

    def _asked(self, region: str, life: int) -> None:
        seen = EnginesSeen(region, self._pools[region].samples())
        self.context.wire.send(region, self.region, self._receive, life, seen)

    def _asked_peer(self, peer: str, life: int) -> None:
        there = self._peers[peer]
        seen = BalancerSeen(peer, 0, False, up=False)
        if there.alive:
            state = there.flow.state
            free = any(state.pending(name) == 0 for name in state.serving(state.local))
            seen = BalancerSeen(peer, state.queued, free)
        self.context.wire.send(peer, self.region, self._receive, life, seen)

    def _ping(self, life: int, every_s: float) -> None:
        if not self._lives(life):
            return
        timeline = self.context.timeline
        for region in self._pools:
            rtt_ms = self.context.wire.rtt_ms(self.region, region)
            timeline.after(rtt_ms / 1e3, self._receive, life, WireMeasured(region, rtt_ms))
        timeline.after(every_s, self._ping, life, every_s)

    def _receive(self, life: int, event: EnginesSeen | BalancerSeen | WireMeasured) -> None:
        if self._lives(life):
            self.relay.react(event)
