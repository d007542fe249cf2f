"""Assembles an announcer from its configuration: the one module here with the clock, random numbers and sockets.

Order of starting: etcd and the speaker, with nothing announced; then the probe. Of stopping: drain, wait, withdraw, let
that settle, and only then end: the entry itself stops listening after this process (docs/operate/anycast.md).
"""

from __future__ import annotations

import asyncio
from math import inf
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from entry_anycast.announcing.machine import (
    Acknowledged,
    Announcer,
    Distrusted,
    Exit,
    KillSpeaker,
    Observed,
    Phase,
    SendUpdate,
    SetTimer,
    SpeakerLost,
    SpeakerStarted,
    StartSpeaker,
    StopAsked,
    TimerFired,
)
from entry_anycast.app.config import AnycastConfig
from entry_anycast.app.others import Others
from entry_anycast.app.probe import Prober
from entry_anycast.speakers.bird import Bird
from entry_anycast.speakers.exabgp import ExaBgp
from entry_anycast.speakers.speaker import SpeakerError
from farhop.config import ConfigError, load, redacted
from farhop.service.admin.server import AdminServer, ExplainError
from farhop.service.assembly import dataplane, stores
from farhop.service.assembly.store_opening import opened
from farhop.service.config.certificates import TlsManager
from farhop.service.observability.decisions import Decisions
from farhop.service.process.clock import Clock, wall
from farhop.service.process.lifecycle import run as run_process
from farhop.service.process.tasks import Tasks, all_of
from farhop.store.contract import announce_key
from farhop.store.documents.announce import AnnounceReport, encode
from farhop.store.state import StateDir, StateError
from farhop.telemetry import logs
from farhop.telemetry.metrics import TierMetrics
from topology import law_document

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from entry_anycast.announcing.machine import Command, Event
    from entry_anycast.speakers.speaker import Speaker, SpeakerState
    from farhop.balance.machine import Request
    from farhop.service.admin.server import Question
    from farhop.store.contract import Publication
    from topology.model import Topology

LEASE_S = 5.0  # of our report; a killed announcer counts as healthy for as long
OBSERVED_S = 2.0  # how long the speaker may take to report what it announces
HOLD = "anycast-hold"


class _Hold(msgspec.Struct, frozen=True):
    """The part of the budget that a restart must know. Times are by this host's wall clock, 0 is never. `announced`:
    since when the prefixes are; None while they are not. It is written before they are announced, and outlives a kill.
    """

    until: float
    doublings: int
    announced: float | None = None
    skipped: float = 0.0


