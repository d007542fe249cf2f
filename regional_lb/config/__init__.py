"""The regional balancer's configuration: a module for each part of the file. Never opens a connection."""

from regional_lb.config.bounds import Foreign, Queue, Watch
from regional_lb.config.policy import POLICIES, PolicyConfig
from regional_lb.config.regional import RegionalConfig
from regional_lb.config.replica import ENGINE_NAMES, Model, ReplicaConfig, place_of

__all__ = [
    "ENGINE_NAMES",
    "POLICIES",
    "Foreign",
    "Model",
    "PolicyConfig",
    "Queue",
    "RegionalConfig",
    "ReplicaConfig",
    "Watch",
    "place_of",
]
