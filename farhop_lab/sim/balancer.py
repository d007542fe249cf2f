"""One global balancer in virtual time: its shipped machine, its links to the regions, and its attempts at them.

Does what the process around `global_lb` does: a deadline is sent as the time that is left. Never decides, and never
compares its clock with a region's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome
from farhop.balance.health.inquiry import QUIET_S, Inquiry, stall_s
from farhop.balance.machine import LawChanged
from farhop_lab.sim.law_client import LawClient
from farhop_lab.sim.links import RegionLinks
from farhop_lab.sim.relay import ActiveRequest, SimulatedRelay
from farhop_lab.sim.wire import answer_bytes
from global_lb.links.prefix_streams import CONFIRM_S, Prefixes
from global_lb.routing.flow import GlobalFlow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from farhop.balance.machine import Answer, Flow, Forward, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.context import SimContext
    from farhop_lab.sim.region import RegionProcess
    from farhop_lab.sim.timeline import Call
    from topology.law import Law


class Hop:
    """One attempt at a region: the request and its answer travel over the wire."""

    __slots__ = (
        "_active",
        "_balancer",
        "_began",
        "_opened_at",
        "_over",
        "_region",
        "_there",
        "_watch",
        "forward",
        "id",
        "inquiry",
        "number",
        "request",
    )  # fmt: skip

    def __init__(
        self, balancer: BalancerProcess, active: ActiveRequest, forward: Forward, region: RegionProcess
    ) -> None:
        self._balancer, self._active, self.forward, self._region = balancer, active, forward, region
        self.number = forward.attempt
        self.id = f"{forward.id}/{forward.attempt}"
        self._began = self._over = False
        self.inquiry = Inquiry()
        balancer.hops.setdefault(region.name, {})[self] = None
        self.request = self._signed(active.request, balancer.relay.clock())
        self._there = ActiveRequest(self.request, active.prompt, self)  # as the region sees it
        self._there.generated = active.generated
        context = balancer.context
        self._opened_at = context.timeline.now
        streams, watching = active.request.stream, context.watching
        patience_s = watching.first_byte_s if streams else watching.whole_answer_s
        late = outcome.FIRST_BYTE_TIMEOUT if streams else outcome.WHOLE_ANSWER_TIMEOUT
        self._watch: Call = context.timeline.after(patience_s, self._give_up, late)
        context.wire.carry(balancer.region, region.name, self.request.body_bytes)
        if region.name in balancer.cut_off:
            context.timeline.after(0.0, self._lost, outcome.CONNECT_FAILED)
        else:
            context.wire.send(balancer.region, region.name, self._arrive)

    def _signed(self, request: Request, now: float) -> Request:
        """The request as its hop token will describe it; the deadline still as the time that is left."""
        balancer, forward = self._balancer, self.forward
        return msgspec.structs.replace(
            request,
            id=self.id,
            deadline=max(0.0, request.deadline - now),
            first_token_by=None if forward.first_token_by is None else max(0.0, forward.first_token_by - now),
            entry_region=balancer.region,
            issuer=balancer.name,
            lawful=forward.lawful if forward.lawful is not None else frozenset(),
            promised_ttft_ms=forward.promised_ttft_ms,
            waited_s=forward.waited_s,
            continues="ids" if self._active.generated else None,
        )

    def _arrive(self) -> None:
        region, request = self._region, self.request
        if region.alive:
            here, within_s = region.relay.clock(), request.first_token_by
            self._there.request = msgspec.structs.replace(
                request,
                deadline=here + request.deadline,
                first_token_by=None if within_s is None else here + within_s,
            )
        if not region.serve(self._there):
            self._back(self._lost, outcome.CONNECT_FAILED)

    def _back(self, act: Callable[..., None], *args: object) -> None:
        self._balancer.context.wire.send_on(self._opened_at, self._region.name, self._balancer.region, act, *args)

    # -- there: the region's client

    def began(self, status: int) -> None:
        """See relay.Client."""
        self._back(self._on_began, status)

    def ended(self, status: int, usage: Usage | None) -> None:
        """See relay.Client."""
        self._balancer.context.wire.carry(self._region.name, self._balancer.region, answer_bytes(usage))
        self._back(self._on_ended, status, usage)

    def refused(self, answer: Answer) -> None:
        """See relay.Client."""
        self._balancer.context.measures.refused(self._region.name, answer.outcome)
        self._back(self._on_refused, answer.outcome, answer.wait_ms)

    def broke(self, outcome: Outcome) -> None:
        """See relay.Client."""
        self._back(self._lost, outcome)

    # -- here

    def _on_began(self, status: int) -> None:
        if self._over:
            return
        self._began = True
        self._watch.cancel()
        context = self._balancer.context
        self._watch = context.timeline.after(context.watching.between_bytes_s, self._quiet)
        self._balancer.relay.began(self._active, self, status)

    def _on_ended(self, status: int, usage: Usage | None) -> None:
        if self._end():
            self._balancer.relay.ended(self._active, self, status, usage)

    def _on_refused(self, reason: Outcome, wait_ms: float | None) -> None:
        if self._end():
            self._balancer.relay.refused(self._active, self, reason, wait_ms)

    def _lost(self, reason: Outcome) -> None:
        """The connection broke, or the region ended the stream; nothing is known but that the region lives."""
        if self._end():
            known = reason is outcome.CONNECT_FAILED or reason is outcome.FIRST_BYTE_TIMEOUT
            died = outcome.DIED_MID_STREAM if self._began else outcome.DIED_BEFORE_START
            lives = self._began and not known and reason is not outcome.DIED_BEFORE_START
            self._balancer.relay.failed(self._active, self, reason if known else died, target_lives=lives)

    def _quiet(self) -> None:
        """Chunks are not simulated: they come all the time unless the link is frozen."""
        context = self._balancer.context
        due = self._last_activity_at + self._silent_s()
        if due <= context.timeline.now:
            self._give_up(outcome.STALLED)
        else:
            # The path may break meanwhile: path_broke() then checks again.
            self._watch = context.timeline.at(due, self._quiet)

    @property
    def _last_activity_at(self) -> float:
        context = self._balancer.context
        if not self._began:
            return self._opened_at
        silent_at = context.wire.silent_since(self._opened_at, self._region.name, self._balancer.region)
        return context.timeline.now if silent_at is None else silent_at

    def _silent_s(self) -> float:
        """Seconds for which the attempt may be silent, as in relay.attempt.AttemptRun.check."""
        most_s = self._balancer.context.watching.between_bytes_s
        return stall_s(0.0, most_s) if self._balancer.links.path_is_broken(self._region.name) else most_s

    def path_broke(self) -> None:
        """The channel to its region broke."""
        self.inquiry.path_broke = True
        if self._began:
            self._watch.cancel()
            self._watch = self._balancer.context.timeline.after(0.0, self._quiet)

    @property
    def quiet(self) -> bool:
        """See relay.attempt.AttemptRun.is_quiet."""
        if self._began and not self._balancer.context.wire.has_broken:
            return False  # every ping asks this of all attempts under way
        return self._balancer.context.timeline.now - self._last_activity_at >= QUIET_S

    def on_inquiry_answer(self, asked_at: float, quiet_s: float | None, rtt_s: float) -> None:
        """See relay.attempt.AttemptRun. `asked_at` in the timeline's seconds."""
        now, last_activity_at = self._balancer.context.timeline.now, self._last_activity_at
        if self._over:
            return
        if self._began and last_activity_at > asked_at:
            self.inquiry.clear()
        elif self.inquiry.lost(now - last_activity_at, quiet_s, rtt_s, now, began=self._began):
            self._give_up(outcome.STALLED if self._began else outcome.LOST)

    def _give_up(self, reason: Outcome) -> None:
        self.abort()
        self._balancer.relay.failed(self._active, self, reason)

    def _end(self) -> bool:
        """End the attempt; False if it had ended before."""
        if self._over:
            return False
        self._over = True
        self._watch.cancel()
        self._balancer.hops[self._region.name].pop(self, None)
        return True

    def cut(self) -> None:
        """The connection breaks, and both ends notice at once."""
        self._lost(outcome.DIED_BEFORE_START)
        self._region.leave(self.id)

    def so_far(self) -> bytes | None:
        """See relay.Attempt. A region reports the token ids of its output, and chunks take no time here."""
        generated = self._there.so_far() if self._began and self._active.request.stream else None
        return generated[len(self._active.generated) :] or None if generated is not None else None

    def abort(self) -> None:
        """See relay.Attempt."""
        if self._end():
            here, there = self._balancer.region, self._region
            self._balancer.context.wire.send_on(self._opened_at, here, there.name, there.leave, self.id)

    @property
    def region(self) -> str:
        """The region that it was sent to."""
        return self._region.name


