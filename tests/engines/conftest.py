from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import real
from clients import Entry
from inprocess import HOP_KEY


@pytest.fixture(autouse=True)
def _hop_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def vllms(logs: Path) -> Iterator[list[real.RealEngine]]:
    """Two real vLLMs with KV events."""
    if not real.VLLM.exists():
        pytest.skip(f"vLLM is {real.MISSING}")
    running = os.environ.get("FARHOP_TEST_VLLM", "").split()
    if running:
        yield [real.RealEngine(url.partition("#")[0], int(url.partition("#")[2] or 0)) for url in running]
        return
    started = [real.vllm(logs), real.vllm(logs)]
    try:
        for engine in started:
            engine.ready()
        yield started
    finally:
        for engine in started:
            engine.stop()


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
