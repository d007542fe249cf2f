"""The processes that answer by UDP: started with their sockets, started again if one ends, ended with us.

Never answers a question itself, and never leaves a worker behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from entry_dns.app.worker import READY, Settings, Task
from farhop.relay.http.listener import PortTakenError
from farhop.service.process.tasks import Tasks

if TYPE_CHECKING:
    from entry_dns.app.config import DnsListen

_AGAIN_S = 0.5
_READY_S = 60.0  # a busy machine starts a process in seconds
_CHOICES = 16
_REMEDIES = {
    errno.EADDRNOTAVAIL: "this host has no such address: give it to an interface, or name one that it has",
    errno.EACCES: "choose a port from 1024 on, or give the right to use it (CAP_NET_BIND_SERVICE)",
}
_BUFFER_BYTES = 4 << 20  # a burst of questions while a new view is mapped


def bind(listen: DnsListen) -> tuple[list[socket.socket], list[socket.socket], int]:
    """Sockets for UDP, one for each worker of each address, for TCP one for each address, and the port.

    Raises PortTakenError.
    """
    for attempt in range(_CHOICES):
        try:
            return _all(listen)
        except OSError as error:
            # Port 0: the port that the system chose for TCP may be in use by UDP.
            if listen.port or error.errno != errno.EADDRINUSE or attempt == _CHOICES - 1:
                why, address = error.strerror or str(error), f"{', '.join(listen.hosts)} port {listen.port}"
                remedy = _REMEDIES.get(error.errno or 0, "choose another port")
                raise PortTakenError(f"listen: cannot bind {address}: {why}; {remedy}") from None
    raise AssertionError("every attempt returns or raises")


def _all(listen: DnsListen) -> tuple[list[socket.socket], list[socket.socket], int]:
    """Every socket. Raises OSError, with none left open."""
    udp: list[socket.socket] = []
    tcp: list[socket.socket] = []
    port = listen.port
    try:
        for host in listen.hosts:
            tcp.append(_bound(host, port, socket.SOCK_STREAM))
            port = tcp[-1].getsockname()[1]
            udp += [_bound(host, port, socket.SOCK_DGRAM) for _ in range(listen.workers)]
    except OSError:
        for one in (*udp, *tcp):
            one.close()
        raise
    return udp, tcp, port


def _bound(host: str, port: int, kind: socket.SocketKind) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if kind is socket.SOCK_DGRAM:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    if family is socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


class WorkerError(Exception):
    """A worker did not start."""


class Workers:
    """The worker processes, one for each socket. `counters`: the file with one row for each of them."""

    def __init__(self, sockets: list[socket.socket], view: Path, counters: Path, settings: Settings) -> None:
        self._sockets = sockets
        self._tasks = [Task(sock.fileno(), str(view), str(counters), row, settings) for row, sock in enumerate(sockets)]
        self._running = Tasks()
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.restarts = 0

    def open(self) -> None:
        """Start all workers; each one is started again when it ends."""
        for task in self._tasks:
            self._running.start(self._keep(task), f"run dns worker {task.row}")

    async def renew(self, settings: Settings) -> None:
        """Use new settings. Each worker is replaced without a pause: a new process starts on the same socket, and once
        it answers, the old one ends after its current query. Raises WorkerError if a new worker does not start.
        """
        self._tasks = [msgspec.structs.replace(task, settings=settings) for task in self._tasks]
        for task in self._tasks:
            old = self.processes.get(task.row)
            if old is None or old.returncode is not None:
                continue  # it is being started again, from the new task
            new = await self._spawn(task)
            try:
                async with asyncio.timeout(_READY_S):
                    assert new.stdout is not None
                    ready = await new.stdout.readline() == READY
            except TimeoutError:
                ready = False
            if ready and self.processes.get(task.row) is old:
                self.processes[task.row] = new
                new, old = old, new
            # Otherwise the old one continues with the old settings until it ends, or another was started meanwhile.
            with contextlib.suppress(ProcessLookupError):
                new.terminate()
            await new.wait()
            if not ready:
                raise WorkerError(f"worker {task.row} did not start with the new settings within {_READY_S:g} s")

    @property
    def alive(self) -> int:
        """The number of running workers."""
        return sum(one.returncode is None for one in self.processes.values())

    async def close(self) -> None:
        """Stop all workers and close their sockets."""
        await self._running.close()
        for process in self.processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()
        for sock in self._sockets:
            sock.close()

    async def _keep(self, task: Task) -> None:
        while True:
            process = self.processes[task.row] = await self._spawn(self._tasks[task.row])
            while True:
                await process.wait()
                if self.processes[task.row] is process:
                    break
                process = self.processes[task.row]  # it was replaced
            self.restarts += 1
            await asyncio.sleep(_AGAIN_S)

    async def _spawn(self, task: Task) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "entry_dns.app.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=(task.socket,),
        )  # fmt: skip
        assert process.stdin is not None  # a pipe was asked for
        process.stdin.write(msgspec.msgpack.encode(task))
        process.stdin.close()
        return process
