"""Clients of `farhop bench anycast`, a program inside a namespace: at a fixed rate a new connection, a short request.

`python -m farhop_lab.bench.anycast_client JOB` prints a line of JSON for each connection as it ends: its start, and the
site that served it. Never retries, so that losses show.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import msgspec

PATIENCE_S = 1.0


class Job(msgspec.Struct, frozen=True):
    """The address, and the rate per second."""

    host: str
    port: int
    key: str
    model: str
    per_s: float


class ConnectionResult(msgspec.Struct, frozen=True):
    """A connection: when it began, by the wall clock, and the region that served it; "" for one that got no answer."""

    at: float
    site: str


async def ask(job: Job, request: bytes) -> ConnectionResult:
    """One connection."""
    at, site = time.time(), ""
    with contextlib.suppress(OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(job.host, job.port)
            try:
                writer.write(request)
                site = served_by(await reader.readuntil(b"\r\n\r\n"))
            finally:
                writer.transport.abort()
    return ConnectionResult(at, site)


def served_by(head: bytes) -> str:
    """The region that an answer's head names; "" if the answer is not a 200."""
    lines = head.decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    return headers.get("x-farhop-region", "") if " 200 " in lines[0] else ""


def request_of(job: Job) -> bytes:
    """The request that each connection brings."""
    asked = {"model": job.model, "messages": [{"role": "user", "content": "where am I?"}], "max_tokens": 1}
    body = msgspec.json.encode(asked)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {job.host}\r\nauthorization: Bearer {job.key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def main(job: Job) -> None:
    """Until killed."""
    request, due = request_of(job), asyncio.get_running_loop().time()
    running: set[asyncio.Task[None]] = set()

    async def one() -> None:
        sys.stdout.write(msgspec.json.encode(await ask(job, request)).decode() + "\n")
        sys.stdout.flush()

    while True:
        running = {task for task in running if not task.done()} | {asyncio.create_task(one())}
        due += 1.0 / job.per_s
        await asyncio.sleep(due - asyncio.get_running_loop().time())


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Job)))
