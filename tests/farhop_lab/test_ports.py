from __future__ import annotations

import socket

import pytest

from farhop_lab import ports


def test_ports_are_free_different_and_never_lent_to_outgoing_connections() -> None:
    chosen = ports.free_ports(20)
    assert len(set(chosen)) == 20
    assert all(port in ports.PORTS for port in chosen)
    for port in chosen:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        (port,) = ports.free_ports(1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
        with pytest.raises(ports.PortsError, match="no 1 free ports"):
            ports.free_ports(1)
