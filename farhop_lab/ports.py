"""Ports for the lab's own servers. Never one that the system may lend to an outgoing connection in the meantime."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(12_000, 32_000)  # below Linux's ip_local_port_range, 32768 and up


class PortsError(Exception):
    """No port is left; the text names the range."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on nor just did (TIME_WAIT), all different.

    They lie below those that a system lends to outgoing connections, which would take one before its balancer does.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise PortsError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")
