"""Ports for the lab's own servers. Never one that the system may lend to an outgoing connection in the meantime.

Nor one that was given away before and is not listened on yet: whoever chooses by chance takes such a one, now and then.
So a process goes through them all in order before it gives one twice, and each process begins elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
from itertools import count as count_from

PORTS = range(12_000, 32_000)  # below Linux's ip_local_port_range, 32768 and up
_STRIDE = 7_919  # a prime: between two processes that start one after the other
_turns = count_from(os.getpid() * _STRIDE)


class PortsError(Exception):
    """No port is left; the text names the range."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on nor just did (TIME_WAIT), all different.

    They lie below those that a system lends to outgoing connections, which would take one before its balancer does.
    """
    ports: list[int] = []
    for _ in PORTS:
        port = PORTS[next(_turns) % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise PortsError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")
