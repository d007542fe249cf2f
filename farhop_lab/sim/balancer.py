"""One global balancer in virtual time: its shipped machine, what it hears of the regions, and its hops to them.

Does what global_lb's tier does, in its words: a deadline travels as what is left of it. Never decides, and never
compares its clock with a region's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome
from farhop.balance.inquiry import QUIET_S, Inquiry, stall_s
from farhop.balance.machine import LawChanged
from farhop_lab.sim.carrier import Carrier, Journey
from farhop_lab.sim.hearing import Hearing
from farhop_lab.sim.statutes import Statutes
from farhop_lab.sim.wire import answer_bytes
from global_lb.flow import GlobalFlow
from global_lb.prefixes import CONFIRM_S, Prefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from farhop.balance.machine import Answer, Flow, Forward, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.region import RegionProcess
    from farhop_lab.sim.stage import Stage
    from farhop_lab.sim.timeline import Call
    from topology.law import Law


class Hop:
    """One attempt at a region: the request goes there, its answer comes back, each over the wire."""

    __slots__ = (
        "_balancer", "_began", "_journey", "_opened_at", "_over", "_region", "_watch", "forward", "id", "inquiry",
        "number", "request",
    )  # fmt: skip

    def __init__(self, balancer: BalancerProcess, journey: Journey, forward: Forward, region: RegionProcess) -> None:
        self._balancer, self._journey, self.forward, self._region = balancer, journey, forward, region
        self.number = forward.attempt
        self.id = f"{forward.id}/{forward.attempt}"
        self._began = self._over = False
        self.inquiry = Inquiry()
        balancer.hops.setdefault(region.name, {})[self] = None
        self.request = self._signed(journey.request, balancer.carrier.clock())
        stage = balancer.stage
        self._opened_at = stage.timeline.now
        streams, watching = journey.request.stream, stage.watching
        patience_s = watching.first_byte_s if streams else watching.whole_answer_s
        late = outcome.FIRST_BYTE_TIMEOUT if streams else outcome.WHOLE_ANSWER_TIMEOUT
        self._watch: Call = stage.timeline.after(patience_s, self._give_up, late)
        stage.wire.carry(balancer.region, region.name, self.request.body_bytes)
        if region.name in balancer.cut_off:
            stage.timeline.after(0.0, self._lost, outcome.CONNECT_FAILED)
        else:
            stage.wire.send(balancer.region, region.name, self._arrive)

    def _signed(self, request: Request, now: float) -> Request:
        """The request as its hop token will say it; the deadline still as what is left of it."""
        balancer, forward = self._balancer, self.forward
        return msgspec.structs.replace(
            request,
            id=self.id,
            deadline=max(0.0, request.deadline - now),
            entry_region=balancer.region,
            issuer=balancer.name,
            lawful=forward.lawful if forward.lawful is not None else frozenset(),
            promised_ttft_ms=forward.promised_ttft_ms,
            waited_s=forward.waited_s,
        )

    def _arrive(self) -> None:
        region, request = self._region, self.request
        if region.alive:
            request = msgspec.structs.replace(request, deadline=region.carrier.clock() + request.deadline)
        if not region.serve(Journey(request, self._journey.prompt, self)):
            self._back(self._lost, outcome.CONNECT_FAILED)

    def _back(self, act: Callable[..., None], *args: object) -> None:
        self._balancer.stage.wire.send_on(self._opened_at, self._region.name, self._balancer.region, act, *args)

    # -- there: the region's client

    def began(self, status: int) -> None:
        """See carrier.Client."""
        self._back(self._hear_began, status)

    def ended(self, status: int, usage: Usage | None) -> None:
        """See carrier.Client."""
        self._balancer.stage.wire.carry(self._region.name, self._balancer.region, answer_bytes(usage))
        self._back(self._hear_ended, status, usage)

    def refused(self, answer: Answer) -> None:
        """See carrier.Client."""
        self._balancer.stage.measures.refused(self._region.name, answer.outcome)
        self._back(self._hear_refused, answer.outcome, answer.wait_ms)

    def broke(self, outcome: Outcome) -> None:
        """See carrier.Client."""
        self._back(self._lost, outcome)

    # -- here

    def _hear_began(self, status: int) -> None:
        if self._over:
            return
        self._began = True
        self._watch.cancel()
        stage = self._balancer.stage
        self._watch = stage.timeline.after(stage.watching.between_bytes_s, self._quiet)
        self._balancer.carrier.began(self._journey, self, status)

    def _hear_ended(self, status: int, usage: Usage | None) -> None:
        if self._end():
            self._balancer.carrier.ended(self._journey, self, status, usage)

    def _hear_refused(self, reason: Outcome, wait_ms: float | None) -> None:
        if self._end():
            self._balancer.carrier.refused(self._journey, self, reason, wait_ms)

    def _lost(self, reason: Outcome) -> None:
        """The connection broke; a stream breaks without a word of the region's reasons."""
        if self._end():
            known = reason is outcome.CONNECT_FAILED or reason is outcome.FIRST_BYTE_TIMEOUT
            died = outcome.DIED_MID_STREAM if self._began else outcome.DIED_BEFORE_START
            self._balancer.carrier.failed(self._journey, self, reason if known else died)

    def _quiet(self) -> None:
        """Chunks are not simulated: they come all the time, unless the link is frozen."""
        stage = self._balancer.stage
        due = self._heard_at + self._silent_s()
        if due <= stage.timeline.now:
            self._give_up(outcome.STALLED)
        else:
            # The way may break meanwhile: doubt() has it looked at again.
            self._watch = stage.timeline.at(due, self._quiet)

    @property
    def _heard_at(self) -> float:
        stage = self._balancer.stage
        if not self._began:
            return self._opened_at
        silent_at = stage.wire.silent_since(self._opened_at, self._region.name, self._balancer.region)
        return stage.timeline.now if silent_at is None else silent_at

    def _silent_s(self) -> float:
        """For how long it may be silent, as relay.attempt.AttemptRun.check has it."""
        most_s = self._balancer.stage.watching.between_bytes_s
        return stall_s(0.0, most_s) if self._balancer.hearing.is_dark(self._region.name) else most_s

    def doubt(self) -> None:
        """The channel to its region broke."""
        self.inquiry.doubted = True
        if self._began:
            self._watch.cancel()
            self._watch = self._balancer.stage.timeline.after(0.0, self._quiet)

    @property
    def quiet(self) -> bool:
        """See relay.attempt.AttemptRun.is_quiet."""
        return self._balancer.stage.timeline.now - self._heard_at >= QUIET_S

    def told(self, asked_at: float, quiet_s: float | None, way_s: float) -> None:
        """See relay.attempt.AttemptRun. `asked_at` in the timeline's seconds."""
        now, heard_at = self._balancer.stage.timeline.now, self._heard_at
        if self._over:
            return
        if self._began and heard_at > asked_at:
            self.inquiry.heard()
        elif self.inquiry.lost(now - heard_at, quiet_s, way_s, now, began=self._began):
            self._give_up(outcome.STALLED if self._began else outcome.LOST)

    def _give_up(self, reason: Outcome) -> None:
        self.abort()
        self._balancer.carrier.failed(self._journey, self, reason)

    def _end(self) -> bool:
        """Whether this is news."""
        if self._over:
            return False
        self._over = True
        self._watch.cancel()
        self._balancer.hops[self._region.name].pop(self, None)
        return True

    def cut(self) -> None:
        """The connection is broken, and both ends notice at once."""
        self._lost(outcome.DIED_BEFORE_START)
        self._region.leave(self.id)

    def abort(self) -> None:
        """See carrier.Attempt."""
        if self._end():
            here, there = self._balancer.region, self._region
            self._balancer.stage.wire.send_on(self._opened_at, here, there.name, there.leave, self.id)

    @property
    def region(self) -> str:
        """Where it went."""
        return self._region.name


