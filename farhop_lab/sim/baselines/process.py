"""Baseline routers and the engines they send to, in virtual time: what travels between them and costs the wire.

A router asks engines of its own region and of others, or routers of others, over the world's wire; requests of its
clients come and their answers go over it too. Invariants: what was given up is never heard of again; bytes are counted
once per crossing, each way. Never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome
from farhop.balance.machine import Tokens
from farhop_lab.sim.baselines.words import BalancerSeen, EnginesSeen, Sample, WireMeasured
from farhop_lab.sim.carrier import Carrier, Journey
from farhop_lab.sim.measures import use_of
from farhop_lab.sim.region import ENGINES_EVERY, SAMPLE_S
from farhop_lab.sim.wire import answer_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from farhop.balance.machine import Answer, Forward, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.baselines.router import Router
    from farhop_lab.sim.carrier import Client
    from farhop_lab.sim.engines import Engine
    from farhop_lab.sim.scenery import Site
    from farhop_lab.sim.stage import Stage


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """How often a router looks: at engines and at other routers, and at the wire. Seconds; `rtt_s` None: never. An
    `oracle` is told how long each answer will be, as its `max_tokens`."""

    probe_s: float = 1.0
    rtt_s: float | None = None
    oracle: bool = False


class EngineRoom:
    """A region's engines, which live and die together; no balancer of ours stands before them."""

    def __init__(self, stage: Stage, name: str, site: Site) -> None:
        self.stage, self.name, self.site = stage, name, site
        self.alive = False
        self.calls: dict[str, EngineCall] = {}
        self._samples = 0
        self._seen: list[tuple[int, int, float]] = []
        stage.measures.use[name] = []
        self.rise()
        stage.every(SAMPLE_S, self._measure)

    def rise(self) -> None:
        """Idle engines with empty caches. Harmless while they live."""
        if not self.alive:
            self.alive = True
            self.engines: dict[str, Engine] = {
                f"{self.name}/{r.name}": self.site.engine(self.stage.timeline) for r in self.site.named()
            }

    def die(self) -> None:
        """They are gone; whoever is connected notices."""
        self.alive = False
        calls, self.calls = list(self.calls.values()), {}
        for call in calls:
            call.cut()

    def samples(self) -> dict[str, Sample] | None:
        """What their metrics say now; None if nobody is at home."""
        if not self.alive:
            return None
        return {name: Sample(*engine.metrics()) for name, engine in self.engines.items()}

    def _measure(self) -> None:
        share = len(self.calls) / self.site.slots
        if self._samples % ENGINES_EVERY == 0:
            self._seen = [engine.metrics() for engine in self.engines.values()]
        self._samples += 1
        engines = self._seen if self.alive else []
        self.stage.measures.use[self.name].append(use_of(self.stage.timeline.now, share, share, engines))


class EngineCall:
    """One attempt at an engine, wherever it is."""

    __slots__ = (
        "_far",
        "_journey",
        "_over",
        "_router",
        "_target",
        "answer_tokens",
        "id",
        "max_tokens",
        "number",
        "prompt",
    )

    def __init__(self, router: RouterProcess, journey: Journey, forward: Forward, far: EngineRoom) -> None:
        self._router, self._journey, self._target, self._far = router, journey, forward.target, far
        self.number, self.id = forward.attempt, f"{forward.id}#{forward.attempt}"
        self.prompt, self.answer_tokens = journey.prompt.text, journey.prompt.answer_tokens
        self.max_tokens = journey.request.max_tokens
        self._over = False
        wire = router.stage.wire
        wire.carry(router.region, far.name, journey.request.body_bytes)
        if wire.rtt_ms(router.region, far.name) > 0.0:
            wire.send(router.region, far.name, self._arrive)
        else:
            self._arrive()  # at once: who comes at the same moment must find it there

    def _arrive(self) -> None:
        far, carrier = self._far, self._router.carrier
        if not far.alive:
            self._back(carrier.failed, outcome.CONNECT_FAILED)
        elif far.engines[self._target].submit(self):
            far.calls[self.id] = self
        else:
            self._back(carrier.began, 503)
            self._back(carrier.ended, 503, None)

    def _back(self, act: Callable[..., None], *args: object) -> None:
        self._router.stage.wire.send(self._far.name, self._router.region, act, self._journey, self, *args)

    def first(self) -> None:
        """See engines.Job."""
        if not self._over:
            self._back(self._router.carrier.began, 200)

    def done(self, usage: Usage) -> None:
        """See engines.Job."""
        if not self._over:
            self._over = True
            del self._far.calls[self.id]
            self._router.stage.wire.carry(self._far.name, self._router.region, answer_bytes(usage))
            self._back(self._router.carrier.ended, 200, usage)

    def broke(self, _text: str) -> None:
        """See engines.Job."""
        if not self._over:
            del self._far.calls[self.id]
            self.cut()

    def cut(self) -> None:
        """The engine died."""
        self._over = True
        self._back(self._router.carrier.failed, outcome.DIED_BEFORE_START)

    def abort(self) -> None:
        """See carrier.Attempt."""
        self._router.stage.wire.send(self._router.region, self._far.name, self._stop)

    def _stop(self) -> None:
        self._over = True
        if self._far.calls.pop(self.id, None) is not None:
            self._far.engines[self._target].abort(self.id)


