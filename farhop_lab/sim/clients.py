"""Clients in virtual time: they run programs against a world, in a closed or an open loop.

    clients = ClientPool(world, until=600.0)
    clients.closed("paris", programs)       # one client: a program, then the next
    clients.open(schedule)                  # each program at its time, whatever became of the others

Invariants: the requests of a batch are sent together and all awaited; a program's next batch depends on the answers it
really received; a client disconnects after `timeout_s`. If a request failed, its program is abandoned and counted once
its batch is over; a closed client continues with the next program `pause_s` later (at once would loop forever in a
world that refuses at once). No request is sent from `until` on. Draws no random numbers, so worlds of one seed get the
same programs, whatever their machines decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from farhop_lab.workloads.program import BATCH_MAX, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.sim.measures import RequestRecord
    from farhop_lab.sim.timeline import Call, Timeline
    from farhop_lab.workloads.program import Ask, Batch, Program, Programs, Schedule, Start

TIMEOUT_S = 100.0
PAUSE_S = 1.0


class Service(Protocol):
    """What a world offers its clients; `World` is one."""

    timeline: Timeline

    def near_s(self, entry: str, /) -> float:
        """Round-trip time in seconds between a region's clients and its balancers."""

    def arrive(
        self,
        entry: str,
        tenant: str,
        /,
        *,
        text: bytes,
        max_tokens: int,
        answer_tokens: int | None,
        session: int,
        tools: bool,
        ttft_s: float | None,
        retries: int,
        on_done: Callable[[RequestRecord, bytes], None],
    ) -> str:
        """See World.arrive."""

    def leave(self, request_id: str) -> None:
        """See World.leave."""


class ProgramCounts(msgspec.Struct):
    """Programs and requests so far. Each program that began is finished, failed, cut (by the end) or under way."""

    programs: int = 0
    finished: int = 0
    failed: int = 0
    cut: int = 0
    asked: int = 0
    timeouts: int = 0

    @property
    def under_way(self) -> int:
        """Programs that have begun and are not over."""
        return self.programs - self.finished - self.failed - self.cut


class ProgramRun:
    """One running program. `over` is called with whether it succeeded."""

    __slots__ = ("_answers", "_clients", "_failed", "_over", "_program", "_region", "_sent_at", "_waits")

    def __init__(self, clients: ClientPool, region: str, program: Program, over: Callable[[bool], None] | None) -> None:
        self._clients, self._region, self._program, self._over = clients, region, program, over
        self._answers: list[bytes] = []
        self._waits = 0
        self._sent_at = clients.timeline.now
        self._failed = False
        clients.counts.programs += 1
        self._next(None)

    def _next(self, answers: tuple[bytes, ...] | None) -> None:
        clients = self._clients
        try:
            batch = next(self._program) if answers is None else self._program.send(answers)
        except StopIteration:
            clients.counts.finished += 1
            self._end(True)
            return
        if not 1 <= len(batch) <= BATCH_MAX:
            raise WorkloadError(f"a batch of {len(batch)} requests; let the program yield 1 to {BATCH_MAX}")
        self._send(batch)

    def _send(self, batch: Batch) -> None:
        self._answers = [b""] * len(batch)
        self._waits = len(batch)
        clients = self._clients
        # The next batch goes out one client round trip after the last answer. Never at once: an answer that comes at
        # once must not meet half a batch, nor call this again from inside.
        near_s, now, before = clients.service.near_s(self._region), clients.timeline.now, self._sent_at
        waits_s = [max(near_s + ask.think_s, before + ask.since_s - now) for ask in batch]
        self._sent_at = now + min(waits_s)
        for at, (ask, wait_s) in enumerate(zip(batch, waits_s, strict=True)):
            clients.timeline.after(wait_s, self._ask, at, ask)

    def _ask(self, at: int, ask: Ask) -> None:
        clients = self._clients
        if clients.timeline.now >= clients.until:
            self._on_answer(at, None)
        else:
            PendingRequest(clients, self._region, ask, lambda answer: self._on_answer(at, answer))

    def _on_answer(self, at: int, answer: bytes | None) -> None:
        if answer is None:
            self._failed = True
        else:
            self._answers[at] = answer
        self._waits -= 1
        if self._waits:
            return
        if not self._failed:
            self._next(tuple(self._answers))
            return
        self._program.close()
        counts = self._clients.counts
        if self._clients.timeline.now >= self._clients.until:
            counts.cut += 1
        else:
            counts.failed += 1
        self._end(False)

    def _end(self, well: bool) -> None:
        if self._over is not None:
            self._over(well)


