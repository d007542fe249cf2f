"""TCP's own signs of life: a path that forgets quiet connections keeps ours, and one that swallows packets is noticed.

Firewalls and address translators forget a connection that nothing crosses for some minutes, and drop what comes later
without a word. Ours are quiet while an answer in one piece is generated, and between two requests.

Never sends or closes anything itself: the kernel does.
"""

from __future__ import annotations

import contextlib
import socket

IDLE_S, BETWEEN_S = 15, 5  # without a packet, until the kernel asks whether the other end is there, and asks again
_MS_MAX = 0x7FFFFFFF


def keep_alive(sock: socket.socket, unacknowledged_s: float) -> None:
    """Have the kernel ask, and end the connection whose other end acknowledges nothing for `unacknowledged_s`, neither
    data nor that; a socket that listens passes this on to those that it accepts from then on. A process that is stopped
    acknowledges: its kernel does."""
    wanted = {
        "TCP_KEEPIDLE": IDLE_S,
        "TCP_KEEPINTVL": BETWEEN_S,
        "TCP_USER_TIMEOUT": min(int(1e3 * unacknowledged_s), _MS_MAX),
    }
    with contextlib.suppress(OSError):  # it is closed already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in wanted.items():
            if (option := getattr(socket, name, None)) is not None:  # all of them on Linux
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