class Leg:
    """A request on its way from a place to a router, and its answers back to `client`, who stands there.

    Its deadline travels as what is left of it. Within one region it takes no time, as a client is beside its region's
    global balancer in the shipped world.
    """

    __slots__ = ("_client", "_here", "_over", "_router", "request", "there")

    def __init__(self, router: RouterProcess, here: str, journey: Journey, request: Request, client: Client) -> None:
        self._router, self._here, self._client = router, here, client
        self._over = False
        self.request = request
        self.there = Journey(request, journey.prompt, self)

    def go(self) -> None:
        """Set out."""
        self._router.stage.wire.carry(self._here, self._router.region, self.request.body_bytes)
        self._send(self._here, self._router.region, self._arrive)

    def _send(self, a: str, b: str, act: Callable[..., object], *args: object) -> None:
        if a == b:
            act(*args)
        else:
            self._router.stage.wire.send(a, b, act, *args)

    def _arrive(self) -> None:
        router, request = self._router, self.request
        if router.alive:
            self.there.request = msgspec.structs.replace(request, deadline=router.carrier.clock() + request.deadline)
            router.take(self.there)
        else:
            self.broke(outcome.CONNECT_FAILED)

    def leave(self) -> None:
        """The client there is gone, and hears no more."""
        self._over = True
        self._send(self._here, self._router.region, self._left)

    def _left(self) -> None:
        if self._router.alive:
            self._router.carrier.client_left(self.request.id)

    def _back(self, act: Callable[..., None], *args: object) -> None:
        self._send(self._router.region, self._here, self._hear, act, *args)

    def _hear(self, act: Callable[..., None], *args: object) -> None:
        if not self._over:
            act(*args)

    # -- there: the router's client

    def began(self, status: int) -> None:
        """See carrier.Client."""
        self._back(self._client.began, status)

    def ended(self, status: int, usage: Usage | None) -> None:
        """See carrier.Client."""
        self._router.stage.wire.carry(self._router.region, self._here, answer_bytes(usage))
        self._back(self._client.ended, status, usage)

    def refused(self, answer: Answer) -> None:
        """See carrier.Client."""
        self._back(self._client.refused, answer)

    def broke(self, reason: Outcome) -> None:
        """See carrier.Client."""
        self._back(self._client.broke, reason)


class PeerCall:
    """One attempt at another region's router, which knows it as forwarded."""

    __slots__ = ("_journey", "_leg", "_router", "number")

    def __init__(self, router: RouterProcess, journey: Journey, forward: Forward, peer: RouterProcess) -> None:
        self._router, self._journey, self.number = router, journey, forward.attempt
        request = msgspec.structs.replace(
            journey.request,
            id=f"{forward.id}/{forward.attempt}",
            issuer=router.region,
            deadline=max(0.0, journey.request.deadline - router.carrier.clock()),
        )
        self._leg = Leg(peer, router.region, journey, request, self)
        self._leg.go()

    def began(self, status: int) -> None:
        """See carrier.Client."""
        self._router.carrier.began(self._journey, self, status)

    def ended(self, status: int, usage: Usage | None) -> None:
        """See carrier.Client."""
        self._router.carrier.ended(self._journey, self, status, usage)

    def refused(self, answer: Answer) -> None:
        """See carrier.Client."""
        self._router.carrier.refused(self._journey, self, answer.outcome, answer.wait_ms)

    def broke(self, reason: Outcome) -> None:
        """See carrier.Client."""
        self._router.carrier.failed(self._journey, self, reason)

    def abort(self) -> None:
        """See carrier.Attempt."""
        self._leg.leave()


