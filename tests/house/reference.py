"""The tables of docs/reference that list what the code exposes: metrics, commands, a topology's fields, read from it.

`python tests/house/reference.py` writes them anew, between their markers. Never run by a balancer.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from farhop.telemetry.metrics import TierMetrics
from farhop_cli.main import app
from topology import schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
METRICS = ROOT / "docs" / "reference" / "metrics.md"
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
TOPOLOGY = ROOT / "docs" / "reference" / "topology.md"
BEGIN, END = "<!-- generated: tests/house/reference.py -->", "<!-- end -->"
TIERS = {
    "farhop": "both",
    "global_lb": "global",
    "regional_lb": "regional",
    "entry_dns": "dns",
    "entry_anycast": "anycast",
}
OF_ALL = ("tier", "region", "le")  # labels of every series, and of every histogram bucket
SUFFIXES = {"counter": "_total", "info": "_info"}


class Metric(NamedTuple):
    """One family as a scrape shows it."""

    name: str
    kind: str
    labels: str
    tier: str
    meaning: str


@cache
def metrics() -> list[Metric]:
    """All of both tiers, by name. Standard ones of the process (`process_…`) are left out."""
    found: dict[str, Metric] = {}
    for one in (*_families(), *_read_at_the_scrape()):
        known = found.get(one.name)
        found[one.name] = one if known is None else known._replace(tier="both")
    return sorted(found.values())


def _families() -> Iterator[Metric]:
    """What every tier counts as requests pass."""
    for family in TierMetrics("global", "virginia", "global-0").collect():
        labels = {*getattr(family, "_labelnames", ()), *(name for one in family.samples for name in one.labels)}
        shown = ", ".join(f"`{name}`" for name in sorted(labels - set(OF_ALL)))
        name = family.name + SUFFIXES.get(family.type, "")
        yield Metric(name, family.type, shown, "both", family.documentation)


def _read_at_the_scrape() -> Iterator[Metric]:
    """What modules pass to TierMetrics.gauge and .counter: (name, help, reading, label), the first two spelled out."""
    for package, tier in TIERS.items():
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if not any(f"{kind}(" in text for kind in ("gauge", "counter")):
                continue
            nodes = list(ast.walk(ast.parse(text)))
            given_names = [one for one in nodes if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)]
            named = {ast.unparse(one.targets[0]): one.value for one in given_names}
            for node in nodes:
                if not isinstance(node, ast.Call):
                    continue
                kind = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if kind not in ("gauge", "counter"):
                    continue
                values = [named.get(ast.unparse(one), one) for one in node.args]
                given = [one.value if isinstance(one, ast.Constant) else None for one in values]
                if len(given) > 1 and isinstance(given[0], str):
                    label = _labels(values[3]) if len(values) > 3 else ""
                    name = f"farhop_{given[0]}"
                    if kind == "counter":
                        name = name.removesuffix("_total") + "_total"
                    yield Metric(name, kind, label, tier, str(given[1]))


def _labels(value: ast.expr) -> str:
    """One, or a tuple of them."""
    each = value.elts if isinstance(value, ast.Tuple) else [value]
    return ", ".join(f"`{one.value}`" for one in each if isinstance(one, ast.Constant))


def table_of_metrics() -> str:
    """As Markdown."""
    lines = ["| metric | type | labels | tier | meaning |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| `{one.name}` | {one.kind} | {one.labels or '–'} | {one.tier} | {one.meaning} |" for one in metrics()]
    return "\n".join(lines)


@cache
def commands() -> list[tuple[str, str]]:
    """Every command that can be given, and the first sentence of its help."""
    return list(_below(typer.main.get_command(app()), "farhop"))


def _below(command: Any, name: str) -> Iterator[tuple[str, str]]:
    names = command.list_commands(None) if hasattr(command, "list_commands") else []
    if not names or getattr(command, "invoke_without_command", False):
        text = " ".join((command.help or command.short_help or "").split())
        yield name, re.split(r"(?<=[.?])\s", text.partition("Example:")[0].strip())[0]
    for one in names:
        yield from _below(command.get_command(None, one), f"{name} {one}")


def table_of_commands() -> str:
    """As Markdown."""
    lines = ["| command | what it does |", "| --- | --- |"]
    lines += [f"| `{name}` | {what.replace('|', chr(92) + '|')} |" for name, what in commands()]
    return "\n".join(lines)


# For each class of a topology, the field that holds it.
PLACES_OF_A_TOPOLOGY: dict[str, type[schema.Doc]] = {
    "The whole file": schema.TopologyDoc,
    "`jurisdictions[]`, `countries[]`": schema.PlaceDoc,
    "`regions[]`": schema.RegionDoc,
    "`entries[]`": schema.EntryDoc,
    "`tenants[]`": schema.TenantDoc,
    "`tenants[].keys[]`": schema.KeyDoc,
    "`tenants[].objectives[]`": schema.ObjectiveDoc,
    "`tenants[].residency`": schema.ResidencyDoc,
    "`tenants[].residency.processing`, `.entry`, `.logging`, `.hints`": schema.TenantRuleDoc,
    "`models.<name>`, `tenants[].models.<name>`": schema.ModelRuleDoc,
}


def fields(kind: type[schema.Doc]) -> list[tuple[str, str, str, str]]:
    """Of a class of a topology: field, default, what it is, what may stand there."""
    rows = []
    for name, field in kind.model_fields.items():
        default = "–" if field.is_required() else _default(field.default)
        rows.append((f"`{name}`", default, field.title or "", field.description or ""))
    return rows


def _default(value: object) -> str:
    return "none" if value in (None, [], {}, "") else f"`{json.dumps(value)}`"


def tables_of_a_topology() -> str:
    """As Markdown, a heading and a table for each class."""
    parts = []
    for path, kind in PLACES_OF_A_TOPOLOGY.items():
        text = " ".join((kind.__doc__ or "").split())
        lines = [
            f"### {path}",
            "",
            text,
            "",
            "| field | default | what it is | what to write |",
            "| --- | --- | --- | --- |",
        ]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in fields(kind)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def between(text: str) -> str:
    """What stands between the markers of a document."""
    found = re.search(f"{re.escape(BEGIN)}\n(.*?)\n{re.escape(END)}", text, re.S)
    return found.group(1) if found else ""


def write(path: Path, table: Callable[[], str]) -> None:
    """Put the table of now between the markers."""
    text = path.read_text()
    path.write_text(text.replace(f"{BEGIN}\n{between(text)}\n{END}", f"{BEGIN}\n{table()}\n{END}"))


TABLES: dict[Path, Callable[[], str]] = {
    METRICS: table_of_metrics,
    COMMANDS: table_of_commands,
    TOPOLOGY: tables_of_a_topology,
}

if __name__ == "__main__":
    for document, made in TABLES.items():
        write(document, made)
