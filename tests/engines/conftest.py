from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import real
from clients import Entry


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who has engines of its own comes last: those that the others share end for them, and are not started again."""
    items.sort(
        key=lambda item: item.path.parent == Path(__file__).parent and "own" in getattr(item, "fixturenames", ())
    )


@pytest.fixture(scope="session")
def shared(logs: Path) -> Iterator[real.Shared]:
    """The vLLMs of all tests that break none."""
    if not real.VLLM.exists():
        pytest.skip(f"vLLM is {real.MISSING}")
    both = real.Shared(logs)
    try:
        yield both
    finally:
        both.stop()


@pytest.fixture
def vllms(shared: real.Shared) -> list[real.RealEngine]:
    """Two real vLLMs with KV events."""
    return shared.started()


@pytest.fixture(scope="session")
def llama(logs: Path) -> Iterator[real.RealEngine]:
    """llama.cpp's server."""
    if not real.LLAMA.exists():
        pytest.skip(f"llama-server is {real.MISSING}")
    started = real.llama(logs)
    try:
        started.ready()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def emulated(logs: Path) -> Iterator[real.RealEngine]:
    """The lab's engine."""
    started = real.emulated(logs)
    try:
        started.ready()
        yield started
    finally:
        started.stop()


@pytest.fixture(params=["emulated", "vllm", "llama"])
async def entry(request: pytest.FixtureRequest) -> AsyncIterator[Entry]:
    """Both tiers before an engine of each kind: what a client of somebody else's is pointed at."""
    kind = request.param
    engine = request.getfixturevalue("vllms" if kind == "vllm" else kind)
    async with real.tiers(*(engine if kind == "vllm" else [engine]), tokenizer=kind == "vllm") as both:
        yield Entry(kind, both)
