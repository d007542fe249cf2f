"""Names of several addresses, one of which swallows packets or refuses, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from farhop.balance.machine import Address
from farhop.balance.outcome import Outcome
from farhop.relay.http.head import AnswerHead
from farhop.relay.upstream.dial import dial
from farhop.relay.upstream.pool import Pool, UpstreamConnection, UpstreamLimits
from farhop_lab.world.ports import free_ports

NAME = "engine.test"


@contextmanager
def swallowing(host: str, port: int) -> Iterator[None]:
    """An address whose packets are dropped: the kernel does so once as many as may be wait to be accepted."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        full.bind((host, port))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        yield


def resolving(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """The name has these addresses, in this order."""

    async def found(_loop: Any, host: str, port: int, **_more: Any) -> list[Any]:
        names = hosts if host == NAME else (host,)  # uvloop itself asks for what it connects a socket to
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in names]

    monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", found)


class Counted(asyncio.Protocol):
    """How many connections are open."""

    open: set[Counted]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.discard(self)


async def closed(transport: asyncio.Transport, counted: type[Counted]) -> None:
    transport.abort()
    while counted.open:
        await asyncio.sleep(0.001)


@pytest.fixture
def counted() -> type[Counted]:
    return type("Own", (Counted,), {"open": set()})


def listening(host: str, port: int = 0) -> socket.socket:
    return socket.create_server((host, port))


@pytest.mark.parametrize("order", [("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "127.0.0.2"), ("127.0.0.3", "127.0.0.1")])
async def test_an_address_that_answers_serves_whatever_the_others_do(
    monkeypatch: pytest.MonkeyPatch, counted: type[Counted], order: tuple[str, ...]
) -> None:
    server = listening("127.0.0.1")
    port = server.getsockname()[1]
    resolving(monkeypatch, *order)
    with swallowing("127.0.0.2", port):  # at 127.0.0.3 nothing listens
        transport, protocol = await asyncio.wait_for(dial(counted, NAME, port), 60.0)
        assert transport.get_extra_info("peername")[0] == "127.0.0.1"
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert counted.open == {protocol}
    await closed(transport, counted)
    server.close()


async def test_where_none_answers_the_first_failure_is_said(
    monkeypatch: pytest.MonkeyPatch, counted: type[Counted]
) -> None:
    (port,) = free_ports(1)
    resolving(monkeypatch, "127.0.0.3", "127.0.0.4")
    with pytest.raises(ConnectionRefusedError):
        await dial(counted, NAME, port)
    with swallowing("127.0.0.2", port):
        resolving(monkeypatch, "127.0.0.2", "127.0.0.3")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await dial(counted, NAME, port)
    assert not counted.open


async def test_of_two_that_answer_at_once_one_is_kept(monkeypatch: pytest.MonkeyPatch, counted: type[Counted]) -> None:
    monkeypatch.setattr("farhop.relay.upstream.dial._STAGGER_S", 0.0)
    one = listening("127.0.0.1")
    port = one.getsockname()[1]
    two = listening("127.0.0.2", port)
    resolving(monkeypatch, "127.0.0.2", "127.0.0.1")
    for _ in range(20):
        transport, protocol = await dial(counted, NAME, port)
        assert counted.open == {protocol}
        await closed(transport, counted)
    one.close()
    two.close()


class Borrower:
    """Gets a connection, or why there is none."""

    streams = False

    def __init__(self) -> None:
        self.got: asyncio.Future[UpstreamConnection | Outcome] = asyncio.get_running_loop().create_future()

    def connected(self, connection: UpstreamConnection) -> None:
        self.got.set_result(connection)

    def lost(self, reason: Outcome) -> None:
        self.got.set_result(reason)

    def answered(self, answer: AnswerHead) -> None: ...
    def received(self, data: bytes) -> None: ...
    def completed(self) -> None: ...
    def broke(self, error: Exception) -> None: ...


async def test_requests_to_a_name_reach_the_address_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    server = listening("127.0.0.1")
    port = server.getsockname()[1]
    resolving(monkeypatch, "127.0.0.2", "127.0.0.1")
    pool, borrower = Pool(UpstreamLimits(connect_s=60.0)), Borrower()
    with swallowing("127.0.0.2", port):
        pool.lend(Address(NAME, port), borrower)
        got = await borrower.got
    assert isinstance(got, UpstreamConnection)
    await pool.close()
    assert pool.connections == 0
    assert not pool.in_use(Address(NAME, port), 60.0)
    server.close()
