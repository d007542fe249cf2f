"""How a region is chosen: one small file per kind of policy, the modifiers, one table of them all."""

from global_lb.policy.base import Policy
from global_lb.policy.chosen import KNOWN, Route, Routes, RoutesChanged, Rule, Scope, made
from global_lb.policy.predictive import Predictive
from global_lb.policy.words import Bias, Pin, Steered, Words

__all__ = [
    "KNOWN", "Bias", "Pin", "Policy", "Predictive", "Route", "Routes", "RoutesChanged", "Rule", "Scope", "Steered",
    "Words", "made",
]  # fmt: skip
