"""Huge pages: asked for once a run is long, again when it is twice as long, and never where there are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farhop_lab.sim import huge_pages
from farhop_lab.sim.huge_pages import WORTH_IT, Growing

# In a process of its own, since this one's memory depends on earlier tests; a large part is objects, as in a world.
ASKS = """
from pathlib import Path
from farhop_lab.sim import huge_pages

kept = [str(n) for n in range(500_000)]
asked = huge_pages.ask()
rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
huge = sum(int(line.split()[1]) for line in rollup if line.startswith("AnonHugePages"))
assert kept == [str(n) for n in range(500_000)]
print(asked, huge)
"""


def test_memory_moves_to_huge_pages_with_its_content_unchanged() -> None:
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=True)
    asked, huge_kb = map(int, done.stdout.split())
    if sys.platform == "linux":
        assert asked >= 5 * huge_pages.PAGE_BYTES  # the positions of the pieces are random
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if switch.exists() and "[never]" not in switch.read_text():
        assert huge_kb > 0


def test_huge_pages_are_requested_for_long_runs_and_at_each_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    measures = SimpleNamespace(arrived=0)
    world: Any = SimpleNamespace(measures=measures)
    monkeypatch.setattr(huge_pages, "WORTH_IT", WORTH_IT)
    monkeypatch.setattr(huge_pages, "ask", lambda: asked.append(measures.arrived))
    growing = Growing(world)
    for measures.arrived in range(0, 5 * WORTH_IT, 100):
        growing()
    assert asked == [WORTH_IT, 2 * WORTH_IT, 4 * WORTH_IT]


def test_unsupported_kernel_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "none")
    assert huge_pages.ask() == 0
