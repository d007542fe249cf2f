from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from farhop_lab.world import ports


def test_ports_are_free_different_and_never_lent_to_outgoing_connections() -> None:
    chosen = ports.free_ports(20)
    assert len(set(chosen)) == 20
    assert all(port in ports.PORTS for port in chosen)
    for port in chosen:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_a_free_port_is_not_given_twice() -> None:
    given = [port for _ in range(50) for port in ports.free_ports(20)]
    assert len(set(given)) == len(given)


TAKES = """
import sys
from farhop_lab.world import ports
ports._turns._at = int(sys.argv[1])
print(*ports.free_ports(150), flush=True)
sys.stdin.read()
"""
FORKS = """
import os
from farhop_lab.world import ports
print(*ports.free_ports(5), flush=True)
child = os.fork()
if child:
    os.waitpid(child, 0)
print(*ports.free_ports(50), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="blocks are claimed on Linux alone")
def test_no_two_processes_are_given_one_before_either_listens() -> None:
    """Not even where both begin at the same block: what was given to one, and is not listened on, was free to all."""
    takes = [
        subprocess.Popen([sys.executable, "-c", TAKES, "7"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    given: list[bytes] = []
    for one in takes:
        assert one.stdout is not None
        given += one.stdout.readline().split()
    for one in takes:
        one.communicate()
    assert len(given) == 450
    assert len(set(given)) == len(given)


@pytest.mark.skipif(sys.platform != "linux", reason="blocks are claimed on Linux alone")
def test_a_fork_is_given_none_of_its_parents() -> None:
    asked = [sys.executable, "-W", "default", "-c", FORKS]
    done = subprocess.run(asked, capture_output=True, check=True, timeout=60.0)
    given = done.stdout.split()
    assert len(given) == 105
    assert len(set(given)) == len(given)
    assert done.stderr == b""  # processes that claim blocks are closed at the end: otherwise each causes a warning


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        (port,) = ports.free_ports(1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
        with pytest.raises(ports.PortsError, match="no 1 free ports"):
            ports.free_ports(1)


def test_a_port_whose_connections_are_not_quite_over_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = ports.free_ports(1)
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as client:
        served, _ = server.accept()
        served.close()  # the side that closes first keeps the port in TIME_WAIT
        assert client.recv(1) == b""
    monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
    with pytest.raises(ports.PortsError, match="no 1 free ports"):
        ports.free_ports(1)
