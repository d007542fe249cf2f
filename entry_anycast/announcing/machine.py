"""The announcer's state machine: `handle(event, now) -> commands`. withdrawn -> announced -> draining -> withdrawn.

The shell probes the entry, follows etcd and talks to the speaker; this decides. It never awaits and opens nothing.
Invariants: a dead entry is not announced, unless the policy keeps the last healthy site; while it is kept, only the end
of this process withdraws it; a drain is announced first, and withdraws after a wait; a stop waits until the withdrawal
is acknowledged and has settled; a speaker that does not acknowledge in time, or announces what it should have
withdrawn, is killed, whatever the budget: its session ends, and with it the route.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Literal, TypeAlias

from entry_anycast.announcing.budget import Budget, BudgetConfig


class Phase(StrEnum):
    """The wanted state of the prefixes: not announced, announced, or announced with the mark of a drain."""

    WITHDRAWN = "withdrawn"
    ANNOUNCED = "announced"
    DRAINING = "draining"


class Fitness(StrEnum):
    """The result of a probe. LEAVING: the entry answers that it is not ready. DEAD: it does not answer."""

    FIT = "fit"
    LEAVING = "leaving"
    DEAD = "dead"


LastSite: TypeAlias = Literal["withdraw", "keep", "keep_unknown"]


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """Times in seconds; `rise` and `fall` count probes in a row.

    `last_site` is for the time while no other entry that announces these prefixes is healthy. "withdraw": withdraw as
    any other; "keep": keep announcing if that is known; "keep_unknown": also while etcd is out of contact.
    """

    rise: int = 3
    fall: int = 3
    drain_s: float = 30.0
    settle_s: float = 2.0
    ack_s: float = 1.0
    restart_s: float = 1.0
    restart_max_s: float = 60.0
    last_site: LastSite = "keep"
    budget: BudgetConfig = field(default_factory=BudgetConfig)


# -- events


@dataclass(frozen=True, slots=True)
class Probed:
    """The entry was probed. `silent`: no answer within the probe's timeout, which counts as `fall` answers."""

    fitness: Fitness
    why: str = ""
    silent: bool = False


@dataclass(frozen=True, slots=True)
class DrainChanged:
    """An operator drains the entry, for the reason given; None: no longer."""

    why: str | None


@dataclass(frozen=True, slots=True)
class OthersChanged:
    """How many other entries announce these prefixes and are healthy; None: unknown."""

    healthy: int | None


@dataclass(frozen=True, slots=True)
class SpeakerStarted:
    """It takes updates from now on, and announces nothing yet."""


@dataclass(frozen=True, slots=True)
class SpeakerLost:
    """The speaker is gone, and its announcements with it."""

    why: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """It took the update of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Distrusted:
    """The speaker refused an update, or does not answer: its announcements are unknown."""

    why: str


@dataclass(frozen=True, slots=True)
class Observed:
    """The announcement that it reports; None: neither phase. `sessions`: the number of established sessions."""

    phase: Phase | None
    sessions: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """This process is to end."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of the last SetTimer has come."""


Event: TypeAlias = (
    Probed | DrainChanged | OthersChanged | SpeakerStarted | SpeakerLost | Acknowledged | Distrusted | Observed
    | StopAsked | TimerFired
)  # fmt: skip

# -- commands


