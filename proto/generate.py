"""Generates the stubs of `farhop_wire` beside their .proto file, or checks that the committed ones are current.

Never edit what it writes. `python proto/generate.py` writes; `--check` compares; exit 1, a line per stale file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = "farhop_wire"
STUBS = tuple(
    f"{words}_{stub}"
    for words in ("ext_proc", "peers", "region")
    for stub in ("pb2.py", "pb2.pyi", "pb2_grpc.py", "pb2_grpc.pyi")
)
PLUGINS = ("mypy", "mypy_grpc")
TIMEOUT_S = 120


def generate(out: Path) -> None:
    """Write every stub into `out`/farhop_wire. Raises SystemExit with the compiler's words if it refuses."""
    plugins = [f"--plugin=protoc-gen-{name}={_plugin(name)}" for name in PLUGINS]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", *PLUGINS)]
    sources = sorted(str(path) for path in (ROOT / PACKAGE).glob("*.proto"))
    # -I at the source root makes the stubs import each other as `farhop_wire.x`, which is what they are at run time.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *plugins, *outputs, *sources]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"protoc failed ({done.returncode}): {done.stderr.strip()}")


def stale(fresh: Path) -> list[str]:
    """Names of the committed stubs that differ from those under `fresh`, missing and unexpected ones included."""
    committed = {path.name for path in (ROOT / PACKAGE).glob("*_pb2*") if path.suffix in {".py", ".pyi"}}
    names = committed | set(STUBS)
    return sorted(name for name in names if _text(ROOT / PACKAGE / name) != _text(fresh / PACKAGE / name))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the committed stubs are stale")
    if not parser.parse_args(arguments).check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        names = stale(Path(folder))
    for name in names:
        print(f"proto/{PACKAGE}/{name} is stale: run `python proto/generate.py` and commit it", file=sys.stderr)
    return 1 if names else 0


def _plugin(name: str) -> Path:
    path = Path(sysconfig.get_path("scripts")) / f"protoc-gen-{name}{'.exe' if os.name == 'nt' else ''}"
    if not path.exists():
        raise SystemExit(f"{path.name} is not installed beside this Python: pip install mypy-protobuf")
    return path


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
