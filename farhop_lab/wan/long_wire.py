"""Two network namespaces with a long emulated link between them: every packet arrives half a round trip later.

The other emulated links (`tunnel.py`) delay bytes between two sockets of this machine, whose own round trip is near
zero: TCP's window never limits them. Here it does: both kernels see the whole round trip. Needs root (namespaces, and
TUN devices, through which this process carries the packets). Invariants: no packet overtakes another of its direction;
all is removed in the end; the machine's own network is not touched.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import struct
import subprocess
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NEAR, FAR = "near", "far"
HOSTS = {NEAR: "10.78.0.1", FAR: "10.78.0.2"}
_TUN, _TUNSETIFF, _IFF_TUN, _IFF_NO_PI = "/dev/net/tun", 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 65_536
_QUEUE = 10_000  # packets that a device queues for us: none may be lost because this process was late


class WireError(Exception):
    """The link cannot be made; the text says why."""


def lacking() -> str:
    """What this machine lacks for it; "" if nothing."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if not os.path.exists(_TUN):
        return f"{_TUN} is not there (load the module `tun`)"
    return "" if shutil.which("ip") else "ip is not installed (Debian: iproute2)"


class Way:
    """One direction: packets read from a device, and when each is due at the other."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self._loop, self._source, self._target, self._delay_s = asyncio.get_running_loop(), source, target, delay_s
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(source, self._take)

    def _take(self) -> None:
        due = self._loop.time() + self._delay_s
        while True:
            try:
                self._under_way.append((due, os.read(self._source, _PACKET_BYTES)))
            except BlockingIOError:
                break
        if self._timer is None:
            self._deliver()

    def _deliver(self) -> None:
        now, self._timer = self._loop.time(), None
        while self._under_way and self._under_way[0][0] <= now:
            os.write(self._target, self._under_way.popleft()[1])
        if self._under_way:
            self._timer = self._loop.call_at(self._under_way[0][0], self._deliver)

    def close(self) -> None:
        self._loop.remove_reader(self._source)
        if self._timer is not None:
            self._timer.cancel()


class LongWire:
    """An asynchronous context. `settings` are sysctls of both ends, by name. Raises WireError."""

    def __init__(self, rtt_ms: float, settings: dict[str, str]) -> None:
        self._delay_s, self._settings = rtt_ms / 2e3, settings
        self._tag = f"fhw{os.getpid() % 100_000}"
        self._devices: dict[str, int] = {}
        self._ways: list[Way] = []

    def command(self, end: str, words: Sequence[str]) -> list[str]:
        """The command that runs these words at that end."""
        return ["ip", "netns", "exec", self._name(end), *words]

    def _name(self, end: str) -> str:
        return f"{self._tag}{end}"

    async def __aenter__(self) -> LongWire:
        why = lacking()
        if why:
            raise WireError(why)
        try:
            for end, host in HOSTS.items():
                self._open(end, host)
            near, far = self._devices[NEAR], self._devices[FAR]
            self._ways = [Way(near, far, self._delay_s), Way(far, near, self._delay_s)]
        except BaseException:
            self._close()
            raise
        return self

    def _open(self, end: str, host: str) -> None:
        name = self._name(end)
        _run("ip", "netns", "add", name)
        device = self._devices[end] = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        try:
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
        except OSError as error:
            raise WireError(f"{_TUN}: {error.strerror}") from None
        _run("ip", "link", "set", name, "netns", name, "txqueuelen", str(_QUEUE))
        _run("ip", "-n", name, "addr", "add", f"{host}/30", "dev", name)
        _run("ip", "-n", name, "link", "set", name, "up")
        for setting, value in self._settings.items():
            _run(*self.command(end, ["sysctl", "-qw", f"{setting}={value}"]))

    async def __aexit__(self, *_exc: object) -> None:
        self._close()

    def _close(self) -> None:
        for way in self._ways:
            way.close()
        for end, device in self._devices.items():
            os.close(device)
            subprocess.run(["ip", "netns", "del", self._name(end)], capture_output=True, check=False)
        self._devices.clear()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
    if done.returncode:
        raise WireError(f"{' '.join(command)}: {done.stderr.strip()}")
