"""Tells the service manager the process's state: ready, alive, stopping (systemd's sd_notify protocol).

Without a service manager ($NOTIFY_SOCKET is not set) it does nothing. The watchdog's message is sent from the event
loop, so that a blocked loop is silent, too. Never delays or ends the process: if the manager cannot be reached, it is
not told, and its own timeouts decide.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

_SHARE = 3  # messages per watchdog interval: one may be late
_STARTING_S = 60  # how long a start that says why it takes long may take until it says so again


class Notifier:
    """Notifies the service manager (systemd). `environment`: the environment variables of the process."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._interval_s = _watchdog_s(environment) / _SHARE
        self._timer: asyncio.TimerHandle | None = None

    def starting(self, why: str) -> None:
        """It cannot serve yet: `why`, for `systemctl status`. The manager's limit for a start is put off."""
        self._send(f"STATUS={why}\nEXTEND_TIMEOUT_USEC={_STARTING_S * 1_000_000}")

    def ready(self, loop: asyncio.AbstractEventLoop, status: str) -> None:
        """It serves; `status` is a line for `systemctl status`. From now on the watchdog is fed, if there is one."""
        self._send(f"READY=1\nSTATUS={status}")
        if self._address and self._interval_s > 0.0:
            self._feed(loop)

    def stopping(self) -> None:
        """The process drains. The watchdog is still served, as a drain may take long, so that a blocked event loop is
        detected.
        """
        self._send("STOPPING=1\nSTATUS=draining")

    def close(self) -> None:
        """Stop notifying."""
        if self._timer is not None:
            self._timer.cancel()

    def _feed(self, loop: asyncio.AbstractEventLoop) -> None:
        self._send("WATCHDOG=1")
        self._timer = loop.call_later(self._interval_s, self._feed, loop)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address  # @: abstract
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(message.encode(), address)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """How often the manager wants to hear of this process; 0: it does not."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    given = environment.get("WATCHDOG_USEC", "")
    return int(given) / 1e6 if given.isascii() and given.isdigit() else 0.0
