"""The regional balancer's configuration: a module for each part of the file. Never opens a connection."""

from regional_lb.config.bounds import Foreign, Queue, Watch
from regional_lb.config.discovery import (
    DnsSource,
    EtcdSource,
    FileSource,
    KubernetesSource,
    SourceConfig,
    Template,
)
from regional_lb.config.health import Health, Probe
from regional_lb.config.peers import Peers, PeersTls
from regional_lb.config.policy import POLICIES, PolicyConfig
from regional_lb.config.regional import REPLICAS_MAX, RegionalConfig
from regional_lb.config.replica import ENGINE_NAMES, MODELS_MAX, Model, ReplicaConfig, place_of
from regional_lb.config.split import SplitConfig
from regional_lb.config.tokenizer import TokenizerFiles

__all__ = [
    "ENGINE_NAMES",
    "MODELS_MAX",
    "POLICIES",
    "REPLICAS_MAX",
    "DnsSource",
    "EtcdSource",
    "FileSource",
    "Foreign",
    "Health",
    "KubernetesSource",
    "Model",
    "Peers",
    "PeersTls",
    "PolicyConfig",
    "Probe",
    "Queue",
    "RegionalConfig",
    "ReplicaConfig",
    "SourceConfig",
    "SplitConfig",
    "Template",
    "TokenizerFiles",
    "Watch",
    "place_of",
]
