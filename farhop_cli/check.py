"""`farhop check`: every error of a topology at once, or what its law comes to; or of a balancer's configuration.

Opens that file and those that it names, and no socket.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from farhop.config import ConfigError, parsed
from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail
from topology import load as worlds
from topology.law import Law, Scope
from topology.model import Tenant, Topology
from topology.problems import Problem, TopologyError

if TYPE_CHECKING:
    from farhop.service.config import Process

NAMES_SHOWN_MAX = 8


def run(name: str, as_json: bool) -> int:
    """Check a file or a ready-made world; the exit code."""
    path = _path(name)
    tier = _tier(path)
    if tier is not None:
        return _check_configuration(path, tier, as_json)
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


def _tier(path: Path) -> str | None:
    """Of a balancer's configuration, by the listener that only its tier has; None: it is no such file."""
    try:
        document = parsed(path.read_bytes(), str(path))
    except (OSError, ConfigError):
        return None
    if not isinstance(document, dict) or not document.keys() & {"region", "instance", "admin", "hop"}:
        return None
    return "regional" if document.keys() & {"tier", "control", "client"} else "global"


def _check_configuration(path: Path, tier: str, as_json: bool) -> int:
    """As the balancer does at its start, up to where it would listen."""
    # A balancer's rooms are not light; nobody but this needs them.
    from farhop.config import load
    from farhop.service import stores
    from global_lb.app.config import GlobalConfig
    from regional_lb.app.config import RegionalConfig

    try:
        if tier == "regional":
            regional = load(RegionalConfig, path)
            topology = stores.world(regional)
            hubs = stores.home_hubs(regional, topology, regional.remote_hub)
            config: Process = regional
        else:
            config = load(GlobalConfig, path)
            topology = stores.world(config)
            hubs = stores.hubs(config, topology)
        stores.state(config, tier)
    except TopologyError as error:
        _tell_problems(error, as_json)
        return NEGATIVE
    except ConfigError as error:
        lines = str(error).splitlines()
        if as_json:
            show.json({"ok": False, "source": str(path), "problems": lines})
        for line in lines if not as_json else ():
            typer.echo(line, err=True)
        return NEGATIVE
    told = {"tier": tier, "region": config.region, "instance": config.instance, "hubs": sorted(hubs)}
    if as_json:
        show.json({"ok": True, "source": str(path), **told})
    else:
        where = f"region {config.region}, instance {config.instance}"
        show.line(f"{path}: fine ({tier}, {where}, topology {topology.name}, hubs {', '.join(sorted(hubs))})")
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
