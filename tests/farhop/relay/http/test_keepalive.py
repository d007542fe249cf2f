"""What the kernel is told, and that sockets accepted later inherit it."""

from __future__ import annotations

import socket

import pytest

from farhop.relay.http.keepalive import BETWEEN_S, IDLE_S, keep_alive

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
OPTIONS = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT")


def told(sock: socket.socket) -> list[int]:
    alive = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return [alive, *(sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in OPTIONS)]


def test_a_connection_is_asked_after_and_ended_if_nothing_is_acknowledged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        keep_alive(server, 7.5)
        with socket.create_connection(server.getsockname()) as sock:
            keep_alive(sock, 1e9)
            assert told(sock) == [1, IDLE_S, BETWEEN_S, 2**31 - 1]
            accepted, _ = server.accept()
            with accepted:
                assert told(accepted) == [1, IDLE_S, BETWEEN_S, 7500]


def test_a_socket_that_is_closed_already_is_left_alone() -> None:
    sock = socket.socket()
    sock.close()
    keep_alive(sock, 1.0)
