"""The house's own rules, held by machine: rooms at the root, mirrored tests, banned calls."""

from __future__ import annotations

import ast
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("topology", "farhop", "regional_lb", "global_lb", "farhop_lab", "farhop_cli")
FOLDERS = {*PACKAGES, "proto", "tests", "docs", "deploy", ".ci"}

SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))

# Files that are tested by what runs them whole (tests/drills, tests/flows): wiring, and the worlds they are wired in.
TESTED_WHOLE = {
    "farhop/shell/process.py",
    "farhop/shell/wiring.py",
    "global_lb/main.py",
    "regional_lb/main.py",
    "farhop_lab/demo.py",
    "farhop_lab/scenes_home.py",
    "farhop_lab/scenes_ocean.py",
    "farhop_lab/stage.py",
    "farhop_lab/world.py",
}


def _tracked() -> list[str]:
    told = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if told.returncode != 0:
        pytest.skip("not a git checkout: the folders at the root cannot be told from what a build left there")
    return told.stdout.splitlines()


def test_the_root_holds_the_rooms_of_the_plan_and_no_others() -> None:
    folders = {name.split("/", 1)[0] for name in _tracked() if "/" in name}
    assert folders <= FOLDERS, f"not in the plan of the house: {sorted(folders - FOLDERS)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_opens_with_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "open with two or three lines: what for, and what never"


def _mirror(path: Path) -> Path:
    relative = path.relative_to(ROOT)
    return ROOT / "tests" / relative.parent / f"test_{relative.stem.lstrip('_')}.py"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.stem not in ("__init__", "__main__")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_tests_mirror_sources(path: Path) -> None:
    if str(path.relative_to(ROOT)) in TESTED_WHOLE:
        return
    assert _mirror(path).exists(), f"write {_mirror(path).relative_to(ROOT)}"


# The machines read no clock and roll no dice: what they decide must be the same in the simulator.
MACHINES = [
    ROOT / tier / f"{room}.py"
    for tier in ("regional_lb", "global_lb")
    for room in (
        "view",
        "admission",
        "policy",
        "pick",
        "fleet",
        "instances",
        "table",
        "row",
        "flow",
        "queue",
        "split",
        "outlook",
        "placing",
        "memory",
        "pairs",
    )
    if (ROOT / tier / f"{room}.py").exists()
] + [path for tier in ("regional_lb", "global_lb") for path in sorted((ROOT / tier / "policy").glob("*.py"))]


@pytest.mark.parametrize("path", MACHINES, ids=lambda p: str(p.relative_to(ROOT)))
def test_machines_never_await_nor_read_a_clock(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith)
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"time", "random", "asyncio", "socket"}
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "asyncio", "socket"):
            pytest.fail(f"imports {node.module}")


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.parts[len(ROOT.parts)] != "farhop_lab"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_only_the_shell_knows_the_real_clock(path: Path) -> None:
    allowed = {"farhop/shell/clock.py", "regional_lb/main.py", "global_lb/main.py"}
    if str(path.relative_to(ROOT)) in allowed or path.parts[len(ROOT.parts)] == "farhop_cli":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert "time" not in {alias.name for alias in node.names}, "take a clock as an argument"
        if isinstance(node, ast.ImportFrom):
            assert node.module != "time", "take a clock as an argument"


def test_the_folder_of_the_wire_is_no_package() -> None:
    """A package named `proto` would shadow proto-plus for whoever installs both."""
    assert not (ROOT / "proto" / "__init__.py").exists()
    assert find_spec("farhop_wire") is not None


def test_no_path_of_a_machine_and_no_registry_is_named() -> None:
    words = ("/wo" + "rk/", "pypi" + ".org", "deb.debian" + ".org", "files.python" + "hosted")
    for name in _tracked():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".proto", "") and path.is_file():
            text = path.read_text(errors="replace")
            assert not [word for word in words if word in text], name
