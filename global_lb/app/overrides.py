"""Follows this entry's routes and operators' biases and pins in etcd. Never decides.

Invariants: a document that is invalid, names an unknown region or is under another's key changes nothing and is
counted; an override ends with its key, with a snapshot that lacks it, or after its own length by this process's clock;
a deleted routes key returns the entry to its configuration; losing etcd changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from farhop.store.contract import STEER_PREFIX, route_key
from farhop.store.documents import overrides
from farhop.store.documents.authored import split_routes_authorship
from farhop.store.documents.overrides import BiasOverride
from farhop.store.follow import Documents, Refused, follow
from global_lb.routing.policy import (
    ROUTES_MAX,
    Bias,
    OperatorOverrides,
    OverridesChanged,
    Pin,
    RouteConfig,
    RouteScope,
    routes_of,
)
from global_lb.routing.routes import RoutesChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from farhop.balance.machine import Event
    from farhop.store.contract import Change, Store
    from farhop.store.documents.authored import Authorship
    from farhop.store.documents.overrides import RoutingOverride

DOCUMENT_LIMIT_BYTES = 256 * 1024
OVERRIDES_MAX = 4096

_reader: TypeAdapter[list[RouteConfig]] = TypeAdapter(Annotated[list[RouteConfig], Field(max_length=ROUTES_MAX)])


class RoutingOverrides:
    """What is in force. `react` takes events; `refused` counts refused documents, by reason.

    `regions` are those of the map in force; after a change all documents are read again, as a rejected one may be valid
    now."""

    def __init__(
        self,
        store: Store,
        region: str,
        regions: Collection[str],
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._store, self.regions, self._route_key = store, regions, route_key(region)
        self._react, self._clock = react, clock
        self._routes: Documents[tuple[dict[RouteScope, RouteConfig], Authorship | None]] = Documents(
            self._read_routes, refused, "routes", self._route_key
        )
        self._overrides: Documents[tuple[RoutingOverride, float]] = Documents(self._read_override, refused, "steer")

    async def follow_routes(self) -> None:
        """Follow the documents in etcd until cancelled, or until the store is closed."""
        await follow(self._store, self._route_key, self.routes_changed)

    async def follow_overrides(self) -> None:
        """Follow the documents in etcd until cancelled, or until the store is closed."""
        await follow(self._store, STEER_PREFIX, self.overrides_changed)

    # -- routes

    def routes_changed(self, change: Change) -> None:
        """Process one step of the watch. Without a document, the configuration is in force again."""
        for document in self._routes.take(change).values():
            self._react(RoutesChanged({} if document is None else document[0]))

    def _read_routes(self, _key: str, document: bytes) -> tuple[dict[RouteScope, RouteConfig], Authorship | None]:
        """JSON: a list of routes as in the configuration, bare or with its author."""
        listed, authorship = split_routes_authorship(document, DOCUMENT_LIMIT_BYTES)
        return routes_of(_reader.validate_json(listed or b"[]"), self.regions), authorship

    def author(self) -> dict[str, Any] | None:
        """The author of the routes in force, the reason, and how many there are (0: all were taken back); None if they
        come from the configuration, or name no author."""
        routes, known = self._routes.get(self._route_key) or ({}, None)
        return None if known is None else {**known.shown(), "routes": len(routes)}

    # -- biases and pins

    def overrides_changed(self, change: Change) -> None:
        """Apply one change from the etcd watch."""
        if self._overrides.take(change):
            self._react(OverridesChanged(self._in_force()))

    def _read_override(self, key: str, value: bytes) -> tuple[RoutingOverride, float]:
        """The override, and until when by our clock."""
        override = overrides.decode_routing(value)
        if override.region not in self.regions:
            raise Refused("steer_to_unknown_region")
        if override.key != key:
            raise Refused("steer_misplaced")
        if key not in self._overrides and len(self._overrides) >= OVERRIDES_MAX:
            raise Refused("too_many_overrides")
        return override, self._clock() + override.for_s

    def _in_force(self) -> OperatorOverrides:
        biases: dict[str, Bias] = {}
        pins: dict[tuple[str, str], Pin] = {}
        for override, until in self._overrides.values():
            if isinstance(override, BiasOverride):
                biases[override.region] = Bias(override.region, override.ms, override.why, override.author, until)
            else:
                whom = ("tenant", override.tenant) if override.tenant else ("model", override.model)
                pins[whom] = Pin(override.region, override.strict, override.why, override.author, until)
        return OperatorOverrides(biases, pins)

    def status(self) -> list[dict[str, Any]]:
        """The biases and pins in force, for operators."""
        now = self._clock()
        listed = []
        for override, until in self._overrides.values():
            if now < until:
                own: dict[str, Any] = (
                    {"action": "bias", "ms": override.ms}
                    if isinstance(override, BiasOverride)
                    else {
                        "action": "pin",
                        "tenant": override.tenant,
                        "model": override.model,
                        "strict": override.strict,
                    }
                )
                ends = {"until": override.until.isoformat(timespec="seconds"), "left_s": until - now}
                listed.append(
                    {**own, "region": override.region, "why": override.why, "author": override.author, **ends}
                )
        return listed
