"""The client of `farhop bench ttft`: one request at a time, the same by each path in turn, forth and back (ABBA).

`python -m farhop_lab.bench.ttft_client '{"ways": [...], ...}'`. It blocks in recv(), so no event loop's wake-up lies
between the answer's first event and the clock. Never sends two requests at once.
"""

from __future__ import annotations

import socket
import sys
import time

import msgspec

from farhop_lab.bench import bodies, usage

_SILENT_S = 60.0
_READ_BYTES = 64 * 1024


class Way(msgspec.Struct, frozen=True):
    """One path to the engine: where to connect, and the processes whose CPU time counts for it."""

    name: str
    host: str
    port: int
    pids: list[int] = []


class Job(msgspec.Struct, frozen=True):
    """Each of the `ways` is used twice a round, `pause_s` after the previous request; `warm_ups` rounds are not
    reported.
    """

    ways: list[Way]
    body: str
    rounds: int
    warm_ups: int = 3
    pause_s: float = 0.01


class Sample(msgspec.Struct, frozen=True):
    """One request: the time to its answer's first event, and the CPU time of the path's processes, pause included."""

    way: str
    ttft_ms: float
    cpu_ms: float


class ClientError(Exception):
    """An unusable answer: the text names the path and what came."""


class Connection:
    """A kept-alive connection of one path."""

    def __init__(self, way: Way, body: bytes) -> None:
        self._way, self._body, self._asked = way, body, 0
        self._socket: socket.socket | None = None

    def ask(self, pause_s: float) -> Sample:
        """Send the request, with a different end of its prompt each time, and read all of the answer. Raises
        ClientError, OSError.
        """
        self._asked += 1
        body = self._body.replace(bodies.NUMBER.encode(), b"%0*d" % (len(bodies.NUMBER), self._asked))
        request = bodies.request(body, self._way.host)
        wire = self._socket = self._socket or self._opened()
        cpu_s = usage.cpu_s(self._way.pids)
        began = time.perf_counter()
        wire.sendall(request)
        received, first_at = b"", 0.0
        while not received.endswith(b"0\r\n\r\n"):
            piece = wire.recv(_READ_BYTES)
            now = time.perf_counter()
            received += piece
            if not first_at and b"data: " in received:
                first_at = now
            if not piece or (not first_at and not received.startswith(b"HTTP/1.1 200")):
                raise ClientError(f"{self._way.name}: instead of a stream came {received[-300:]!r}")
        time.sleep(pause_s)
        return Sample(self._way.name, (first_at - began) * 1e3, (usage.cpu_s(self._way.pids) - cpu_s) * 1e3)

    def close(self) -> None:
        """Hang up."""
        if self._socket is not None:
            self._socket.close()

    def _opened(self) -> socket.socket:
        made = socket.create_connection((self._way.host, self._way.port), _SILENT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


def run(job: Job) -> list[list[Sample]]:
    """The samples of each round, in the order they were taken. Raises ClientError, OSError."""
    there = [Connection(way, job.body.encode()) for way in job.ways]
    try:
        rounds = [
            [connection.ask(job.pause_s) for connection in (*there, *reversed(there))]
            for _ in range(job.warm_ups + job.rounds)
        ]
    finally:
        for connection in there:
            connection.close()
    return rounds[job.warm_ups :]


if __name__ == "__main__":
    try:
        samples = run(msgspec.json.decode(sys.argv[1], type=Job))
    except (ClientError, OSError) as error:
        sys.exit(f"{error}")
    sys.stdout.write(msgspec.json.encode(samples).decode() + "\n")
