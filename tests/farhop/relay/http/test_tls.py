"""TLS on real sockets: a listener's handshakes, and ours towards an upstream, in and out of a tunnel."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from relay_wire import SSE, Line, chunk, plain, post, until

from farhop.balance.machine import Address
from farhop.relay.http import tls
from farhop.relay.http.connection import ClientLimits
from farhop.relay.http.tls import ListenerTls, client_of
from farhop.relay.upstream.pool import UpstreamLimits
from farhop.service.config.certificates import Certificates, Files
from farhop_lab.wan.link import Link
from farhop_lab.world.certs import Authority, Pair


class Pki:
    """An authority, one it does not know, a server and a client."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.stranger = Authority(folder), Authority(folder, "stranger")
        self.server, self.client = self.authority.issue("server"), self.authority.issue("client")
        self.intruder = self.stranger.issue("intruder")

    def listens(self, pair: Pair | None = None, ca_file: str | None = None) -> Certificates:
        pair = pair or self.server
        return Certificates("t", Files(True, pair.cert_file, pair.key_file, ca_file), lambda: datetime.now(UTC))

    def connects(self, pair: Pair | None = None, authority: Authority | None = None) -> ssl.SSLContext:
        ours = Files(False, pair and pair.cert_file, pair and pair.key_file, (authority or self.authority).ca_file)
        return Certificates("t", ours, lambda: datetime.now(UTC)).context()


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


class Door(ListenerTls, frozen=True, kw_only=True):
    """A listener's TLS whose refusals can be read."""

    counts: Counter[str]


def listens(certificates: Certificates, handshake_s: float = 5.0) -> ListenerTls:
    counts: Counter[str] = Counter()
    return Door(certificates.context, handshake_s, lambda reason: counts.update((reason,)), counts=counts)


# -- a listener


async def test_requests_over_tls_are_as_others(stage: Any, pki: Pki) -> None:
    s = await stage(tls=listens(pki.listens()))
    c = await s.client(pki.connects())
    found = c.writer.get_extra_info("ssl_object")
    assert (found.version(), found.selected_alpn_protocol()) == ("TLSv1.3", "http/1.1")
    s.upstream.answer = lambda _m: plain(b"y" * 300_000)
    for size in (2, 100_000):
        await c.send(post(b"x" * size))
        answer = await c.read()
        assert (answer.status, answer.body, answer.whole) == (200, b"y" * 300_000, True)
    assert s.handler.bodies == [b"xx", b"x" * 100_000]


