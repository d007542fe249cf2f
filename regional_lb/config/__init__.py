"""The regional balancer's configuration: a module for each part of the file. Never opens a connection."""

from regional_lb.config.bounds import Foreign, Queue, Watch
from regional_lb.config.health import Health, Probe
from regional_lb.config.policy import POLICIES, PolicyConfig, Session
from regional_lb.config.regional import RegionalConfig
from regional_lb.config.replica import ENGINE_NAMES, Model, ReplicaConfig, place_of
from regional_lb.config.split import SplitConfig

__all__ = [
    "ENGINE_NAMES",
    "POLICIES",
    "Foreign",
    "Health",
    "Model",
    "PolicyConfig",
    "Probe",
    "Queue",
    "RegionalConfig",
    "ReplicaConfig",
    "Session",
    "SplitConfig",
    "Watch",
    "place_of",
]
