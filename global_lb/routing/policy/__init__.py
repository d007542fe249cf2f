"""How a region is chosen: policies, what modifies them, and a table of them all."""

from global_lb.routing.policy.base import Policy
from global_lb.routing.policy.overrides import Bias, OperatorOverrides, OverridesChanged, Pin
from global_lb.routing.policy.predictive import Predictive
from global_lb.routing.policy.route import KNOWN, ROUTES_MAX, Route, RouteConfig, RouteScope, routes_of

__all__ = [
    "KNOWN",
    "ROUTES_MAX",
    "Bias",
    "OperatorOverrides",
    "OverridesChanged",
    "Pin",
    "Policy",
    "Predictive",
    "Route",
    "RouteConfig",
    "RouteScope",
    "routes_of",
]  # fmt: skip
