"""The copy of etcd on disk is used at a start if a law is known, until etcd answers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest

from farhop.store import disk_cache
from farhop.store.contract import LAW_KEY, REGION_PREFIX, STEER_PREFIX, Change, ChangeKind, StoreUnreachable
from farhop.store.disk_cache import DiskCachedStore, disk_cache_status, notice
from farhop.store.state import StateDir, StateError
from farhop_lab.memory_store import MemoryCluster, MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

REPORT, WORD = f"{REGION_PREFIX}tokyo/lb/r1", f"{STEER_PREFIX}bias/tokyo"


class Etcd(MemoryStore):
    """As EtcdStore: one whose opening fails can be watched all the same, and is told to be lost."""

    async def open(self) -> None:
        self._open = True
        await super().open()


async def until(true: Callable[[], object]) -> None:
    """Poll a condition, with a bound."""
    async with asyncio.timeout(60.0):
        while not true():
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "SAVE_S", 0.0)


class Process:
    """One start of a process that keeps its state here."""

    def __init__(self, folder: Path, cluster: MemoryCluster) -> None:
        self.state, self.warnings = StateDir(folder, "fleet", "a"), list[str]()
        self.etcd = Etcd(Random(1), cluster)
        self.store = DiskCachedStore(self.etcd, "hub-1", self.state, Random(2), self.warnings.append)
        self.changes: dict[str, list[Change]] = {}

    async def follow(self, prefix: str) -> None:
        found = self.changes.setdefault(prefix, [])
        async for change in self.store.watch(prefix):
            found.append(change)

    def held(self, prefix: str) -> dict[str, bytes]:
        """What the disk has of it."""
        found = self.state.load(self.store.name(prefix))
        return {} if found is None else {e.key: e.value for e in disk_cache.decode_snapshot(found.document).entries}


@asynccontextmanager
async def running(process: Process, *prefixes: str) -> AsyncIterator[Process]:
    await process.store.open()
    tasks = [asyncio.create_task(process.follow(prefix)) for prefix in prefixes]
    await until(lambda: all(process.changes.get(prefix) for prefix in prefixes))
    try:
        yield process
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await process.store.close()


ALL = (LAW_KEY, REGION_PREFIX, STEER_PREFIX)


async def test_a_start_while_etcd_is_silent_gets_what_stood_there_last(tmp_path: Path) -> None:
    cluster = MemoryCluster()
    async with running(Process(tmp_path, cluster), *ALL) as before:
        for key, value in ((LAW_KEY, b"law 7"), (REPORT, b"report"), (WORD, b"word")):
            await before.store.put(key, value)
        await until(lambda: before.held(STEER_PREFIX) and before.held(LAW_KEY) and before.held(REGION_PREFIX))
        assert before.store.status()["from_disk"] is False
    after = Process(tmp_path, cluster)
    after.etcd.outage()
    async with running(after, *ALL):
        await until(lambda: all(len(after.changes.get(prefix, ())) == 2 for prefix in ALL))
        for prefix, key, value in ((LAW_KEY, LAW_KEY, b"law 7"), (REGION_PREFIX, REPORT, b"report")):
            first, second = after.changes[prefix]
            assert (first.kind, first.from_disk, second.kind) == (ChangeKind.SNAPSHOT, True, ChangeKind.LOST)
            assert {entry.key: entry.value for entry in first.entries} == {key: value}
        found = disk_cache_status([after.store])
        assert found[0]["from_disk"]
        assert found[0]["written_at"] is not None
        assert "started from what was kept on disk" in notice(found)
        assert len(after.warnings) == 1
        cluster.put(WORD, b"newer")
        after.etcd.restore()
        await until(lambda: not after.store.status()["from_disk"] and len(after.changes[STEER_PREFIX]) == 3)
        last = after.changes[STEER_PREFIX][-1]
        assert (last.kind, last.from_disk, last.entries[0].value) == (ChangeKind.SNAPSHOT, False, b"newer")
        await until(lambda: after.held(STEER_PREFIX) == {WORD: b"newer"})
        assert notice(disk_cache_status([after.store])) == ""


async def test_without_a_law_read_before_there_is_no_start(tmp_path: Path) -> None:
    cluster = MemoryCluster()
    first = Process(tmp_path, cluster)
    first.etcd.outage()
    with pytest.raises(StoreUnreachable, match="nor was anything kept yet"):
        await first.store.open()
    async with running(Process(tmp_path, cluster), STEER_PREFIX) as before:
        await before.store.put(WORD, b"word")
        await until(lambda: before.held(STEER_PREFIX))
    with pytest.raises(StoreUnreachable, match="nor was anything kept yet"):
        await first.store.open()
    async with running(Process(tmp_path, cluster), LAW_KEY) as before:
        await until(lambda: before.state.load(before.store.name(LAW_KEY)) is not None)
        assert before.held(LAW_KEY) == {}  # it is also known that none was set
    async with running(first, LAW_KEY):
        await until(lambda: len(first.changes.get(LAW_KEY, ())) == 2)


async def test_a_law_on_disk_that_is_not_what_was_written_is_no_law(tmp_path: Path) -> None:
    cluster = MemoryCluster()
    async with running(Process(tmp_path, cluster), *ALL) as before:
        await before.store.put(LAW_KEY, b"law 7")
        await before.store.put(WORD, b"word")
        await until(lambda: before.held(LAW_KEY) and before.held(STEER_PREFIX))
        names = [before.store.name(prefix) for prefix in (STEER_PREFIX, LAW_KEY)]
    after = Process(tmp_path, cluster)
    after.etcd.outage()
    word, law = (after.state.path(name) for name in names)
    word.write_bytes(word.read_bytes()[:-1])
    async with running(after, STEER_PREFIX, LAW_KEY):
        await until(lambda: len(after.changes.get(LAW_KEY, ())) == 2 and after.changes.get(STEER_PREFIX))
        assert [change.kind for change in after.changes[STEER_PREFIX]] == [ChangeKind.LOST]  # nothing rather than that
        assert "checksum" in str(after.store.trouble)
        assert len(after.warnings) == 2
    law.write_bytes(law.read_bytes().replace(b"law 7", b"law 8"))
    with pytest.raises(StoreUnreachable, match="checksum"):
        await after.store.open()


async def test_values_that_always_change_are_not_always_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "LAZY_S", 3600.0)
    cluster, saved = MemoryCluster(), list[str]()
    process = Process(tmp_path, cluster)
    save = process.state.save
    monkeypatch.setattr(process.state, "save", lambda name, data: saved.append(name) or save(name, data))
    async with running(process, REGION_PREFIX):
        await process.store.put(REPORT, b"report 0")
        await until(lambda: process.held(REGION_PREFIX))
        written = len(saved)
        for number in range(1, 20):
            await process.store.put(REPORT, b"report %d" % number)
            await asyncio.sleep(0.002)
        assert len(saved) == written
        await process.store.put(REPORT + "b", b"another balancer")
        await until(lambda: len(process.held(REGION_PREFIX)) == 2)
        await process.store.put(REPORT, b"the last")
        await until(lambda: process.changes[REGION_PREFIX][-1].value == b"the last")
        assert process.held(REGION_PREFIX)[REPORT] == b"report 19"
    assert process.held(REGION_PREFIX)[REPORT] == b"the last"  # an orderly end leaves the latest


async def test_keys_that_a_full_disk_refused_are_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "LAZY_S", 0.01)
    process = Process(tmp_path, MemoryCluster())
    save = process.state.save

    def full(_name: str, _data: bytes) -> None:
        raise StateError("disk: cannot be written: No space left on device")

    monkeypatch.setattr(process.state, "save", full)
    async with running(process, LAW_KEY):
        await process.store.put(LAW_KEY, b"law 7")
        await until(lambda: process.store.trouble is not None and len(process.changes[LAW_KEY]) == 2)
        monkeypatch.setattr(process.state, "save", save)
        await until(lambda: process.held(LAW_KEY) == {LAW_KEY: b"law 7"})
        await until(lambda: process.store.trouble is None)


async def test_a_disk_that_is_full_is_logged_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_name: str, _data: bytes) -> None:
        raise StateError("disk: cannot be written: No space left on device")

    process = Process(tmp_path, MemoryCluster())
    with monkeypatch.context() as patched:
        patched.setattr(process.state, "save", full)
        async with running(process, STEER_PREFIX):
            await process.store.put(WORD, b"word")
            await until(lambda: process.store.trouble is not None)
            await until(lambda: process.changes[STEER_PREFIX][-1].value == b"word")
    assert "No space left" in str(process.store.status()["trouble"])
    assert all("No space left" in line for line in process.warnings)


@pytest.mark.parametrize("rounds", range(12))
async def test_a_change_at_the_moment_of_its_end_is_kept_and_does_not_hold_it_up(tmp_path: Path, rounds: int) -> None:
    process = Process(tmp_path, MemoryCluster())
    async with running(process, LAW_KEY, REGION_PREFIX):
        await process.etcd.put(REPORT, b"1")
        await until(lambda: process.held(REGION_PREFIX))
        await process.etcd.put(REPORT, b"2")  # which is kept after a while
        await until(lambda: len(process.changes[REGION_PREFIX]) == 3)
        for _ in range(20):  # and is waited for
            await asyncio.sleep(0.002)
        await process.etcd.put(LAW_KEY, b"law")
        for _ in range(rounds):
            await asyncio.sleep(0)
        async with asyncio.timeout(60.0):
            await process.store.close()
    assert process.held(REGION_PREFIX) == {REPORT: b"2"}
    assert process.held(LAW_KEY) == ({LAW_KEY: b"law"} if process.changes[LAW_KEY][1:] else {})
