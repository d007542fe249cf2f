"""The repository's own rules: packages at the root, mirrored tests, banned calls, cycles, named files.

Each rule is one test, which names all that breaks it at once.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "topology", "farhop", "regional_lb", "global_lb", "entry_dns", "entry_anycast", "farhop_drill", "farhop_lab",
    "farhop_cli",
)  # fmt: skip
FOLDERS = {*PACKAGES, "proto", "tests", "docs", "deploy", ".ci"}

# Code whose decisions must be the same in the simulator: no waiting, no clock, no random generator of its own.
PURE = (
    "topology",
    "farhop/balance",
    "regional_lb/scheduler",
    "regional_lb/fleet",
    "global_lb/routing",
    "global_lb/fleet",
    "entry_dns/answers",
    "entry_dns/fleet",
    "entry_anycast/announcing",
)

# Files tested only as parts of a whole (tests/drills, tests/flows): wiring, and the worlds around them.
TESTED_WHOLE = {
    "farhop/balance/quota_root.py",  # both together, in the worlds of tests/farhop/balance/test_quota.py
    "farhop/balance/quota_holder.py",
    "farhop/service/process/lifecycle.py",
    "farhop/service/assembly/stores.py",
    "global_lb/app/main.py",
    "regional_lb/app/main.py",
    "entry_dns/app/main.py",
    "entry_anycast/app/main.py",
    "farhop_lab/demo/demo.py",
    "farhop_lab/demo/checker.py",
    "farhop_lab/demo/checks.py",
    "farhop_lab/demo/entry.py",
    "farhop_lab/world/world.py",
}


@cache
def _sources() -> dict[str, ast.Module]:
    """Every module by its path from the root, parsed."""
    found = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    gc.disable()  # all of it stays: to look through it for garbage meanwhile is a third of the work
    try:
        return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in found}
    finally:
        gc.enable()


@cache
def _nodes() -> dict[str, list[ast.AST]]:
    """The nodes of each, walked once for all rules."""
    return {path: list(ast.walk(tree)) for path, tree in _sources().items()}


@pytest.fixture(scope="module", autouse=True)
def _trees_forgotten() -> Iterator[None]:
    """Else the worker keeps a million nodes, which each later walk of the garbage collector visits: half a second."""
    yield
    _nodes.cache_clear()
    _sources.cache_clear()


def _pure() -> Iterator[tuple[str, ast.AST]]:
    """Every node of the pure packages, with its path."""
    for path, nodes in _nodes().items():
        if path.startswith(tuple(f"{room}/" for room in PURE)):
            yield from ((path, node) for node in nodes)


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the folders at the root cannot be told from what a build left there")
    return listed.stdout.splitlines()


def _none(found: Iterable[object], remedy: str) -> None:
    """Nothing was found; else all of it is said at once."""
    if lines := [str(one) for one in found]:
        pytest.fail("\n".join((remedy, *lines)), pytrace=False)


def _imported(node: ast.AST) -> set[str]:
    """The names of the packages that a node imports, without what is below them."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {str(node.module).split(".")[0]}
    return set()


def test_the_root_has_only_the_planned_folders() -> None:
    folders = {name.split("/", 1)[0] for name in _tracked() if "/" in name}
    assert folders <= FOLDERS, f"not in the plan of the house: {sorted(folders - FOLDERS)}"


def test_a_module_opens_with_what_it_is_for() -> None:
    silent = [path for path, tree in _sources().items() if not ast.get_docstring(tree)]
    _none(silent, "open with two or three lines: what for, and what never")


def test_tests_mirror_sources() -> None:
    modules = (Path(path) for path in _sources() if path not in TESTED_WHOLE)
    mirrors = [
        f"tests/{path.parent.as_posix()}/test_{path.stem.lstrip('_')}.py"
        for path in modules
        if path.stem not in ("__init__", "__main__")
    ]
    _none((mirror for mirror in mirrors if not (ROOT / mirror).exists()), "write these")


