from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from farhop_lab.bench import bodies, wrk

OUTPUT = """Running 1s test @ http://127.0.0.1:9000
  1 threads and 32 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     2.13ms    1.05ms  24.10ms   86.12%
Requests/sec:  14875.51
farhop-bench 14982 1007158 3 2 1998 5120
"""


def test_output_of_wrk_is_parsed() -> None:
    content = wrk.read(OUTPUT)
    assert content == wrk.WrkOutput(14982, 1.007158, 3, 2, 1.998, 5.12)
    assert content.errors == 5


@pytest.mark.parametrize("output", ["", "unable to connect to 127.0.0.1:9: Connection refused", "farhop-bench 1 2"])
def test_incomplete_output_of_wrk_is_refused(output: str) -> None:
    with pytest.raises(wrk.WrkError, match="wrk did not finish; it said: "):
        wrk.read(output)


def test_wrk_runs_for_whole_seconds_and_at_least_one() -> None:
    assert "-d1s" in wrk.command("wrk", "s.lua", "http://h:1", 32, 0.2)
    assert "-d3s" in wrk.command("wrk", "s.lua", "http://h:1", 32, 2.6)


@pytest.mark.skipif(wrk.find() is None, reason="wrk is not installed")
async def test_the_script_runs(engines: int, tmp_path: Path) -> None:
    lines, script = tmp_path / "bodies", tmp_path / "s.lua"
    lines.write_bytes(b"\n".join(bodies.plain(1024)) + b"\n")
    script.write_text(wrk.script(str(lines), 5))
    binary = wrk.find()
    assert binary is not None
    command = wrk.command(binary, str(script), f"http://127.0.0.1:{engines}", 4, 1.0)
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True, timeout=20)
    output = wrk.read(ran.stdout)
    assert output.requests > 100
    assert output.errors == 0