class BalancerProcess:
    """See the module's head. `regions` are all there are, by name, living or not. `prefixes` is what they tell of their
    caches; None for a machine that is not the shipped one, which is told of none. One that died is replaced by another
    object of its name, as a process is, with the next `incarnation`."""

    def __init__(
        self,
        stage: Stage,
        region: str,
        instance: str,
        regions: Mapping[str, RegionProcess],
        make: Callable[[str, Random], Flow],
        incarnation: int = 0,
    ) -> None:
        self.stage, self.region, self.instance, self.name = stage, region, instance, f"{region}/{instance}"
        self.alive, self.incarnation, self._make = True, incarnation, make
        self._regions = regions
        self.cut_off: set[str] = set()  # regions that no connection reaches now
        self._rng = stage.rng(f"balancer {self.name}" + (f" {incarnation}" if incarnation else ""))
        self.flow = make(region, self._rng)
        self.statutes = Statutes(region, stage.law, self._adopt)
        self.carrier = Carrier(
            f"global {self.name}", self.flow, stage.timeline, self._rng.uniform(10.0, 1e5), stage.journal, self._attempt
        )
        self.hops: dict[str, dict[Hop, None]] = {}  # under way, by region
        self.prefixes: Prefixes | None = None
        if isinstance(self.flow, GlobalFlow):
            self.prefixes = Prefixes(self.flow.trie, self._disbelieved, self.flow.law.epoch)
            self.flow.sent.append(self.prefixes.sent)
            self.flow.forgotten.append(self.prefixes.begin_anew)
            stage.timeline.after(CONFIRM_S, self._tidy, self.prefixes)
        self.hearing = Hearing(
            stage, region, self.name, regions, self.carrier.react, self.carrier.clock, self._rng, self.prefixes,
            self._hops,
        )  # fmt: skip

    def _hops(self, region: str) -> list[Hop]:
        return list(self.hops.get(region, ()))

    def cut(self, region: str) -> None:
        """All connections to a region break, and none comes about until `cut_off` lacks it."""
        self.cut_off.add(region)
        for attempt in self.carrier.attempts():
            if isinstance(attempt, Hop) and attempt.region == region:
                attempt.cut()

    def die(self) -> None:
        """The process is gone; whoever is connected notices, and the regions lose whom it had sent them. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        for journey in self.carrier.die():
            journey.client.broke(outcome.DIED_BEFORE_START)
        self.hearing.close()

    def successor(self) -> BalancerProcess:
        """The same, as a new process that has heard of nothing."""
        return BalancerProcess(self.stage, self.region, self.instance, self._regions, self._make, self.incarnation + 1)

    def _adopt(self, law: Law) -> None:
        self.carrier.react(LawChanged(law))
        if self.prefixes is not None:
            self.prefixes.adopt(law.epoch)

    def _tidy(self, prefixes: Prefixes) -> None:
        if not self.alive:
            return
        for _ in prefixes.tidy(self.carrier.clock()):
            pass  # it takes no time
        self.stage.timeline.after(CONFIRM_S, self._tidy, prefixes)

    def _disbelieved(self, reason: str) -> None:
        if reason != "prefixes_gap":
            self.stage.journal.violated(f"{self.name} was told of prefixes what cannot be: {reason}")

    def _attempt(self, journey: Journey, forward: Forward) -> Hop:
        request, lawful = journey.request, forward.lawful
        self.stage.witness("sent", forward.target, self.name, request)
        verdict = self.statutes.law.verdict(request.tenant, request.model, narrow=request.narrow, key=request.key)
        if forward.target not in verdict.lawful or (lawful is not None and not lawful <= verdict.lawful):
            self.stage.journal.violated(f"{request.id} was sent to {forward.target} against the law")
        return Hop(self, journey, forward, self._regions[forward.target])
