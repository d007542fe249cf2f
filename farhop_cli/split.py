"""`farhop split`: what share of a model's traffic each version gets in a region, written to etcd. Never draws one.

Weights change alone: rules, stickiness and the rest stay as they stand there or are configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.store.contract import split_key
from farhop_cli import show
from farhop_cli.by_model import Document, checked, listed
from farhop_cli.exits import fail, warn
from regional_lb.config import SplitConfig
from topology.problems import quoted

if TYPE_CHECKING:
    from farhop_cli.by_model import Options
    from farhop_cli.fleet import Status


def run(options: Options, weights: str | None) -> int:
    """Set, clear or show; the exit code."""
    if options.clear and weights is not None:
        fail("give --weights or --clear, not both")
    given = parsed(weights) if weights is not None else {}
    document = Document("splits", split_key, options)
    if options.clear:
        return document.clear()
    if weights is None:
        return document.show(lambda _model, entry: _said(entry))
    model = options.model
    if not model:
        fail("--model: say whose traffic to split")

    def entry(before: Any) -> Any:
        made = {**(before if isinstance(before, dict) else {}), "weights": given}
        checked(SplitConfig, made, "--weights")
        return made

    def told(_entry: Any, status: Status | None) -> None:
        show.line(f"{model} in {options.region}: {_shares(given)}", "bold")
        show.line("requests under way finish where they are; those that wait go by it")
        unserved = (((status or {}).get("splits") or {}).get(model) or {}).get("unserved")
        if unserved:
            warn(f"no replica there has version {', '.join(unserved)}; until one has, the split's fallback decides")

    return document.set(model, entry, told)


def parsed(text: str) -> dict[str, float]:
    """The weights in `v1=95,v2=5`. Ends the command for anything else."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        version, _, number = part.strip().partition("=")
        try:
            weight = float(number)
        except ValueError:
            fail(f"--weights: {quoted(part.strip())} is no VERSION=WEIGHT; give such as v1=95,v2=5")
        if version in weights:
            fail(f"--weights: {quoted(version)} stands twice")
        weights[version] = weight
    return weights


def _shares(weights: dict[str, float]) -> str:
    total = sum(weights.values())
    return ", ".join(f"{version} {100.0 * weight / total:.4g} %" for version, weight in weights.items())


def _said(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    weights = entry.get("weights")
    parts = [listed(weights)] if isinstance(weights, dict) else []
    parts += [f"{len(entry['rules'])} rules"] if isinstance(entry.get("rules"), list) else []
    parts += [f"{field} {entry[field]}" for field in ("name", "sticky", "fallback", "pinning") if field in entry]
    return ", ".join(parts) or "as configured"
