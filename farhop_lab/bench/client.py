"""The load that wrk cannot make: streams, open loops, idle streams. One uvloop process beside the measured ones.

`python -m farhop_lab.bench.client JOB` prints one Report as JSON. It reads the measured processes' use at the same
moment as its own counts. Never retries: what is not answered with 200 counts as an error.
"""

from __future__ import annotations

import asyncio
import collections
import random
import sys
import time
from typing import Literal, cast

import httptools
import msgspec
import uvloop

from farhop_lab.bench import bodies, usage
from farhop_lab.bench.harness import unverified_tls

_TICK_S = 0.001
_AT_ONCE = 4  # connections opened together
_NUMBER = bodies.NUMBER.encode()


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. `pids` are the roots of the process trees to measure.

    closed: each connection sends its next request when it is answered. open: `rate_per_s` requests at random times,
    whatever has been answered. idle: streams are opened, and nothing more is sent; the first window is before them, the
    second when all have begun.
    """

    mode: Literal["closed", "open", "idle"]
    host: str
    port: int
    pids: list[int]
    connections: int
    ramp_s: float
    window_s: float
    windows: int
    body_bytes: int = 1024
    chunks: int = 0  # of a stream; 0: answers in one piece
    interval_ms: float = 20.0
    rate_per_s: float = 0.0
    first: int = -1  # from this number on each prompt is numbered, so that no two are equal; below 0: not numbered
    timeout_s: float = 30.0
    tls: bool = False


class Window(msgspec.Struct, frozen=True):
    """What happened between two moments, by the client's counts and the measured processes' CPU clocks.

    `rss_bytes` is their memory at its end; `streams` are those under way then. `errors` are requests that were not
    answered with 200, or not completely.
    """

    seconds: float
    cpu_s: float
    requests: int
    chunks: int
    errors: int
    rss_bytes: int
    streams: int


class Report(msgspec.Struct, frozen=True):
    """The windows, and for an open loop the latency in ms at percentiles 50 and 99, from the time at which each was
    due.
    """

    windows: list[Window]
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class Load:
    """The connections and their counts."""

    def __init__(self, job: Job) -> None:
        self._tls = unverified_tls() if job.tls else None
        self.job = job
        made = (
            bodies.streamed(job.body_bytes, job.chunks, job.interval_ms) if job.chunks else bodies.plain(job.body_bytes)
        )
        self._requests = [bodies.request(body, job.host) for body in made]
        self._sent = 0
        self.requests = self.chunks = self.errors = self.streams = 0
        self.idle: list[Connection] = []
        self.due: collections.deque[float] = collections.deque()
        self.latencies: list[float] = []
        self.open: set[Connection] = set()
        self.closing = False

    def next_request(self) -> bytes:
        """The bodies in rotation."""
        self._sent += 1
        request = self._requests[self._sent % len(self._requests)]
        return request if self.job.first < 0 else request.replace(_NUMBER, b"%010d" % (self.job.first + self._sent), 1)

    def free(self, connection: Connection) -> None:
        """A connection's request is answered."""
        if self.job.mode == "closed":
            connection.send(0.0)
        elif self.due:
            connection.send(self.due.popleft())
        else:
            self.idle.append(connection)

    async def connect(self) -> None:
        """Open the connections over half of the ramp, each with a request under way unless the loop is open."""
        began, count = time.perf_counter(), self.job.connections
        for opened in range(0, count, _AT_ONCE):
            await asyncio.gather(*(self._connect() for _ in range(min(_AT_ONCE, count - opened))))
            due = began + self.job.ramp_s / 2 * (opened + _AT_ONCE) / count
            await asyncio.sleep(due - time.perf_counter())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self), self.job.host, self.job.port, ssl=self._tls
            )
        except OSError:
            self.errors += 1
            return
        if self.job.mode == "open":
            self.idle.append(connection)
        else:
            connection.send(0.0)


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._due = 0.0
        self._busy = self._streaming = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self._load.open.add(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._load.open.discard(self)
        if self._busy and not self._load.closing:
            self._load.errors += 1
            self._ended()

    def send(self, due: float) -> None:
        """Send the next request; one that was due at `due`."""
        if self._transport is None:
            self._load.errors += 1
            return
        self._due, self._busy = due, True
        self._transport.write(self._load.next_request())

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_headers_complete(self) -> None:
        """An answer begins."""
        if self._parser.get_status_code() != 200:
            self._load.errors += 1

    def on_body(self, data: bytes) -> None:
        """A piece of the answer."""
        load = self._load
        load.chunks += data.count(b"data: ")
        if not self._streaming:
            self._streaming = True
            load.streams += 1

    def _ended(self) -> None:
        self._busy = False
        if self._streaming:
            self._streaming = False
            self._load.streams -= 1

    def on_message_complete(self) -> None:
        """The answer has ended."""
        self._ended()
        load = self._load
        load.requests += 1
        if self._due:
            load.latencies.append(time.perf_counter() - self._due)
        load.free(self)


class Sampler:
    """Makes windows: the changes since the last sample."""

    def __init__(self, load: Load) -> None:
        self._load, self.windows = load, list[Window]()
        self.start()

    def _counts(self) -> tuple[float, float, int, int, int]:
        self._pids = usage.tree(self._load.job.pids)
        load = self._load
        return time.perf_counter(), usage.cpu_s(self._pids), load.requests, load.chunks, load.errors

    def start(self) -> None:
        """The next window begins now."""
        self._last = self._counts()

    def take(self) -> None:
        """A window ends now, and the next begins."""
        now = self._counts()
        seconds, cpu_s, requests, chunks, errors = (b - a for a, b in zip(self._last, now, strict=True))
        self._last = now
        self.windows.append(
            Window(
                seconds, cpu_s, int(requests), int(chunks), int(errors), usage.rss_bytes(self._pids), self._load.streams
            )
        )


async def run(job: Job) -> Report:
    """Send what the job says. Bounded: what has not ended `timeout_s` after it should have is cut."""
    load = Load(job)
    try:
        async with asyncio.timeout(job.ramp_s + job.windows * job.window_s + job.timeout_s):
            return await {"closed": _closed, "open": _open, "idle": _idle}[job.mode](load)
    finally:
        load.closing = True
        for connection in tuple(load.open):
            connection.close()
        await asyncio.sleep(0.05)


async def _closed(load: Load) -> Report:
    connecting = asyncio.create_task(load.connect())
    try:
        await asyncio.sleep(load.job.ramp_s)
        await connecting
        return Report(await _windows(load, Sampler(load)))
    finally:
        connecting.cancel()


async def _windows(load: Load, sampler: Sampler) -> list[Window]:
    for _ in range(load.job.windows):
        await asyncio.sleep(load.job.window_s)
        sampler.take()
    return sampler.windows


async def _open(load: Load) -> Report:
    await load.connect()
    arriving = asyncio.create_task(_arrive(load))
    try:
        await asyncio.sleep(load.job.ramp_s)
        load.latencies.clear()
        windows = await _windows(load, Sampler(load))
    finally:
        arriving.cancel()
    waited = sorted([*load.latencies, *(time.perf_counter() - due for due in load.due)])
    if not waited:
        return Report(windows)
    return Report(windows, *(waited[int(share * (len(waited) - 1))] * 1e3 for share in (0.50, 0.99)))


async def _arrive(load: Load) -> None:
    """Poisson arrivals, checked every millisecond (a loop's timers are no finer); latency counts from the due time."""
    rng, rate = random.Random(1), load.job.rate_per_s
    next_at = time.perf_counter()
    while True:
        now = time.perf_counter()
        while next_at <= now:
            next_at += rng.expovariate(rate)
            if load.idle:
                load.idle.pop().send(now)
            else:
                load.due.append(now)
        await asyncio.sleep(_TICK_S)


async def _idle(load: Load) -> Report:
    sampler = Sampler(load)
    sampler.take()
    await load.connect()
    while load.streams < load.job.connections - load.errors:
        await asyncio.sleep(0.02)
    await asyncio.sleep(load.job.window_s)
    sampler.take()
    return Report(sampler.windows)


if __name__ == "__main__":
    report = uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Job)))
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
