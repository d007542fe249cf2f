from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farhop_lab.world.child import Child, ChildError
from tests.conftest import NO_CERTIFICATES

SPINS = """import threading
def spin():
    while True: pass
for _ in range(8): threading.Thread(target=spin, daemon=True).start()"""
LINGERS = 'print("up", flush=True)\ntime.sleep(60)'
ENGINE = ["engine", "--port", "0"]


def alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


async def gone(pid: int, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while alive(pid):
            await asyncio.sleep(0.01)


def script(folder: Path, text: str) -> list[str]:
    """The program of a child that runs this instead of `python -m farhop_cli`."""
    path = folder / "script"
    path.write_text(f"import sys, time, os, signal\n{text}\n")
    return [sys.executable, str(path)]


# A small process: to fork one that has imported all tests takes ten times as long.
STARTS = """
import asyncio, contextlib, sys
import farhop_lab  # with what keeps children alive
import grpc
from farhop_lab.world import child

async def speaking(channel):
    call = channel.unary_unary("/nobody/Listens")
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call(b"?", timeout=10.0)

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        busy = asyncio.create_task(speaking(channel))
        ends = []
        for _ in range(150):
            one = await asyncio.create_subprocess_exec("true", preexec_fn=child.bound_to_parent())
            ends.append(await one.wait())
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    await server.stop(0)
    assert ends == [0] * 150, ends

asyncio.run(main())
"""


def test_children_survive_a_fork_while_grpc_is_in_use() -> None:
    """It killed one in thirty before its program began (grpc/grpc#43055)."""
    subprocess.run([sys.executable, "-c", STARTS], check=True, timeout=300.0)


async def test_a_child_process_starts_reports_ready_and_stops_cleanly(tmp_path: Path) -> None:
    one = Child("an engine", ENGINE, tmp_path / "log", NO_CERTIFICATES)
    assert one.pid is None
    ready = await one.start()
    assert ready.split()[-1].startswith("127.0.0.1:")
    pid = one.pid
    assert pid is not None
    assert alive(pid)
    assert os.getsid(pid) == pid  # its parent decides whether to pass on a terminal's Ctrl-C
    assert await one.stop() == 0
    assert one.pid is None
    assert not alive(pid)
    assert await one.stop() == 0  # again is no harm
    one.signal(signal.SIGTERM)
    await one.kill()


async def test_process_that_dies_before_ready_is_reported_with_its_last_output(tmp_path: Path) -> None:
    one = Child("an engine", [*ENGINE, "--profile", "abacus"], tmp_path / "log", NO_CERTIFICATES)
    with pytest.raises(ChildError, match=r"an engine: did not start; it said: .*abacus"):
        await one.start()
    assert one.pid is None


async def test_its_environment_is_ours_and_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_OURS", "1")
    program = script(tmp_path, 'print(os.environ["FARHOP_TEST_OURS"] + os.environ["GIVEN"], flush=True)')
    one = Child("a script", [], tmp_path / "log", {"GIVEN": "2"}, program)
    assert await one.start() == "12"
    await one.stop()


async def test_process_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    program = script(tmp_path, 'print("still thinking", file=sys.stderr, flush=True)\ntime.sleep(60)')
    found = ""
    for patience_s in (0.5, 2.0, 8.0):  # until it has printed so much
        one = Child("a script", [], tmp_path / "log", {}, program)
        with pytest.raises(ChildError, match=rf"a script: not ready within {patience_s:g} s; it said: ") as caught:
            await one.start(timeout_s=patience_s)
        assert one.pid is None
        found = str(caught.value)
        if found.endswith("still thinking"):
            break
    assert found.endswith("still thinking")


async def test_process_that_closes_its_output_silently_is_killed(tmp_path: Path) -> None:
    program = script(tmp_path, "os.close(1)\ntime.sleep(60)")
    one = Child("a script", [], tmp_path / "log", {}, program)
    async with asyncio.timeout(60.0):
        with pytest.raises(ChildError, match="a script: did not start; it said: nothing"):
            await one.start()
    assert one.pid is None


async def test_a_cancelled_wait_leaves_no_process_behind(tmp_path: Path) -> None:
    program = script(tmp_path, "time.sleep(60)")
    one = Child("a script", [], tmp_path / "log", {}, program)
    starting = asyncio.create_task(one.start())
    while one.pid is None:
        await asyncio.sleep(0.01)
    pid = one.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive(pid)


def states(pid: int | None) -> list[str]:
    """The state letter of each thread of a process: R, S, T, …"""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return [stat.read_text().rpartition(")")[2].split()[0] for stat in stats]


async def test_process_that_does_not_stop_in_its_grace_period_is_killed(tmp_path: Path) -> None:
    program = script(tmp_path, 'signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint("up", flush=True)\ntime.sleep(60)')
    one = Child("a script", [], tmp_path / "log", {}, program)
    await one.start()
    assert await one.stop(grace_s=0.2) == -signal.SIGKILL


async def test_a_frozen_one_can_be_killed(tmp_path: Path) -> None:
    """As a balancer is, it has a handler for SIGTERM, which does not run while it is frozen."""
    program = script(tmp_path, f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n{LINGERS}")
    one = Child("a script", [], tmp_path / "log", {}, program)
    await one.start()
    one.signal(signal.SIGSTOP)
    assert await one.stop(grace_s=0.2) == -signal.SIGKILL


async def test_a_frozen_one_does_nothing_more(tmp_path: Path) -> None:
    """Not even on a busy machine, where a thread that spins would be the last to see the signal."""
    program = script(tmp_path, f"{SPINS}\n{LINGERS}")
    one = Child("a script", [], tmp_path / "log", {}, program)
    await one.start()
    for _ in range(20):
        one.signal(signal.SIGSTOP)
        seen = states(one.pid)
        one.signal(signal.SIGCONT)
        assert set(seen) == {"T"}, seen
    await one.kill()
    one.signal(signal.SIGSTOP)  # no process is there, and none is waited for


async def test_process_with_much_output_is_not_blocked(tmp_path: Path) -> None:
    program = script(tmp_path, 'print("up", flush=True)\nprint("x" * 1_000_000, flush=True)\nsys.exit(7)')
    one = Child("a script", [], tmp_path / "log", {}, program)
    assert await one.start() == "up"
    async with asyncio.timeout(60.0):
        while one.pid is not None:
            await asyncio.sleep(0.01)
    assert await one.stop() == 7


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_a_child_dies_with_its_parent_however_that_dies(tmp_path: Path) -> None:
    program = f"""
import asyncio, pathlib
from farhop_lab.world.child import Child
async def main():
    one = Child("an engine", {ENGINE!r}, pathlib.Path({str(tmp_path / "log")!r}), {{}})
    await one.start()
    print(one.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        pid = int(await parent.stdout.readline())
        assert alive(pid)
    finally:
        parent.kill()
        await parent.wait()
    await gone(pid)


async def test_readiness_of_another_program_is_polled(tmp_path: Path) -> None:
    asked = 0

    async def ready() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    one = Child("sleeper", ["60"], tmp_path / "log", {}, ["/bin/sleep"])
    await one.start_until(ready, 5.0)
    assert asked == 3
    assert one.pid is not None
    assert await one.stop() == -signal.SIGTERM


async def test_a_program_that_ends_or_is_never_ready_is_reported(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    ends = Child("a shell", ["-c", "echo out of luck; exit 3"], tmp_path / "log", {}, ["/bin/sh"])
    with pytest.raises(ChildError, match="a shell: did not start; it said: out of luck"):
        await ends.start_until(never, 5.0)
    stays = Child("sleeper", ["60"], tmp_path / "log2", {}, ["/bin/sleep"])
    with pytest.raises(ChildError, match=r"sleeper: not ready within 0\.1 s"):
        await stays.start_until(never, 0.1)
    assert stays.pid is None
