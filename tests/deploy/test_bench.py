"""deploy/bench/gateway.sh before a mock: started, asked by wrk's or our own load, ended by the file as a rig would."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import machine
import pytest

from farhop_lab.bench.bodies import KEY, MODEL
from farhop_lab.bench.client import Job
from farhop_lab.bench.harness import HOST, HOSTS, engines, open_files
from farhop_lab.bench.relay import asked
from farhop_lab.world.ports import free_ports

FILE = machine.DEPLOY / "bench" / "gateway.sh"
CONNECTIONS = 16


def _environment(folder: Path, upstream: str, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "FARHOP": str(Path(sys.executable).parent / "farhop"),
        "FARHOP_UPSTREAM": upstream,
        "CORES": "0,0",  # two instances, wherever this runs
        "GW_PORT": str(port),
        "GW_MODEL": MODEL,
        "GW_AUTH": KEY,
        "GW_DIR": str(folder),
    }


def _port() -> int:
    """One that is free with those beside it that the file takes: two admin ports, etcd's."""
    while True:
        (port,) = free_ports(1)
        with ExitStack() as held, suppress(OSError, OverflowError):
            for beside in (1, 2, 100, 101):
                held.enter_context(socket.socket()).bind((HOST, port + beside))
            return port


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.long
async def test_a_rig_starts_it_loads_both_instances_and_ends_all_of_it(tmp_path: Path) -> None:
    async with engines(tmp_path, open_files(), None) as place:
        port = _port()
        environment = _environment(tmp_path, f"http://{HOSTS[0]}:{place.targets[0][1]}", port)
        process = await asyncio.create_subprocess_exec(
            "bash", str(FILE), "run", env=environment, stdout=asyncio.subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60.0):
                said = (await process.stdout.readline()).decode()
            assert said.startswith(f"ready: http://127.0.0.1:{port}/v1/chat/completions, model {MODEL}, bearer {KEY};")
            pids = [int(pid) for pid in (tmp_path / f"farhop-{port}" / "pids").read_text().split()]
            assert said.split("processes ")[1].split() == [str(pid) for pid in pids[1:]]
            job = Job(
                mode="closed", host=HOST, port=port, pids=pids[1:], connections=CONNECTIONS, ramp_s=0.2, window_s=0.5,
                windows=1, body_bytes=1024,
            )  # fmt: skip
            (window,) = (await asked(job)).windows
            assert (window.errors, len(pids)) == (0, 3)
            assert window.requests > 0
        finally:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30.0):
                assert await process.wait() == 0
        assert all(_gone(pid) for pid in pids)
        assert not (tmp_path / f"farhop-{port}").exists()


def test_every_setting_that_a_rig_reads_is_set_once_the_file_is_sourced() -> None:
    told = "source $1; echo $GW_KIND $GW_PORT $GW_PATH $GW_MODEL $GW_AUTH; _cores 0-2,5; declare -F"
    environment = {"PATH": os.environ["PATH"]}
    command = ["bash", "-c", told, "rig", str(FILE)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = printed.stdout.splitlines()
    assert lines[:5] == ["native 8080 /v1/chat/completions gpt-4o-mini sk-farhop-bench-token", "0", "1", "2", "5"]
    functions = {line.split()[-1] for line in lines[5:]}
    assert {"gw_build", "gw_launch", "gw_rss", "gw_hwm", "gw_stop", "gw_diag", "gw_version"} <= functions
