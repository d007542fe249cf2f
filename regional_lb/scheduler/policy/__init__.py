"""How a region chooses among its replicas: one small file per kind of policy, one table of them all."""

from regional_lb.scheduler.policy.base import Need, Policy
from regional_lb.scheduler.policy.chosen import KNOWN, OPTIONS, Policies, PoliciesChanged, PolicyConfig, made
from regional_lb.scheduler.policy.predictive import Predictive

__all__ = [
    "KNOWN",
    "OPTIONS",
    "Need",
    "Policies",
    "PoliciesChanged",
    "Policy",
    "PolicyConfig",
    "Predictive",
    "made",
]