@dataclass(frozen=True, slots=True)
class StartSpeaker:
    """Start it, or connect to it."""


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """Have the speaker announce all prefixes in this phase. SpeakerLost or Acknowledged follows, or nothing does."""

    number: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class KillSpeaker:
    """End it at once, so that its sessions fall. SpeakerLost follows."""

    why: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send TimerFired then; it replaces the one before."""

    at: float


@dataclass(frozen=True, slots=True)
class Exit:
    """Everything is withdrawn and settled: this process may end, and the entry may stop listening."""


Command: TypeAlias = StartSpeaker | SendUpdate | KillSpeaker | SetTimer | Exit


@dataclass(frozen=True, slots=True)
class Update:
    """The last update that was sent, when, and whether it is acknowledged."""

    number: int
    phase: Phase
    at: float
    acknowledged: bool = False


class Announcer:
    """The machine. Its state is public, for `status`; only `handle` writes it."""

    def __init__(self, config: MachineConfig) -> None:
        self.config, self.budget = config, Budget(config.budget)
        self.phase = Phase.WITHDRAWN
        self.fitness: Fitness | None = None  # None: not probed often enough yet
        self.fitness_why = "not probed yet"
        self.good = self.bad = 0
        self.drain: str | None = None
        self.others: int | None = None
        self.speaker: Literal["none", "starting", "up", "dying"] = "none"
        self.speaker_why = "not started yet"
        self.update: Update | None = None  # the last, to the speaker that runs
        self.observed: Observed | None = None
        self.differs_since: float | None = None
        self.stopping_since: float | None = None
        self.exited = False
        self.updates = dict.fromkeys(Phase, 0)
        self.kills = 0
        self._restart_at, self._restarts = -inf, 0
        self._drain_until = inf
        self._withdrawn_at = -inf
        self._numbers = 0

    @property
    def why_not(self) -> str:
        """Why the entry's prefixes should not be announced; "" where they should."""
        if self.stopping_since is not None:
            return "farhop anycast is stopping"
        if self.drain is not None:
            return f"drained: {self.drain}"
        if self.fitness is not Fitness.FIT:
            return f"the entry is not fit: {self.fitness_why}"
        return ""

    @property
    def last(self) -> bool:
        """Whether, by the policy, this counts as the last healthy site."""
        policy = self.config.last_site
        return policy != "withdraw" and (self.others == 0 or (self.others is None and policy == "keep_unknown"))

    @property
    def kept_as_last(self) -> bool:
        """Whether it stays announced only because it is the last."""
        return self.last and self.stopping_since is None and bool(self.why_not) and self.phase is not Phase.WITHDRAWN

    @property
    def healthy(self) -> bool:
        """Whether others may count on this site: announced, not drained, and not a single probe failed since."""
        return self.phase is Phase.ANNOUNCED and not self.why_not and self.bad == 0

    def held_s(self, now: float) -> float:
        """For how long the budget still keeps us from announcing."""
        return max(0.0, self.budget.announce_at(now, last=self.last) - now) if self.phase is Phase.WITHDRAWN else 0.0

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event. `now` in seconds of any monotonic clock."""
        commands: list[Command] = []
        match event:
            case Probed():
                self._probed(event)
            case DrainChanged():
                self.drain = event.why
            case OthersChanged():
                self.others = event.healthy
            case SpeakerStarted():
                if self.speaker == "starting":
                    self.speaker, self.speaker_why = "up", ""
            case SpeakerLost():
                self._lost(event.why, now)
            case Acknowledged():
                if self.update is not None and self.update.number == event.number:
                    self.update = Update(event.number, self.update.phase, self.update.at, acknowledged=True)
                    self._restarts = 0
            case Distrusted():
                commands += self._kill(event.why)
            case Observed():
                commands += self._observe(event, now)
            case StopAsked():
                self.stopping_since = now if self.stopping_since is None else self.stopping_since
            case TimerFired():
                pass
        wakes: list[float] = []
        commands += self._decide(now, wakes)
        commands += self._overdue(now, wakes)
        if wakes and not self.exited:
            commands.append(SetTimer(min(wakes)))
        return commands

    # -- on events

    def _probed(self, event: Probed) -> None:
        if event.fitness is Fitness.FIT:
            self.good, self.bad = self.good + 1, 0
            if self.good >= self.config.rise:
                self.fitness, self.fitness_why = Fitness.FIT, ""
            return
        self.good, self.bad = 0, self.bad + 1
        if event.silent or self.bad >= self.config.fall:
            self.fitness, self.fitness_why = event.fitness, event.why

    def _lost(self, why: str, now: float) -> None:
        if self.phase is not Phase.WITHDRAWN:
            self.budget.withdrawn(now)
            self._withdrawn_at = now
        self.phase, self.speaker, self.speaker_why = Phase.WITHDRAWN, "none", why
        self.update = self.observed = self.differs_since = None
        self._restart_at = now + min(self.config.restart_s * 2.0**self._restarts, self.config.restart_max_s)
        self._restarts = min(self._restarts + 1, 16)

    def _kill(self, why: str) -> list[Command]:
        if self.speaker not in ("starting", "up"):
            return []
        self.speaker, self.speaker_why = "dying", why
        self.kills += 1
        return [KillSpeaker(why)]

    def _observe(self, event: Observed, now: float) -> list[Command]:
        """Compare the announced state with the sent one, once the update had time to take effect."""
        self.observed, update = event, self.update
        sent = update.phase if update is not None else Phase.WITHDRAWN
        if event.phase is sent and (sent is Phase.WITHDRAWN or event.sessions):
            self.differs_since = None
            return []
        settled = update is None or (update.acknowledged and now >= update.at + self.config.ack_s)
        if self.differs_since is None:
            self.differs_since = now
        if settled and sent is Phase.WITHDRAWN and event.phase is not Phase.WITHDRAWN:
            return self._kill("it announces what was withdrawn")
        return []

    # -- decisions

    def _decide(self, now: float, wakes: list[float]) -> list[Command]:
        if self.exited:
            return []
        if self.speaker == "none" and self.stopping_since is None:
            if _early(self._restart_at, now, wakes):
                return []
            self.speaker = "starting"
            return [StartSpeaker()]
        if self.phase is Phase.WITHDRAWN:
            return self._withdrawn(now, wakes)
        if self.speaker != "up":
            return []
        leave = bool(self.why_not) and not self.kept_as_last
        dead = self.fitness is Fitness.DEAD
        if not leave:
            return self._stay(now, wakes)
        if dead or (self.phase is Phase.DRAINING and now >= self._drain_until):
            return self._withdraw(now, wakes)
        if self.phase is Phase.ANNOUNCED:
            self.phase, self._drain_until = Phase.DRAINING, now + self.config.drain_s
            wakes.append(self._drain_until)
            if now < self.budget.change_at(now):
                return []  # no update: it only waits. One more update could cost us the route for an hour.
            self.budget.changed(now)
            return [self._send(Phase.DRAINING, now)]
        wakes.append(self._drain_until)
        return []

    def _stay(self, now: float, wakes: list[float]) -> list[Command]:
        """It is announced and is to stay so; if it was draining, it comes back."""
        if self.phase is Phase.ANNOUNCED:
            return []
        if self.update is not None and self.update.phase is Phase.ANNOUNCED:
            self.phase = Phase.ANNOUNCED  # no update was sent for the drain
            return []
        if _early(self.budget.change_at(now), now, wakes):
            return []
        self.budget.changed(now)
        return self._announce(now)

    def _withdraw(self, now: float, wakes: list[float]) -> list[Command]:
        self.budget.withdrawn(now)
        self.phase, self._withdrawn_at = Phase.WITHDRAWN, now
        wakes.append(now + self.config.settle_s)
        return [self._send(Phase.WITHDRAWN, now)]

    def _withdrawn(self, now: float, wakes: list[float]) -> list[Command]:
        if self.stopping_since is not None:
            return self._leave(now, wakes)
        if self.why_not or self.speaker != "up":
            return []
        if _early(self.budget.announce_at(now, last=self.last), now, wakes):
            return []
        self.budget.announced(now)
        return self._announce(now)

    def _announce(self, now: float) -> list[Command]:
        self.phase = Phase.ANNOUNCED
        return [self._send(Phase.ANNOUNCED, now)]

    def _leave(self, now: float, wakes: list[float]) -> list[Command]:
        """Stopping, and withdrawn: wait until that is acknowledged and has settled."""
        if self.speaker == "up" and self.update is not None and not self.update.acknowledged:
            return []  # _overdue kills what does not acknowledge
        if _early(self._withdrawn_at + self.config.settle_s, now, wakes):
            return []
        self.exited = True
        return [Exit()]

    def _overdue(self, now: float, wakes: list[float]) -> list[Command]:
        """A speaker that does not acknowledge an update in time is killed."""
        if self.speaker != "up" or self.update is None or self.update.acknowledged or self.exited:
            return []
        if _early(self.update.at + self.config.ack_s, now, wakes):
            return []
        return self._kill(f"it did not acknowledge within {self.config.ack_s:g} s")

    def _send(self, phase: Phase, now: float) -> SendUpdate:
        self._numbers += 1
        self.update = Update(self._numbers, phase, now)
        self.updates[phase] += 1
        return SendUpdate(self._numbers, phase)


def _early(at: float, now: float, wakes: list[float]) -> bool:
    """Whether it is too early; if so, adds the time to `wakes`."""
    if now < at:
        wakes.append(at)
        return True
    return False