class PendingRequest:
    """One request under way, and its client's time limit."""

    __slots__ = ("_clients", "_id", "_is_over", "_on_answer", "_patience")

    def __init__(self, clients: ClientPool, region: str, ask: Ask, on_answer: Callable[[bytes | None], None]) -> None:
        self._clients, self._on_answer = clients, on_answer
        self._is_over = False
        self._patience: Call | None = None
        clients.counts.asked += 1
        self._id = clients.service.arrive(
            region,
            ask.tenant,
            text=ask.prompt,
            max_tokens=ask.max_tokens,
            answer_tokens=ask.answer_tokens,
            session=ask.session,
            tools=ask.tools,
            ttft_s=clients.ttft_s,
            retries=clients.retries,
            on_done=self._over,
        )
        if not self._is_over:
            self._patience = clients.timeline.after(clients.timeout_s, self._leave)

    def _leave(self) -> None:
        self._clients.counts.timeouts += 1
        self._clients.service.leave(self._id)

    def _over(self, record: RequestRecord, answer: bytes) -> None:
        self._is_over = True
        if self._patience is not None:
            self._patience.cancel()
        self._on_answer(answer if record.served else None)


class ClientPool:
    """See the module's head. Times are the timeline's seconds; no request is sent from `until` on. `ttft_s`: the TTFT
    objective that each request states; None: none. `retries`: how often a request that failed before its answer began
    is sent again.
    """

    def __init__(
        self,
        service: Service,
        *,
        until: float,
        timeout_s: float = TIMEOUT_S,
        pause_s: float = PAUSE_S,
        ttft_s: float | None = None,
        retries: int = 0,
    ) -> None:
        if not (timeout_s > 0.0 and pause_s > 0.0):
            raise WorkloadError(f"timeout_s {timeout_s} and pause_s {pause_s} must be above 0 seconds")
        self.service, self.timeline = service, service.timeline
        self.until, self.timeout_s, self.pause_s = until, timeout_s, pause_s
        self.ttft_s, self.retries = ttft_s, retries
        self.counts = ProgramCounts()

    def closed(
        self, region: str, programs: Programs, *, since: float = 0.0, awake: Callable[[float], float] | None = None
    ) -> None:
        """One client: from `since` on it runs a program, then the next. `awake(now)` gives the earliest time at which
        it may begin one (now or later), if clients sleep; None: always now.
        """

        def begin() -> None:
            now = self.timeline.now
            wakes = now if awake is None else awake(now)
            if wakes > now:
                self._at(wakes, begin)
            elif now < self.until and (program := next(programs, None)) is not None:
                ProgramRun(self, region, program, ended)

        def ended(well: bool) -> None:
            self._at(self.timeline.now + (0.0 if well else self.pause_s), begin)

        self._at(since, begin)

    def open(self, schedule: Schedule) -> None:
        """Each program at its time. WorkloadError, once reached, if the schedule is out of order."""

        def await_next() -> None:
            start = next(schedule, None)
            if start is None or start.at >= self.until:
                return
            if start.at < self.timeline.now:
                raise WorkloadError(f"a start at {start.at} s comes after {self.timeline.now} s; sort the schedule")
            self._at(start.at, begin, start)

        def begin(start: Start) -> None:
            ProgramRun(self, start.region, start.make(), None)
            await_next()

        await_next()

    def _at(self, at: float, act: Callable[..., None], *args: object) -> None:
        if at < self.until:
            self.timeline.at(at, act, *args)
