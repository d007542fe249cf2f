"""A baseline router: its state, its queue (first come, first served), and rules for which targets are eligible and
which is picked.

The machine `handle(event, now) -> commands` that a SimulatedRelay drives, as it drives the shipped ones. Invariants:
the head of the queue goes first, and while it cannot, none does, but those that may go elsewhere where it may not by
law; one attempt per request, never a second (none of the
published routers retries); a request is concluded at its deadline if it has not begun. `RouterState` counts every sent
request once, as queued until its first byte and as running from then on, and forgets it once; only the router writes
it, rules read. Tokens are the emulated engine's, 4 bytes of text.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import xxhash

from farhop.balance import machine, outcome
from farhop.balance.machine import Address, Answer, Event, Forward, Hold, Request, SetTimer
from farhop_lab.engine.core.text import token_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farhop.balance.machine import Command, Usage
    from farhop.balance.outcome import Outcome

QUEUE_MAX = 100_000
_ANYWHERE = Address("sim", 1)
KEY_BYTES = 100  # without a session, requests whose first characters are equal belong together


class Target(msgspec.Struct, frozen=True):
    """Where a router may send: an engine (`tokyo/gpu-0`), or with `balancer` the router of another region (`tokyo`)."""

    name: str
    region: str
    prefill_ms_per_token: float = 0.0
    balancer: bool = False


class Sample(msgspec.Struct, frozen=True):
    """An engine's metrics: requests waiting and running, share of its KV cache in use (0..1)."""

    waiting: int
    running: int
    usage: float


class EnginesSeen(Event, frozen=True):
    """A region's engines answered a probe, by name those that are ready; None if all are dead."""

    region: str
    samples: dict[str, Sample] | None


class BalancerSeen(Event, frozen=True):
    """Another region's router answered a probe: its queue's length, whether a replica is available; not `up`: gone."""

    target: str
    queued: int
    available: bool
    up: bool = True


class WireMeasured(Event, frozen=True):
    """A ping to a region came back."""

    region: str
    rtt_ms: float


def text_of(request: Request) -> bytes:
    """The prompt: a router of this kind reads the body itself."""
    return request.tokens.ids if request.tokens is not None else b""


def key_of(request: Request) -> int:
    """What a hash router hashes: the session if the client names one, otherwise the prompt's first characters."""
    return request.session or xxhash.xxh64_intdigest(text_of(request)[:KEY_BYTES])


def forwarded(request: Request) -> bool:
    """Whether another router sent it: it is never forwarded again."""
    return bool(request.issuer)


class RouterState:
    """See the module's head. `rtt_ms` by region is as configured, until a ping has measured it."""

    def __init__(self, here: str, targets: Sequence[Target], rtt_ms: dict[str, float]) -> None:
        self.here, self.rtt_ms = here, rtt_ms
        self.targets = {target.name: target for target in targets}
        self.engines = [target.name for target in targets if not target.balancer]
        self.local = [name for name in self.engines if self.targets[name].region == here]
        self.peers = [target.name for target in targets if target.balancer]
        self.by_region: dict[str, list[str]] = {}
        for name in self.engines:
            self.by_region.setdefault(self.targets[name].region, []).append(name)
        self.in_flight: Counter[str] = Counter(dict.fromkeys(self.targets, 0))
        self.queued_tokens: Counter[str] = Counter(dict.fromkeys(self.targets, 0))
        self.running_tokens: Counter[str] = Counter(dict.fromkeys(self.targets, 0))
        self.seen: dict[str, tuple[Sample, float]] = {}
        self.balancers: dict[str, BalancerSeen] = {}
        self.gone: set[str] = set()
        self.queued = 0
        self._sent: dict[str, tuple[str, int, bool]] = {}
        self._within: dict[frozenset[str], RouterState] = {}

    def within(self, lawful: frozenset[str] | None) -> RouterState:
        """What there is for a request that only these regions may compute (None: all): all else is the same state."""
        if lawful is None or lawful >= self.by_region.keys() | {self.targets[name].region for name in self.peers}:
            return self
        state = self._within.get(lawful)
        if state is None:
            state = self._within[lawful] = copy(self)
            state.engines, state.local, state.peers = (
                [name for name in names if self.targets[name].region in lawful]
                for names in (self.engines, self.local, self.peers)
            )
            state.by_region = {region: names for region, names in self.by_region.items() if region in lawful}
        state.queued = self.queued
        return state

    # -- probes

    def on_engines(self, event: EnginesSeen, now: float) -> None:
        """Take in a probe's answer."""
        ready = event.samples or {}
        self.gone.update(self.by_region[event.region])
        self.gone.difference_update(ready)
        self.seen.update((name, (sample, now)) for name, sample in ready.items())

    def on_balancer(self, event: BalancerSeen) -> None:
        """Take in a probe's answer."""
        self.balancers[event.target] = event
        if event.up:
            self.gone.discard(event.target)
        else:
            self.gone.add(event.target)

    def serving(self, names: Sequence[str]) -> list[str]:
        """Those of them that are not known to be down, in order."""
        return [name for name in names if name not in self.gone] if self.gone else list(names)

    def pending(self, name: str) -> int:
        """Requests that waited at an engine at its last probe; 0 before that."""
        known = self.seen.get(name)
        return known[0].waiting if known is not None else 0

    # -- sent requests

    def sent(self, request: Request, target: str) -> None:
        """A request was sent there."""
        tokens = token_count(text_of(request))
        self._sent[request.id] = (target, tokens, False)
        self.in_flight[target] += 1
        self.queued_tokens[target] += tokens

    def began(self, request_id: str) -> None:
        """Its first byte arrived. Does nothing for one that is over."""
        known = self._sent.get(request_id)
        if known is not None and not known[2]:
            target, tokens, _ = known
            self._sent[request_id] = (target, tokens, True)
            self.queued_tokens[target] -= tokens
            self.running_tokens[target] += tokens

    def over(self, request_id: str) -> str | None:
        """It ended, one way or another. Returns where it was, if it was anywhere."""
        known = self._sent.pop(request_id, None)
        if known is None:
            return None
        target, tokens, begun = known
        self.in_flight[target] -= 1
        (self.running_tokens if begun else self.queued_tokens)[target] -= tokens
        return target

    def begun(self, request_id: str) -> bool:
        """Whether its first byte has arrived."""
        return request_id in self._sent and self._sent[request_id][2]


