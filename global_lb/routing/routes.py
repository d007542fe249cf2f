"""The routes in force: which one decides for whom, what is counted over the requests sent, operators' overrides.

Never scores, and counts only what was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.balance import model_steps
from farhop.balance.machine import Event
from farhop.balance.session_affinity import SessionAffinity
from global_lb.routing.policy.overrides import OperatorOverrides, OverridesChanged
from global_lb.routing.policy.route import Route, RouteConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farhop.balance.machine import Request
    from farhop.balance.model_steps import ModelStep
    from global_lb.routing.pick import Decision
    from global_lb.routing.policy.route import RouteScope

ALL: RouteScope = ("", "")


class RoutesChanged(Event, frozen=True):
    """By scope, the routes that override the configuration from now on."""

    routes: dict[RouteScope, RouteConfig]


class Routes:
    """The routes in force, as configured or as changed at work, and the operators' overrides.

    The narrowest scope decides, whole: tenant and model, tenant, model, all.
    """

    def __init__(self, configured: Mapping[RouteScope, RouteConfig] | None = None) -> None:
        self._configured = {ALL: RouteConfig(), **(configured or {})}
        self._changes: Mapping[RouteScope, RouteConfig] = {}
        self._routes: dict[RouteScope, Route] = {}
        self.cascades: dict[RouteScope, tuple[ModelStep, ...]] = {}
        self.overrides = OperatorOverrides()
        self.affinity, self.soft_affinity = SessionAffinity(), SessionAffinity()
        self.changed: list[Callable[[], None]] = []  # called when others are in force
        self.override({})

    def of(self, tenant: str, model: str) -> Route:
        """The route for a tenant's request for a model."""
        routes = self._routes
        if len(routes) == 1:
            return self._default
        return routes.get((tenant, model)) or routes.get((tenant, "")) or routes.get(("", model)) or self._default

    def cascade(self, tenant: str, model: str) -> tuple[ModelStep, ...]:
        """What the name stands for if this tenant uses it; empty if it is only a model. A name in a cascade is never
        resolved in turn."""
        return model_steps.of(self.cascades, tenant, model)

    def configure(self, configured: Mapping[RouteScope, RouteConfig]) -> None:
        """Replace the configured routes. Routes that override them stay in force."""
        self._configured = {ALL: RouteConfig(), **configured}
        self.override(self._changes)

    def override(self, routes: Mapping[RouteScope, RouteConfig]) -> None:
        """From now on these, and only these, override the configuration. A new route begins with nothing counted; one
        that stays keeps its counts."""
        self._changes = routes
        chosen = {**self._configured, **routes}
        before = self._routes
        kept = {scope: before[scope] for scope, it in chosen.items() if scope in before and before[scope].config == it}
        self._routes = {
            scope: kept.get(scope) or Route(config) for scope, config in chosen.items() if not config.models
        }
        self.cascades = {scope: config.models for scope, config in chosen.items() if config.models}
        self._default = self._routes[ALL]
        self._wants_session = any(route.wants_session() for route in self._routes.values())
        self._affine = any(route.config.affinity_ms for route in self._routes.values())
        configs = {scope: route.config for scope, route in self._routes.items() if route.config.reuses_answers}
        self.repeating = {scope: (config.keep_answers_s, config.coalesce) for scope, config in configs.items()}
        for changed in self.changed:
            changed()

    def apply(self, event: RoutesChanged | OverridesChanged) -> None:
        """Replace the routes or overrides in force."""
        if isinstance(event, RoutesChanged):
            self.override(event.routes)
        else:
            self.overrides = event.overrides

    def sent(self, request: Request, decision: Decision, now: float) -> None:
        """A request is on its way to the chosen region: count it."""
        chosen, route, candidates = decision.chosen, decision.route, decision.candidates
        if chosen is None or candidates is None:
            return
        if self._affine and request.session:
            self.affinity.moved_in(request.session, request.model, chosen.region)
        if request.soft_session:
            self.soft_affinity.moved_in(request.soft_session, request.model, chosen.region)
        if route.plain:
            return
        if route.quota is not None and decision.lawful_here:
            route.quota.sent(foreign=decision.foreign)
        if route.budget is not None and decision.foreign:
            route.budget.spend(candidates.egress_usd(candidates.at[chosen.region]), now)

    def answered(self, decision: Decision, output_tokens: int, now: float) -> None:
        """A request's answer had this many tokens: correct the estimate of its cost."""
        chosen, route, candidates = decision.chosen, decision.route, decision.candidates
        if route.budget is not None and decision.foreign and chosen is not None and candidates is not None:
            place = candidates.at[chosen.region]
            route.budget.spend(candidates.egress_usd(place, output_tokens) - candidates.egress_usd(place), now)

    def policies(self) -> dict[str, str]:
        """The policies in force, by `tenant/model`; `*` stands for any."""
        return {
            f"{tenant or '*'}/{model or '*'}": route.policy.name
            for (tenant, model), route in sorted(self._routes.items())
        }

    def accounts(self, now: float) -> list[dict[str, Any]]:
        """For people: each route's policy, way to answer, and what is left of what is counted for it."""
        routes = [route.status(scope, now) for scope, route in sorted(self._routes.items())]
        for (tenant, model), steps in sorted(self.cascades.items()):
            routes.append({"tenant": tenant, "model": model, "models": [step.model_dump() for step in steps]})
        return routes

    def want_session(self) -> bool:
        """Whether any of them asks for a request's session."""
        return self._wants_session