class AnycastProcess:
    """One announcer, assembled."""

    def __init__(self, config: AnycastConfig, topology: Topology, rng: Random) -> None:
        self.config, self.topology = config, topology
        self.prefixes = config.announced(topology)
        self.clock, self._rng = Clock(rng), rng
        self.machine = Announcer(config.machine())
        self.metrics = TierMetrics("anycast", config.region, config.instance)
        self._log = logs.get("anycast")
        quiet = logs.Throttled(self._log, 10.0, self.clock.now)
        self.store = stores.sealed(
            stores.hubs(config, topology), config.signing.made(), self.metrics.report_refused, rng
        )
        self.speaker = self._made()
        self.others = Others(
            self.store, config.region, config.entry, self.prefixes, self.react, self.metrics.report_refused, self._later
        )
        try:
            self.prober = Prober(config.probe, self.react)
        except OSError as error:
            problem = f"ca_file: {config.probe.ca_file}: {error.strerror or error}"
            raise ConfigError("probe", [problem]) from None
        self._state = None if config.state_dir is None else StateDir(
            Path(config.state_dir), config.fleet, f"anycast.{config.region}.{config.instance}"
        )  # fmt: skip
        self.tls = dataplane.TlsSetup(TlsManager(self._log, wall), self.metrics, quiet)
        self.admin = AdminServer(
            AnycastAdmin(self), self.metrics, Decisions(), self.tls.listener("admin", config.admin),
            config.admin.made(config.trust_domain), lambda: redacted(self.config),
        )  # fmt: skip
        self._tasks = Tasks()
        self._sending = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._started: asyncio.Future[None] | None = None
        self._exit = asyncio.Event()
        self._publication: Publication | None = None
        self._published = b""
        self._hold_saved: tuple[float | None, ...] = ()
        self._since = wall().timestamp()
        self.seen: SpeakerState | None = None
        self._gauges()

    def _made(self) -> Speaker:
        config, prefixes, silence_s = self.config, self.prefixes, self.config.watchdog_s
        exabgp, bird = config.exabgp_made(), config.bird_made()
        if exabgp is not None:
            return ExaBgp(exabgp, prefixes, silence_s, self._ended)
        assert bird is not None  # one of the two is given
        return Bird(bird, prefixes, silence_s, self._ended)

    # -- the machine decides, this acts

    def react(self, event: Event) -> None:
        """Give the machine an event and execute its commands."""
        now, machine = self.clock.now(), self.machine
        phase, speaker = machine.phase, machine.speaker
        commands = self.machine.handle(event, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for command in commands:
            self._act(command, now)
        if machine.phase is not phase:
            self._since = wall().timestamp()
            self._log.info("announcement", phase=machine.phase, why=machine.why_not or machine.speaker_why)
            self._keep_hold(now)
        if machine.speaker != speaker:
            self._log.info("speaker", state=machine.speaker, why=machine.speaker_why)
        self._publish()

    def _act(self, command: Command, now: float) -> None:
        match command:
            case StartSpeaker():
                self._tasks.start(self._start(), "start the speaker")
            case SendUpdate():
                self._tasks.start(self._send(command), f"send the update {command.phase}")
            case KillSpeaker():
                self._log.error("the speaker is killed", why=command.why)
                self._tasks.start(self._kill(command.why), "end the speaker")
            case SetTimer():
                self._timer = self._later(command.at - now, lambda: self.react(TimerFired()))
            case Exit():
                self._exit.set()

    def _later(self, delay_s: float, work: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0.0, delay_s) + 0.001, work)

    async def _start(self) -> None:
        problem: SpeakerError | None = None
        try:
            await self.speaker.start()
        except SpeakerError as error:
            problem = error
            await self.speaker.kill()
        if self._started is not None and not self._started.done():
            if problem is not None:
                self._started.set_exception(problem)
                return
            self._started.set_result(None)
        self.react(SpeakerStarted() if problem is None else SpeakerLost(str(problem)))

    async def _send(self, command: SendUpdate) -> None:
        async with self._sending:
            try:
                await self.speaker.update(command.phase)
            except SpeakerError as error:
                self.react(Distrusted(str(error)))
            else:
                self.react(Acknowledged(command.number))

    async def _kill(self, why: str) -> None:
        await self.speaker.kill()
        self.react(SpeakerLost(why))

    def _ended(self, why: str) -> None:
        """The speaker has ended; stop the rest of it, too."""
        if self.machine.speaker in ("starting", "up"):
            self.react(Distrusted(why))

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(self.config.observe_s)
            if self.machine.speaker != "up":
                self.seen = None
                continue
            try:
                async with asyncio.timeout(OBSERVED_S):
                    self.seen = await self.speaker.observe()
            except (SpeakerError, TimeoutError) as error:
                self.react(Distrusted(str(error) or f"it did not report within {OBSERVED_S:g} s what it announces"))
                continue
            self.react(Observed(self.seen.phase, sum(self.seen.sessions.values())))

    # -- published state

    def _publish(self) -> None:
        if self._publication is None:
            return
        document = encode(self.report())
        if document != self._published:
            self._published = document
            self._tasks.start(self._update(document), "publish what is announced")

    async def _update(self, document: bytes) -> None:
        if self._publication is not None:
            await self._publication.update(document)

    def report(self) -> AnnounceReport:
        """The report for others and operators. `held_s` in whole minutes: otherwise it would change all the time."""
        machine, config, now = self.machine, self.config, self.clock.now()
        held_s = machine.held_s(now)
        return AnnounceReport(
            entry=config.entry, region=config.region, instance=config.instance, prefixes=self.prefixes,
            speaker=self.speaker.name, wanted=machine.phase,
            actual=(self.seen.phase or "") if self.seen is not None else "",
            differs=machine.differs_since is not None, healthy=machine.healthy,
            why=self.why()[:256], held_s=60.0 * -(-held_s // 60.0),
            sessions=dict(self.seen.sessions) if self.seen is not None else {}, since=round(self._since, 3),
        )  # fmt: skip

    def why(self) -> str:
        """The reason for its state, in a line."""
        machine = self.machine
        if machine.kept_as_last:
            return f"kept, as the last healthy site, though {machine.why_not}"
        if machine.why_not:
            return machine.why_not
        if machine.speaker != "up":
            return f"the speaker is {machine.speaker}: {machine.speaker_why}"
        held_s = machine.held_s(self.clock.now())
        return f"held back by the update budget for {held_s / 60.0:.0f} min" if held_s else ""

    def _keep_hold(self, now: float) -> None:
        budget = self.machine.budget
        announced_at = None if self.machine.phase is Phase.WITHDRAWN else budget.announced_at
        keeps = budget.hold_until, announced_at, budget.skipped_at
        if self._state is None or keeps == self._hold_saved:
            return
        self._hold_saved, at = keeps, wall().timestamp() - now
        until, skipped = max(0.0, at + budget.hold_until), max(0.0, at + budget.skipped_at)
        saved = _Hold(until, budget.doublings, None if announced_at is None else at + announced_at, skipped)
        try:
            self._state.save(HOLD, msgspec.json.encode(saved))
        except StateError as error:
            self._log.error("state directory", problem=str(error))

    def _remember(self) -> None:
        try:
            found = self._state.load(HOLD) if self._state is not None else None
            if found is not None:
                hold, at = msgspec.json.decode(found.document, type=_Hold), wall().timestamp()
                self.machine.budget.remember(
                    hold.until - at if hold.until else -inf,
                    hold.doublings,
                    self.clock.now(),
                    announced_s=None if hold.announced is None else at - hold.announced,
                    skipped_s=at - hold.skipped,
                )
        except (StateError, msgspec.MsgspecError) as error:
            self._log.error("state directory", problem=str(error))

    # -- life cycle

    async def open(self) -> str:
        """See farhop.service.process.lifecycle.Daemon."""
        config = self.config
        self._remember()
        self.admin.starting = "starting"
        admin = await self.admin.open(config.admin.host, config.admin.port)
        await opened(self.store, self.admin, self._log, self._rng)
        self._started = asyncio.get_running_loop().create_future()
        self.react(TimerFired())
        try:
            await self._started
        except SpeakerError as error:
            raise ConfigError("speaker", [str(error).removeprefix("speaker: ")]) from None
        key = announce_key(config.region, config.instance)
        self._publication = await self.store.publish(key, encode(self.report()), LEASE_S)
        self._tasks.start(self.others.follow_drains(), "watch the entry's drain")
        self._tasks.start(self.others.follow_others(), "watch the other announcers")
        self._tasks.start(self.prober.run(), "probe the entry")
        self._tasks.start(self._observe(), "ask the speaker what it announces")
        self.tls.open()
        self.admin.starting = ""
        what = ", ".join(self.prefixes)
        return f"entry {config.entry}: {what} by {self.speaker.name}, admin on {config.admin.host}:{admin}"

    async def close(self) -> None:
        """See farhop.service.process.lifecycle.Daemon. Whatever happens, nothing is announced when it returns."""
        config = self.config
        self.react(StopAsked())
        longest_s = config.drain_s + config.settle_s + 4.0 * config.ack_s + 5.0
        try:
            async with asyncio.timeout(longest_s):
                await self._exit.wait()
        except TimeoutError:
            self._log.error("not withdrawn in time; the speaker is killed", waited_s=longest_s)
        await all_of(self.speaker.kill, self._tasks.close, self.store.close, self.admin.close, self.tls.close)

    def reload(self) -> None:
        """See farhop.service.process.lifecycle.Daemon. A change of what is announced is a restart: that drains."""
        self._log.info("the configuration is read only at the start; restart to apply it")

    # -- for operators

    def _gauges(self) -> None:
        gauge, counter, machine = self.metrics.gauge, self.metrics.counter, self.machine
        announced = "1 if the prefixes are announced, and not drained."
        gauge("anycast_announced", announced, lambda: float(machine.phase is Phase.ANNOUNCED))
        draining = "1 while the routes are announced as draining."
        gauge("anycast_draining", draining, lambda: float(machine.phase is Phase.DRAINING))
        gauge(
            "anycast_differs_seconds", "How long the announcements have differed from the wanted ones.", self._differs_s
        )
        held = "For how long the update budget still keeps the prefixes back."
        gauge("anycast_held_seconds", held, lambda: machine.held_s(self.clock.now()))
        kept = "1 if announced only because no other site is healthy."
        gauge("anycast_kept_as_last", kept, lambda: float(machine.kept_as_last))
        gauge("anycast_entry_fit", "1 if the entry is fit, by its probes.", lambda: float(machine.fitness == "fit"))
        gauge("anycast_sessions", "BGP sessions that are established.", lambda: float(sum(self._sessions().values())))
        gauge("anycast_session_up", "1 if the session with the peer is established.", self._sessions_up, "peer")
        counter("anycast_updates", "Updates to the speaker, by their phase.", self._updates, "phase")
        counter("anycast_speaker_kills", "Speakers ended by force.", lambda: float(machine.kills))

    def _differs_s(self) -> float:
        since = self.machine.differs_since
        return 0.0 if since is None else self.clock.now() - since

    def _sessions(self) -> Mapping[str, bool]:
        return self.seen.sessions if self.seen is not None else {}

    def _sessions_up(self) -> dict[str, float]:
        return {peer: float(up) for peer, up in self._sessions().items()}

    def _updates(self) -> dict[str, float]:
        return {phase.value: float(count) for phase, count in self.machine.updates.items()}


class AnycastAdmin:
    """The admin port of an announcer (farhop.service.admin.server.TierAdmin)."""

    def __init__(self, process: AnycastProcess) -> None:
        self._process = process

    def ready(self) -> bool:
        """Whether it has a speaker and is not about to end."""
        machine = self._process.machine
        return machine.speaker == "up" and machine.stopping_since is None

    def notice(self) -> str:
        """Whether the announced state differs from the wanted one."""
        return "what is announced is not what is wanted" if self._process.machine.differs_since is not None else ""

    def status(self) -> dict[str, Any]:
        """For people; `wanted` and `actual` side by side."""
        process, machine = self._process, self._process.machine
        report: dict[str, Any] = msgspec.to_builtins(process.report())
        return {
            **report,
            "tier": "anycast",
            "fitness": machine.fitness,
            "drain": machine.drain,
            "others_healthy": machine.others,
            "last_site": process.config.last_site,
            "kept_as_last": machine.kept_as_last,
            "speaker_state": machine.speaker,
            "speaker_why": machine.speaker_why,
            "updates": {phase.value: count for phase, count in machine.updates.items()},
            "kills": machine.kills,
            "differs_s": process._differs_s(),
            "held_s": machine.held_s(process.clock.now()),
        }

    def compose(self, question: Question) -> Request:  # noqa: ARG002 - as the admin port asks it
        """Nothing is routed here."""
        raise ExplainError("an announcer routes no requests; ask a balancer")

    def explain(self, request: Request, drained: str = "") -> dict[str, Any]:  # noqa: ARG002 - the same
        """Nothing is routed here."""
        raise ExplainError("an announcer routes no requests; ask a balancer")

    def scaling(self) -> dict[str, dict[str, int]]:
        """An announcer has no replicas."""
        return {}

    def law(self) -> dict[str, Any]:
        """Empty: an announcer reads no requests, so no law binds it."""
        return {}

    def topology(self) -> dict[str, Any]:
        """The map it was started with."""
        return law_document.map_of(self._process.topology)


def run(path: Path) -> None:
    """Run an announcer from its configuration file. SystemExit(2), after one line, if it cannot start."""

    def make() -> AnycastProcess:
        config = load(AnycastConfig, path)
        logs.configure("anycast", config.region, config.instance, config.log_level)
        return AnycastProcess(config, stores.topology_of(config), Random())

    run_process("anycast", make)
