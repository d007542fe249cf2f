"""Receivers of one sequence's tokens: a stream writes each to its socket at once, a whole answer gathers them.

Called by the driver, never awaits. Invariant: `done` is resolved exactly once, with "" at the last token or with an
error; a ticket whose client is gone writes nothing more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from farhop_lab.engine.formats.render import Answer

if TYPE_CHECKING:
    import asyncio

    from farhop_lab.engine.core.sequence import Sequence
    from farhop_lab.engine.formats.logprobs import Logprobs
    from farhop_lab.engine.formats.render import Rendering
    from farhop_lab.engine.metrics import Observations

# What a client may leave unread before it is cut off; 4 MiB is a full L4 context at ~250 bytes a token.
UNSENT_BYTES_MAX = 4 * 2**20


class Wait(NamedTuple):
    """What every ticket needs: the sequence, the future for the end, where to measure, and the arrival."""

    sequence: Sequence
    done: asyncio.Future[str]
    observations: Observations
    arrived_at: float


class Ticket(ABC):
    """Measures one request; a subclass handles its tokens. Times are of the driver's clock, in seconds."""

    __slots__ = ("_last_at", "_observations", "arrived_at", "done", "first_at", "sequence")

    def __init__(self, wait: Wait) -> None:
        self.sequence = wait.sequence
        self.arrived_at = wait.arrived_at
        self.first_at: float | None = None
        self.done = wait.done
        self._last_at = 0.0
        self._observations = wait.observations

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, None before it."""
        return None if self.first_at is None else self.first_at - self.arrived_at

    def token(self, text: str, finished: str | None, now: float) -> None:
        """Take one token; the last one ends the wait."""
        seen = self._observations
        first = self.first_at is None
        if first:
            self.first_at = now
            seen.ttft.observe(now - self.arrived_at)
            seen.queue.observe((self.sequence.queued_until or now) - self.sequence.submitted_at)
        else:
            seen.itl.observe(now - self._last_at)
        self._last_at = now
        self._take(text, first=first, last=finished is not None)
        if finished is not None:
            seen.e2e.observe(now - self.arrived_at)
            if not self.done.done():
                self.done.set_result("")

    def failed(self, error: str) -> None:
        """The engine broke: the waiting handler is told."""
        if not self.done.done():
            self.done.set_result(error)

    @abstractmethod
    def _take(self, text: str, *, first: bool, last: bool) -> None:
        """Handle a token."""


class WholeTicket(Ticket):
    """Gathers the answer; `text` is complete when `done` is."""

    __slots__ = ("_logprobs", "_pieces")

    def __init__(self, wait: Wait, logprobs: Logprobs | None = None) -> None:
        """`logprobs` gathers each token's, too."""
        super().__init__(wait)
        self._pieces: list[str] = []
        self._logprobs = logprobs

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def _take(self, text: str, *, first: bool, last: bool) -> None:  # noqa: ARG002
        self._pieces.append(text)
        if self._logprobs is not None:
            self._logprobs.take(self.sequence)


class StreamTicket(Ticket):
    """Writes each token as one event to the connection.

    Straight to the transport, since aiohttp's own write is a coroutine: one task switch per token and sequence would
    cost more than all the rest of the engine. The response must be prepared, chunked and not compressed.
    """

    __slots__ = ("_answer", "_detailed", "_include_usage", "_transport")

    def __init__(self, wait: Wait, answer: Rendering, transport: asyncio.Transport, *, include_usage: bool) -> None:
        super().__init__(wait)
        self._answer = answer
        self._detailed = answer if isinstance(answer, Answer) and answer.details else None
        self._transport = transport
        self._include_usage = include_usage

    def _take(self, text: str, *, first: bool, last: bool) -> None:
        transport = self._transport
        if transport.is_closing():
            return
        opening = self._answer.opening(self.sequence) if first else b""  # before the token: some number their events
        if last:
            event = self._answer.closing(text, self.sequence, include_usage=self._include_usage)
        elif self._detailed is not None:
            event = self._detailed.token_with_details(text, self.sequence)
        else:
            event = self._answer.token(text)
        transport.write(opening + event)
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            transport.abort()
