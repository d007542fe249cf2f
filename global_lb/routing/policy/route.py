"""What one route is: the policy and modifiers configured for a tenant, a model or all, and what is counted for it.

Never scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from farhop.balance import model_steps
from farhop.balance.model_steps import Name, Steps
from farhop.config import Part, rule
from global_lb.routing.policy.account import EgressBudget, ForeignQuota
from global_lb.routing.policy.predictive import Predictive
from global_lb.routing.policy.ranked import Failover, LeastLoad, Nearest, Waterfall
from global_lb.routing.policy.shares import ConsistentHash, Weighted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from global_lb.routing.policy.base import Policy

ROUTES_MAX = 4096
RouteScope: TypeAlias = tuple[str, str]  # a tenant and a model; "" is any

RegionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]

Share = Annotated[float, Field(ge=0, le=1)]

KNOWN: dict[str, Callable[[RouteConfig], Policy]] = {
    Predictive.name: lambda _: Predictive(),
    Nearest.name: lambda _: Nearest(),
    Waterfall.name: lambda it: Waterfall(it.fill_at),
    Weighted.name: lambda it: Weighted(it.weights),
    Failover.name: lambda it: Failover(it.regions),
    ConsistentHash.name: lambda it: ConsistentHash(it.prefix_bytes),
    LeastLoad.name: lambda _: LeastLoad(),
}
# The options that only some policies read.
OPTIONS: dict[str, tuple[str, ...]] = {
    Waterfall.name: ("fill_at",),
    Weighted.name: ("weights",),
    Failover.name: ("regions",),
    ConsistentHash.name: ("prefix_bytes",),
}
_ALL_OPTIONS = {option for options in OPTIONS.values() for option in options}


class RouteConfig(Part):
    """A route: which requests it is for, which policy chooses their region, and which modifiers change the choice.
    Regions are named as in the topology. docs/reference/policies.md describes policies and modifiers."""

    # The requests that it is for. "": any.
    tenant: Name | Literal[""] = ""
    model: Name | Literal[""] = ""

    # The policy and its options.
    policy: str = "predictive"  # one of KNOWN
    # Weighted: shares by region.
    weights: dict[RegionName, Annotated[float, Field(ge=0, le=1e6)]] = Field(default_factory=dict, max_length=1024)
    regions: Annotated[tuple[RegionName, ...], Field(max_length=1024)] = ()  # failover: regions in order
    # Waterfall: the share of a region's capacity in use from which requests go on to the next region.
    fill_at: Annotated[float, Field(gt=0, le=10)] = 0.8
    # Consistent-hash: prompts that agree in this many bytes go together.
    prefix_bytes: Annotated[int, Field(ge=256, le=4 * 1024 * 1024)] = 1024

    # Modifiers.

    # Added to a region's score.
    bias_ms: dict[RegionName, Annotated[float, Field(ge=-60_000, le=60_000)]] = Field(
        default_factory=dict, max_length=1024
    )
    foreign_quota: Share = 1.0  # the share of requests that may leave this region
    # A session stays with its last region if that is at most this much slower; 0: it need not.
    affinity_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    # Shares by region, whatever the scores.
    canary: dict[RegionName, Share] = Field(default_factory=dict, max_length=64)
    canary_by: Literal["session", "tenant"] = "session"  # requests of one session or one tenant are drawn together
    # The budget for traffic between regions; None: unlimited.
    egress_usd_per_hour: Annotated[float, Field(ge=0, le=1e9)] | None = None
    # How many milliseconds a dollar per request is worth; 0: cost does not count.
    usd_weight_ms: Annotated[float, Field(ge=0, le=1e9)] = 0.0

    # How requests are answered.
    answer: Literal["proxy", "redirect"] = "proxy"  # "redirect": the client is sent to the region itself
    redirect_bytes: Annotated[int, Field(ge=0, le=1 << 40)] = 0  # redirect only bodies of at least this size; 0: all
    advise: bool = True  # clients may ask for a decision without a request (POST /v1/route)
    # Streams that came by an anycast address and have at least this many output tokens (or no stated number) are
    # redirected to the entry's own name (`unicast` in its configuration); None: none are.
    unicast_tokens: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    # How long an answer is reused for the same request of the same tenant; 0: never.
    keep_answers_s: Annotated[float, Field(ge=0, le=30 * 86_400)] = 0.0
    coalesce: bool = False  # the same requests under way share one answer

    # A route with `models` has no other field but `tenant` and `model`.

    # The models that the name `model` stands for, in order of preference. Each is routed by its own route.
    models: Steps = ()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("policy", "predictive")
        if not isinstance(name, str) or name not in KNOWN:
            raise ValueError(f"no policy {str(name)[:64]!r}; known are {', '.join(KNOWN)}")
        options = OPTIONS.get(name, ())
        for option in given:
            if option in _ALL_OPTIONS and option not in options:
                takes = ", ".join(options) or "none"
                raise ValueError(f"{option} is no option of policy {name}; its options: {takes}")
        return given

    @rule
    def _sound(self) -> Iterator[str]:
        if self.policy == "failover" and not self.regions:
            yield "regions: give them in order, the active one first"
        if len(set(self.regions)) < len(self.regions):
            yield "regions: one is given twice; name each once"
        if self.policy == "weighted" and self.weights and not any(self.weights.values()):
            yield "weights: none is above 0; give some region a share, or leave them out"
        if sum(self.canary.values()) > 1.0 + 1e-9:
            yield f"canary: the shares come to {sum(self.canary.values()):g}; at most 1"
        if self.redirect_bytes and self.answer != "redirect":
            yield "redirect_bytes: goes with `answer: redirect`; say both or neither"
        if self.reuses_answers and self.answer == "redirect":
            option = "keep_answers_s" if self.keep_answers_s else "coalesce"
            yield f"{option}: does not go with `answer: redirect`, whose answers do not pass here; leave one out"
        self._cascade()

    @property
    def reuses_answers(self) -> bool:
        """Whether an answer may be for more than one request."""
        return self.coalesce or self.keep_answers_s > 0

    def _cascade(self) -> None:
        """Raise ValueError if `models` is invalid."""
        if not self.models:
            return
        if not self.model:
            raise ValueError("models: goes with `model`, the name that stands for them")
        if others := sorted(self.model_fields_set - {"tenant", "model", "models"}):
            raise ValueError(
                f"{others[0]}: does not go with `models`; say it in the route of a model that it stands for"
            )
        model_steps.check(self.models)

    def named(self) -> set[str]:
        """All regions that the route names."""
        return {*self.weights, *self.regions, *self.bias_ms, *self.canary}


class Route:
    """A route in force: its policy, and what is counted for it. `plain`: without modifiers."""

    __slots__ = ("budget", "config", "plain", "policy", "quota")

    def __init__(self, config: RouteConfig) -> None:
        self.config, self.policy = config, KNOWN[config.policy](config)
        self.quota = ForeignQuota(config.foreign_quota) if config.foreign_quota < 1.0 else None
        self.budget = EgressBudget(config.egress_usd_per_hour) if config.egress_usd_per_hour is not None else None
        modified = config.bias_ms or config.canary or config.affinity_ms or config.usd_weight_ms
        self.plain = not modified and self.quota is None and self.budget is None

    def status(self, scope: RouteScope, now: float) -> dict[str, Any]:
        """The state of the route, for operators."""
        config, quota, budget = self.config, self.quota, self.budget
        return {
            "tenant": scope[0],
            "model": scope[1],
            "policy": self.policy.name,
            "answer": config.answer,
            "redirect_bytes": config.redirect_bytes,
            "unicast_tokens": config.unicast_tokens,
            "keep_answers_s": config.keep_answers_s,
            "coalesce": config.coalesce,
            "foreign_quota": quota.share if quota is not None else None,
            "egress_usd_per_hour": budget.usd_per_hour if budget is not None else None,
            "egress_spent_usd": budget.spent_usd(now) if budget is not None else None,
            "usd_weight_ms": config.usd_weight_ms,
        }

    def wants_session(self) -> bool:
        """Whether any part of the route uses a request's session."""
        by_session = self.config.canary and self.config.canary_by == "session"
        return bool(self.policy.wants_session or self.config.affinity_ms or by_session)


def routes_of(listed: Sequence[RouteConfig], regions: Collection[str]) -> dict[RouteScope, RouteConfig]:
    """Routes by their scope. ValueError that names the route and the remedy if they do not fit together."""
    routes: dict[RouteScope, RouteConfig] = {}
    for n, one in enumerate(listed):
        scope = (one.tenant, one.model)
        if scope in routes:
            raise ValueError(f"routes.{n}: a second one for tenant {one.tenant!r}, model {one.model!r}; keep one")
        for name in sorted(one.named() - set(regions)):
            known = ", ".join(sorted(regions)[:8])
            raise ValueError(f"routes.{n}: no region {name!r} in the topology; known are {known}")
        routes[scope] = one
    model_steps.check_ends((one.model, one.models) for one in listed)
    return routes
