"""A request on one of a Pool's kept connections, with its answer read as a whole: for probes, scrapes, tokenizers,
prefills.

A whole HTTP client costs several times as much a request, and replicas are asked thousands of times a second. Never
follows a redirect, never retries, never keeps more of an answer than it may.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from farhop.balance.machine import Address
    from farhop.balance.outcome import Outcome
    from farhop.relay.http.head import AnswerHead
    from farhop.relay.upstream.pool import Pool, UpstreamConnection


class FetchError(Exception):
    """Nothing that could be read came; `reason` is a fixed word: unreachable, timeout, cut, size or unreadable.

    `outcome` says it as an attempt would.
    """

    def __init__(self, reason: str, outcome: Outcome) -> None:
        super().__init__(reason)
        self.reason, self.outcome = reason, outcome


class Fetched(msgspec.Struct, frozen=True):
    """An answer. `content_type` is in lower case, without parameters, b"" if there is none."""

    status: int
    content_type: bytes
    body: bytes


class Collector:
    """A pool.UpstreamHandler that collects the answer. `write` is given the connection, and writes the request; `done`
    gets the result once, unless it was aborted before."""

    __slots__ = ("_body", "_connection", "_done", "_head", "_most", "_over", "_write")

    streams = False

    def __init__(
        self, write: Callable[[UpstreamConnection], None], done: Callable[[Fetched | FetchError], None], bytes_max: int
    ) -> None:
        self._write, self._done, self._most = write, done, bytes_max
        self._connection: UpstreamConnection | None = None
        self._head: AnswerHead | None = None
        self._body = bytearray()
        self._over = False

    # -- pool.UpstreamHandler

    def connected(self, connection: UpstreamConnection) -> None:
        """The connection is open: send the request, unless it was cancelled meanwhile."""
        self._connection = connection
        if self._over:
            connection.abort()
        else:
            self._write(connection)

    def answered(self, answer: AnswerHead) -> None:
        """Keep the answer's head."""
        self._head = answer

    def received(self, data: bytes) -> None:
        """Keep a piece of the body, within the bound."""
        if len(self._body) + len(data) <= self._most:
            self._body += data
        elif not self._over:
            self.abort()
            self._done(FetchError("size", outcome.BAD_FRAMING))

    def completed(self) -> None:
        """The answer is complete."""
        assert self._head is not None
        content_type = self._head.known.get(b"content-type", b"").partition(b";")[0].strip().lower()
        self._finish(Fetched(self._head.status, content_type, bytes(self._body)))

    def lost(self, reason: Outcome) -> None:
        """The connection broke, or could not be opened."""
        unreached = reason in (outcome.CONNECT_FAILED, outcome.CONNECT_TIMEOUT)
        self._finish(FetchError("unreachable" if unreached else "cut", reason))

    def broke(self, _error: Exception) -> None:
        """See pool.UpstreamHandler."""
        self._finish(FetchError("unreadable", outcome.INTERNAL))

    # -- for the caller

    @property
    def held_bytes(self) -> int:
        """Bytes of the answer that are held in memory now."""
        return len(self._body)

    @property
    def connection(self) -> UpstreamConnection | None:
        """Where the request was written, None while there is no connection."""
        return self._connection

    def abort(self) -> None:
        """Stop at once, without a callback."""
        self._over = True
        if self._connection is not None and self._connection.attempt is self:
            self._connection.abort()

    def _finish(self, result: Fetched | FetchError) -> None:
        if not self._over:
            self._over = True
            self._done(result)


def get(
    pool: Pool, address: Address, path: str, timeout_s: float, bytes_max: int, bearer: str | None = None
) -> Coroutine[None, None, Fetched]:
    """The whole answer, whatever its status; with a key where one is wanted. Raises FetchError."""
    return _ask(pool, address, f"GET {path}", _key(bearer) + b"\r\n", timeout_s, bytes_max)


def post(
    pool: Pool, address: Address, path: str, body: bytes, timeout_s: float, bytes_max: int, bearer: str | None = None
) -> Coroutine[None, None, Fetched]:
    """As `get`, with a JSON body. Raises FetchError."""
    tail = b"content-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b" % (
        len(body),
        _key(bearer),
        body,
    )
    return _ask(pool, address, f"POST {path}", tail, timeout_s, bytes_max)


def _key(bearer: str | None) -> bytes:
    return f"authorization: Bearer {bearer}\r\n".encode() if bearer else b""


async def _ask(pool: Pool, address: Address, line: str, tail: bytes, timeout_s: float, bytes_max: int) -> Fetched:
    def write(connection: UpstreamConnection) -> None:
        connection.write(
            b"%b HTTP/1.1\r\nhost: %b\r\naccept: text/plain, */*\r\naccept-encoding: identity\r\n"
            b"user-agent: farhop\r\n%b" % (line.encode(), connection.host, tail)
        )

    ends_at = asyncio.get_running_loop().time() + timeout_s
    result = await _once(pool.lend, address, write, ends_at, bytes_max)
    if isinstance(result, FetchError) and result.outcome is outcome.KEPT_CLOSED:
        # Probes and the like change nothing, and a connection closed at rest says nothing about which side closed it.
        result = await _once(pool.lend_fresh, address, write, ends_at, bytes_max)
    if isinstance(result, FetchError):
        try:
            raise result
        finally:
            del result  # its traceback holds this frame: a cycle for each failed probe
    return result


async def _once(
    lend: Callable[[Address, Collector], None],
    address: Address,
    write: Callable[[UpstreamConnection], None],
    ends_at: float,
    bytes_max: int,
) -> Fetched | FetchError:
    # A failure is a result, too: an exception set after the caller stopped waiting would be logged as lost.
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Fetched | FetchError] = loop.create_future()

    def finish(result: Fetched | FetchError) -> None:
        if not done.done():  # otherwise its waiter was just cancelled
            done.set_result(result)

    attempt = Collector(write, finish, bytes_max)
    # asyncio.timeout does more, at several times the cost.
    timer = loop.call_at(ends_at, lambda: finish(FetchError("timeout", outcome.FIRST_BYTE_TIMEOUT)))
    try:
        lend(address, attempt)
        return await done
    finally:
        timer.cancel()
        attempt.abort()
