"""Recording live machines: off unless asked for, and what is recorded replays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from farhop_lab.histories.replay import replay

ROOT = Path(__file__).parents[3]
SCRIPT = """
from random import Random
from farhop.balance import machine
from farhop_lab.histories import live
from regional_lb.scheduler.flow import FlowConfig, RegionalFlow
from topology.law import Law
from topology.model import Topology

flow = RegionalFlow(FlowConfig("here", "a"), Law(Topology("t", 1, {})), Random(5), lambda _: 2.0)
flow.handle(machine.ClientLeft("r"), 1.0)
"""


def run(folder: Path, **more: str) -> None:
    environment = {**os.environ, **more, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, cwd=folder)


def test_a_process_leaves_what_its_machines_were_given(tmp_path: Path) -> None:
    run(tmp_path, FARHOP_HISTORIES_TO=str(tmp_path))
    (path,) = tmp_path.glob("*.history")
    (one,) = replay(path)
    assert (one.entries, one.diverging) == (1, 0)


def test_no_history_is_recorded_unless_requested(tmp_path: Path) -> None:
    run(tmp_path)
    assert not list(tmp_path.iterdir())
