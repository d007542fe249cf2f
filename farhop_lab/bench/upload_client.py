"""Sends large requests on the shipped pool's connections and times them, by the connection's past.

New ones, ones used just before (`kept`), after a rest, after small requests alone, and if a small request used another
connection last (`beside small`). `python -m farhop_lab.bench.upload_client '{…}'`, at one end of a long emulated link.
Prints the times, in ms from the first byte sent to the whole answer.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import uvloop

from farhop.balance.machine import Address
from farhop.relay.upstream.pool import Pool, UpstreamLimits
from farhop_lab.bench import bodies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from farhop.balance.outcome import Outcome
    from farhop.relay.http.head import AnswerHead
    from farhop.relay.upstream.pool import UpstreamConnection

NEW, KEPT, RESTED, COOL, BESIDE = "new", "kept", "rested", "small before", "beside small"
_WARMING = 2  # requests between a new connection and one that counts as kept
_LIMIT_S = 20.0


class Job(msgspec.Struct, frozen=True):
    """The address, the size, the number, and how long a connection rests."""

    host: str
    port: int
    body_bytes: int
    repeats: int
    idle_s: float


class _Sent:
    """One request on a leased connection (pool.UpstreamHandler)."""

    streams = False

    def __init__(self, request: bytes) -> None:
        self._request, self._loop = request, asyncio.get_running_loop()
        self._began_at = 0.0
        self.over: asyncio.Future[float] = self._loop.create_future()

    def connected(self, connection: UpstreamConnection) -> None:
        self._began_at = self._loop.time()
        connection.write(self._request)

    def answered(self, answer: AnswerHead) -> None:
        if answer.status != 200:
            self.broke(RuntimeError(f"answered with {answer.status}"))

    def received(self, data: bytes) -> None:
        """Only the end counts."""

    def completed(self) -> None:
        if not self.over.done():
            self.over.set_result((self._loop.time() - self._began_at) * 1e3)

    def lost(self, reason: Outcome) -> None:
        self.broke(RuntimeError(reason.reason))

    def broke(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


@asynccontextmanager
async def _pool() -> AsyncIterator[Pool]:
    pool = Pool(UpstreamLimits())
    try:
        yield pool
    finally:
        await pool.close()


async def measure(job: Job) -> dict[str, list[float]]:
    """The times by kind of connection."""
    address, ms = Address(job.host, job.port), {NEW: list[float](), KEPT: [], RESTED: [], COOL: [], BESIDE: []}
    large, small = (bodies.request(bodies.plain(size, 1)[0], job.host) for size in (job.body_bytes, 1024))

    async def sent(pool: Pool, request: bytes) -> float:
        one = _Sent(request)
        pool.lend(address, one, len(request))
        async with asyncio.timeout(_LIMIT_S):
            return await one.over

    for _ in range(job.repeats):
        async with _pool() as pool:
            ms[NEW].append(await sent(pool, large))
            for _ in range(_WARMING):
                await sent(pool, large)
            ms[KEPT].append(await sent(pool, large))
            await asyncio.gather(sent(pool, small), sent(pool, small))  # the second on a new one, which is used last
            ms[BESIDE].append(await sent(pool, large))
            await asyncio.sleep(job.idle_s)
            ms[RESTED].append(await sent(pool, large))
        async with _pool() as pool:
            for _ in range(_WARMING):
                await sent(pool, small)
            ms[COOL].append(await sent(pool, large))
    return ms


if __name__ == "__main__":
    found = uvloop.run(measure(msgspec.json.decode(sys.argv[1], type=Job)))
    print(msgspec.json.encode(found).decode())