class BalancerProcess:
    """See the module's head. `regions` are all regions by name, alive or not. `prefixes` are the prefix streams' data;
    None for a machine other than the shipped one, which gets none. A process that died is replaced by another object of
    the same name with the next `incarnation`; one that was there from the start accepts clients at once.
    """

    def __init__(
        self,
        context: SimContext,
        region: str,
        instance: str,
        regions: Mapping[str, RegionProcess],
        make: Callable[[str, Random], Flow],
        incarnation: int = 0,
    ) -> None:
        self.context, self.region, self.instance, self.name = context, region, instance, f"{region}/{instance}"
        self.alive, self.incarnation, self._make = True, incarnation, make
        self._regions = regions
        self._begun_at, self._settled = context.timeline.now, incarnation == 0
        self.cut_off: set[str] = set()  # regions without a connection now
        self._rng = context.rng(f"balancer {self.name}" + (f" {incarnation}" if incarnation else ""))
        self.flow = make(region, self._rng)
        self.law_client = LawClient(region, context.law, self._adopt)
        self.relay = SimulatedRelay(
            f"global {self.name}",
            self.flow,
            context.timeline,
            self._rng.uniform(10.0, 1e5),
            context.journal,
            self._attempt,
        )
        self.hops: dict[str, dict[Hop, None]] = {}  # attempts under way, by region
        self.prefixes: Prefixes | None = None
        if isinstance(self.flow, GlobalFlow):
            self.prefixes = Prefixes(self.flow.regions.trie, self._disbelieved, self.flow.law.epoch)
            self.flow.regions.sent.append(self.prefixes.sent)
            self.flow.forgotten.append(self.prefixes.begin_anew)
            context.timeline.after(CONFIRM_S, self._tidy, self.prefixes)
        self.links = RegionLinks(
            context, region, self.name, regions, self.relay.react, self.relay.clock, self._rng, self.prefixes,
            self._hops,
        )  # fmt: skip

    @property
    def listens(self) -> bool:
        """Whether it accepts clients, as the shipped process does (global_lb.app.main): not before it knows serving
        regions and their cached prefixes, or has waited long enough for them.
        """
        if not self._settled:
            watching, served = self.context.watching, any(self.links.channel_up.values())
            patience_s = watching.settle_s + watching.warm_s if served else watching.settle_s
            waited_s = self.context.timeline.now - self._begun_at
            self._settled = waited_s >= patience_s or (served and self.links.caught_up)
        return self.alive and self._settled

    def _hops(self, region: str) -> list[Hop]:
        return list(self.hops.get(region, ()))

    def cut(self, region: str) -> None:
        """All connections to a region break, and none can be opened while it is in `cut_off`."""
        self.cut_off.add(region)
        for attempt in self.relay.attempts():
            if isinstance(attempt, Hop) and attempt.region == region:
                attempt.cut()

    def take(self, active: ActiveRequest) -> None:
        """A request has arrived."""
        self.relay.start(active)

    def die(self) -> None:
        """The process dies; connected clients notice, and regions lose its requests. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        for active in self.relay.die():
            active.last_word().broke(outcome.DIED_BEFORE_START)
        self.links.close()

    def successor(self) -> BalancerProcess:
        """The same balancer as a new process that knows nothing yet."""
        return BalancerProcess(
            self.context, self.region, self.instance, self._regions, self._make, self.incarnation + 1
        )

    def _adopt(self, law: Law) -> None:
        self.relay.react(LawChanged(law))
        if self.prefixes is not None:
            self.prefixes.adopt(law.epoch)

    def _tidy(self, prefixes: Prefixes) -> None:
        if not self.alive:
            return
        for _ in prefixes.tidy(self.relay.clock()):
            pass  # applying it takes no time
        self.context.timeline.after(CONFIRM_S, self._tidy, prefixes)

    def _disbelieved(self, reason: str) -> None:
        if reason != "prefixes_gap":
            self.context.journal.violated(f"{self.name} got an impossible prefix message: {reason}")

    def _attempt(self, active: ActiveRequest, forward: Forward) -> Hop:
        request, lawful = active.request, forward.lawful
        self.context.observer("sent", forward.target, self.name, request)
        verdict = self.law_client.law.verdict(request.tenant, request.model, narrow=request.narrow, key=request.key)
        if forward.target not in verdict.lawful or (lawful is not None and not lawful <= verdict.lawful):
            self.context.journal.violated(f"{request.id} was sent to {forward.target} against the law")
        return Hop(self, active, forward, self._regions[forward.target])
