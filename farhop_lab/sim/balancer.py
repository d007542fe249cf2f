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
        "_balancer", "_began", "_dead_since", "_journey", "_over", "_region", "_sent_at", "_watch", "forward", "id",
        "inquiry", "number", "request",
    )  # fmt: skip

    def __init__(self, balancer: BalancerProcess, journey: Journey, forward: Forward, region: RegionProcess) -> None:
        self._balancer, self._journey, self.forward, self._region = balancer, journey, forward, region
        self.number = forward.attempt
        self.id = f"{forward.id}/{forward.attempt}"
        self._began = self._over = False
        self.inquiry = Inquiry()
        self._sent_at = balancer.stage.timeline.now
        self._dead_since: float | None = None  # its connection: nothing of it comes through any more
        balancer.hops.setdefault(region.name, {})[self] = None
        self.request = self._signed(journey.request, balancer.carrier.clock())
        stage = balancer.stage
        streams, watching = journey.request.stream, stage.watching
        patience_s = watching.first_byte_s if streams else watching.whole_answer_s
        late = outcome.FIRST_BYTE_TIMEOUT if streams else outcome.WHOLE_ANSWER_TIMEOUT
        self._watch: Call = stage.timeline.after(patience_s, self._give_up, late)
        stage.wire.carry(balancer.region, region.name, self.request.body_bytes)
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
        )

    def _arrive(self) -> None:
        region, request = self._region, self.request
        if self._dead_since is not None:
            return
        if region.alive:
            request = msgspec.structs.replace(request, deadline=region.carrier.clock() + request.deadline)
        if not region.serve(Journey(request, self._journey.prompt, self)):
            self._back(self._lost, outcome.CONNECT_FAILED)

    def _back(self, act: Callable[..., None], *args: object) -> None:
        self._balancer.stage.wire.send(self._region.name, self._balancer.region, self._come, act, args)

    def _come(self, act: Callable[..., None], args: tuple[object, ...]) -> None:
        if self._dead_since is None:
            act(*args)

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
            return self._sent_at
        if self._dead_since is not None:
            return self._dead_since
        frozen_at = stage.wire.frozen_since(self._region.name, self._balancer.region)
        return stage.timeline.now if frozen_at is None else frozen_at

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

    def sever(self) -> None:
        """The path forgot its connection: nothing gets through either way, and nobody is told."""
        if self._dead_since is None:
            self._dead_since = self._balancer.stage.timeline.now

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

    def abort(self) -> None:
        """See carrier.Attempt."""
        if self._end() and self._dead_since is None:
            self._balancer.stage.wire.send(self._balancer.region, self._region.name, self._region.leave, self.id)


class BalancerProcess:
    """See the module's head. `regions` are all there are, by name, living or not. `prefixes` is what they tell of their
    caches; None for a machine that is not the shipped one, which is told of none."""

    def __init__(
        self,
        stage: Stage,
        region: str,
        instance: str,
        regions: Mapping[str, RegionProcess],
        make: Callable[[str, Random], Flow],
    ) -> None:
        self.stage, self.region, self.name = stage, region, f"{region}/{instance}"
        self._regions = regions
        self._rng = stage.rng(f"balancer {self.name}")
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
            stage.timeline.after(CONFIRM_S, self._tidy, self.prefixes)
        self.hearing = Hearing(
            stage, region, self.name, regions, self.carrier.react, self.carrier.clock, self._rng, self.prefixes,
            self._hops,
        )  # fmt: skip

    def _hops(self, region: str) -> list[Hop]:
        return list(self.hops.get(region, ()))

    def _adopt(self, law: Law) -> None:
        before = self.flow.law if isinstance(self.flow, GlobalFlow) else law
        self.carrier.react(LawChanged(law))
        if self.prefixes is not None:
            self.prefixes.adopt(before, law, self.region)

    def _tidy(self, prefixes: Prefixes) -> None:
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
