"""The shell of a run: carries out the machine's commands, renews injections, and keeps what was seen.

Invariants: however it ends, what was injected is restored or ends by its own lease, and the lock is given back; the
machine alone decides. Never asserts a figure: `measures` does, from what is kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

from farhop.store.contract import StoreError
from farhop_drill import checks, machine, measures
from farhop_drill.injectors import RENEW_S, InjectError
from farhop_drill.machine import Check, Finish, Inject, Observe, Phase, Restore, Run, StopAsked
from farhop_drill.outcome import Done, Outcome, judge, worst
from farhop_drill.records import LEASE_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from farhop_drill.checks import Facts, Finding
    from farhop_drill.document import Drill
    from farhop_drill.injectors import Injector
    from farhop_drill.machine import Command, Event
    from farhop_drill.measures import Canary
    from farhop_drill.oracle import Oracle
    from farhop_drill.probe import Probe
    from farhop_drill.records import DrillLock, Records
    from farhop_drill.status_poller import StatusPoller

TICK_S = 0.1
LIVE_EVERY_S = 0.5
LOOKS_MAX = 20_000
PATIENCE_S = 3.0  # for canaries that are under way at the end
STORE_S = 2.0
STOP_POLL_S = 0.5  # so that an order to stop is followed within a second


class DrilledFleet(NamedTuple):
    """What a run needs to observe a fleet, act on it and judge it. `facts` are for the safety checks; `probe` makes the
    probe, given the receiver of canaries; `egress` are regions' prices in USD per GB."""

    injector: Injector
    facts: Callable[[], Awaitable[Facts]]
    poller: StatusPoller
    probe: Callable[[Callable[[Canary], None]], Probe]
    oracle: Oracle
    egress: Mapping[str, float]


