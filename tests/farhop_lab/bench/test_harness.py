from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_runs import Refuses, listening

from farhop_lab.bench import harness
from farhop_lab.bench.harness import BenchError
from farhop_lab.world.child import Child


async def test_answers_is_true_only_for_a_200(engines: int) -> None:
    assert await harness.answers("127.0.0.1", engines)
    async with listening(Refuses) as port:
        assert not await harness.answers("127.0.0.1", port)
    assert not await harness.answers("127.0.0.1", port)


async def test_a_proxy_that_never_answers_is_ended_and_named(tmp_path: Path) -> None:
    child = Child("sleeper", ["import time; time.sleep(60)"], tmp_path / "log", {}, [sys.executable, "-c"])
    with pytest.raises(BenchError, match="sleeper: not ready within"):
        async with harness.started(child, "127.0.0.1", 9, ready_s=0.3):
            pass
    assert child.pid is None


async def test_output_is_what_a_program_prints_and_its_failure_is_a_bench_error() -> None:
    assert await harness.output([sys.executable, "-c", "print('yes')"], 20.0) == "yes\n"
    with pytest.raises(BenchError, match="ZeroDivisionError"):
        await harness.output([sys.executable, "-c", "1/0"], 20.0)
    with pytest.raises(BenchError, match=r"did not end within 0\.2 s"):
        await harness.output([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows() -> None:
    import resource

    assert harness.open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