async def test_a_client_that_leaves_takes_its_work_with_it(stage: Any, pki: Pki) -> None:
    s = await stage(tls=listens(pki.listens()))

    async def never(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await line.reader.read()
        s.upstream.gone += 1

    s.upstream.script = never
    for leave in ("close", "abort"):
        c = await s.client(pki.connects())
        await c.send(post())
        await c.reader.readuntil(b"data: 1\n\n")
        await c.close() if leave == "close" else c.abort()
        await until(lambda: s.relay.under_way == 0)
    await until(lambda: s.upstream.gone == 2)
    assert s.tier.concluded_with == [("client_left", 0, None)] * 2


async def test_a_slow_client_gets_the_whole_of_its_last_answer(stage: Any, pki: Pki) -> None:
    """What the system still has to send cannot be seen through TLS: it must not be taken for sent."""
    s = await stage(tls=listens(pki.listens()), client_limits=ClientLimits(linger_s=0.1, send_s=5.0))
    s.upstream.answer = lambda _m: plain(b"y" * 50_000)
    go = threading.Event()

    def slow() -> int:
        with socket.socket() as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ours.connect(("127.0.0.1", s.port))
            with pki.connects().wrap_socket(ours, server_hostname="127.0.0.1") as line:
                assert go.wait(5.0)
                line.sendall(post(headers=b"connection: close\r\n"))
                size, pause = 0, 0.8
                while data := line.recv(1 << 16):
                    time.sleep(pause)
                    size, pause = size + len(data), 0.001
                return size

    reading = asyncio.create_task(asyncio.to_thread(slow))
    await until(lambda: s.listener.connections == 1)
    (connection,) = s.listener.open_connections
    connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    go.set()
    assert await reading > 50_000


async def test_a_client_that_ignores_our_goodbye_is_let_go(stage: Any, pki: Pki) -> None:
    s = await stage(tls=listens(pki.listens()), client_limits=ClientLimits(linger_s=0.1, idle_s=0.2))
    with socket.socket() as ours:
        await asyncio.to_thread(ours.connect, ("127.0.0.1", s.port))
        with await asyncio.to_thread(pki.connects().wrap_socket, ours, server_hostname="127.0.0.1"):
            await until(lambda: s.listener.connections == 1)
            await until(lambda: s.listener.connections == 0)


async def test_an_early_answer_reaches_a_client_that_is_still_sending(stage: Any, pki: Pki) -> None:
    s = await stage(tls=listens(pki.listens()), client_limits=ClientLimits(body_bytes_max=1000))
    c = await s.client(pki.connects())
    c.writer.write(post(b"x" * 4_000_000))
    answer = await c.read()
    assert (answer.status, answer.get("connection")) == (413, "close")


async def test_clients_must_show_a_certificate_where_they_must(stage: Any, pki: Pki) -> None:
    entrance = listens(pki.listens(ca_file=pki.authority.ca_file))
    s = await stage(tls=entrance)
    c = await s.client(pki.connects(pki.client))
    await c.send(post())
    assert (await c.read()).status == 200
    for pair in (None, pki.intruder):
        with contextlib.suppress(OSError):  # TLS 1.3: the client learns that after its own handshake is complete
            assert await (await s.client(pki.connects(pair))).ended() == b""
    await until(lambda: entrance.counts.total() == 2)
    assert entrance.counts == {"no_certificate": 1, "bad_certificate": 1}


async def test_a_failed_tls_handshake_is_refused_and_counted(stage: Any, pki: Pki) -> None:
    entrance = listens(pki.listens())
    s = await stage(tls=entrance)
    spoken = await s.client()
    await spoken.send(post())
    assert await spoken.ended() == b""
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.to_thread(_shaken, s.port, pki.connects(authority=pki.stranger))
    silent = await s.client()
    silent.abort()
    await until(lambda: entrance.counts.total() == 3)
    assert entrance.counts == {"not_tls": 1, "alert": 1, "left": 1}
    assert s.listener.connections == 0


async def test_a_client_that_offers_only_h2_is_left_without_alpn_and_refused_as_no_http_1_1(
    stage: Any, pki: Pki
) -> None:
    s = await stage(tls=listens(pki.listens()))
    context = pki.connects()
    context.set_alpn_protocols(["h2"])
    c = await s.client(context)
    assert c.writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
    await c.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    answer = await c.read()
    assert (answer.status, answer.get("connection")) == (400, "close")


async def test_a_handshake_that_is_never_finished_ends_at_its_limit(stage: Any, pki: Pki) -> None:
    entrance = listens(pki.listens(), handshake_s=0.1)
    s = await stage(tls=entrance)
    silent = await s.client()
    assert await silent.ended() == b""
    assert entrance.counts == {"timeout": 1}


async def test_there_is_a_bound_on_handshakes(stage: Any, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKES_MAX", 1)
    entrance = listens(pki.listens())
    s = await stage(tls=entrance)
    first, second = await s.client(), await s.client()
    assert await second.ended() == b""
    assert entrance.counts == {"too_many": 1}
    first.abort()
    await until(lambda: entrance.counts["left"] == 1)
    assert (await _asked(s, pki.connects())).status == 200


async def test_a_connection_for_which_no_file_descriptor_is_left_is_refused_and_counted(
    stage: Any, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: int) -> int:
        raise OSError(24, "Too many open files")

    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    entrance = listens(pki.listens())
    s = await stage(tls=entrance)
    monkeypatch.setattr("os.dup", none_left)
    assert await (await s.client()).ended() == b""
    assert (entrance.counts, faults) == ({"too_many": 1}, [])


async def test_connections_without_a_handshake_do_not_keep_clients_out(
    stage: Any, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKES_MAX", 3)
    monkeypatch.setattr(tls, "GIVES_WAY_S", 0.05)
    entrance = listens(pki.listens())
    s = await stage(tls=entrance)
    strangers = [await s.client() for _ in range(3)]
    await asyncio.sleep(0.1)
    assert (await _asked(s, pki.connects())).status == 200
    assert await strangers[0].ended() == b""
    assert entrance.counts == {"too_many": 1}
    for one in strangers[1:]:
        one.abort()
    await until(lambda: entrance.counts["left"] == 2)


async def test_handshakes_of_one_address_do_not_keep_other_clients_out(
    stage: Any, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon it begins another in place of each that is closed; its own next ones find no room."""
    monkeypatch.setattr(tls, "HANDSHAKES_MAX", 3)
    monkeypatch.setattr(tls, "GIVES_WAY_S", 60.0)
    entrance = listens(pki.listens())
    s = await stage(tls=entrance)

    async def stranger() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", s.port, local_addr=("127.0.0.2", 0))

    strangers = [await stranger() for _ in range(4)]
    assert await strangers[3][0].read() == b""
    for first in strangers[:2]:
        assert (await _asked(s, pki.connects())).status == 200
        assert await first[0].read() == b""
        strangers.append(await stranger())
    assert entrance.counts == {"too_many": 3}
    for _, writer in strangers:
        writer.close()


async def _asked(s: Any, context: ssl.SSLContext) -> Any:
    c = await s.client(context)
    await c.send(post())
    return await c.read()


async def test_draining_lets_an_answer_and_a_handshake_end(stage: Any, pki: Pki) -> None:
    s = await stage(tls=listens(pki.listens(), handshake_s=1.0), client_limits=ClientLimits(drain_idle_s=0.1))
    go = asyncio.Event()

    async def held(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await go.wait()
        await line.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    s.upstream.script = held
    busy, silent, late = await s.client(pki.connects()), await s.client(), await s.client()
    await busy.send(post())
    await busy.reader.readuntil(b"data: 1\n\n")
    closing = asyncio.create_task(s.listener.close(5.0))
    await until(lambda: s.listener.stopping)
    await late.writer.start_tls(pki.connects(), server_hostname="localhost")
    await late.send(post(path="/here"))
    answer = await late.read()
    assert (answer.status, answer.get("connection")) == (200, "close")
    assert await silent.ended() == b""  # at its limit
    go.set()
    assert (await busy.ended()).endswith(b"0\r\n\r\n")
    await closing


async def test_a_renewed_certificate_is_shown_to_new_connections_while_an_old_stream_goes_on(
    stage: Any, pki: Pki, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    held = pki.listens(authority.issue("server"))
    s = await stage(tls=listens(held))
    go = asyncio.Event()

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await go.wait()
        await line.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    s.upstream.script = script
    context = pki.connects(authority=authority)
    old = await s.client(context)
    await old.send(post())
    await old.reader.readuntil(b"data: 1\n\n")
    authority.issue("server")
    assert held.refresh()
    new = await s.client(context)
    shown = [c.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"] for c in (old, new)]
    assert len(set(shown)) == 2
    go.set()
    assert b"data: 2" in await asyncio.wait_for(old.reader.readuntil(b"0\r\n\r\n"), 60.0)


def _shaken(port: int, context: ssl.SSLContext) -> None:
    """By a client that sends its alerts, unlike uvloop's."""
    with socket.create_connection(("127.0.0.1", port)) as plain_socket:
        context.wrap_socket(plain_socket, server_hostname="127.0.0.1").close()


# -- towards an upstream


async def test_an_upstream_over_tls_and_its_connection_kept(stage: Any, pki: Pki) -> None:
    s = await stage(
        upstream_tls=pki.listens(ca_file=pki.authority.ca_file).context(), believing=lambda: pki.connects(pki.client)
    )
    for _ in range(3):
        assert (await s.ask(post())).status == 200
    assert len(s.upstream.lines) == 1


@pytest.mark.parametrize(
    ("believing", "name", "why"),
    [
        ("stranger", "127.0.0.1", "not trusted: unable to get local issuer certificate"),
        ("authority", "tokyo.example", "not trusted: Hostname mismatch"),
    ],
)
async def test_an_untrusted_upstream_is_a_failed_connect_with_the_reason(
    stage: Any, pki: Pki, believing: str, name: str, why: str
) -> None:
    context = pki.connects(authority=getattr(pki, believing))
    s = await stage(upstream_tls=pki.listens().context(), believing=lambda: context)
    s.flow.addresses = [Address("127.0.0.1", s.upstream.address.port, tls=name)]
    answer = await s.ask(post())
    assert (answer.status, s.tier.attempts) == (502, [(1, "connect_failed")])
    assert len(s.troubles) == 1
    assert why in s.troubles[0]
    assert s.upstream.asked == []


async def test_an_upstream_that_does_not_speak_tls_is_a_failed_connect(stage: Any, pki: Pki) -> None:
    s = await stage(believing=lambda: pki.connects())
    s.flow.addresses = [Address("127.0.0.1", s.upstream.address.port, tls="127.0.0.1")]
    s.upstream.script = lambda line: line.send(b"220 smtp.example ESMTP\r\n")
    assert (await s.ask(post())).status == 502
    assert s.tier.attempts == [(1, "connect_failed")]
    assert s.troubles == ["wrong version number"]


async def test_an_upstream_that_never_shakes_hands_is_a_connect_timeout(stage: Any, pki: Pki) -> None:
    s = await stage(believing=lambda: pki.connects(), upstream_limits=UpstreamLimits(connect_s=0.1))
    s.flow.addresses = [Address("127.0.0.1", s.upstream.address.port, tls="127.0.0.1")]
    s.upstream.script = lambda line: line.reader.readuntil(b"never")
    assert (await s.ask(post())).status == 504
    assert s.tier.attempts == [(1, "connect_timeout")]


@pytest.mark.parametrize("says_goodbye", [True, False])
async def test_a_tcp_close_without_close_notify_does_not_end_a_body(stage: Any, pki: Pki, says_goodbye: bool) -> None:
    s = await stage(upstream_tls=pki.listens().context(), believing=lambda: pki.connects())

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(b"HTTP/1.1 200 OK\r\n\r\nhalf of")
        if says_goodbye:
            await line.close()
            return
        await asyncio.sleep(0.05)
        line.abort()  # the connection ends without a TLS alert

    s.upstream.script = script
    answer = await s.ask(post())
    assert answer.body == b"half of"
    assert answer.whole is says_goodbye
    assert s.tier.attempts == [(1, "served" if says_goodbye else "upstream_died_mid_stream")]


async def test_tls_runs_inside_a_tunnel(stage: Any, pki: Pki) -> None:
    s = await stage(upstream_tls=pki.listens().context(), believing=lambda: pki.connects())
    async with Link("a-b", 5.0, rng=random.Random(1)) as link:
        via = Address("127.0.0.1", link.port)
        there = s.upstream.address
        s.flow.addresses = [Address(there.host, there.port, via, "127.0.0.1")]
        for _ in range(2):
            assert (await s.ask(post(b"x" * 100_000))).status == 200
        assert len(s.upstream.lines) == 1
        s.flow.addresses = [Address(there.host, there.port, via, "tokyo.example")]
        assert (await s.ask(post())).status == 502
        assert "Hostname mismatch" in s.troubles[0]


def test_handshake_failure_reasons_are_of_low_cardinality() -> None:
    for error in (TimeoutError(), ConnectionResetError(), ConnectionAbortedError(), ssl.SSLError(1, "odd"), OSError()):
        assert tls.reason_of(error) in tls.REASONS
    assert tls.text_of(OSError()) == "failed"


def _hasty(answer: bytes, context: ssl.SSLContext, server: socket.socket) -> None:
    """Gives each connection an answer, says goodbye, and waits for none: as Go and nginx do."""
    while True:
        try:
            raw, _ = server.accept()
        except OSError:
            return
        with raw, context.wrap_socket(raw, server_side=True) as line:
            while b"\r\n\r\n" not in line.recv(65_536):
                pass
            line.sendall(answer)
            line.setblocking(False)
            with contextlib.suppress(OSError):
                line.unwrap()


@pytest.mark.parametrize("events", [1_000, 5_000, 20_000])
@pytest.mark.parametrize("counted", [True, False])
async def test_bytes_before_the_end_of_a_tls_connection_are_read_first(
    stage: Any, pki: Pki, events: int, counted: bool
) -> None:
    """While we do not read, uvloop drops what is there once the other side has closed."""
    s = await stage(believing=lambda: pki.connects())
    body = b"".join(b"data: %040d\n\n" % number for number in range(events))
    length = b"content-length: %d\r\n" % len(body) if counted else b""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n" + length + b"\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        s.flow.addresses = [Address("127.0.0.1", server.getsockname()[1], tls="127.0.0.1")]
        thread = threading.Thread(target=_hasty, args=(head + body, pki.listens().context(), server))
        thread.start()
        try:
            for _ in range(5):
                answer = await s.ask(post())
                assert (answer.status, len(answer.body), answer.whole) == (200, len(body), True)
                assert answer.body == body
        finally:
            server.shutdown(socket.SHUT_RDWR)
            await asyncio.to_thread(thread.join)


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (("10.0.0.1", 4), "10.0.0.1"),
        (("::ffff:10.0.0.1", 4, 0, 0), "10.0.0.1"),
        (("2001:db8:0:1:2:3:4:5", 4, 0, 0), "2001:0db8:0000:0001"),
        (("fe80::1%eth0", 4, 0, 2), "fe80:0000:0000:0000"),
        ("", ""),
        (None, ""),
    ],
)
def test_clients_are_counted_by_ipv4_address_or_ipv6_64(peer: object, client: str) -> None:
    assert client_of(peer) == client
