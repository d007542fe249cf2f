"""Several sources at once: what is announced, counted and said."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from inprocess import HOP, HOP_KEY, until

from farhop_lab.memory_store import MemoryCluster, MemoryStore
from regional_lb.app.config import RegionalConfig
from regional_lb.engines.config import ReplicaConfig
from regional_lb.engines.discovery import Discovery

PREFIX = "/farhop/v1/replica/virginia/"


class Region:
    """What discovery announced, counted and said."""

    def __init__(self) -> None:
        self.announced: list[list[str]] = []
        self.refused: list[str] = []
        self.said: list[tuple[str, str]] = []
        self.discovery: Discovery

    def announce(self, replicas: Sequence[ReplicaConfig]) -> None:
        self.announced.append([replica.label for replica in replicas])

    async def come(self, *labels: str) -> None:
        await until(lambda: self.announced and self.announced[-1] == list(labels))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(Random(1), MemoryCluster())


@contextlib.asynccontextmanager
async def region(
    monkeypatch: pytest.MonkeyPatch, store: MemoryStore, *sources: dict[str, Any]
) -> AsyncIterator[Region]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    config = RegionalConfig.model_validate({
        "region": "virginia", "instance": "r1", "admin": {"port": 0}, "tier": {"port": 0}, "control": {"port": 0},
        "hop": HOP, "replicas": [{"url": "http://fixed:1", "models": ["m"], "name": "fixed"}], "discovery": sources,
    })  # fmt: skip
    found = Region()
    found.discovery = Discovery(
        config, store, found.announce, found.refused.append, lambda *value: found.said.append(value), Random(1)
    )
    await store.open()
    found.discovery.open()
    try:
        yield found
    finally:
        await found.discovery.close()
        await store.close()


async def test_sources_are_merged_and_each_fails_for_itself(
    monkeypatch: pytest.MonkeyPatch, store: MemoryStore, tmp_path: Path
) -> None:
    path = tmp_path / "replicas.yaml"
    path.write_text("- {url: 'http://a:1', name: a}\n")
    file = {"kind": "file", "path": str(path), "poll_s": 0.01, "replica": {"models": ["m"]}}
    nowhere = {"kind": "kubernetes", "service": "x", "api": "http://127.0.0.1:1", "namespace": "x"}
    etcd = {"kind": "etcd", "replica": {"models": ["m"]}}
    async with region(monkeypatch, store, file, nowhere, etcd) as found:
        await found.come("fixed", "a")
        await store.put(PREFIX + "b", b'{"url":"http://b:1"}')
        await found.come("fixed", "a", "b")
        await until(lambda: "discovery_failed" in found.refused)
        assert any(whom.startswith("kubernetes x") and "no list yet" in why for whom, why in found.said)
        await store.put(PREFIX + "again", b'{"url":"http://a:1"}')
        await store.put(PREFIX + "bad", b'{"url":"http://c:1","engine":"x"}')
        await until(lambda: "discovery_duplicate" in found.refused and "discovery_malformed" in found.refused)
        assert any("again is left out: a:1 is there already, from file" in why for _, why in found.said)
        assert any(PREFIX + "bad.engine: is unknown" in why for _, why in found.said)
        status = found.discovery.status()
        assert [source["replicas"] for source in status["discovery"]] == [1, 0, 2]
        assert "127.0.0.1" in status["discovery"][1]["trouble"]
        assert [out["replica"] for out in status["discovery_left_out"]] == ["again"]
        path.write_text("[]")
        await found.come("fixed", "again", "b")
        path.unlink()
        await until(lambda: any(whom.startswith("file") and "last list stays" in why for whom, why in found.said))
        assert found.refused.count("discovery_duplicate") == found.refused.count("discovery_malformed") == 1


async def test_replicas_found_together_are_announced_together(
    monkeypatch: pytest.MonkeyPatch, store: MemoryStore
) -> None:
    async with region(monkeypatch, store, {"kind": "etcd", "replica": {"models": ["m"]}}) as found:
        await found.come("fixed")
        for number in range(200):
            await store.put(f"{PREFIX}r{number:03}", b'{"url":"http://r%d:1"}' % number)
        await found.come("fixed", *(f"r{number:03}" for number in range(200)))
        assert len(found.announced) < 50


async def test_without_sources_nothing_runs(monkeypatch: pytest.MonkeyPatch, store: MemoryStore) -> None:
    before = len(asyncio.all_tasks())
    async with region(monkeypatch, store) as found:
        assert len(asyncio.all_tasks()) == before
        assert found.discovery.status() == {}
    assert found.announced == []