class RouterProcess:
    """One baseline router in its region. `make` builds its machine; `peers` are those it may know, itself included."""

    def __init__(
        self,
        stage: Stage,
        region: str,
        watch: Watch,
        rooms: Mapping[str, EngineRoom],
        peers: Mapping[str, RouterProcess],
        make: Callable[[str, Random], Router],
    ) -> None:
        self.stage, self.region = stage, region
        self._watch, self._rooms, self._peers, self._make = watch, rooms, peers, make
        self.alive = False
        self.incarnation = 0

    def rise(self) -> None:
        """A new process that knows nothing. Harmless while it lives."""
        if self.alive:
            return
        self.alive = True
        self.incarnation += 1
        stage, life = self.stage, self.incarnation
        rng = stage.rng(f"router {self.region} {life}")
        self.flow = self._make(self.region, rng)
        self.carrier = Carrier(
            f"router {self.region}", self.flow, stage.timeline, rng.uniform(10.0, 1e5), stage.journal, self._attempt
        )
        self._probe(life)
        if self._watch.rtt_s is not None:
            self._ping(life, self._watch.rtt_s)

    def die(self) -> None:
        """The process is gone; whoever is connected notices."""
        if self.alive:
            self.alive = False
            for journey in self.carrier.die():
                journey.client.broke(outcome.DIED_BEFORE_START)

    def take(self, journey: Journey) -> None:
        """A request is here; a router of this kind reads its text."""
        prompt, request = journey.prompt, journey.request
        exact = prompt.answer_tokens if self._watch.oracle else None
        journey.request = msgspec.structs.replace(
            request, tokens=Tokens(prompt.text), max_tokens=exact or request.max_tokens
        )
        self.carrier.start(journey)

    def _attempt(self, journey: Journey, forward: Forward) -> EngineCall | PeerCall:
        target = self.flow.board.targets[forward.target]
        if target.balancer:
            return PeerCall(self, journey, forward, self._peers[target.region])
        return EngineCall(self, journey, forward, self._rooms[target.region])

    # -- looking

    def _lives(self, life: int) -> bool:
        return self.alive and life == self.incarnation

    def _probe(self, life: int) -> None:
        if not self._lives(life):
            return
        wire, board = self.stage.wire, self.flow.board
        for region in board.by_region:
            wire.send(self.region, region, self._asked, region, life)
        for peer in board.peers:
            wire.send(self.region, peer, self._asked_peer, peer, life)
        self.stage.timeline.after(self._watch.probe_s, self._probe, life)

    def _asked(self, region: str, life: int) -> None:
        heard = EnginesSeen(region, self._rooms[region].samples())
        self.stage.wire.send(region, self.region, self._hear, life, heard)

    def _asked_peer(self, peer: str, life: int) -> None:
        there = self._peers[peer]
        heard = BalancerSeen(peer, 0, False, up=False)
        if there.alive:
            board = there.flow.board
            free = any(board.pending(name) == 0 for name in board.serving(board.local))
            heard = BalancerSeen(peer, board.line, free)
        self.stage.wire.send(peer, self.region, self._hear, life, heard)

    def _ping(self, life: int, every_s: float) -> None:
        if not self._lives(life):
            return
        timeline = self.stage.timeline
        for region in self._rooms:
            rtt_ms = self.stage.wire.rtt_ms(self.region, region)
            timeline.after(rtt_ms / 1e3, self._hear, life, WireMeasured(region, rtt_ms))
        timeline.after(every_s, self._ping, life, every_s)

    def _hear(self, life: int, event: EnginesSeen | BalancerSeen | WireMeasured) -> None:
        if self._lives(life):
            self.carrier.react(event)
