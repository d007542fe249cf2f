"""The probe: canary requests from outside, as clients of each entry and tenant would send them, at a bounded rate.

A client has an ordered list of entries and tries them in turn. Never retries a request that began, and never sends more
than its rate, however slow the answers: a client that still waits sends nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from farhop_drill.measures import Canary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farhop_drill.document import Canaries

UNDER_WAY_MAX = 512
REQUEST_S = 30.0
LONG_PROMPTS = 2  # of each client: repeated, so that their answers can be compared
TEXT_CHARS_MAX = 32 * 1024


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. `region`: by the answer's header; `code` "": it is whole; `ttft_ms` None: no token came."""

    status: int
    region: str
    code: str
    text: str
    ttft_ms: float | None


class Sender(Protocol):
    """Sends a request to the first of `entries` that can be reached, and says how it ended. Never raises for that."""

    async def __call__(
        self, entries: Sequence[str], key: str, body: dict[str, Any], request_s: float
    ) -> ProbeResult: ...


class Client(msgspec.Struct, frozen=True):
    """One kind of client: the region of its first entry, its tenant, its key, and its entries in order."""

    entry: str
    tenant: str
    key: str
    urls: tuple[str, ...]


class Probe:
    """Sends canaries until stopped; `received` is called with each as it ends. Times are `clock` less `began`. Engines
    that are `emulated` stop at an arbitrary length: they are told how much to write."""

    def __init__(
        self,
        wanted: Canaries,
        clients: Sequence[Client],
        model: str,
        ask: Sender,
        clock: Callable[[], float],
        received: Callable[[Canary], None],
        salt: str,
        *,
        emulated: bool = False,
    ) -> None:
        self._wanted, self._clients, self._model = wanted, list(clients), model
        self._ask, self._clock, self._received, self._salt = ask, clock, received, salt
        self._emulated = emulated
        self._sending: asyncio.Task[None] | None = None
        self.under_way: set[asyncio.Task[None]] = set()
        self._began = 0.0
        self.skipped = 0  # not sent since too many were under way

    def begin(self, began: float) -> None:
        """Begin; `began` is what times count from."""
        self._began = began
        self._sending = asyncio.create_task(self._send())

    async def stop(self, patience_s: float) -> None:
        """Send no more; those under way have that long to end."""
        if self._sending is not None:
            self._sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sending
        if self.under_way:
            await asyncio.wait(tuple(self.under_way), timeout=patience_s)
        for task in tuple(self.under_way):
            task.cancel()
        await asyncio.gather(*self.under_way, return_exceptions=True)

    async def _send(self) -> None:
        """Each client in turn, at the rate; a part of them long, by a fraction carried over."""
        number, carried, due = 0, dict.fromkeys(range(len(self._clients)), 0.0), self._clock()
        while True:
            at = number % len(self._clients)
            carried[at] += self._wanted.long_share
            is_long = carried[at] >= 1.0
            carried[at] -= is_long
            if len(self.under_way) < UNDER_WAY_MAX:
                task = asyncio.create_task(self._one(self._clients[at], number, is_long=is_long))
                self.under_way.add(task)
                task.add_done_callback(self.under_way.discard)
            else:
                self.skipped += 1
            number += 1
            due = max(due + 1.0 / self._wanted.rate_per_s, self._clock() - 1.0)  # no flood after a pause
            await asyncio.sleep(max(0.0, due - self._clock()))

    async def _one(self, client: Client, number: int, *, is_long: bool) -> None:
        round_ = number // len(self._clients)
        # A long prompt is repeated, so its answer must be, too. A short one is new to every cache.
        text = f"canary {round_ % LONG_PROMPTS} " if is_long else f"canary {self._salt} {number} "
        text += f"of {client.tenant} at {client.entry}: count from one to a hundred."
        tokens = self._wanted.long_tokens if is_long else self._wanted.answer_tokens
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            **({"min_tokens": tokens} if self._emulated else {}),
            "temperature": 0.0,
            "seed": 0,
            "stream": True,
        }
        began = self._clock()
        answer = await self._ask(client.urls, client.key, body, REQUEST_S)
        ended_s = self._clock() - self._began
        first_s = None if answer.ttft_ms is None else began - self._began + answer.ttft_ms / 1e3
        if first_s is None and not answer.code:
            first_s = ended_s  # complete, but without a token
        self._received(
            Canary(
                entry=client.entry,
                tenant=client.tenant,
                model=self._model,
                began_s=began - self._began,
                first_s=first_s,
                ended_s=ended_s,
                region=answer.region,
                code=answer.code,
                status=answer.status,
                prompt=text if is_long else "",
                text=answer.text[:TEXT_CHARS_MAX] if is_long else "",
                sent_bytes=len(text),
                got_bytes=len(answer.text),
            )
        )