def test_files_listed_as_tested_whole_exist() -> None:
    _none(TESTED_WHOLE - set(_sources()), "these are gone: take them off the list")


def test_pure_packages_never_await_nor_read_a_clock() -> None:
    waiting = ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith
    banned = {"time", "datetime", "asyncio", "socket", "threading"}
    found = [
        f"{path}:{node.lineno}"
        for path, node in _pure()
        if isinstance(node, waiting | ast.Import | ast.ImportFrom)
        and (isinstance(node, waiting) or _imported(node) & banned)
    ]
    _none(found, "now is an argument, and IO comes after the decision")


def test_pure_packages_make_no_random_generator() -> None:
    """They import no more of `random` than the type `Random`, and never call it: a Random is handed in."""
    found: list[str] = []
    for path, node in _pure():
        if isinstance(node, ast.Import) and _imported(node) & {"random", "secrets"}:
            found.append(f"{path}:{node.lineno} imports {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and _imported(node) & {"random", "secrets"}:
            if (node.module, [alias.name for alias in node.names]) != ("random", ["Random"]):
                found.append(f"{path}:{node.lineno} imports {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("Random", "default_rng"):
            found.append(f"{path}:{node.lineno} makes {ast.unparse(node)}")
    _none(found, "take a Random as an argument")


def test_only_the_shell_knows_the_real_clock() -> None:
    allowed = {"farhop/service/process/clock.py", "regional_lb/app/main.py", "global_lb/app/main.py"}
    found = [
        f"{path}:{node.lineno}"
        for path, nodes in _nodes().items()
        if path not in allowed and not path.startswith(("farhop_lab/", "farhop_cli/"))
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom) and "time" in _imported(node)
    ]
    _none(found, "take a clock as an argument")


def test_asyncio_wait_for_is_not_used() -> None:
    """Before Python 3.12 a task that is cancelled at the very moment at which its `asyncio.wait_for` ends lives on."""
    found = [
        f"{path}:{node.lineno}"
        for path, nodes in _nodes().items()
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr == "wait_for" and ast.unparse(node) == "asyncio.wait_for"
    ]
    _none(found, "wait under `asyncio.timeout`")


def test_proto_is_not_a_package() -> None:
    """A package named `proto` would shadow proto-plus for whoever installs both."""
    assert not (ROOT / "proto" / "__init__.py").exists()
    assert find_spec("farhop_wire") is not None


def test_no_file_names_a_path_of_this_machine_or_a_registry() -> None:
    named = re.compile(r"(?<![\w.~])/(?:work|check)/|\b(?:pypi|pythonhosted|(?:deb|security)\.debian)\.org\b")
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".proto", "")
    paths = [ROOT / name for name in _tracked() if Path(name).suffix in kinds]
    texts = {path: path.read_text(errors="replace") for path in paths if path.is_file()}
    _none([(path, it[0]) for path, text in texts.items() for it in named.finditer(text)], "name none of these")


# -- imports between files


def _modules() -> dict[str, str]:
    """Paths by the names of their modules."""
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in _sources()}


def _imports() -> dict[str, set[str]]:
    """Which files a file imports, for types or inside a function, too. Of a package: what is named of it."""
    modules = _modules()
    found: dict[str, set[str]] = {path: set() for path in _sources()}
    for path, nodes in _nodes().items():
        for node in nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else str(node.module) for name in inside]
            found[path] |= {modules[name] for name in names if name in modules} - {path}
    return found


def _cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The groups of files that import each other in a circle, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    circles: list[list[str]] = []

    def visit(path: str) -> None:
        order[path] = low[path] = len(order)
        open_.append(path)
        for other in sorted(imports[path]):
            if other not in order:
                visit(other)
            if other in open_:
                low[path] = min(low[path], low[other])
        if low[path] == order[path]:
            circle = [open_.pop()]
            while circle[-1] != path:
                circle.append(open_.pop())
            if len(circle) > 1:
                circles.append(sorted(circle))

    for path in imports:
        if path not in order:
            visit(path)
    return sorted(circles)


