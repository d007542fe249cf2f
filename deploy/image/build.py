"""Builds the container image: packages are installed on this machine, `docker build` only copies them.

`make image` runs it. Which registry packages come from is pip's own configuration here; nothing of that reaches the
image. Never pushes, never pulls by itself: `docker build` fetches BASE where it is not on this machine.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import py_compile
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
BASE = "python:3.11-slim-bookworm"
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"  # packages are installed for the Python that runs this
PLATFORMS = ("manylinux_2_28_{}", "manylinux_2_17_{}", "manylinux2014_{}")  # newest first; all run on Debian 12
# What no process of Farhop loads.
FOLDERS, SUFFIXES = ("tests", "include", "_pyinstaller"), (".pyi", ".pyx", ".pxd", ".h", ".c", ".a")
# `tokenizers` asks for the hub's client, to download by name; tokenizers are read from files here.
UNLOADED = {
    "anyio", "filelock", "fsspec", "h11", "hf_xet", "httpcore2", "httpx2", "huggingface_hub", "tqdm", "truststore",
}  # fmt: skip
COMMAND = "#!/usr/bin/env python3\nfrom farhop_cli.main import main\n\nmain()\n"
EXTRAS = "anycast,geoip,tokenizer"  # what some role needs where its configuration asks for it
ROLES = (
    "import global_lb.app.main, regional_lb.app.main, regional_lb.engines.kv.events, regional_lb.picker.server,"
    " entry_dns.app.main, entry_anycast.app.main, farhop_lab.engine.main"
)


class Wheel(NamedTuple):
    """One package as it is installed."""

    path: Path
    name: str
    version: str
    licence: str
    sha256: str


def wheels(into: Path, machine: str, extras: str) -> list[Wheel]:
    """Farhop's own wheel and all that it needs at run time, in the versions of constraints.txt."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(ROOT))
    (own,) = into.glob("farhop-*.whl")
    asked = f"{own}[{extras}]"
    constraints = str(ROOT / "constraints.txt")
    _run(*pip, "download", "--quiet", *_for(machine), "--constraint", constraints, "--dest", str(into), asked)
    found = [described(path) for path in into.glob("*.whl")]
    return sorted((one for one in found if one.name.replace("-", "_") not in UNLOADED), key=lambda one: one.name)


def _for(machine: str) -> tuple[str, ...]:
    platforms = (f"--platform={one.format(machine)}" for one in PLATFORMS)
    return ("--only-binary=:all:", "--implementation=cp", f"--python-version={VERSION}", *platforms)


def install(wheels_at: Path, packages: list[Wheel], machine: str, target: Path) -> None:
    """Exactly these wheels, pruned and compiled: the root of an image is read-only, so nobody compiles them later."""
    locked = wheels_at / "requirements.lock"
    locked.write_text(lock(packages))
    _run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index",
        f"--find-links={wheels_at}", "--require-hashes", "--no-deps", "--no-compile", *_for(machine),
        f"--target={target}", f"--requirement={locked}",
    )  # fmt: skip
    shutil.rmtree(target / "bin", ignore_errors=True)  # scripts that name this machine's Python
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_dir() and path.name in FOLDERS:
            shutil.rmtree(path)
        elif path.is_file() and path.suffix in SUFFIXES:
            path.unlink()
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        target, quiet=2, workers=0, stripdir=target, prependdir="/opt/farhop", invalidation_mode=mode
    )
    (target / "bin").mkdir()
    (target / "bin" / "farhop").write_text(COMMAND)
    (target / "bin" / "farhop").chmod(0o755)


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
    """Build it, try it, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default=BASE, help=f"image with Python {VERSION} (default {BASE})")
    parser.add_argument("--machine", default=os.uname().machine, choices=("x86_64", "aarch64"))
    parser.add_argument("--extras", default=EXTRAS, help=f"of pyproject.toml, with commas between (default {EXTRAS})")
    parser.add_argument("--tag", default="farhop:latest")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="farhop-image-") as folder:
        context, wheels_at = Path(folder) / "context", Path(folder) / "wheels"
        wheels_at.mkdir()
        (context / "state").mkdir(parents=True)
        packages = wheels(wheels_at, asked.machine, asked.extras)
        install(wheels_at, packages, asked.machine, context / "farhop")
        (context / "farhop" / "sbom.cdx.json").write_text(json.dumps(sbom(packages), indent=1) + "\n")
        shutil.copy(HERE / "Dockerfile", context / "Dockerfile")
        version = next(one.version for one in packages if one.name == "farhop")
        given = {"BASE": asked.base, "VERSION": version, "REVISION": _revision()}
        _run(
            "docker", "build", "--tag", asked.tag, *(f"--build-arg={key}={value}" for key, value in given.items()),
            *(("--platform=linux/arm64",) if asked.machine == "aarch64" else ()),
            str(context), environment={"DOCKER_BUILDKIT": "0"},
        )  # fmt: skip
    if asked.machine == os.uname().machine:
        _try(asked.tag)
    sizes = [_size(image) for image in (asked.tag, asked.base)]
    print(f"{asked.tag}: {sizes[0] / 1e6:.0f} MB, of which {(sizes[0] - sizes[1]) / 1e6:.0f} MB above {asked.base}")


def _try(tag: str) -> None:
    """Every role is imported once: a base that lacks a library, or has another Python, is found here."""
    program = f"import sys\nassert sys.version_info[:2] == {sys.version_info[:2]}, sys.version\n{ROLES}"
    tried = ("docker", "run", "--rm", "--network=none", "--read-only", "--entrypoint=python3", tag, "-c", program)
    if subprocess.run(tried, check=False).returncode:
        raise SystemExit(f"BASE does not do: it must have Python {VERSION}, its whole standard library, and libstdc++")


def _revision() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def _size(image: str) -> int:
    shown = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Size}}", image], capture_output=True, text=True, check=True
    )
    return int(shown.stdout)


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    ended = subprocess.run(command, env={**os.environ, **(environment or {})}, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command[:5])} … ended with {ended.returncode}")


if __name__ == "__main__":
    main()
