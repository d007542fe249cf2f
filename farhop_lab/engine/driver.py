"""The live loop of one replica: each step of the core takes its time, and its tokens go to the waiting tickets.

Runs on one event loop, in its callbacks: no task, no lock. Invariants:
- a step begins where the previous one was due, not where the loop woke up: timer error does not add up;
- if the host falls behind by more than `LAG_MAX_S`, that time is dropped, never made up by a burst;
- after `abort` a ticket gets nothing more.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from farhop_lab.engine.core.scheduler import EngineCore, Step
    from farhop_lab.engine.core.sequence import Sequence

LAG_MAX_S = 0.050
STUCK_LOOK_S = 0.02  # how often a stuck engine checks whether it still is


class Ticket(Protocol):
    """Receives a sequence's tokens."""

    def token(self, text: str, finished: str | None, now: float) -> None:
        """One token at `now` (the driver's clock); `finished` is not None on the last. Must not raise."""

    def failed(self, error: str) -> None:
        """Nothing more comes. Must not raise."""


class Driver:
    """Drives one core on one loop. `clock` gives monotonic seconds: uvloop's own time does not advance within a
    callback and counts whole milliseconds, too coarse for steps of a few. `stretch` returns the factor on a step's
    duration: asked at each step, infinite while the engine is stuck.
    """

    __slots__ = ("_clock", "_core", "_loop", "_stretch", "_tickets", "_timer", "lag_s", "scheduled")

    def __init__(
        self,
        core: EngineCore,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        stretch: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._core, self._stretch = core, stretch
        self._clock = clock
        self._loop = loop
        self._tickets: dict[str, Ticket] = {}
        self._timer: asyncio.Handle | None = None
        self.scheduled: Callable[[], None] | None = None  # called with each step, as it begins
        self.lag_s = 0.0  # time dropped so far: the host was too slow for the emulated GPU

    def submit(self, sequence: Sequence, ticket: Ticket) -> None:
        """Queue a sequence; its ticket gets every token. Raises what EngineCore.submit raises."""
        now = self._clock()
        self._core.submit(sequence, now)
        self._tickets[sequence.id] = ticket
        if self._timer is None:
            # Not at once: requests that arrived together share the first step.
            self._timer = self._loop.call_soon(self._begin, now)

    def abort(self, id: str) -> None:  # noqa: A002
        """Stop a sequence at once; does nothing for one that has ended."""
        self._tickets.pop(id, None)
        self._core.abort(id)

    def break_off(self, error: str) -> None:
        """Fail all sequences, as when the GPU's memory runs out."""
        tickets, self._tickets = self._tickets, {}
        for name, ticket in tickets.items():
            self._core.abort(name)
            ticket.failed(error)

    def close(self) -> None:
        """Stop the loop; tickets get nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self._tickets.clear()

    def _begin(self, now: float) -> None:
        if not self._core.has_work:
            self._timer = None
            return
        stretch = self._stretch()
        if stretch == inf:
            self._timer = self._loop.call_later(STUCK_LOOK_S, lambda: self._begin(self._clock()))
            return
        step = self._core.step(now)
        if self.scheduled is not None:
            self.scheduled()
        due = now + stretch * step.duration_ms / 1000
        self._timer = self._loop.call_later(max(0.0, due - self._clock()), self._end, step, due)

    def _end(self, step: Step, due: float) -> None:
        self._core.end_step()
        now = self._clock()
        tickets = self._tickets
        for emission in step.emissions:
            finished = emission.finished
            ticket = tickets.get(emission.id) if finished is None else tickets.pop(emission.id, None)
            if ticket is not None:
                ticket.token(emission.text, finished, now)
        late_s = self._clock() - due
        if late_s > LAG_MAX_S:
            self.lag_s += late_s
            due += late_s
        self._begin(due)
