"""How a region chooses among its replicas: one small file per kind of policy, one table of them all."""

from regional_lb.policy.base import Need, Policy
from regional_lb.policy.chosen import KNOWN, Choice, Policies, PoliciesChanged, made
from regional_lb.policy.predictive import Predictive

__all__ = ["KNOWN", "Choice", "Need", "Policies", "PoliciesChanged", "Policy", "Predictive", "made"]
