"""Mutants of the files on which the law, the accounts and the retries rest: does a test notice each small change?

    make mutants                                       all of them, some minutes
    python tests/mutants.py farhop/balance/retry.py    those of one file; with --lines 60,78 those of two lines

A mutant is one file with one operator, constant or returned value changed; it is killed if a test of its file fails or
hangs. Who survives and is listed in tests/mutants.md changes nothing that can be seen; any other is a missing test, and
the command ends with 1. Never writes to the tree: mutants live in memory, in forks of this process.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]
LISTED = Path(__file__).with_suffix(".md")
TARGETS = {
    "topology/law.py": ("tests/topology/test_law.py",),
    "farhop/balance/ledger.py": ("tests/farhop/balance/test_ledger.py",),
    "farhop/balance/retry.py": ("tests/farhop/balance/test_retry.py",),
    "farhop/identity/hop_token.py": ("tests/farhop/identity/test_hop_token.py",),
}
HOUSE = (
    "topology",
    "farhop",
    "regional_lb",
    "global_lb",
    "entry_dns",
    "entry_anycast",
    "farhop_lab",
    "farhop_cli",
    "tests",
    "test_",
)
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


class Mutant(NamedTuple):
    path: str
    line: int
    was: str  # the statement or expression around the change
    now: str
    source: str

    @property
    def name(self) -> str:
        """What it is known by in the list: without a line number, which moves."""
        return f"{self.path}: `{self.was}` -> `{self.now}`"


# -- making them


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that this one could be instead."""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[at] = SWAPPED[type(operator)]()  # type: ignore[call-overload]
            yield changed
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in SWAPPED:
        changed = copy.deepcopy(node)
        changed.op = SWAPPED[type(node.op)]()  # type: ignore[assignment]
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, index, child) of everything that runs: no annotation, no argument of a class, no type import."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "keywords" if isinstance(node, ast.ClassDef) else ""):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.AST):
                if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                    continue
                yield node, field, index, child
                yield from _places(child)


def mutants(path: str) -> Iterator[Mutant]:
    """All of one file."""
    tree = ast.parse((ROOT / path).read_text())
    for parent, field, index, child in list(_places(tree)):
        for changed in _changes(child):
            whole = not isinstance(parent, ast.stmt | ast.Module) or isinstance(parent, ast.Assign | ast.AnnAssign)
            shown = parent if whole else child
            was = ast.unparse(shown).splitlines()[0]
            _put(parent, field, index, changed)
            now = ast.unparse(changed if shown is child else parent).splitlines()[0]
            yield Mutant(path, getattr(child, "lineno", 0), was, now, ast.unparse(ast.fix_missing_locations(tree)))
            _put(parent, field, index, child)


def _put(parent: ast.AST, field: str, index: int | None, child: ast.AST) -> None:
    if index is None:
        setattr(parent, field, child)
    else:
        getattr(parent, field)[index] = child


# -- running them


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from the mutant's source."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = mutant.path.removesuffix(".py").replace("/", ".")
        self._source = mutant.source

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._name else None

    def get_source(self, _name: str) -> str:
        return self._source


def _pytest(path: str, *more: str) -> int:
    tests = TARGETS[path]
    options = [
        "-q",
        "-x",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        f"--confcutdir={Path(tests[0]).parent}",
        *more,
    ]
    return int(pytest.main([*options, *tests]))


def _forget_the_house() -> None:
    """What others wrote stays imported; each mutant imports the house anew."""
    for name in list(sys.modules):
        if name.split(".")[0].startswith(HOUSE) and not name.startswith("farhop_wire"):
            del sys.modules[name]


def _forked(mutant: Mutant | None, path: str, within_s: float) -> int:
    """How pytest ended in a fork: 0 if nobody noticed anything."""
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, within_s)
        if mutant is not None:
            sys.meta_path.insert(0, _Instead(mutant))
        code = 70
        try:
            code = _pytest(path)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=list(TARGETS), metavar="PATH", help="; ".join(TARGETS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--lines", metavar="N,N", help="only the mutants of these lines: to look at survivors again")
    asked = parser.parse_args()
    os.chdir(ROOT)
    settings.register_profile("mutants", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    settings.load_profile("mutants")
    listed = {line[2:].rsplit(" - ", 1)[0] for line in LISTED.read_text().splitlines() if line.startswith("- ")}
    unlisted = 0
    for path in asked.paths:
        with open(os.devnull, "w") as null:
            out, sys.stdout = sys.stdout, null
            collected = _pytest(path, "--collect-only")
            sys.stdout = out
        _forget_the_house()
        began = time.monotonic()
        if collected or _forked(None, path, 600.0):
            print(f"{path}: its tests fail without a mutant")
            return 2
        within_s = 10.0 + 5.0 * (time.monotonic() - began)
        made = [one for one in mutants(path) if not asked.lines or str(one.line) in asked.lines.split(",")]
        alive = 0
        with ThreadPoolExecutor(asked.jobs) as pool:  # threads that wait: each run is a fork
            codes = pool.map(lambda mutant: _forked(mutant, path, within_s), made)  # noqa: B023
            for mutant, code in zip(made, codes, strict=True):
                if code == 0:
                    known = mutant.name in listed
                    alive, unlisted = alive + 1, unlisted + (not known)
                    print(f"  {'listed' if known else 'NEW'}, line {mutant.line}: {mutant.name}", flush=True)
        print(f"{path}: {len(made)} mutants, {len(made) - alive} killed, {alive} survive", flush=True)
    return int(unlisted > 0)


if __name__ == "__main__":
    sys.exit(main())
