"""The state machine of a run: pending > checking > steady > (injecting > soaking)* > restoring > after > done.

`handle(event, now) -> commands`, now in monotonic seconds; it never awaits. Invariants: for every `Inject` there is a
`Restore` before the run is done, and nothing is injected afterwards; never two injections at once; a verdict is PASS
only if every step ran to its end, and everything was restored; an abort returns `Restore` at once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop_drill.document import Drill

RESTORE_TRIES = 5


class Phase(StrEnum):
    """The phase of a run."""

    PENDING = "pending"
    CHECKING = "checking"
    STEADY = "steady"
    INJECTING = "injecting"
    SOAKING = "soaking"
    RESTORING = "restoring"
    AFTER = "after"
    DONE = "done"


class DrillVerdict(StrEnum):
    """Of a hypothesis, and of a run: the worst of its hypotheses."""

    PASS = "PASS"  # noqa: S105
    FAIL = "FAIL"
    ABORTED = "ABORTED"
    NOT_RUN = "NOT_RUN"


# -- events: past tense


class Started(msgspec.Struct, frozen=True):
    """The run was asked for."""


class Checked(msgspec.Struct, frozen=True):
    """The safety checks are done; `blocked` says why it must not run, () if it may."""

    blocked: tuple[str, ...] = ()


class Injected(msgspec.Struct, frozen=True):
    """A step is in place."""

    step: int


class InjectFailed(msgspec.Struct, frozen=True):
    """A step could not be injected, or only in part."""

    step: int
    why: str


class Ticked(msgspec.Struct, frozen=True):
    """Time went on. `live`: the measures of the last moment, as far as there are any; `back`: all is as it was."""

    live: Mapping[str, float] = {}
    back: bool = False


class StopAsked(msgspec.Struct, frozen=True):
    """An operator, the emergency stop, a lost lock or a signal ends it."""

    why: str


class Restored(msgspec.Struct, frozen=True):
    """Nothing that was injected is in place any more."""


class RestoreFailed(msgspec.Struct, frozen=True):
    """It could not be restored; it ends by its own lease."""

    why: str


Event: TypeAlias = Started | Checked | Injected | InjectFailed | Ticked | StopAsked | Restored | RestoreFailed


# -- commands: imperative


class Check(msgspec.Struct, frozen=True):
    """Check the fleet and report `Checked`."""


class Observe(msgspec.Struct, frozen=True):
    """Begin to send canaries and to look at balancers."""


class Inject(msgspec.Struct, frozen=True):
    """Inject a step, and report `Injected` or `InjectFailed`."""

    step: int


class Restore(msgspec.Struct, frozen=True):
    """Restore all that was injected, the last first, and report `Restored` or `RestoreFailed`."""


class Finish(msgspec.Struct, frozen=True):
    """Judge and report. `verdict` None: by the hypotheses."""

    verdict: DrillVerdict | None
    why: str


Command: TypeAlias = Check | Observe | Inject | Restore | Finish


class Run:
    """One run of one drill. `ended` says why it ended early, "" if it did not."""

    def __init__(self, drill: Drill) -> None:
        self.drill = drill
        self.phase = Phase.PENDING
        self.step = -1
        self.steps_done = 0
        self.ended = ""
        self.blocked: tuple[str, ...] = ()
        self.verdict: DrillVerdict | None = None  # set when it is not for the hypotheses to say
        self._touched = False  # whether anything was asked to be injected
        self._tries = 0
        self._since: dict[int, float] = {}  # since when an abort condition holds, by its place
        self._due = 0.0
        self._bound = float("inf")

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; returns the commands, in order."""
        if self.phase is Phase.DONE:
            return []
        match event:
            case Started():
                return self._started(now)
            case Checked(blocked):
                return self._checked(blocked, now)
            case Injected(step):
                return self._injected(step, now)
            case InjectFailed(step, why):
                return self._abort(f"step {step + 1} could not be injected: {why}") if step == self.step else []
            case StopAsked(why):
                return self._stop(why)
            case Restored():
                return self._restored(now)
            case RestoreFailed(why):
                return self._not_restored(why)
            case Ticked(live, back):
                return self._ticked(live, back, now)

    # -- forwards

    def _started(self, now: float) -> list[Command]:
        if self.phase is not Phase.PENDING:
            return []
        self.phase, self._bound = Phase.CHECKING, now + self.drill.duration_max_s
        return [Check()]

    def _checked(self, blocked: tuple[str, ...], now: float) -> list[Command]:
        if self.phase is not Phase.CHECKING:
            return []
        if blocked:
            self.blocked = blocked
            return self._finish(DrillVerdict.NOT_RUN, "; ".join(blocked))
        self.phase, self._due = Phase.STEADY, now + self.drill.before_s
        return [Observe()]

    def _next(self) -> list[Command]:
        if self.step + 1 == len(self.drill.steps):
            return self._restore()
        self.step += 1
        self.phase, self._touched = Phase.INJECTING, True
        return [Inject(self.step)]

    def _injected(self, step: int, now: float) -> list[Command]:
        if self.phase is Phase.INJECTING and step == self.step:
            self.phase, self._due = Phase.SOAKING, now + self.drill.steps[step].soak_s
        return []

    def _ticked(self, live: Mapping[str, float], back: bool, now: float) -> list[Command]:
        if self.phase in (Phase.STEADY, Phase.INJECTING, Phase.SOAKING):
            if now >= self._bound:
                return self._abort(f"it took longer than {self.drill.duration_max_s:g} s")
            if why := self._broken(live, now):
                return self._abort(why)
        if self.phase is Phase.STEADY and now >= self._due:
            return self._next()
        if self.phase is Phase.SOAKING and now >= self._due:
            self.steps_done += 1
            return self._next()
        if self.phase is Phase.AFTER and (back or now >= self._due):
            return self._finish(self.verdict, self.ended)
        return []

    def _broken(self, live: Mapping[str, float], now: float) -> str:
        for at, one in enumerate(self.drill.aborts):
            value = live.get(one.measure)
            if value is None or not value > one.above:
                self._since.pop(at, None)
                continue
            if now - self._since.setdefault(at, now) >= one.for_s:
                held = f" for {one.for_s:g} s" if one.for_s else ""
                return f"{one.measure} is {value:.4g}, above {one.above:g}{held}"
        return ""

    # -- backwards

    def _stop(self, why: str) -> list[Command]:
        if self.phase in (Phase.PENDING, Phase.CHECKING):
            return self._finish(DrillVerdict.ABORTED, why)
        return self._abort(why, DrillVerdict.ABORTED)

    def _abort(self, why: str, untouched: DrillVerdict = DrillVerdict.NOT_RUN) -> list[Command]:
        """`untouched`: the verdict if nothing was injected yet. A steady state that does not hold is not a drill that
        failed."""
        if self.phase in (Phase.RESTORING, Phase.AFTER):
            if self.verdict is None and self.phase is Phase.AFTER:
                self.verdict, self.ended = DrillVerdict.ABORTED, why
                return self._finish(self.verdict, why)
            if self.verdict is None:
                self.verdict, self.ended = DrillVerdict.ABORTED, why
            return []
        self.verdict, self.ended = DrillVerdict.ABORTED if self._touched else untouched, why
        return self._restore() if self._touched else self._finish(self.verdict, why)

    def _restore(self) -> list[Command]:
        self.phase = Phase.RESTORING
        return [Restore()]

    def _restored(self, now: float) -> list[Command]:
        if self.phase is not Phase.RESTORING:
            return []
        if self.verdict is not None:
            return self._finish(self.verdict, self.ended)
        self.phase, self._due = Phase.AFTER, now + self.drill.after_s
        return []

    def _not_restored(self, why: str) -> list[Command]:
        if self.phase is not Phase.RESTORING:
            return []
        self._tries += 1
        if self._tries < RESTORE_TRIES:
            return [Restore()]
        ended = f"{self.ended}; " if self.ended else ""
        ended += f"what was injected could not be taken back, and ends by its own lease: {why}"
        return self._finish(DrillVerdict.FAIL if self.verdict is None else self.verdict, ended)

    def _finish(self, verdict: DrillVerdict | None, why: str) -> list[Command]:
        self.phase, self.verdict, self.ended = Phase.DONE, verdict, why
        return [Finish(verdict, why)]
