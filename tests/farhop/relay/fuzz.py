"""A fuzz target: whatever bytes come, we and a second parser (h11) agree on every request that we let pass.

What we refuse, h11 may accept: we repair nothing. The other way round, or two readings of one request, is how requests
are smuggled. `python tests/farhop/relay/fuzz.py SECONDS [SEED]` runs it; a few thousand rounds run with the tests.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter
from itertools import pairwise
from random import Random

import h11
import uvloop

from farhop.balance import outcome
from farhop.balance.bounds import ByteBudget, SlotLimit
from farhop.relay.answers import Reply
from farhop.relay.http.connection import ClientConnection, ClientLimits
from farhop.relay.http.cork import Cork
from farhop.relay.http.exchange import Exchange
from farhop.relay.http.head import passes

PassedRequest = tuple[bytes, bytes, tuple[tuple[bytes, bytes], ...], bytes]  # method, target, headers that go on, body

SEEDS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nX-A: 1\r\n\r\nhello",
    b"POST /v1/x?y=1 HTTP/1.1\r\nHost: a:80\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n2;e=1\r\nde\r\n0\r\nT: 1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: [::1]:1\r\nConnection: x-a, close\r\nx-a: 1\r\n\r\n",
    b"POST http://b/v1/x?y=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nok",
    b"POST / HTTP/1.0\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok",
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
)
PIECES = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", b";", b",", b"\0", b"\x0b", b"\x7f", b"\x85", b"\xa0",
    b"0\r\n\r\n", b"1\r\na\r\n", b"-1", b"+5", b"0x5", b"5 ", b"_", b"chunked", b"gzip, chunked", b"identity",
    b"Content-Length: 3\r\n", b"Content-Length: 5, 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: b\r\n",
    b"Transfer-Encoding : x\r\n", b"Transfer-Encoding:\x0bchunked\r\n", b" folded\r\n", b"Connection: close\r\n",
    b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"GET / ", b"POST http://b/ ", b"X: \xe4\r\n", b"\xff",
    b"99999999999999999999", b"FFFFFFFFFFFFFFFFF",
)  # fmt: skip


class Listening:
    """A handler that keeps what passes, a listener without bounds and a transport that drops what is said."""

    stopping = is_hop = False

    def __init__(self) -> None:
        self.seen: list[PassedRequest] = []
        self.closing = False
        self.cork = Cork(asyncio.get_running_loop())
        self.refused: Counter[str] = Counter()
        self.slots, self.requests, self.unproven = None, SlotLimit(sys.maxsize), dict[object, float]()

    def admit(self, _connection: ClientConnection, _peer: object) -> None:
        pass

    def forget(self, _connection: ClientConnection) -> None:
        pass

    def head(self, _exchange: Exchange) -> Reply | None:
        return None

    def arrived(self, exchange: Exchange) -> None:
        head = exchange.head
        lines = [line.partition(b": ") for line in head.onward.split(b"\r\n")[:-1]]
        onward = tuple((name, value) for name, _, value in lines)
        self.seen.append((head.method, head.target, onward, exchange.body))
        exchange.reply(Reply(200, b"{}", outcome.SERVED))

    def get_extra_info(self, _name: str) -> None:
        pass

    def write(self, _data: bytes) -> None:
        pass

    def writelines(self, _parts: list[bytes]) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


def ours(segments: list[bytes]) -> list[PassedRequest]:
    """What we let pass."""
    ear, budget = Listening(), ByteBudget(1 << 24)
    connection = ClientConnection(ear, ear, ClientLimits(), budget)  # type: ignore[arg-type]
    connection.connection_made(ear)  # type: ignore[arg-type]
    for segment in segments:
        connection.data_received(segment)
    ear.cork.flush()
    connection.connection_lost(None)
    assert budget.used_bytes == 0, "bytes are held for nobody"
    return ear.seen


def theirs(data: bytes) -> list[PassedRequest]:
    """What h11 reads of the same bytes, up to what it refuses."""
    seen: list[PassedRequest] = []
    while True:
        while data.startswith(b"\r\n"):  # RFC 9112 §2.2: we skip empty lines before a request, h11 does not
            data = data[2:]
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(data)
        try:
            request, body = connection.next_event(), b""
            if not isinstance(request, h11.Request):  # nothing, or not all of it
                break
            while isinstance(event := connection.next_event(), h11.Data):
                body += bytes(event.data)
        except h11.RemoteProtocolError:
            break
        if not isinstance(event, h11.EndOfMessage):
            break
        named = {t.strip().lower() for n, v in request.headers if n == b"connection" for t in v.split(b",")}
        onward = tuple((n, v) for n, v in request.headers if passes(n) and n not in named)
        target, (scheme, _, rest) = request.target, request.target.partition(b"://")
        if scheme.lower() in (b"http", b"https"):  # we forward its path, h11 reports it unchanged
            place = re.split(rb"(?=[/?])", rest, maxsplit=1)
            target = b"/" + b"".join(place[1:]).removeprefix(b"/")
        seen.append((request.method, target, onward, body))
        data = connection.trailing_data[0]
    return seen


def mutated(rng: Random) -> bytes:
    """Some requests in a row, bent."""
    data = bytearray(b"".join(rng.choice(SEEDS) for _ in range(rng.randint(1, 3))))
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.random()
        if kind < 0.5:
            data[at:at] = rng.choice(PIECES)
        elif kind < 0.7:
            del data[at : at + rng.randint(1, 4)]
        elif kind < 0.85:
            data[at : at + 1] = bytes((rng.randrange(256),))
        else:
            stop = min(len(data), at + rng.randint(1, 60))
            data[at:at] = data[at:stop]
    return bytes(data)


def cut(data: bytes, rng: Random) -> list[bytes]:
    """The same bytes in segments."""
    ends = sorted({rng.randrange(len(data) + 1) for _ in range(rng.randint(0, 6))} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(ends)]


def check(rng: Random) -> int:
    """One round; how many requests passed. AssertionError where we read what nobody else would."""
    data = mutated(rng)
    passed = ours([data])
    assert passed == theirs(data)[: len(passed)], data
    assert ours(cut(data, rng)) == passed, data
    return len(passed)


async def rounds(seconds: float, most: int, seed: int) -> tuple[int, int]:
    """Rounds run, and requests that passed."""
    rng, end, ran, passed = Random(seed), time.monotonic() + seconds, 0, 0
    while ran < most and time.monotonic() < end:
        passed += check(rng)
        ran += 1
    return ran, passed


if __name__ == "__main__":
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    ran, passed = uvloop.run(rounds(float(sys.argv[1]), sys.maxsize, seed))
    print(f"seed {seed}: {ran} rounds, {passed} requests passed, none that we read differently from h11")
