"""Makes wheel and source distribution in dist/, and tries them: metadata, content, a tier and the console run from it.

`make dist` runs it. Never uploads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PACKAGES = (
    "topology",
    "farhop",
    "regional_lb",
    "global_lb",
    "entry_dns",
    "entry_anycast",
    "farhop_drill",
    "farhop_lab",
    "farhop_cli",
    "farhop_wire",
)
NEEDED = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Description-Content-Type")
CONSOLE = ("", "app.js", "style.css", "icon.svg", "coast.json")
# It checks its configuration, and says in one line what it lacks: so far it needs nothing but what the wheel brings.
CONFIGURATION = """region: virginia
instance: g-1
admin: {port: 0}
listen: {port: 0}
etcd: {endpoints: ["127.0.0.1:1"]}
hop: {keys: {k1: env:HOP_KEY}, active: k1}
"""


def main() -> None:
    """All of it; SystemExit with a line at the first fault."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory(prefix="farhop-dist-") as folder:
        sdist, wheel = _built(Path(folder))
        _check_metadata(wheel, sdist)
        _check_content(wheel, sdist)
        _try(wheel, Path(folder))
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.2f} MB; a tier and the console start from it alone")
    print(f"{sdist.relative_to(ROOT)}: {sdist.stat().st_size / 1e6:.2f} MB")


def _built(folder: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is made from that (not from this folder: so both are whole)."""
    builder = folder / "builder"
    venv.create(builder, with_pip=True)
    python = str(builder / "bin" / "python")
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "hatchling>=1.27")
    _run(python, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(DIST))
    (sdist,) = DIST.glob("farhop-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # 3.11.0 to 3.11.3 have none
        archive.extractall(folder)  # noqa: S202 - built here
    source = folder / sdist.name.removesuffix(".tar.gz")
    _run(python, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(DIST), folder=source)
    (wheel,) = DIST.glob("farhop-*.whl")
    return sdist, wheel


def _check_metadata(wheel: Path, sdist: Path) -> None:
    told = _metadata(wheel)
    if missing := [name for name in NEEDED if not told[name]]:
        raise SystemExit(f"{wheel.name}: METADATA lacks {', '.join(missing)}; add it to pyproject.toml")
    if sdist.name != f"{told['Name']}-{told['Version']}.tar.gz":
        raise SystemExit(f"{sdist.name}: is not of version {told['Version']}")


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def _check_content(wheel: Path, sdist: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    roots = {name.split("/")[0] for name in names}
    if strangers := {root for root in roots - set(PACKAGES) if not root.endswith(".dist-info")}:
        raise SystemExit(f"{wheel.name}: holds {', '.join(sorted(strangers))}, which are no packages of Farhop's")
    if missing := set(PACKAGES) - roots:
        raise SystemExit(f"{wheel.name}: lacks {', '.join(sorted(missing))}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        raise SystemExit(f"{wheel.name}: lacks the licence")
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    if doomed := top & {".venv", "dist", ".git", ".engines"}:
        raise SystemExit(f"{sdist.name}: holds {', '.join(sorted(doomed))}")


def _try(wheel: Path, folder: Path) -> None:
    """Install the wheel and nothing else by name; its balancer starts until etcd is missing, in one line."""
    target = folder / "alone"
    venv.create(target, with_pip=True)
    constraints = str(ROOT / "constraints.txt")
    python = str(target / "bin" / "python")
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, str(wheel))
    _run(python, "-m", "pip", "check", "--quiet", "--disable-pip-version-check")
    config = folder / "global.yaml"
    config.write_text(CONFIGURATION)
    environment = {**os.environ, "HOP_KEY": "x" * 32, "PYTHONPATH": ""}
    farhop = str(target / "bin" / "farhop")
    for arguments, code, expected in (
        (("--version",), 0, f"farhop {_metadata(wheel)['Version']}"),
        (("check", str(config)), 0, "fine"),
        (("global", "--config", str(config)), 2, "etcd"),
    ):
        ended = subprocess.run(
            [farhop, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60.0, check=False
        )
        said = ended.stdout + ended.stderr
        if ended.returncode != code or expected not in said or "Traceback" in said:
            raise SystemExit(f"farhop {' '.join(arguments)}: code {ended.returncode}: {said}")
    _try_console(farhop, folder, environment)


def _try_console(farhop: str, folder: Path, environment: dict[str, str]) -> None:
    """Its page is served whole from the wheel. Of a fleet that does not answer: the page needs none."""
    command = [farhop, "console", "--admin", "http://127.0.0.1:9", "--read-only"]
    running = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert running.stdout is not None
        address = running.stdout.readline().partition("#")[0].strip()
        if not address:
            raise SystemExit(f"{' '.join(command[1:])}: it opened no port")
        for file in CONSOLE:
            with urllib.request.urlopen(f"{address}/{file}", timeout=10.0) as answer:  # noqa: S310 - of our own
                if not answer.read():
                    raise SystemExit(f"{address}/{file}: empty")
    except OSError as error:
        raise SystemExit(f"the console's page is not served from the wheel: {error}") from None
    finally:
        running.terminate()
        running.wait(10.0)


def _run(*command: str, folder: Path = ROOT) -> None:
    ended = subprocess.run(command, cwd=folder, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command[:5])} … ended with {ended.returncode}")


if __name__ == "__main__":
    sys.exit(main())
