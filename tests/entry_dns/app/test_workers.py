from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from entry_dns.app.config import DnsListen
from entry_dns.app.counters import Counters
from entry_dns.app.worker import Settings
from entry_dns.app.workers import Workers, bind
from farhop.relay.http.listener import PortTakenError


def test_every_worker_has_a_socket_of_its_own_on_one_port() -> None:
    udp, tcp, port = bind(DnsListen(port=0, workers=3))
    assert {one.getsockname()[1] for one in (*udp, *tcp)} == {port}
    assert (len(udp), len(tcp)) == (3, 1)
    for one in (*udp, *tcp):
        one.close()


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(
            PortTakenError, match=rf"listen: cannot bind 127.0.0.1 port {port}: .*; choose another port"
        ):
            bind(DnsListen(port=port))


def test_an_address_that_this_host_has_not_is_one_line() -> None:
    with pytest.raises(
        PortTakenError, match=r"cannot bind 192.0.2.1 port 53: .*; this host has no such address: give it"
    ):
        bind(DnsListen(hosts=["192.0.2.1"]))


async def test_a_worker_that_ends_is_started_again(tmp_path) -> None:
    udp, tcp, _ = bind(DnsListen(port=0))
    Counters.make(tmp_path / "counters", 1)
    workers = Workers(udp, tmp_path / "view", tmp_path / "counters", Settings())
    workers.open()
    async with asyncio.timeout(60):
        while not workers.alive:
            await asyncio.sleep(0.02)
        first = workers.processes[0]
        with contextlib.suppress(ProcessLookupError):
            first.kill()
        while workers.processes[0] is first or not workers.alive:
            await asyncio.sleep(0.02)
    assert workers.restarts == 1
    await workers.close()
    assert workers.alive == 0
    for one in tcp:
        one.close()
