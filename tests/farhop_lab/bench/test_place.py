from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_runs import Refuses, listening

from farhop_lab.bench import place
from farhop_lab.bench.place import BenchError
from farhop_lab.world.child import Child


async def test_answers_is_true_only_for_a_200(engines: int) -> None:
    assert await place.answers("127.0.0.1", engines)
    async with listening(Refuses) as port:
        assert not await place.answers("127.0.0.1", port)
    assert not await place.answers("127.0.0.1", port)


async def test_a_proxy_that_never_answers_is_ended_and_named(tmp_path: Path) -> None:
    child = Child("sleeper", ["import time; time.sleep(60)"], tmp_path / "log", {}, [sys.executable, "-c"])
    with pytest.raises(BenchError, match="sleeper: not ready within"):
        async with place.started(child, "127.0.0.1", 9, ready_s=0.3):
            pass
    assert child.pid is None


async def test_what_a_program_says() -> None:
    assert await place.output([sys.executable, "-c", "print('yes')"], 20.0) == "yes\n"
    with pytest.raises(BenchError, match="ZeroDivisionError"):
        await place.output([sys.executable, "-c", "1/0"], 20.0)
    with pytest.raises(BenchError, match=r"did not end within 0\.2 s"):
        await place.output([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


def test_open_files_are_raised_to_what_the_system_lets() -> None:
    import resource

    assert place.open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
