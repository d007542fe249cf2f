"""Timers with a precision of some tens of microseconds, on any event loop.

asyncio's own timers count whole milliseconds here (epoll, libuv), which is too coarse for a WAN sped up twenty times.
One kernel timer serves all; without one (not Linux), the loop's timers are used. Never calls back more than `SLACK_S`
early. Calls cannot be cancelled: a caller ignores those that it no longer wants.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

# What is due this soon is due now: about the latency of a wake-up anyway, and it saves a second one.
SLACK_S = 0.0001

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class _Timer(Protocol):
    def set(self, due: float | None) -> None:
        """Ring at `due` (seconds of `time.monotonic`), instead of any time set before. None: never."""

    def close(self) -> None:
        """Never ring again."""


class _KernelTimer:
    """timerfd_create(2), in Python since 3.13. Setting it again also cancels a ring that was not read yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._set_time = libc.timerfd_settime
        self._set_time.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_TimerSpec), ctypes.c_void_p)
        self._fd: int = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _TimerSpec()
        self._value = self._spec.value
        self._at = ctypes.byref(self._spec)
        self._loop = loop
        loop.add_reader(self._fd, ring)

    def set(self, due: float | None) -> None:
        nanoseconds = 0 if due is None else max(1, int(due * 1e9))  # zero would disarm it
        self._value.seconds, self._value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        if self._set_time(self._fd, _TFD_TIMER_ABSTIME, self._at, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class _LoopTimer:
    """The loop's own timers, good to a millisecond."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._handle: asyncio.Handle | None = None

    def set(self, due: float | None) -> None:
        self.close()
        if due is not None:
            self._handle = self._loop.call_later(max(0.0, due - time.monotonic()), self._ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Alarm:
    """Calls back at times of `now()`. For the running loop; close it in the end. `precise=False`: loop timers."""

    now = staticmethod(time.monotonic)

    def __init__(self, *, precise: bool = sys.platform == "linux") -> None:
        loop = asyncio.get_running_loop()
        self._timer: _Timer = (_KernelTimer if precise else _LoopTimer)(loop, self._ring)
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0  # keeps the order of equal times
        self._ringing = self._closed = False

    def at(self, due: float, call: Callable[[], None]) -> None:
        """Call at `due`, once. As many may wait as there are connections, which are bounded."""
        self._serial += 1
        heappush(self._waiting, (due, self._serial, call))
        if not self._ringing and self._waiting[0][1] == self._serial and not self._closed:
            self._timer.set(due)

    def _ring(self) -> None:
        waiting = self._waiting
        until = time.monotonic() + SLACK_S
        self._ringing = True
        try:
            while waiting and waiting[0][0] <= until:
                heappop(waiting)[2]()
        finally:
            self._ringing = False
            if not self._closed:
                self._timer.set(waiting[0][0] if waiting else None)

    def close(self) -> None:
        """No more calls."""
        if not self._closed:
            self._closed = True
            self._timer.close()
            self._waiting.clear()
