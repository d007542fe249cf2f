"""A worker's process, whole: a socket, a view, a question, another view, and its end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import dns.message
import msgspec

from entry_dns.answers.snapshot import encode
from entry_dns.answers.zones import Ttls, view
from entry_dns.app.counters import Counters
from entry_dns.app.worker import NICE, Settings, Task, responder
from entry_dns.fleet.entry_health import State
from entry_dns.links.view_file import write
from tests.entry_dns.conftest import NAMES, PLAN, entry_health, unconfined, world
from topology.law import Law

DEADLINE_S = 60.0


def put(path, **healths) -> None:
    listed = [healths.get(name, entry_health(name)) for name in NAMES]
    write(path / "view", encode(*view([PLAN], Law(world()), unconfined(), listed, Ttls(5, 30), 3, 1)))


def test_a_worker_answers_by_the_view_in_force_and_counts(tmp_path) -> None:
    put(tmp_path)
    counters = Counters.make(tmp_path / "counters", 1)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as me,
    ):
        sock.bind(("127.0.0.1", 0))
        me.settimeout(0.5)
        task = Task(sock.fileno(), str(tmp_path / "view"), str(tmp_path / "counters"), 0, Settings((bytes(16),)))
        process = subprocess.Popen(
            [sys.executable, "-m", "entry_dns.app.worker"], stdin=subprocess.PIPE, pass_fds=(sock.fileno(),)
        )
        try:
            process.stdin.write(msgspec.msgpack.encode(task))
            process.stdin.close()
            at = sock.getsockname()

            def first() -> str:
                query = dns.message.make_query("api.entry.example", "A", use_edns=0)
                me.sendto(query.to_wire(), at)
                while True:
                    found = dns.message.from_wire(me.recvfrom(4096)[0])
                    if found.id == query.id:
                        return found.answer[0][0].address if found.answer else ""

            def until(wanted: str) -> None:
                end = time.monotonic() + DEADLINE_S
                while time.monotonic() < end:
                    try:
                        if first() == wanted:
                            return
                    except TimeoutError:
                        continue
                raise AssertionError(f"never led to {wanted}")

            until("192.0.2.1")
            me.sendto(b"nonsense", at)
            put(tmp_path, virginia=entry_health("virginia", State.DOWN))
            counters.raise_version()
            until("192.0.2.2")
            end = time.monotonic() + DEADLINE_S
            while counters.total(1)[1]["queries"] < 3 and time.monotonic() < end:
                time.sleep(0.05)
            assert counters.total(1)[1]["queries"] >= 3
            assert counters.total(1)[0] == 0
        finally:
            process.terminate()
            process.wait()


def test_there_is_no_rate_limit_over_tcp() -> None:
    settings = Settings((bytes(16),), b"x", 100, 2)
    assert responder(settings).rate == 100
    assert responder(settings, udp=False).rate == 0


def test_a_worker_freezes_its_first_objects_and_raises_its_priority_if_it_may() -> None:
    script = """
import gc, os, sys
from entry_dns.app.worker import prepare_process
if sys.argv[1] == "refused":
    os.setpriority = lambda *_: (_ for _ in ()).throw(PermissionError(1, "no"))
else:
    os.setpriority = lambda *said: print(*said[1:])
prepare_process()
print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1000)
"""
    for how, text in (("refused", ""), ("allowed", f"0 {NICE}\n")):
        done = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, check=True)
        assert done.stdout == f"{text}True True\n"
