"""`farhop route`: how an entry chooses regions and answers, for a tenant, a model or all. Never routes.

Refuses what a balancer would refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from farhop.loose_json import dicts
from farhop.service.law import effect
from farhop.store.contract import ROUTE_PREFIX
from farhop.store.documents import authored
from farhop_cli import region_document
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.law import in_force
from farhop_cli.region_document import Checks, RegionDocument
from farhop_cli.setting import Item, Noun, Setting
from global_lb.app.overrides import DOCUMENT_LIMIT_BYTES
from global_lb.routing.policy import ROUTES_MAX, RouteConfig, routes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.store.contract import Store
    from farhop.store.documents.authored import Authorship
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions

_SCOPE = ("tenant", "model")


def put(region: str, text: str, tenant: str, model: str, why: str, by: str | None, fleet_options: FleetOptions) -> int:
    """Set the route of an entry, for a tenant, a model or all without their own; the exit code."""
    authorship = region_document.authorship(why, by)
    whom = _scope(tenant, model)
    route = _parsed(text)
    region_document.checked(RouteConfig, {**route, **whom}, "ROUTE")
    regions = (found := fleet_options.fleet(region)).topology and found.topology.regions

    def encode(items: Sequence[Item], authorship: Authorship) -> bytes:
        _together(items, regions)
        return _encode(items, authorship)

    notes = ("requests under way are not disturbed; those on hold are decided by it",)

    async def effects(here: Fleet, store: Store) -> Sequence[str]:
        topology = await in_force(store, here.topology)
        return () if topology is None else effect.routed(topology, await here.statuses(), region, tenant, model, route)

    async def unserved(here: Fleet) -> Sequence[str]:
        names = [model] if model and not route.get("models") else []
        return [f"--model: {text}" for text in effect.unserved(await here.statuses(), names)]

    document, checks = RegionDocument(NOUN, region, encode), Checks(warnings=unserved, effects=effects)
    return region_document.put(document, whom, lambda _: route, authorship, fleet_options, checks, notes)


def unset(region: str, tenant: str, model: str, why: str, by: str | None, fleet_options: FleetOptions) -> int:
    """Remove the route of a tenant or a model, or, without either, all; the exit code."""
    return region_document.unset(
        RegionDocument(NOUN, region, _encode), _scope(tenant, model) or None, why, by, fleet_options
    )


def _scope(tenant: str, model: str) -> dict[str, str]:
    named = {"tenant": region_document.named("--tenant", tenant), "model": region_document.named("--model", model)}
    return {kind: name for kind, name in named.items() if name}


def _parsed(text: str) -> dict[str, Any]:
    try:
        route = yaml.safe_load(text)
    except yaml.YAMLError:
        fail("ROUTE: not YAML or JSON; give one such as '{policy: nearest}'")
    if not isinstance(route, dict):
        fail("ROUTE: must be a mapping such as '{policy: nearest}'; docs/reference/policies.md has the fields")
    for name in _SCOPE:
        if name in route:
            fail(f"ROUTE: {name}: say it by --{name}")
    return route


def _together(items: Sequence[Item], regions: Any) -> None:
    """End the command if the routes would be refused as a whole."""
    if len(items) > ROUTES_MAX:
        fail(f"{len(items)} routes, at most {ROUTES_MAX}; take some away", NEGATIVE)
    try:
        listed = [RouteConfig.model_validate(_route(item)) for item in items]
        if regions is not None:
            routes_of(listed, regions)
    except ValueError as error:
        fail(f"ROUTE: {str(error).splitlines()[0]}", NEGATIVE)


# -- the documents


def _route(item: Item) -> dict[str, Any]:
    return {**item.value, **{kind: item.whom[kind] for kind in _SCOPE if item.whom.get(kind)}}


def _items(region: str, routes: Sequence[dict[str, Any]]) -> list[Item]:
    """The routes by their subjects."""
    found = []
    for route in routes:
        whom = {kind: str(route[kind]) for kind in _SCOPE if route.get(kind)}
        found.append(Item({"region": region, **whom}, {name: v for name, v in route.items() if name not in _SCOPE}))
    return found


def _read(key: str, document: bytes) -> Setting:
    listed, authorship = authored.split_routes_authorship(document, DOCUMENT_LIMIT_BYTES)
    return region_document.setting_of(
        _items(key.rpartition("/")[2], msgspec.json.decode(listed, type=list[dict[str, Any]])), authorship
    )


def _encode(items: Sequence[Item], by: Authorship) -> bytes:
    return authored.routes_with_author([_route(item) for item in items], by)


def _line(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _configured(configuration: dict[str, Any]) -> list[Item]:
    return _items(configuration["region"], dicts(configuration.get("routes")))


def _asked(here: Fleet, region: str) -> int:
    """If only one global balancer is known, by its configuration, it counts if it is of that entry."""
    return 0 if here.region not in ("", region) else min(1, len(here.admins))


async def _followed(here: Fleet, region: str, _before: Setting | None, after: Setting | None) -> int:
    at = after.at.isoformat() if after is not None and after.at is not None else None
    own = [one for one in await here.statuses() if one.get("region") == region]
    return int(bool(own) and all((one.get("routes_author") or {}).get("at") == at for one in own))


NOUN = Noun(
    "route", ROUTE_PREFIX, "nothing is set in etcd; the entries' configurations apply",
    _read, _line, _asked, _followed, _configured,
)  # fmt: skip
