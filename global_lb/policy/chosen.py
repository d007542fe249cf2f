"""Which route decides for whom: the table of all policies, the modifiers with them, those in force. Never scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from farhop.balance.machine import Event
from global_lb.policy.account import EgressBudget, ForeignQuota, Homes
from global_lb.policy.load import LeastLoad
from global_lb.policy.near import Nearest, Waterfall
from global_lb.policy.order import Failover
from global_lb.policy.predictive import Predictive
from global_lb.policy.shares import ConsistentHash, Weighted
from global_lb.policy.words import Steered, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farhop.balance.machine import Request
    from global_lb.pick import Decision
    from global_lb.policy.base import Policy

Scope: TypeAlias = tuple[str, str]  # a tenant and a model; "" is any
ALL: Scope = ("", "")


class Route(msgspec.Struct, frozen=True):
    """A policy by name with its options, each read by the policies it concerns, and the modifiers.

    `weights`: shares by region. `regions`: the order of failover. `fill_at`: the share of its use from which a
    waterfall goes on to the next. `prefix_bytes`: how much of a prompt's beginning keeps prompts together.
    `bias_ms`: by region, added. `foreign_quota`: the share of the requests sent that may leave this region.
    `affinity_ms`: how much slower the region of its last request may be for a session to stay. `canary`: shares by
    region, whatever the scores; `canary_by`: who stays drawn. `egress_usd_per_hour`: what traffic between regions may
    cost. `usd_weight_ms`: milliseconds that a dollar a request is worth. `answer`: whether the client is sent to the
    region itself ("redirect") with bodies of `redirect_bytes` and more, or its answer is relayed. `advise`: whether it
    may ask for decisions alone.
    """

    policy: str = "predictive"
    weights: dict[str, float] = {}
    regions: tuple[str, ...] = ()
    fill_at: float = 0.8
    prefix_bytes: int = 1024
    bias_ms: dict[str, float] = {}
    foreign_quota: float = 1.0
    affinity_ms: float = 0.0
    canary: dict[str, float] = {}
    canary_by: str = "session"
    egress_usd_per_hour: float | None = None
    usd_weight_ms: float = 0.0
    answer: str = "proxy"
    redirect_bytes: int = 0
    advise: bool = True


KNOWN: dict[str, Callable[[Route], Policy]] = {
    Predictive.name: lambda _: Predictive(),
    Nearest.name: lambda _: Nearest(),
    Waterfall.name: lambda it: Waterfall(it.fill_at),
    Weighted.name: lambda it: Weighted(it.weights),
    Failover.name: lambda it: Failover(it.regions),
    ConsistentHash.name: lambda it: ConsistentHash(it.prefix_bytes),
    LeastLoad.name: lambda _: LeastLoad(),
}


def made(route: Route) -> Policy:
    """The policy. KeyError for a name that is not KNOWN: configuration sees to it."""
    return KNOWN[route.policy](route)


class Rule:
    """A route in force: its policy, and what is counted for it. `plain`: without modifiers."""

    __slots__ = ("budget", "plain", "policy", "quota", "route")

    def __init__(self, route: Route) -> None:
        self.route, self.policy = route, made(route)
        self.quota = ForeignQuota(route.foreign_quota) if route.foreign_quota < 1.0 else None
        self.budget = EgressBudget(route.egress_usd_per_hour) if route.egress_usd_per_hour is not None else None
        modified = route.bias_ms or route.canary or route.affinity_ms or route.usd_weight_ms
        self.plain = not modified and self.quota is None and self.budget is None

    def told(self, scope: Scope, now: float) -> dict[str, Any]:
        """For people."""
        quota, budget = self.quota, self.budget
        return {
            "tenant": scope[0],
            "model": scope[1],
            "policy": self.policy.name,
            "answer": self.route.answer,
            "redirect_bytes": self.route.redirect_bytes,
            "foreign_quota": quota.share if quota is not None else None,
            "egress_usd_per_hour": budget.usd_per_hour if budget is not None else None,
            "egress_spent_usd": budget.spent_usd(now) if budget is not None else None,
            "usd_weight_ms": self.route.usd_weight_ms,
        }

    def wants_session(self) -> bool:
        """Whether anything in it goes by a request's session."""
        by_session = self.route.canary and self.route.canary_by == "session"
        return bool(self.policy.wants_session or self.route.affinity_ms or by_session)


class RoutesChanged(Event, frozen=True):
    """By scope, what goes before the configuration from now on."""

    routes: dict[Scope, Route]


class Routes:
    """The routes in force, as configured or as changed at work, and the operators' words.

    The narrowest scope decides, whole: tenant and model, tenant, model, all.
    """

    def __init__(self, configured: Mapping[Scope, Route] | None = None) -> None:
        self._configured = {ALL: Route(), **(configured or {})}
        self._rules: dict[Scope, Rule] = {}
        self.words = Words()
        self.homes = Homes()
        self.override({})

    def of(self, tenant: str, model: str) -> Rule:
        """What decides for a tenant's request for a model."""
        rules = self._rules
        if len(rules) == 1:
            return self._default
        return rules.get((tenant, model)) or rules.get((tenant, "")) or rules.get(("", model)) or self._default

    def override(self, routes: Mapping[Scope, Route]) -> None:
        """From now on these go before what is configured, and nothing else does. One not heard of till now begins
        with nothing counted; one that stays goes on."""
        chosen = {**self._configured, **routes}
        before = self._rules
        kept = {scope: before[scope] for scope, it in chosen.items() if scope in before and before[scope].route == it}
        self._rules = {scope: kept.get(scope) or Rule(route) for scope, route in chosen.items()}
        self._default = self._rules[ALL]
        self._wants_session = any(rule.wants_session() for rule in self._rules.values())
        self._affine = any(rule.route.affinity_ms for rule in self._rules.values())

    def hear(self, event: RoutesChanged | Steered) -> None:
        """What is in force has changed."""
        if isinstance(event, RoutesChanged):
            self.override(event.routes)
        else:
            self.words = event.words

    def sent(self, request: Request, decision: Decision, now: float) -> None:
        """A request is on its way to the region chosen: what is counted, counts it."""
        chosen, rule, field = decision.chosen, decision.rule, decision.asked
        if chosen is None or field is None:
            return
        if self._affine and request.session:
            self.homes.moved_in(request.session, request.model, chosen.region)
        if rule.plain:
            return
        if rule.quota is not None and decision.lawful_here:
            rule.quota.sent(foreign=decision.foreign)
        if rule.budget is not None and decision.foreign:
            rule.budget.spend(field.egress_usd(field.at[chosen.region]), now)

    def answered(self, decision: Decision, output_tokens: int, now: float) -> None:
        """Its answer took so many tokens: what it was thought to cost is set right."""
        chosen, rule, field = decision.chosen, decision.rule, decision.asked
        if rule.budget is not None and decision.foreign and chosen is not None and field is not None:
            place = field.at[chosen.region]
            rule.budget.spend(field.egress_usd(place, output_tokens) - field.egress_usd(place), now)

    def told(self) -> dict[str, str]:
        """The policies in force, by `tenant/model`; `*` stands for any."""
        return {
            f"{tenant or '*'}/{model or '*'}": rule.policy.name for (tenant, model), rule in sorted(self._rules.items())
        }

    def accounts(self, now: float) -> list[dict[str, Any]]:
        """For people: each route's policy, way to answer, and what is left of what is counted for it."""
        return [rule.told(scope, now) for scope, rule in sorted(self._rules.items())]

    def want_session(self) -> bool:
        """Whether any of them asks for a request's session."""
        return self._wants_session
