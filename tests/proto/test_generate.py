"""The stubs are those of the .proto files beside them, wherever the generator is run."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "proto" / "generate.py"


def run(script, *arguments, cwd):
    return subprocess.run(
        [sys.executable, str(script), *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "proto"


def test_the_committed_stubs_are_current_from_any_folder(tmp_path):
    done = run(SCRIPT, "--check", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_changed_proto_makes_every_stale_stub_a_line_and_writing_cures_it(copy, tmp_path):
    proto = copy / "farhop_wire" / "region.proto"
    proto.write_text(proto.read_text().replace("double wait_ms = 12;", "double wait_ms = 12;\n  bool new = 99;"))
    (copy / "farhop_wire" / "region_pb2_grpc.pyi").unlink()
    done = run(copy / "generate.py", "--check", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert [line.split(" ")[0].rsplit("/")[-1] for line in lines] == [
        "region_pb2.py",
        "region_pb2.pyi",
        "region_pb2_grpc.pyi",
    ]
    assert all("python proto/generate.py" in line for line in lines)
    assert run(copy / "generate.py", cwd=tmp_path).returncode == 0
    assert run(copy / "generate.py", "--check", cwd=tmp_path).returncode == 0


def test_a_broken_proto_is_one_clear_failure(copy, tmp_path):
    (copy / "farhop_wire" / "region.proto").write_text("nonsense")
    done = run(copy / "generate.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "protoc failed" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_folder_is_a_source_root_and_never_a_package():
    assert not (ROOT / "proto" / "__init__.py").exists()
    assert importlib.util.find_spec("farhop_wire.region_pb2").origin.startswith(str(ROOT / "proto"))
