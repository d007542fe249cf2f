"""Builds the container image: wheels and SBOM on this machine, then `docker build` without a network.

`make image` runs it. Which registry wheels come from is pip's own configuration here; nothing of that reaches the
image. Never pushes, never pulls by itself: `docker build` fetches BASE where it is not on this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASE, PYTHON_OF_BASE = "python:3.13-slim", "3.13"
PLATFORMS = ("manylinux_2_28_{}", "manylinux_2_17_{}", "manylinux2014_{}")  # newest first; all run on Debian 12


class Wheel(NamedTuple):
    """One package as it is installed."""

    path: Path
    name: str
    version: str
    licence: str
    sha256: str


def wheels(into: Path, python: str, machine: str, extras: str) -> list[Wheel]:
    """Farhop's own wheel and all that it needs at run time, for that Python, in the versions of constraints.txt."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(ROOT))
    (own,) = into.glob("farhop-*.whl")
    platforms = [f"--platform={one.format(machine)}" for one in PLATFORMS]
    _run(
        *pip, "download", "--quiet", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}",
        *platforms, "--constraint", str(ROOT / "constraints.txt"), "--dest", str(into),
        f"{own}[{extras}]" if extras else str(own),
    )  # fmt: skip
    return sorted((described(path) for path in into.glob("*.whl")), key=lambda one: one.name)


def described(path: Path) -> Wheel:
    """What a wheel says of itself."""
    with zipfile.ZipFile(path) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(archive.read(metadata).decode())
    licence = told["License-Expression"] or (told["License"] or "").strip().splitlines()[:1] or ""
    return Wheel(
        path,
        str(told["Name"]),
        str(told["Version"]),
        licence if isinstance(licence, str) else licence[0],
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def lock(packages: list[Wheel]) -> str:
    """A requirements file that admits these very files."""
    return "".join(f"{one.name}=={one.version} --hash=sha256:{one.sha256}\n" for one in packages)


def sbom(packages: list[Wheel]) -> dict[str, Any]:
    """CycloneDX 1.5: every Python package of the image, with its hash and licence. BASE's own packages are BASE's."""
    (own,) = (one for one in packages if one.name == "farhop")
    content = "".join(one.sha256 for one in packages)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",  # of the same wheels the same
        "version": 1,
        "metadata": {"component": _component(own, "application")},
        "components": [_component(one, "library") for one in packages if one is not own],
    }


def _component(one: Wheel, kind: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{one.name.lower().replace('_', '-')}@{one.version}"
    made: dict[str, Any] = {
        "type": kind,
        "bom-ref": purl,
        "name": one.name,
        "version": one.version,
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": one.sha256}],
    }
    if one.licence:
        made["licenses"] = [{"license": {"name": one.licence[:200]}}]
    return made


def main(arguments: list[str] | None = None) -> None:
    """Build it, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default=BASE, help=f"image with a Python that has venv (default {BASE})")
    parser.add_argument("--python", default=PYTHON_OF_BASE, help=f"its version (default {PYTHON_OF_BASE})")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"))
    parser.add_argument(
        "--extras", default="", help="such as tokenizer, where regional balancers read prompts as tokens"
    )
    parser.add_argument("--tag", default="farhop:latest")
    parser.add_argument("--docker", default="docker")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="farhop-image-") as folder:
        context = Path(folder)
        (context / "wheels").mkdir()
        packages = wheels(context / "wheels", asked.python, asked.machine, asked.extras)
        (context / "requirements.lock").write_text(lock(packages))
        (context / "sbom.cdx.json").write_text(json.dumps(sbom(packages), indent=1) + "\n")
        for name in ("Dockerfile", "prune.py"):
            shutil.copy(HERE / name, context / name)
        version = next(one.version for one in packages if one.name == "farhop")
        given = {"BASE": asked.base, "VERSION": version, "REVISION": _revision()}
        _run(
            asked.docker, "build", "--tag", asked.tag, *(f"--build-arg={key}={value}" for key, value in given.items()),
            str(context), environment={"DOCKER_BUILDKIT": "0"},
        )  # fmt: skip
    sizes = [_size(asked.docker, image) for image in (asked.tag, asked.base)]
    print(f"{asked.tag}: {sizes[0] / 1e6:.0f} MB, of which {(sizes[0] - sizes[1]) / 1e6:.0f} MB above {asked.base}")


def _revision() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def _size(docker: str, image: str) -> int:
    shown = subprocess.run(
        [docker, "image", "inspect", "--format", "{{.Size}}", image], capture_output=True, text=True, check=True
    )
    return int(shown.stdout)


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    ended = subprocess.run(command, env={**os.environ, **(environment or {})}, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command[:5])} … ended with {ended.returncode}")


if __name__ == "__main__":
    main()