class Eligibility(Protocol):
    """Where a request may be sent now."""

    def candidates(self, request: Request, state: RouterState, now: float) -> Sequence[str]:
        """Names of targets, in the state's order; none: the request stays queued."""


class Picker(Protocol):
    """Picks one of the eligible targets."""

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """One of `among`, which is never empty. Reads only."""

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """It was sent there: update the picker's memory."""


class Ended(msgspec.Struct, frozen=True):
    """The end of a request that was sent. `ttft_s`: seconds from its arrival here to its first byte, `after_s` from
    there to its end; both None, as `usage` may be, if it was not answered well.
    """

    id: str
    target: str
    ttft_s: float | None = None
    after_s: float | None = None
    usage: Usage | None = None


@runtime_checkable
class Learner(Protocol):
    """A picker that learns from the end of requests."""

    def began(self, request_id: str) -> None:
        """The first byte of a sent request arrived."""

    def ended(self, what: Ended) -> None:
        """A sent request is over, one way or another; called once for each."""


class Router:
    """See the module's head. `pause_s`: between two requests that leave the queue. `smoothing` is the weight
    of a new ping in a round-trip time (1: the last one counts alone).
    """

    def __init__(
        self,
        state: RouterState,
        eligibility: Eligibility,
        picker: Picker,
        *,
        pause_s: float = 0.0,
        smoothing: float = 1.0,
    ) -> None:
        self.state, self.eligibility, self.picker = state, eligibility, picker
        self._pause_s, self._smoothing = pause_s, smoothing
        self._next_at = 0.0
        self._queues: dict[frozenset[str] | None, OrderedDict[str, Request]] = {}  # by where they may go
        self._live: dict[str, Request] = {}
        self._learner = picker if isinstance(picker, Learner) else None
        self._moments: dict[str, tuple[float, float]] = {}  # when it arrived, and began
        self._handlers: dict[type[Event], Callable[[Any, float], list[Command]]] = {
            machine.RequestArrived: self._arrived,
            machine.AttemptBegan: self._began,
            machine.AttemptEnded: self._ended,
            machine.AttemptFailed: self._failed,
            machine.AttemptRefused: self._failed,
            machine.ClientLeft: self._left,
            machine.TimerFired: self._fired,
            EnginesSeen: self._engines_seen,
            BalancerSeen: self._balancer_seen,
            WireMeasured: self._measured,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """See farhop.balance.machine.Flow."""
        return self._handlers[type(event)](event, now)

    # -- requests

    def _arrived(self, event: machine.RequestArrived, now: float) -> list[Command]:
        request = event.request
        if self._queued >= QUEUE_MAX:
            return [Answer(request.id, outcome.QUEUE_FULL, "the queue is full")]
        self._live[request.id] = self._queues.setdefault(request.lawful, OrderedDict())[request.id] = request
        self._moments[request.id] = (now, now)
        commands: list[Command] = [SetTimer(request.id, request.deadline)]
        commands += self._drain(now)
        if self._waits(request):
            commands.append(Hold(request.id))
        return commands

    def _drain(self, now: float) -> list[Command]:
        """Send from the head as many as may go."""
        commands: list[Command] = []
        state = self.state
        waiting = {lawful: queue for lawful, queue in self._queues.items() if queue}
        while waiting:
            state.queued = self._queued
            heads = {lawful: next(iter(queue.values())) for lawful, queue in waiting.items()}
            lawful, head = min(heads.items(), key=self._arrival) if len(heads) > 1 else next(iter(heads.items()))
            if now < self._next_at:
                commands.append(SetTimer(head.id, min(head.deadline, self._next_at)))
                break
            allowed = state.within(lawful)
            names = self.eligibility.candidates(head, allowed, now)
            if not names:
                if allowed is state:
                    break
                del waiting[lawful]
                continue
            target = self.picker.choose(head, names, state, now)
            del waiting[lawful][head.id]
            if not waiting[lawful]:
                del waiting[lawful]
            self._next_at = now + self._pause_s
            state.sent(head, target)
            self.picker.sent(head, target, state, now)
            commands += [SetTimer(head.id, head.deadline), Forward(head.id, 1, target, _ANYWHERE, None, head.lawful)]
        state.queued = self._queued
        return commands

    @property
    def _queued(self) -> int:
        return sum(map(len, self._queues.values()))

    def _arrival(self, head: tuple[frozenset[str] | None, Request]) -> float:
        return self._moments[head[1].id][0]

    def _waits(self, request: Request) -> bool:
        return request.id in self._queues.get(request.lawful, ())

    def _conclude(self, request_id: str, now: float = 0.0, *, well: bool = False, usage: Usage | None = None) -> None:
        request = self._live.pop(request_id, None)
        if request is not None:
            self._queues[request.lawful].pop(request_id, None)
        moments = self._moments.pop(request_id, None)
        target = self.state.over(request_id)
        if self._learner is None or target is None:
            return
        if well and moments is not None:
            arrived, began = moments
            self._learner.ended(Ended(request_id, target, began - arrived, now - began, usage))
        else:
            self._learner.ended(Ended(request_id, target))

    def _answer(self, request_id: str, reason: Outcome, now: float) -> list[Command]:
        self._conclude(request_id)
        return [Answer(request_id, reason, reason.reason), *self._drain(now)]

    def _began(self, event: machine.AttemptBegan, now: float) -> list[Command]:
        self.state.began(event.id)
        if event.id in self._moments:
            self._moments[event.id] = (self._moments[event.id][0], now)
            if self._learner is not None:
                self._learner.began(event.id)
        return self._drain(now)

    def _ended(self, event: machine.AttemptEnded, now: float) -> list[Command]:
        self._conclude(event.id, now, well=event.status < 400, usage=event.usage)
        return self._drain(now)

    def _failed(self, event: machine.AttemptFailed | machine.AttemptRefused, now: float) -> list[Command]:
        return self._answer(event.id, event.outcome, now)

    def _left(self, event: machine.ClientLeft, now: float) -> list[Command]:
        self._conclude(event.id)
        return self._drain(now)

    def _fired(self, event: machine.TimerFired, now: float) -> list[Command]:
        request = self._live.get(event.id)
        if request is None or self.state.begun(event.id):
            return []
        if now >= request.deadline:
            late = outcome.QUEUE_TIMEOUT if self._waits(request) else outcome.DEADLINE
            return self._answer(event.id, late, now)
        return [SetTimer(event.id, request.deadline), *self._drain(now)]

    # -- probes

    def _engines_seen(self, event: EnginesSeen, now: float) -> list[Command]:
        self.state.on_engines(event, now)
        return self._drain(now)

    def _balancer_seen(self, event: BalancerSeen, now: float) -> list[Command]:
        self.state.on_balancer(event)
        return self._drain(now)

    def _measured(self, event: WireMeasured, now: float) -> list[Command]:
        known, share = self.state.rtt_ms, self._smoothing
        known[event.region] = (1.0 - share) * known[event.region] + share * event.rtt_ms
        return self._drain(now)
