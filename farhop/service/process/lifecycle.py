"""The life of a daemon (a balancer, the DNS server, the announcer): start, report readiness, serve until told to stop,
stop in order. Never decides about a request.

A fault of the configuration or the environment is one line on stderr and exit code 2, never a stack trace. Everything
that was opened is closed, and an error while closing never hides the reason for it.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, Protocol

import uvloop

from farhop.config import ConfigError
from farhop.relay.http.listener import PortTakenError
from farhop.service.process.garbage import Garbage
from farhop.service.process.notify import Notifier
from farhop.store.contract import StoreError
from farhop.telemetry import logs
from topology.problems import TopologyError

if TYPE_CHECKING:
    from collections.abc import Callable

# Python lets a thread that computes go on for 5 ms while the loop waits, after each of its reads and writes again: the
# exporter of spans works for 0.1 s every 5 s.
_SWITCH_S = 0.0001

# Errors that an operator can fix: reported in a line.
_FAULT_EVERY_S = 10.0
_FAULTS = (ConfigError, TopologyError, PortTakenError, StoreError, logs.LogError)


class Daemon(Protocol):
    """A process that serves until a signal ends it: a balancer, the DNS server or the announcer, assembled."""

    async def open(self) -> str:
        """Start everything; returns the line that lists the listeners."""

    async def close(self) -> None:
        """Drain, and stop all parts in order."""

    def reload(self) -> None:
        """Read the configuration again soon (SIGHUP). An invalid configuration changes nothing."""


def run(name: str, make: Callable[[], Daemon]) -> None:
    """Run a daemon until SIGTERM or SIGINT. SystemExit(2) on a fault of configuration or surroundings."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # the soft one, 1024 by default, is for select(2)
    sys.setswitchinterval(_SWITCH_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(name, make))
    except _FAULTS as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


async def _serve(name: str, make: Callable[[], Daemon]) -> None:
    stop, told = asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_logged(name, loop))

    def end(number: signal.Signals) -> None:
        told.append(number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # while it starts: its files are looked at from then on
    daemon, manager = make(), Notifier()
    try:
        line = await _unless(stop, daemon)
    except BaseException:
        await _close_anyway(name, daemon)
        raise
    if line is not None:
        loop.add_signal_handler(signal.SIGHUP, daemon.reload)
        print(f"{name}: {line}", flush=True)
        manager.ready(loop, line)
        garbage = Garbage()
        garbage.open()
        await stop.wait()
        garbage.close()
    logs.get(name).info("stopping", signal=told[0])
    manager.stopping()
    await daemon.close()
    manager.close()
    logs.get(name).info("stopped")  # without this line the process was killed


def _logged(name: str, loop: asyncio.AbstractEventLoop) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Log uncaught errors with their traces, at a limited rate, since a client may be able to cause them."""
    log = logs.Throttled(logs.get(name), _FAULT_EVERY_S, loop.time)

    def handle(_loop: asyncio.AbstractEventLoop, given: dict[str, Any]) -> None:
        error = given.get("exception")
        what = str(given.get("message", "unhandled"))
        key = f"{what} {type(error).__name__}"
        if isinstance(error, BaseException):
            log.error("uncaught", key, what=what, error=type(error).__name__, exc_info=error)
        else:
            log.error("uncaught", key, what=what)

    return handle


async def _unless(stop: asyncio.Event, daemon: Daemon) -> str | None:
    """Open the daemon, unless `stop` is set before that is done: then return None. Otherwise return the result of
    `open`.
    """
    opening, stopping = asyncio.create_task(daemon.open()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
        return opening.result() if opening.done() else None
    finally:
        opening.cancel()
        stopping.cancel()
        await asyncio.wait((opening, stopping))


async def _close_anyway(name: str, daemon: Daemon) -> None:
    try:
        await daemon.close()
    except Exception as error:  # noqa: BLE001 - already closing because of another error, which is the one to report
        logs.get(name).error("closing failed", error=type(error).__name__, exc_info=error)
