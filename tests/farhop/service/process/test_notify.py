"""Notifications to a service manager, over a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhop.service.process.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(60.0)
        yield listening


def sent(manager: socket.socket) -> str:
    return manager.recv(4096).decode()


async def test_without_a_notify_socket_nothing_is_sent() -> None:
    notifier = Notifier({})
    notifier.starting("waiting")
    notifier.ready(asyncio.get_running_loop(), "here")
    notifier.stopping()
    notifier.close()


async def test_ready_and_stopping_are_sent(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.ready(asyncio.get_running_loop(), "region paris: clients on 0.0.0.0:443")
    assert sent(manager) == "READY=1\nSTATUS=region paris: clients on 0.0.0.0:443"
    notifier.stopping()
    assert sent(manager) == "STOPPING=1\nSTATUS=draining"
    notifier.close()


async def test_a_start_that_takes_long_is_given_time(manager: socket.socket) -> None:
    """Else systemd would kill at TimeoutStartSec who waits for etcd."""
    Notifier({"NOTIFY_SOCKET": manager.getsockname()}).starting("waiting for etcd")
    assert sent(manager) == "STATUS=waiting for etcd\nEXTEND_TIMEOUT_USEC=60000000"


async def test_the_watchdog_is_fed_from_the_loop_until_the_end(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environment)
    notifier.ready(asyncio.get_running_loop(), "here")
    manager.setblocking(False)
    found = [sent(manager), sent(manager)]
    while len(found) < 5:
        await asyncio.sleep(0.01)
        try:
            found.append(sent(manager))
        except BlockingIOError:
            continue
    assert found == ["READY=1\nSTATUS=here", *["WATCHDOG=1"] * 4]
    notifier.close()
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError):
        for _ in range(10):
            sent(manager)


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": ""}],
)
async def test_a_watchdog_setting_that_is_invalid_or_for_another_process_is_ignored(
    manager: socket.socket, environment: dict[str, str]
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), **environment})
    notifier.ready(asyncio.get_running_loop(), "here")
    assert sent(manager).startswith("READY=1")
    await asyncio.sleep(0.02)
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        sent(manager)


async def test_a_manager_that_is_gone_or_full_ends_nothing(tmp_path: Path, manager: socket.socket) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready(asyncio.get_running_loop(), "here")
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    for _ in range(2000):
        notifier.stopping()  # far more than a socket buffers


async def test_an_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0farhop-test-{os.getpid()}")
        listening.settimeout(60.0)
        Notifier({"NOTIFY_SOCKET": f"@farhop-test-{os.getpid()}"}).stopping()
        assert sent(listening).startswith("STOPPING=1")
