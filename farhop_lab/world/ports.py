"""Ports for the lab's own servers. Never one that the system may assign to an outgoing connection in the meantime.

Nor one that was handed out before and is not listened on yet, which random choice would sometimes take. So each process
goes in order through blocks of ports that no other process uses at that time. A block is claimed by a name that the
system gives to one process alone, and frees when that ends, however it ends (an abstract socket; Linux only: elsewhere
each process just begins at another block).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PORTS = range(12_000, 32_000)  # below Linux's ip_local_port_range, 32768 and up
_BLOCK = 100
_BLOCKS_KEPT = 10  # a thousand ports later, a port is either listened on or will never be
_STRIDE = 7_919  # a prime: between two processes that start one after the other
_lock = threading.Lock()


class PortsError(Exception):
    """No port is left; the text names the range."""


class _Turns:
    """The ports of one process, and the blocks that it claims."""

    def __init__(self) -> None:
        self._at = os.getpid() * _STRIDE
        self._kept: dict[int, socket.socket] = {}  # the latest last
        self._rest: Iterator[int] = iter(())

    def next(self) -> int | None:
        """The next one; None: every block is another process's."""
        port = next(self._rest, None)
        if port is None and self._claim():
            port = next(self._rest)
        return port

    def close(self) -> None:
        """Free the blocks."""
        while self._kept:
            self._kept.popitem()[1].close()

    def _claim(self) -> bool:
        blocks = range(PORTS.start // _BLOCK, -(-PORTS.stop // _BLOCK))
        for _ in blocks:
            self._at += 1
            block = blocks[self._at % len(blocks)]
            claim = self._kept.pop(block, None) or _claim(block)
            if claim is not None:
                self._kept[block] = claim
                if len(self._kept) > _BLOCKS_KEPT:
                    self._kept.pop(next(iter(self._kept))).close()
                self._rest = iter(range(block * _BLOCK, (block + 1) * _BLOCK))
                return True
        return False


def _claim(block: int) -> socket.socket | None:
    """Claim a block until it is closed; None: another process has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if sys.platform == "linux":
            claim.bind(f"\0farhop-lab-ports-{block}")
    except OSError:
        claim.close()
        return None
    return claim


_turns = _Turns()


def _leave() -> None:
    """In a fork: the parent's blocks are not its own. At once: later its descriptors may be others."""
    global _turns, _lock
    _turns.close()
    _turns, _lock = _Turns(), threading.Lock()


os.register_at_fork(after_in_child=_leave)
atexit.register(lambda: _turns.close())


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports without a listener now or just before (TIME_WAIT), all different.

    They lie below those that a system assigns to outgoing connections, which would take one before its balancer does.
    """
    ports: list[int] = []
    with _lock:
        for _ in range(len(PORTS) + _BLOCK):
            port = _turns.next()
            if port is None:
                break
            if port not in PORTS:
                continue
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind((host, port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise PortsError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")
