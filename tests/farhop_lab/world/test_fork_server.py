from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from farhop_lab.world import fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux alone")
# The state that a program finds at its start: a module of its own, distinguished from the command's by its name only.
LOOKS = """
import gc, json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "main": sys.modules["__main__"].__name__,
    "environment": dict(os.environ), "folder": os.getcwd(), "path": sys.path,
    "session": os.getsid(0) == os.getpid(), "threads": len(os.listdir("/proc/self/task")),
    "descriptors": [at for at in range(64) if os.path.exists(f"/proc/self/fd/{at}")],
    "input": os.readlink("/proc/self/fd/0"), "collects": gc.isenabled(),
    "output": [sys.stdout.seekable(), *((s.encoding, s.errors, s.line_buffering) for s in (sys.stdout, sys.stderr))],
    "handlers": {number.name: str(signal.getsignal(number)) for number in signal.valid_signals() if number < 32
                 if isinstance(number, signal.Signals)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "title": open("/proc/self/cmdline", "rb").read().rstrip(bytes(1)).decode().split("\\0"),
}), flush=True)
sys.exit(7)
"""
# Everything that an interpreter does at its end, except for clearing imported modules: only `Kept` sees that.
ENDS = """
import atexit, sys, threading, time
class Kept:
    def __del__(self):
        print("to pieces", flush=True)
kept = Kept()
atexit.register(print, "handler")
def late():
    time.sleep(0.1)
    print("thread")
threading.Thread(target=late).start()
print("program")
if sys.argv[1:]:
    sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
"""


PROGRAMS = {
    "looks": LOOKS,
    "fails": "import atexit\natexit.register(print, 'the end', flush=True)\n1 / 0\n",
    "ends": ENDS,
    "dice": "import random, secrets\nprint(random.random(), secrets.token_hex(4))\n",
    "works": "for _ in range(2_000_000): pass\nimport time\nprint(flush=True)\ntime.sleep(60)\n",
    "stays": "import time\nprint(flush=True)\ntime.sleep(60)\n",
}


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `python -m looks` is the program above."""
    folder = tmp_path_factory.mktemp("programs")
    for name, text in PROGRAMS.items():
        (folder / f"{name}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture
def another(looks: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment for which there is no server yet; that one has nothing to import."""
    monkeypatch.setattr(fork_server, "PRELOADED", ())
    return looks | {"PYTHONPATH": looks["PYTHONPATH"] + os.pathsep + secrets.token_hex(4)}


async def run(program: str, arguments: list[str], environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr."""
    with TemporaryFile() as err:
        process = await fork_server.start(
            program, arguments, environment, stdout=None, stderr=err.fileno(), limit=1 << 20
        )
        assert process.stdout is not None
        out = await process.stdout.read()
        code = await process.wait()
        return code, out, os.pread(err.fileno(), 1 << 20, 0)


def test_a_fork_is_what_the_command_line_runs(looks: dict[str, str]) -> None:
    """All that a program can see of itself, though all that a balancer imports was there before; and its code."""
    arguments = ["a b", "--option", "ü"]
    command = [sys.executable, "-m", "looks", *arguments]
    output = subprocess.run(
        command, stdout=subprocess.PIPE, env=looks, stdin=subprocess.DEVNULL, start_new_session=True, check=False
    )
    code, out, err = asyncio.run(run("looks", arguments, looks))
    assert (code, err) == (output.returncode, b"")
    seen, wanted = json.loads(out), json.loads(output.stdout)
    assert seen == wanted
    assert wanted["threads"] == 1  # so was the server's, otherwise a fork could not be trusted
    assert wanted["title"] == command


async def test_an_error_ends_a_fork_as_it_ends_an_interpreter(looks: dict[str, str]) -> None:
    code, out, err = await run("fails", [], looks)
    assert (code, out) == (1, b"the end\n")
    assert err.rstrip().endswith(b"ZeroDivisionError: division by zero")
    code, _, err = await run("nowhere", [], looks)
    assert code == 1
    assert b"No module named" in err


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["0"], 0), (["3"], 3), (["no such thing"], 1)])
async def test_a_forked_process_ends_like_an_interpreter(
    looks: dict[str, str], arguments: list[str], code: int
) -> None:
    ended, out, err = await run("ends", arguments, looks)
    assert ended == code
    assert out.split(b"\n")[:3] == [b"program", b"thread", b"handler"]
    assert (b"no such thing" in err) is (code == 1)


async def test_modules_imported_by_a_fork_are_not_torn_down(looks: dict[str, str]) -> None:
    """That copies each page that is the server's: half of what a world of processes cost to start and to stop."""
    _, out, _ = await run("ends", ["0"], looks)
    assert b"to pieces" not in out


async def test_forked_processes_have_independent_random_generators(looks: dict[str, str]) -> None:
    thrown = [await run("dice", [], looks) for _ in range(2)]
    assert len({word for _, out, _ in thrown for word in out.split()}) == 4


async def test_the_exit_status_of_a_forked_process_is_known(looks: dict[str, str]) -> None:
    process = await begun("works", looks)
    assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == process.returncode == -signal.SIGTERM
    assert process.ended is not None
    assert 0.0 < process.ended.cpu_s < 60.0
    process.send_signal(signal.SIGTERM)  # it has no owner any more


async def test_stopped_process_makes_no_progress(looks: dict[str, str]) -> None:
    process = await begun("stays", looks)
    process.send_signal(signal.SIGSTOP)
    process.wait_until_stopped()
    assert state(process.pid) == "T"
    process.send_signal(signal.SIGKILL)
    process.wait_until_stopped()  # there is no process to wait for
    assert await process.wait() == -signal.SIGKILL


async def begun(program: str, environment: dict[str, str]) -> fork_server.Process:
    """A program that has printed its first line."""
    process = await fork_server.start(program, [], environment, stdout=None, stderr=2, limit=1024)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"\n"
    return process


def fields(pid: int) -> list[str]:
    """Those of a process's `stat`, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state(pid: int) -> str:
    """Its letter; "" it is gone."""
    with contextlib.suppress(OSError):
        return fields(pid)[0]
    return ""


async def test_a_server_that_is_killed_takes_its_forks_along_and_another_takes_its_place(
    another: dict[str, str],
) -> None:
    first = await begun("stays", another)
    server = int(fields(first.pid)[1])
    assert server != os.getpid()
    os.kill(server, signal.SIGKILL)
    assert await first.wait() == -signal.SIGKILL
    async with asyncio.timeout(60.0):
        while state(first.pid) or state(server) not in "Z":
            await asyncio.sleep(0.01)
    second = await begun("stays", another)
    assert int(fields(second.pid)[1]) not in (server, os.getpid())
    second.send_signal(signal.SIGKILL)
    await second.wait()


async def test_a_cancelled_start_leaves_no_process_behind(another: dict[str, str]) -> None:
    starting = asyncio.create_task(run("stays", [], another))
    await asyncio.sleep(0)  # it has contacted a server that does not run yet
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    last = await begun("stays", another)  # by the same server, after that
    server = int(fields(last.pid)[1])
    async with asyncio.timeout(60.0):
        while children(server) != [last.pid]:
            await asyncio.sleep(0.01)
    last.send_signal(signal.SIGKILL)
    await last.wait()


async def test_too_long_message_is_reported(another: dict[str, str]) -> None:
    with pytest.raises(fork_server.ForkError, match="bytes; at most"):
        await run("looks", ["x" * 200_000], another)
