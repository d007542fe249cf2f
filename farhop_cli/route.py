"""`farhop route`: how an entry chooses regions and answers, written to etcd for a tenant, a model or all. Never routes.

Every write is a compare-and-set of the whole list and signed, so that two operators at once cannot overwrite each other
unseen, and whoever looks sees who it was. What a balancer would refuse is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml
from pydantic import ValidationError

from farhop.store import word
from farhop.store.contract import route_key
from farhop.store.word import Signature, WordError
from farhop_cli import fleet, show
from farhop_cli.drain import author_here, heeded, with_store
from farhop_cli.exits import NEGATIVE, fail, warn
from global_lb.config import ROUTES_MAX, RouteConfig
from global_lb.steering import DOCUMENT_LIMIT_BYTES, routes_of
from topology.problems import quoted

if TYPE_CHECKING:
    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet

Route = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What the user asked for, as typed. `route`: YAML or JSON; None: show, or with `clear` take away."""

    region: str
    route: str | None
    tenant: str
    model: str
    clear: bool
    why: str | None
    author: str | None
    world: Path
    config: Path | None
    etcd: str | None
    as_json: bool


def run(options: Options) -> int:
    """Set, clear or show; the exit code."""
    where = fleet.find(options.world, options.config, options.etcd)
    if where.topology is not None:
        fleet.known(options.region, where.topology.regions, f"topology {quoted(where.topology.name)}")
    if options.clear and options.route is not None:
        fail("give a route or --clear, not both")
    if options.route is None and not options.clear:
        return with_store(where, lambda store: _show(store, options))
    signature = _signed(options)
    made = None if options.route is None else _made(options)
    return with_store(where, lambda store: _write(store, where, options, made, signature))


def _signed(options: Options) -> Signature:
    if options.why is None:
        fail("--why: say why; whoever looks will see it")
    signature = Signature(options.author or author_here(), options.why, datetime.now(UTC))
    try:
        word.check(signature)
    except WordError as error:
        fail(f"--{error}")
    return signature


def _made(options: Options) -> Route:
    """The route as it will stand. Ends the command, naming the field, if a balancer would refuse it."""
    try:
        said = yaml.safe_load(options.route or "")
    except yaml.YAMLError:
        fail("ROUTE: not YAML or JSON; give such as '{policy: nearest}'")
    if not isinstance(said, dict):
        fail("ROUTE: must be a mapping such as '{policy: nearest}'; docs/policies.md has the fields")
    for field in ("tenant", "model"):
        if field in said:
            fail(f"ROUTE: {field}: say it by --{field}")
    route = {**said, **_scope(options)}
    try:
        RouteConfig.model_validate(route)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        fail(f"ROUTE: {place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}")
    return route


def _scope(options: Options) -> Route:
    said = {"tenant": options.tenant, "model": options.model}
    return {field: name for field, name in said.items() if name}


def _of(route: Route) -> tuple[str, str]:
    return str(route.get("tenant", "")), str(route.get("model", ""))


# -- etcd


async def _stands(store: Store, region: str) -> tuple[list[Route], Signature | None, int]:
    """The routes there, who wrote them, and the revision (0: nothing stands)."""
    key = route_key(region)
    found = await store.get(key)
    if found is None:
        return [], None, 0
    try:
        listed, signature = word.routes_parted(found.value, DOCUMENT_LIMIT_BYTES)
        return msgspec.json.decode(listed, type=list[Route]), signature, found.revision
    except (WordError, msgspec.DecodeError):
        fail(f"what stands at {key} cannot be read; take it away with `etcdctl del`", NEGATIVE)


async def _show(store: Store, options: Options) -> int:
    routes, signature, _ = await _stands(store, options.region)
    if options.as_json:
        show.json({"region": options.region, "routes": routes, "signed": signature})
        return 0
    if not routes:
        show.line(f"{options.region}: nothing in etcd; its configuration decides")
    for route in routes:
        said = {field: value for field, value in route.items() if field not in ("tenant", "model")}
        show.line(f"{_whose(_of(route))}: {msgspec.json.encode(said).decode()}")
    if routes and signature is not None:
        show.line(f"by {signature.author} at {signature.at:%Y-%m-%d %H:%M:%S} UTC: {signature.why}", "dim")
    return 0


async def _write(store: Store, where: Fleet, options: Options, made: Route | None, signature: Signature) -> int:
    before, _, revision = await _stands(store, options.region)
    scope = (options.tenant, options.model)
    routes = [route for route in before if _of(route) != scope]
    if made is not None:
        routes.append(made)
    elif not options.tenant and not options.model:
        routes = []  # all of it
    if made is None and len(routes) == len(before):
        fail(f"{options.region}: nothing stands there for {_whose(scope)}; nothing was changed", NEGATIVE)
    _check(routes, where)
    if routes:
        document = word.routes_signed(list(routes), signature)
        await store.put(route_key(options.region), document, expect_revision=revision)
    else:
        await store.delete(route_key(options.region), expect_revision=revision)
    known = await _known(where, options.region, signature.at.isoformat() if routes else None)
    if options.as_json:
        show.json({"region": options.region, "routes": routes, "signed": signature, "known": known})
        return 0
    what = "as configured" if made is None else msgspec.json.encode(made).decode()
    show.line(f"{options.region}, {_whose(scope) if made or any(scope) else 'everybody'}: {what}", "bold")
    show.line("requests under way are not disturbed; those on hold are decided by it")
    if not known and where.admins:
        warn("no global balancer there says so yet; they follow when they can")
    return 0


def _check(routes: list[Route], where: Fleet) -> None:
    """End the command if the list would be refused as a whole."""
    if len(routes) > ROUTES_MAX:
        fail(f"{len(routes)} routes, at most {ROUTES_MAX}; take some away", NEGATIVE)
    try:
        listed = [RouteConfig.model_validate(route) for route in routes]
        if where.topology is not None:
            routes_of(listed, where.topology.regions)
    except ValueError as error:
        fail(f"ROUTE: {str(error).splitlines()[0]}", NEGATIVE)


async def _known(where: Fleet, region: str, at: str | None) -> bool:
    """Whether every balancer of the entry that answers says within a moment that it follows (None: nothing stands)."""

    async def count() -> int:
        told = [one for one in await where.statuses() if one.get("region") == region]
        return bool(told) and all((one.get("routes_said") or {}).get("at") == at for one in told)

    return await heeded(count, min(1, len(where.admins))) > 0


def _whose(scope: tuple[str, str]) -> str:
    tenant, model = scope
    named = [f"tenant {tenant}"] * bool(tenant) + [f"model {model}"] * bool(model)
    return ", ".join(named) or "all without a route of their own"
