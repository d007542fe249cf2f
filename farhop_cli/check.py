"""`farhop check`: every error of a topology at once, or what its law comes to. Opens the one file, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail
from topology import load as worlds
from topology.law import Law, Scope
from topology.model import Tenant, Topology
from topology.problems import Problem, TopologyError

NAMES_SHOWN_MAX = 8


def run(name: str, as_json: bool) -> int:
    """Check a file or a ready-made world; the exit code."""
    path = _path(name)
    try:
        topology = worlds.load(path)
    except TopologyError as error:
        _tell_problems(error, as_json)
        return NEGATIVE
    summary = summed_up(topology)
    if as_json:
        show.json({"ok": True, "source": str(path), **summary})
    else:
        _tell(summary, str(path))
    return 0


def _path(name: str) -> Path:
    """A file, by its ending, a slash or its being there; else a ready-made world. Ends the command if it is none."""
    path = Path(name)
    if path.is_file():
        return path
    if name.endswith((".yaml", ".yml")) or "/" in name:
        fail(f"{name}: no such file; give a topology, or one of: {', '.join(worlds.shipped_names())}")
    try:
        return worlds.shipped(name)
    except TopologyError as error:
        fail(str(error))


def _tell_problems(error: TopologyError, as_json: bool) -> None:
    problems = error.problems
    if as_json:
        show.json({"ok": False, "source": error.source, "problems": [_problem(one) for one in problems]})
        return
    for one in problems:
        typer.echo(f"{error.source}: {one}", err=True)
    typer.echo(f"{error.source}: {len(problems)} problem{'s' * (len(problems) != 1)}", err=True)


def _problem(one: Problem) -> dict[str, str]:
    return {"path": one.path, "message": one.message, "remedy": one.remedy}


def summed_up(topology: Topology) -> dict[str, Any]:
    """A topology for people: regions, and for each tenant the lawful regions by scope and by model with a rule."""
    law = Law(topology)
    return {
        "name": topology.name,
        "epoch": topology.epoch,
        "regions": [
            {
                "region": region.name,
                "city": region.city,
                "country": region.country,
                "jurisdictions": sorted(region.jurisdictions),
                "entry": list(region.entry),
                "hub": region.hub,
            }
            for region in topology.regions.values()
        ],
        "tenants": [_tenant(topology, law, tenant) for tenant in topology.tenants.values()],
    }


def _tenant(topology: Topology, law: Law, tenant: Tenant) -> dict[str, Any]:
    models = sorted({*tenant.models, *topology.models})
    residency = tenant.residency
    return {
        "tenant": tenant.name,
        "keys": len(tenant.keys),
        "priority": tenant.priority,
        "on_exhausted": residency.on_exhausted if residency is not None else None,
        "lawful": {str(scope): sorted(law.verdict(tenant.name, "", scope).lawful) for scope in Scope},
        "models": {model: sorted(law.verdict(tenant.name, model).lawful) for model in models},
    }


def _tell(summary: dict[str, Any], source: str) -> None:
    regions = summary["regions"]
    show.line(f"{source}: fine ({summary['name']}, epoch {summary['epoch']})")
    show.table(
        f"{len(regions)} regions",
        ("region", "city", "country", "within", "hub", "entry"),
        [
            [r["region"], r["city"], r["country"], ", ".join(r["jurisdictions"]), r["hub"], ", ".join(r["entry"])]
            for r in regions
        ],
    )
    show.table(
        f"{len(summary['tenants'])} tenants, and the regions lawful for each",
        ("tenant", ">keys", *Scope, "models apart", "on exhausted"),
        [_tenant_row(tenant, len(regions)) for tenant in summary["tenants"]],
    )


def _tenant_row(tenant: dict[str, Any], regions: int) -> list[str]:
    processing = tenant["lawful"][Scope.PROCESSING]
    apart = {model: lawful for model, lawful in tenant["models"].items() if lawful != processing}
    return [
        tenant["tenant"],
        str(tenant["keys"]),
        *(_listed(tenant["lawful"][scope], regions) for scope in Scope),
        "; ".join(f"{model}: {_listed(lawful, regions)}" for model, lawful in apart.items()) or show.NONE,
        show.word(tenant["on_exhausted"]),
    ]


def _listed(names: list[str], regions: int) -> str:
    if len(names) == regions:
        return "all"
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return ", ".join(names[:NAMES_SHOWN_MAX]) + more if names else "none"
