"""`farhop policy` and `farhop split`: how a region picks replicas, and which share of a model each version gets.

`split` changes the weights alone: rules, stickiness and the rest stay as set or configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop.loose_json import as_dict, dicts
from farhop.service.law import effect
from farhop.store.contract import PICK_PREFIX, SPLIT_PREFIX
from farhop.store.documents import authored, splits
from farhop.store.documents.document import DocumentError
from farhop_cli import region_document
from farhop_cli.exits import fail
from farhop_cli.region_document import Checks, RegionDocument
from farhop_cli.setting import Item, Noun, Setting
from regional_lb.scheduler.policy import PolicyConfig
from regional_lb.scheduler.split import SplitConfig
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.store.contract import Store
    from farhop.store.documents.authored import Authorship
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions


def set_policy(region: str, name: str, model: str, why: str, by: str | None, fleet_options: FleetOptions) -> int:
    """Make a region pick replicas by a policy, for a model or all others; the exit code."""
    authorship = region_document.authorship(why, by)
    region_document.checked(PolicyConfig, name, "POLICY")
    whom = {"model": region_document.named("--model", model)}
    notes = ("requests under way are not disturbed; those that wait are placed by it",)

    async def effects(here: Fleet, _store: Store) -> Sequence[str]:
        return _ranked(await here.status_of(region) or {}, model)

    document, checks = RegionDocument(POLICY, region, _encode), Checks(effects=effects)
    return region_document.put(document, whom, lambda _: name, authorship, fleet_options, checks, notes)


def set_split(region: str, model: str, weights: str, why: str, by: str | None, fleet_options: FleetOptions) -> int:
    """Split a model's traffic between its versions; the exit code."""
    authorship = region_document.authorship(why, by)
    given = parsed(weights)

    def split(before: Any) -> Any:
        made = {**as_dict(before), "weights": given}
        region_document.checked(SplitConfig, made, "--weights")
        return made

    async def unserved(here: Fleet) -> Sequence[str]:
        status = await here.status_of(region) or {}
        absent = ((status.get("splits") or {}).get(model) or {}).get("unserved")
        text = "no replica there has version {}; until one has, the split's fallback decides"
        return [text.format(", ".join(absent))] if absent else []

    async def effects(here: Fleet, _store: Store) -> Sequence[str]:
        return effect.split(await here.status_of(region) or {}, model, given)

    async def served(here: Fleet) -> None:
        status = await here.status_of(region) or {}
        replicas = dicts(status.get("replicas"))
        known = {*(status.get("splits") or {}), *(name for one in replicas for name in one.get("models") or ())}
        if known and model not in known:
            fail(f"--model: no replica in {region} serves {quoted(model)}; there is {', '.join(sorted(known)[:8])}")

    whom = {"model": region_document.named("--model", model)}
    notes = (effect.shares(given), "requests under way finish where they are; waiting requests follow it")
    document, checks = RegionDocument(SPLIT, region, _encode), Checks(served, unserved, effects)
    return region_document.put(document, whom, split, authorship, fleet_options, checks, notes)


def _ranked(status: dict[str, Any], model: str) -> list[str]:
    """What a policy changes in a region, by its balancer's view of its replicas."""
    replicas = dicts(status.get("replicas"))
    ranked = [one for one in replicas if not model or model in (one.get("models") or ())]
    whose = f" of {model}" if model else ""
    return [f"ranks {len(ranked)} replicas{whose} anew, and excludes none: no tenant is left without a replica"]


def unset(noun: Noun, region: str, model: str | None, why: str, by: str | None, fleet_options: FleetOptions) -> int:
    """Remove what is set for a model ("": for all others; None: all of it); the exit code."""
    whom = None if model is None else {"model": region_document.named("--model", model)}
    return region_document.unset(RegionDocument(noun, region, _encode), whom, why, by, fleet_options)


def parsed(text: str) -> dict[str, float]:
    """The weights in `v1=95,v2=5`. Ends the command for anything else."""
    try:
        return splits.weights_of(text)
    except DocumentError as error:
        fail(f"--weights: {error.message}")


# -- the documents


def _read(key: str, document: bytes) -> Setting:
    by_model, authorship = authored.split_authorship(document)
    region = key.rpartition("/")[2]
    items = msgspec.json.decode(by_model, type=dict[str, Any])
    return region_document.setting_of(
        [Item({"region": region, "model": model}, value) for model, value in items.items()], authorship
    )


def _encode(items: Sequence[Item], by: Authorship) -> bytes:
    return authored.with_author({item.whom["model"]: item.value for item in items}, by)


def _policy_line(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    options = ", ".join(f"{name} {option}" for name, option in value.items() if name != "name")
    return f"{value.get('name', 'predictive')} {options}".strip()


def _split_line(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    weights = value.get("weights")
    parts = [",".join(f"{name}={number:g}" for name, number in weights.items())] if isinstance(weights, dict) else []
    parts += [f"{len(value['rules'])} rules"] if isinstance(value.get("rules"), list) else []
    parts += [f"{name} {value[name]}" for name in ("name", "sticky", "fallback", "pinning") if name in value]
    return ", ".join(parts) or "as configured"


def _policies(configuration: dict[str, Any]) -> list[Item]:
    named = {"": configuration.get("policy", "predictive"), **as_dict(configuration.get("policies"))}
    return [Item({"region": configuration["region"], "model": model}, value) for model, value in named.items()]


def _splits(configuration: dict[str, Any]) -> list[Item]:
    named = as_dict(configuration.get("splits"))
    return [Item({"region": configuration["region"], "model": model}, value) for model, value in named.items()]


def _asked(here: Fleet, region: str) -> int:
    return int(region in here.regional)


def _noun(name: str, prefix: str, what: str, line: Any, configured: Any) -> Noun:
    """`what`: the name that balancers use for it in their status."""

    async def followed(here: Fleet, region: str, _before: Setting | None, after: Setting | None) -> int:
        status = await here.status_of(region) or {}
        shown = (status.get("overrides") or {}).get(what) or {}
        return int(after is not None and after.at is not None and shown.get("at") == after.at.isoformat())

    nothing = "nothing is set in etcd; the regions' configurations apply"
    return Noun(name, prefix, nothing, _read, line, _asked, followed, configured)


POLICY = _noun("policy", PICK_PREFIX, "policies", _policy_line, _policies)
SPLIT = _noun("split", SPLIT_PREFIX, "splits", _split_line, _splits)
