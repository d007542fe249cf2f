"""From a checked configuration to the parts it configures. Never decides a default: those stand with the fields."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farhop.relay.inbound import InboundLimits
from farhop.relay.outbound import OutboundLimits
from farhop.shell.config import ConfigError
from topology import load as worlds

if TYPE_CHECKING:
    from farhop.shell.config import Limits, Process
    from farhop.store.etcd_link import EtcdSettings
    from topology.model import Topology


def world(config: Process) -> Topology:
    """The topology named: a file, or a ready-made world. Raises TopologyError or ConfigError."""
    name = config.topology
    path = Path(name) if name.endswith((".yaml", ".yml")) else worlds.shipped(name)
    topology = worlds.load(path)
    if config.region not in topology.regions:
        known = ", ".join(sorted(topology.regions))
        raise ConfigError("region", [f"{config.region!r} is not in topology {topology.name!r}; it has {known}"])
    return topology


def etcd(config: Process, topology: Topology) -> EtcdSettings:
    """Where etcd is: as configured, else the hub of this region. Raises ConfigError."""
    given = config.etcd
    hub = topology.regions[config.region].hub
    endpoints = tuple(given.endpoints) or topology.hubs.get(hub, ())
    if not endpoints:
        raise ConfigError("etcd.endpoints", [f"none given, and hub {hub!r} of the topology has none; add some"])
    try:
        return given.settings(endpoints)
    except ValueError as error:
        raise ConfigError(f"hub {hub!r} of the topology", [str(error)]) from None


def inbound(limits: Limits) -> InboundLimits:
    """Bounds of the client's side."""
    return InboundLimits(
        head_bytes_max=limits.head_bytes_max,
        body_bytes_max=limits.body_bytes_max,
        connections_max=limits.connections_max,
    )


def outbound(limits: Limits) -> OutboundLimits:
    """Bounds of the upstream's side."""
    return OutboundLimits(
        connect_s=limits.connect_s, first_byte_s=limits.first_byte_s, between_bytes_s=limits.between_bytes_s
    )
