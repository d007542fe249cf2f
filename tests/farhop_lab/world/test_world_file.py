"""The description of a running world: what is written is read, by its owner; what does not run says so."""

import os
import stat
import subprocess
import sys

import msgspec
import pytest

from farhop_lab.world import world_file
from farhop_lab.world.world_file import RegionFile, WorldFile, WorldFileError, read, write

WORLD = WorldFile(
    pid=os.getpid(),
    speedup=10.0,
    topology="topology.yaml",
    etcd="127.0.0.1:2379",
    collector="http://127.0.0.1:4318",
    model="llama-3.1-8b",
    keys={"anywhere": "sk-farhop-anywhere"},
    regions={"virginia": RegionFile("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3", ["http://e/v1"])},
)


def test_world_file_survives_a_round_trip(tmp_path):
    path = tmp_path / "deep" / "world.json"
    write(path, WORLD)
    assert read(path) == WORLD


def test_keys_are_for_their_owner_and_no_other_file_is_left(tmp_path):
    path = tmp_path / "world.json"
    write(path, WORLD)
    write(path, msgspec.structs.replace(WORLD, speedup=20.0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["world.json"]
    assert read(path).speedup == 20.0


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "world.json"
    write(path, WORLD)

    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        write(path, msgspec.structs.replace(WORLD, speedup=20.0))
    assert [one.name for one in tmp_path.iterdir()] == ["world.json"]
    assert read(path) == WORLD


def test_a_missing_world_file_names_farhop_up(tmp_path):
    with pytest.raises(WorldFileError, match=r"no world runs here .*`farhop up`"):
        read(tmp_path / "world.json")


def test_a_folder(tmp_path):
    with pytest.raises(WorldFileError, match="directory"):
        read(tmp_path)


def test_a_world_whose_process_is_gone(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path = tmp_path / "world.json"
    write(path, msgspec.structs.replace(WORLD, pid=gone.pid))
    with pytest.raises(WorldFileError, match=rf"no longer runs \(process {gone.pid} is gone\); run `farhop up`"):
        read(path)


@pytest.mark.parametrize("change", [
    {"pid": 0}, {"pid": "1"}, {"speedup": 0}, {"regions": {}}, {"keys": None}, {"surprise": 1},
    {"regions": {"virginia": {"entry": "127.0.0.1:1", "global_admin": "http://h", "regional_admin": "http://h"}}},
    {"regions": {"virginia": {"entry": "http://h"}}},
])  # fmt: skip
def test_a_malformed_file_is_one_line_with_the_remedy(tmp_path, change):
    path = tmp_path / "world.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(WORLD), **change}))
    with pytest.raises(WorldFileError) as refused:
        read(path)
    assert "`farhop up`" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]"])
def test_file_other_than_a_json_object_is_refused(tmp_path, text):
    path = tmp_path / "world.json"
    path.write_bytes(text)
    with pytest.raises(WorldFileError, match="farhop up"):
        read(path)


def test_a_file_without_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(world_file, "FILE_BYTES_MAX", 10)
    path = tmp_path / "world.json"
    write(path, WORLD)
    with pytest.raises(WorldFileError, match="larger than 10 bytes"):
        read(path)
