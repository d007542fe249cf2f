"""A process that answers UDP questions at one address, and does nothing else.

It is given a bound socket and the files of the view and its counters, and ends with its parent. One blocking loop: a
question costs one receive, the answer and one send. A new view is mapped between two questions.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from entry_dns.answers.cookies import Cookies
from entry_dns.answers.responder import COUNTERS, Responder, wire
from entry_dns.answers.signing import Role, Stage, ZoneKey, ZoneKeys
from entry_dns.answers.snapshot import decode
from entry_dns.app.counters import Counters
from entry_dns.links.view_file import load
from farhop.service.process.clock import Clock, wall

if TYPE_CHECKING:
    from collections.abc import Mapping

IDLE_S = 0.1  # how long a new view may wait for a question
TICK_S = 1.0
_LOOK_EVERY = 16  # questions: reading the clock costs a hundredth of an answer
_DATAGRAM_MAX = 4096
READY = b"ready\n"
NICE = -10


class KeyFile(msgspec.Struct, frozen=True):
    """A key of a zone: its file's content, its role and whether it signs."""

    pem: bytes
    role: Role = Role.CSK
    stage: Stage = Stage.ACTIVE

    def __repr__(self) -> str:
        return f"KeyFile({self.role}, {self.stage})"  # never the key


class Settings(msgspec.Struct, frozen=True):
    """A worker's settings, passed on its standard input at start; to change them, the worker is replaced.

    `cookies`: secrets; `nsid`: this server's identifier; `rate`, `slip`: see Responder; `keys`: by zone.
    """

    cookies: tuple[bytes, ...] = ()
    nsid: bytes = b""
    rate: int = 0
    slip: int = 2
    keys: dict[str, tuple[KeyFile, ...]] = {}


class Task(msgspec.Struct, frozen=True):
    """Identifies a worker: the descriptor of its socket, the folder of its files, its row of the counters."""

    socket: int
    view: str
    counters: str
    row: int
    settings: Settings


def responder(settings: Settings, *, udp: bool = True) -> Responder:
    """The responder of these settings; by TCP the sender's address is proven, and no rate limit applies."""
    keys: Mapping[bytes, ZoneKeys] = {
        wire(zone): ZoneKeys([ZoneKey(one.pem, one.role, one.stage) for one in listed])
        for zone, listed in settings.keys.items()
    }
    cookies = Cookies(settings.cookies) if settings.cookies else None
    return Responder(cookies, settings.nsid, settings.rate if udp else 0, settings.slip, dict(keys))


def serve(sock: socket.socket, answers: Responder, task: Task, parent: int) -> None:
    """Answer until the parent is gone or a SIGTERM came; the question at hand is answered first. The first view in
    force is taken before READY is written: from then on another worker of the same socket may end."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(IDLE_S), int(IDLE_S % 1 * 1e6)))
    counters = Counters(Path(task.counters))
    receive, send, answer, monotonic = sock.recvfrom, sock.sendto, answers.answer, Clock(Random()).now
    version, due, view = counters.version, 0.0, Path(task.view)
    seen, asked, ready = -1, 0, False
    answers.tick(wall().timestamp())  # the first question must not be answered and signed in 1970
    while not ended:
        try:
            data, asker = receive(_DATAGRAM_MAX)
        except BlockingIOError:
            data = b""
        except OSError:  # an earlier answer met an unreachable port
            continue
        asked += 1
        if (not data or asked >= _LOOK_EVERY) and monotonic() >= due:
            asked, due = 0, monotonic() + TICK_S
            counters.add(task.row, answers.counts, answers.led)
            answers.tick(wall().timestamp())
            if os.getppid() != parent:
                return
        if version[0] != seen:
            seen = version[0]
            counters.add(task.row, answers.counts, answers.led)
            if view.exists():
                answers.adopt(*decode(load(view)))
            if not ready:
                ready = True
                _report_ready()
        if not data:
            continue
        try:
            reply = answer(data, asker[0])
        except Exception as error:  # noqa: BLE001 - one question must not end all; it is counted, and logged without its bytes
            counters.fault(task.row)
            print(f"dns worker: a question of {len(data)} bytes: {type(error).__name__}", file=sys.stderr)
            continue
        if reply is not None:
            try:
                send(reply, asker)
            except OSError:
                continue
    counters.add(task.row, answers.counts, answers.led)


def prepare_process() -> None:
    """Prepare the process before its first question, so that no answer is delayed.

    A full garbage collection visits all imported objects (27,000, 10 ms): exclude them from now on. Other processes'
    turns on this core take milliseconds and an answer takes microseconds: raise our priority, if permitted
    (CAP_SYS_NICE or RLIMIT_NICE, as the systemd unit gives it).
    """
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _report_ready() -> None:
    try:
        os.write(sys.stdout.fileno(), READY)
    except OSError:  # nothing listens, so nothing waits for it
        return


def main() -> None:
    """The entry point of a worker's process."""
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Task)
    sock = socket.socket(fileno=task.socket)
    answers = responder(task.settings)
    prepare_process()
    try:
        serve(sock, answers, task, os.getppid())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()


__all__ = ["COUNTERS", "Settings", "Task", "responder", "serve"]