class Runner:
    """Runs one drill, once. `clock` is monotonic seconds."""

    def __init__(
        self,
        drill: Drill,
        held: DrillLock,
        records: Records,
        fleet: DrilledFleet,
        outcome: Outcome,
        clock: Callable[[], float],
        progress: Callable[[str], None],
    ) -> None:
        self.run_ = Run(drill)
        self.outcome = outcome
        self.live: Mapping[str, float] = {}  # the measures of the last moment
        self._drill, self._held, self._records = drill, held, records
        self._injector, self._facts, self._poller, probe, self._oracle, self._egress = fleet
        self._clock, self._progress = clock, progress
        self._probe = probe(self._received)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._began = self._live_at = clock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._injecting: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._locked = self._observing = self._finished = False
        self._violations = 0
        self._read_at = 0.0
        self._without_etcd = any(one.do == "stop-etcd" for step in drill.steps for one in step.inject)

    def stop(self, why: str) -> None:
        """End it early; safe to call from a signal's handler."""
        self._events.put_nowait(StopAsked(why))

    async def run(self) -> Outcome:
        """From the checks to the verdict."""
        self._act(machine.Started())
        try:
            while not self._finished:
                try:
                    async with asyncio.timeout(TICK_S):
                        event: Event = await self._events.get()
                except TimeoutError:
                    event = self._ticked()
                self._act(event)
        finally:
            await self._end()
        self._decide_verdict()
        return self.outcome

    def _act(self, event: Event) -> None:
        before = self.run_.phase, self.run_.step
        commands = self.run_.handle(event, self._clock())
        if (self.run_.phase, self.run_.step) != before:
            self._report_phase()
        for command in commands:
            self._carry_out(command)

    def _report_phase(self) -> None:
        run, phase = self.run_, self.run_.phase
        if phase is Phase.INJECTING:
            step = self._drill.steps[run.step]
            self._progress(f"step {run.step + 1} of {len(self._drill.steps)}: {step.name}")
        elif phase is Phase.STEADY:
            self._progress(f"the steady state is measured for {self._drill.before_s:g} s")
        elif phase is Phase.RESTORING:
            self._progress("restoring" + (f": {run.ended}" if run.ended else ""))
        elif phase is Phase.AFTER:
            self._progress("restored; until all is as it was")

    def _carry_out(self, command: Command) -> None:
        match command:
            case Check():
                self._spawn(self._check())
            case Observe():
                self._observing = True
                self._probe.begin(self._began)
                self._spawn(self._renew())
                self._spawn(self._follow_stops())
            case Inject(step):
                self._injecting = self._spawn(self._inject(step))
            case Restore():
                self._spawn(self._restore())
            case Finish():
                self._finished = True

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop(f"the runner failed: {error}")

    def _now_s(self) -> float:
        return self._clock() - self._began

    # -- what is commanded

    async def _check(self) -> None:
        at_s, findings = self._now_s(), list[checks.Finding]()
        try:
            facts = await self._facts()
            findings = checks.look(self._drill, facts)
            blocked = checks.blocked(findings)
            if not blocked:
                self._locked = await self._records.lock(self._held)
                blocked = () if self._locked else ("alone: another drill began just now",)
        except StoreError as error:
            blocked = (f"etcd: {error}",)
        self.outcome.findings = _sorted(findings)
        self._note("safety checks", "check", at_s, not blocked, "; ".join(blocked))
        self._events.put_nowait(machine.Checked(blocked))

    async def _inject(self, number: int) -> None:
        step, at_s = self._drill.steps[number], self._now_s()
        marks = self.outcome.marks
        marks.t0_s = at_s if marks.t0_s is None else marks.t0_s
        marks.steps.append((step.name, at_s))
        try:
            await self._injector.inject(step)
        except InjectError as error:
            self._note(step.name, "inject", at_s, False, str(error))
            self._events.put_nowait(machine.InjectFailed(number, str(error)))
        else:
            marks.law_epoch = getattr(self._injector, "law_epoch", 0)
            self._note(step.name, "inject", at_s, True, "")
            self._events.put_nowait(machine.Injected(number))

    async def _restore(self) -> None:
        at_s, marks = self._now_s(), self.outcome.marks
        marks.restore_s = at_s if marks.restore_s is None else marks.restore_s
        for task in (self._injecting, self._renewing):  # neither may write after what is restored
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        try:
            await self._injector.restore()
        except InjectError as error:
            self._note("restore", "restore", at_s, False, str(error))
            await asyncio.sleep(TICK_S)
            self._events.put_nowait(machine.RestoreFailed(str(error)))
        else:
            marks.restored_s = self._now_s()
            self._note("restore", "restore", at_s, True, "")
            self._events.put_nowait(machine.Restored())

    def _note(self, what: str, kind: str, at_s: float, ok: bool, output: str) -> None:
        done = Done(what=what, kind=kind, at_s=at_s, took_s=self._now_s() - at_s, ok=ok, output=output)
        self.outcome.done.append(done)

    # -- meanwhile

    def _received(self, canary: Canary) -> None:
        self.outcome.canaries.append(canary)
        self._violations += self.violates(canary)

    def violates(self, canary: Canary) -> bool:
        """Whether it was served where the law forbids it."""
        return bool(canary.region) and canary.region not in self._oracle.lawful(canary.tenant, canary.model)

    def _ticked(self) -> Event:
        if not self._observing or self._clock() < self._live_at + LIVE_EVERY_S:
            return machine.Ticked()
        self._live_at, outcome = self._clock(), self.outcome
        look = self._poller.look(self._began)
        if look is not None and len(outcome.looks) < LOOKS_MAX:
            outcome.looks.append(look)
        now_s = self._now_s()
        self.live = live = measures.live(self._drill, outcome.canaries, outcome.looks, now_s, self._violations)
        back = self.run_.phase is Phase.AFTER and measures.is_back(
            self._drill, outcome.canaries, outcome.looks, outcome.marks, now_s
        )
        return machine.Ticked(live, back)

    async def _renew(self) -> None:
        """Renew the injections and the lock for as long as this process runs."""
        while True:
            await asyncio.sleep(RENEW_S)
            if self.run_.phase in (Phase.INJECTING, Phase.SOAKING):
                self._renewing = self._spawn(self._renew_injections())
                await asyncio.wait({self._renewing})
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(STORE_S):
                    if not await self._records.renew(self._held):
                        self.stop("somebody else took the lock")

    async def _renew_injections(self) -> None:
        try:
            await self._injector.renew()
        except InjectError as error:
            if not self._without_etcd:
                self.stop(f"what is injected could not be renewed: {error}")

    async def _follow_stops(self) -> None:
        """An operator's order to stop. A run that cannot receive one ends."""
        self._read_at = self._clock()
        while True:
            try:
                async with asyncio.timeout(STORE_S):
                    why = await self._records.stop_reason(self._held.run)
                self._read_at = self._clock()
                if why:
                    self.stop(why)
            except (StoreError, TimeoutError):
                if not self._without_etcd and self._clock() - self._read_at > LEASE_S:
                    self.stop("etcd cannot be read, so that it could not be stopped")
            await asyncio.sleep(STOP_POLL_S)

    # -- the end

    async def _end(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._observing:
            await self._probe.stop(PATIENCE_S)
        if not self._finished:  # by an internal error, or cancelled
            with contextlib.suppress(InjectError):
                await self._injector.restore()
        if self._locked:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(STORE_S):
                    await self._records.release(self._held)
        self.outcome.marks.ended_s = self._now_s()

    def _decide_verdict(self) -> None:
        outcome, run = self.outcome, self.run_
        outcome.skipped = self._probe.skipped
        outcome.measures = measures.measured(
            self._drill, outcome.canaries, outcome.looks, outcome.marks, self.violates, self._egress
        )
        outcome.judged = judge(self._drill, outcome.measures, run.verdict, run.ended)
        outcome.verdict, outcome.why = worst(outcome.judged, run.verdict), run.ended


def _sorted(findings: list[Finding]) -> list[Finding]:
    """Those that do not hold first."""
    return sorted(findings, key=lambda one: one.held)