def test_there_are_no_import_cycles() -> None:
    _none(_cycles(_imports()), "types counted: part them, or make them one")


def test_an_import_cycle_is_found() -> None:
    assert _cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


# -- files that the documents name

# A file's name in prose, with or without its folders; no placeholder such as `test_<module>.py`.
NAMED = re.compile(r"(?<![\w<>*{}./-])(?:[\w.-]+/)*[\w.-]+\.py\b")


def test_files_that_the_documents_name_exist() -> None:
    """By a whole path from the root, or by its end as far as it is given."""
    tracked = {f"/{name}" for name in _tracked()}
    documents = [name for name in _tracked() if name.endswith(".md") and name != "CHANGELOG.md"]
    gone = [
        f"{document}: {named}"
        for document in documents
        for named in sorted(set(NAMED.findall((ROOT / document).read_text())))
        if not any(name.endswith(f"/{named}") for name in tracked)
    ]
    _none(gone, "name files that are there")


def test_functions_and_classes_that_the_architecture_names_exist() -> None:
    """Names in backticks with an underscore or a capital: a walk through the code must lead to what is there."""
    sources = [name for name in _tracked() if name.endswith(".py") and not name.startswith("tests/")]
    words = {word for name in sources for word in re.findall(r"\w+", (ROOT / name).read_text())}
    named = re.findall(r"`([A-Za-z_][\w.]*)`", (ROOT / "docs/architecture.md").read_text())
    parts = {part for one in named if not one.endswith(".py") for part in one.split(".") if re.search("[_A-Z]", part)}
    assert len(parts) > 20
    _none(sorted(parts - words), "name what is there")


# A link's target in Markdown: a URL, a file, a file's anchor or an anchor of the same file.
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.M | re.S)


def _anchors(text: str) -> set[str]:
    """The anchors of a Markdown file: those that GitHub makes from its headings, and those written as `<a id>`.

    GitHub's rule: lower case; letters, digits, `_`, `-` and spaces stay, and each space becomes `-`; a link's text
    stays without its target; a repeated heading gets `-1`, `-2` and so on.
    """
    text = FENCED.sub("", text)
    found, times = set(re.findall(r'<a id="([^"]+)"', text)), dict[str, int]()
    for heading in re.findall(r"^ {0,3}#{1,6} +(.*?)(?: +#+)? *$", text, re.M):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        repeated = times.get(slug, 0)
        times[slug] = repeated + 1
        found.add(f"{slug}-{repeated}" if repeated else slug)
    return found


def _broken_links(document: Path) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = document.parent / name if name else document
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in _anchors(linked.read_text())):
            yield f"{document.relative_to(ROOT)}: {target}"


def test_links_within_the_documents_lead_to_files_and_anchors_that_exist() -> None:
    documents = [ROOT / name for name in _tracked() if name.endswith(".md")]
    _none((broken for one in documents for broken in _broken_links(one)), "link to a file or heading that exists")


def test_anchors_follow_githubs_rule_for_headings() -> None:
    text = "# What it is: `law`, and why?\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n\n### [Ten](a.md) × 2\n"
    assert _anchors(f'{text}<a id="older"></a>') == {"what-it-is-law-and-why", "twice", "twice-1", "ten--2", "older"}


def test_a_link_to_a_missing_anchor_or_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    document = tmp_path / "a.md"
    document.write_text("# One\n\n[a](#one) [b](#two) [c](b.md#one) [d](a.md#one) [e](https://x.example/#y)\n")
    assert list(_broken_links(document)) == ["a.md: #two", "a.md: b.md#one"]


def test_architecture_lists_every_package_of_farhop_service() -> None:
    section = (ROOT / "docs/architecture.md").read_text().split("## Inside `farhop/service/`")[1].split("\n## ")[0]
    packages = {path.parent.name for path in (ROOT / "farhop/service").glob("*/__init__.py")}
    assert set(re.findall(r"^\| \d \| `(\w+)/` \|", section, re.M)) == packages


def test_contributing_exists() -> None:
    assert (ROOT / "CONTRIBUTING.md").exists()
