"""A file on a real disk: renames over it, changes in place, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from inprocess import until
from sources import following

from regional_lb.engines.config import FileSource, Template
from regional_lb.engines.discovery import file
from regional_lb.engines.discovery.file import ReplicaFile


def source(path: Path) -> ReplicaFile:
    return ReplicaFile(FileSource(kind="file", path=str(path), poll_s=0.01, replica=Template(models=["m"])))


def lines(*names: str) -> str:
    return "".join(f"- {{url: 'http://{name}:8000', name: {name}}}\n" for name in names)


def replace(path: Path, text: str) -> None:
    """As config management and Kubernetes do it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


async def test_a_file_is_followed_through_renames_and_changes_in_place(tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    path.write_text(lines("a"))
    async with following(source(path)) as found:
        await found.come("a")
        assert found.found is not None
        assert found.found.replicas[0].models == ["m"]
        replace(path, lines("a", "b"))
        await found.come("a", "b")
        path.write_text(json.dumps([{"url": "http://c:1", "name": "c", "models": ["x"], "draining": True}]))
        await found.come("c")
        assert found.draining() == ["c"]
        path.write_text("[]")
        await found.come()
        assert found.failures == []


async def test_faults_of_a_replica_file_are_named_and_its_last_good_version_stands(tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    async with following(source(path)) as found:
        await until(lambda: found.failures)
        assert found.failures == ["cannot be read: No such file or directory"]
        replace(path, lines("a"))
        await found.come("a")
        for text, says in (
            ("- {url: 'http://b:1'}\n- {url: b}\n- {url: 'http://c:1', engine: tensorrt}\n- 7\n", "[1].url: must look"),
            ("", "must be a list of replicas"),
            ("a: b", "must be a list of replicas"),
            ("- {url: 'http://b:1'", "is not YAML"),
            ("- {url: 'http://b:1', name: x, name: y}", "a key is given twice"),
        ):
            count = len(found.failures)
            replace(path, text)
            await until(lambda count=count: len(found.failures) > count)
            assert says in found.failures[-1]
        assert "[2].engine: is unknown; there is vllm" in found.failures[1]
        assert "[3]: must be a mapping" in found.failures[1]
        path.unlink()
        await until(lambda: "No such file" in found.failures[-1])
        assert found.labels == ["a"]
        assert len(found.failures) == 7  # each problem is reported once, not at every read
        replace(path, lines("a"))  # the same text as before: reported again, since the problem had ended
        await until(lambda: len(found.steps) == 9)
        assert found.steps[-1] == found.found


async def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "FILE_BYTES_MAX", 10)
    path = tmp_path / "replicas.yaml"
    path.write_text(lines("a"))
    async with following(source(path)) as found:
        await until(lambda: found.failures)
        assert "larger than 10 bytes" in found.failures[0]
    monkeypatch.setattr(file, "FILE_BYTES_MAX", 1000)
    monkeypatch.setattr(file, "REPLICAS_MAX", 1)
    path.write_text(lines("a", "b"))
    async with following(source(path)) as found:
        await until(lambda: found.failures)
        assert "holds 2 replicas, at most 1" in found.failures[0]
