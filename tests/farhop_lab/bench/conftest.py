from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from farhop_lab.bench import upstream

# Under --import-mode=importlib test files do not see their neighbours: bench_runs is found by path.
sys.path.insert(0, str(Path(__file__).parent))

from bench_runs import listening

from tests.conftest import NO_CERTIFICATES


@pytest.fixture(autouse=True)
def _processes_as_others_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NO_CERTIFICATES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def engines() -> AsyncIterator[int]:
    """The port of the uvloop upstream's protocol in this process."""
    async with listening(upstream.Connection) as port:
        yield port
