"""A small GET or POST on one of a Pool's kept connections, its answer read whole: probes and scrapes of upstreams.

A whole HTTP client costs several times as much a request, and replicas are asked thousands of times a second. Never
follows a redirect, never retries, never keeps more of an answer than it was told to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome

if TYPE_CHECKING:
    from farhop.balance.machine import Address
    from farhop.balance.outcome import Outcome
    from farhop.relay.head import AnswerHead
    from farhop.relay.outbound import Outbound, Pool


class FetchError(Exception):
    """Nothing that could be read came; `reason` is a fixed word: unreachable, timeout, cut or size."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Fetched(msgspec.Struct, frozen=True):
    """An answer. `content_type` is in lower case, without parameters, b"" if it was not told."""

    status: int
    content_type: bytes
    body: bytes


class _Ask:
    """An outbound.Attempt that collects the answer."""

    __slots__ = ("_connection", "_head", "_line", "_most", "_parts", "_rest", "_size", "done")

    def __init__(self, line: str, rest: bytes, bytes_max: int) -> None:
        self._line, self._rest, self._most = line, rest, bytes_max
        self._connection: Outbound | None = None
        self._head: AnswerHead | None = None
        self._parts: list[bytes] = []
        self._size = 0
        # A failure is a result, too: an exception that comes just as nobody waits any more would be logged as lost.
        self.done: asyncio.Future[Fetched | FetchError] = asyncio.get_running_loop().create_future()

    def connected(self, connection: Outbound) -> None:
        self._connection = connection
        if self.done.done():  # nobody waits any more
            connection.abort()
            return
        connection.write(
            b"%b HTTP/1.1\r\nhost: %b\r\naccept: text/plain, */*\r\naccept-encoding: identity\r\n"
            b"user-agent: farhop\r\n%b" % (self._line.encode(), connection.host, self._rest)
        )

    def answered(self, answer: AnswerHead) -> None:
        self._head = answer

    def received(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._most:
            self.abort()
            self._fail("size")
        else:
            self._parts.append(data)

    def completed(self) -> None:
        assert self._head is not None
        if not self.done.done():
            told = self._head.known.get(b"content-type", b"").partition(b";")[0].strip().lower()
            self.done.set_result(Fetched(self._head.status, told, b"".join(self._parts)))

    def lost(self, reason: Outcome) -> None:
        unheard = reason in (outcome.CONNECT_FAILED, outcome.CONNECT_TIMEOUT)
        self._fail("unreachable" if unheard else "cut")

    def abort(self) -> None:
        if self._connection is not None and self._connection.attempt is self:
            self._connection.abort()

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_result(FetchError(reason))


async def get(
    pool: Pool, address: Address, path: str, timeout_s: float, bytes_max: int, bearer: str | None = None
) -> Fetched:
    """The whole answer, whatever its status; with a key where one is wanted. Raises FetchError."""
    return await _ask(pool, address, _Ask(f"GET {path}", _key(bearer) + b"\r\n", bytes_max), timeout_s)


async def post(
    pool: Pool, address: Address, path: str, body: bytes, timeout_s: float, bytes_max: int, bearer: str | None = None
) -> Fetched:
    """The same with a JSON body. Raises FetchError."""
    rest = b"content-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b" % (len(body), _key(bearer), body)
    return await _ask(pool, address, _Ask(f"POST {path}", rest, bytes_max), timeout_s)


def _key(bearer: str | None) -> bytes:
    return f"authorization: Bearer {bearer}\r\n".encode() if bearer else b""


async def _ask(pool: Pool, address: Address, attempt: _Ask, timeout_s: float) -> Fetched:
    try:
        async with asyncio.timeout(timeout_s):
            pool.lend(address, attempt)
            told = await attempt.done
    except TimeoutError:
        raise FetchError("timeout") from None
    finally:
        attempt.done.cancel()
        attempt.abort()
    if isinstance(told, FetchError):
        raise told
    return told
