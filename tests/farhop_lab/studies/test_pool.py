"""Cells in processes: the same as in one, kept as they finish, not run twice, and nobody is left behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from farhop_lab.scenarios.load import Scenario, parse
from farhop_lab.studies import cell, pool
from farhop_lab.studies.cell import Key

TEXT = """
name: tiny
sites:
  virginia: {gpu: l4, replicas: 1}
work:
  - {kind: requests, figures: {prompt_tokens: 64, answer_tokens: 8, max_tokens: 8}, clients: {virginia: 2}}
duration_s: 4
warm_up_s: 1
"""


def tiny() -> Scenario:
    return parse(TEXT, "it", Path(), ["farhop"])


def test_processes_change_nothing_and_what_is_kept_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = pool.jobs(tiny(), ["farhop", "region-local"], [1])
    shares: list[float] = []
    results = pool.run(jobs, out=tmp_path, workers=2, moved=shares.append)
    job = jobs[1]
    alone = cell.run(job.document, Path(job.folder), job.key, job.recipe)
    assert msgspec.structs.replace(results[1], wall_s=0.0) == msgspec.structs.replace(alone, wall_s=0.0)
    assert shares[-1] == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tiny.farhop.x1.s1.json",
        "tiny.region-local.x1.s1.json",
    ]
    done: list[Key] = []
    monkeypatch.setattr(pool, "_Crew", None)  # nor is the process prepared that would fork
    again = pool.run(jobs, out=tmp_path, done=lambda result: done.append(result.key))
    assert again == results  # wall times, too: nothing was run
    assert done == [job.key for job in jobs]
    assert not multiprocessing.active_children()


def test_cell_is_run_again_for_another_recipe_or_a_damaged_file(tmp_path: Path) -> None:
    (job,) = pool.jobs(tiny(), ["region-local"], [1])
    result = cell.run(job.document, Path(job.folder), job.key, job.recipe)
    pool.save(result, tmp_path)
    assert pool.load(job, tmp_path) == result
    assert pool.load(msgspec.structs.replace(job, recipe="other"), tmp_path) is None
    path = tmp_path / "tiny.region-local.x1.s1.json"
    path.write_bytes(path.read_bytes()[:100])
    assert pool.load(job, tmp_path) is None
    assert pool.load(job, None) is None


def test_a_cells_recipe_depends_only_on_what_changes_its_result() -> None:
    scenario = tiny()
    assert pool.recipe(scenario) == pool.recipe(scenario.but(seeds=9, routers=["skywalker"]))
    assert pool.recipe(scenario) != pool.recipe(scenario.but(duration_s=5.0))


@pytest.mark.long
def test_a_recipe_is_the_same_in_every_process() -> None:
    code = (
        "from farhop_lab.studies import pool, routers\nfrom farhop_lab.scenarios.load import find\n"
        "print(pool.recipe(find('arena', routers.names())))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_a_cell_that_fails_ends_the_rest_in_one_line() -> None:
    jobs = pool.jobs(tiny().but(duration_s=1e5), ["farhop"], [1])
    broken = msgspec.structs.replace(jobs[0], key=Key("tiny", "nobody", 1.0, 1))
    began = time.monotonic()
    with pytest.raises(pool.CellError) as caught:
        pool.run([jobs[0], broken], workers=2)
    assert "nobody" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 60.0  # it did not wait for the long one
    assert not multiprocessing.active_children()


def test_an_interrupted_run_leaves_what_is_finished(tmp_path: Path) -> None:
    jobs = pool.jobs(tiny(), ["region-local"], [1]) + pool.jobs(
        tiny().but(name="long", duration_s=1e5), ["farhop"], [1]
    )

    def interrupt(_result: cell.Result) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(jobs, out=tmp_path, workers=2, done=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.region-local.x1.s1.json"]
    assert not multiprocessing.active_children()


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pool.CellError, match="give another folder"):
        pool.opened(tmp_path / "file" / "under")


def test_a_folder_that_cannot_be_written_to_is_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(pool.CellError, match="Permission denied; give a folder that can be written to"):
        pool.opened(tmp_path)


def test_a_result_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (job,) = pool.jobs(tiny(), ["region-local"], [1])
    result = cell.run(job.document, Path(job.folder), job.key, job.recipe)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(pool.CellError, match="No space left on device; give a folder"):
        pool.save(result, tmp_path)
    assert not list(tmp_path.iterdir())


PREPARED = """
from multiprocessing import forkserver
from farhop_lab.studies import pool

pool._Crew(1)
forkserver.ensure_running()
print(open(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read())
"""


def test_ctrl_c_while_processes_are_prepared_is_not_answered_by_them() -> None:
    """Python begins with a stack trace for it; held back from its first instruction on it is not there."""
    said = subprocess.run([sys.executable, "-c", PREPARED], capture_output=True, text=True, timeout=60.0, check=True)
    (blocked,) = (line for line in said.stdout.splitlines() if line.startswith("SigBlk:"))
    assert int(blocked.split()[1], 16) & 1 << signal.SIGINT - 1


def test_a_cell_whose_parent_is_gone_ends_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process itself handles Ctrl-C
    here, there = multiprocessing.Pipe(duplex=False)
    here.close()
    (job,) = pool.jobs(tiny(), ["farhop"], [1])
    pool.work_apart(there, msgspec.msgpack.encode(job))
    assert there.closed
