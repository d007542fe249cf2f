"""Faults of a world, by name and duration; injects and repairs them in a simulated one. Live counterpart: `chaos.live`.

Invariant: what a fault broke works again once it is repaired, whatever else broke meanwhile. Never judges.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from farhop_lab.engine.core import faults
from farhop_lab.engine.core.faults import KINDS as ENGINE_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farhop_lab.sim.replicas import ReplicaProcess
    from farhop_lab.sim.world import World

REPLICA_KINDS = (*ENGINE_KINDS, "pause", "restart", "refuse")
REGION_KINDS = ("kill", "restart-regional", "restart-global", "drain", "lose-reports")
LINK_KINDS = ("freeze", "cut", "blackhole")
WORLD_KINDS = (*LINK_KINDS, "etcd", "law")
KINDS = (*REPLICA_KINDS, *REGION_KINDS, *WORLD_KINDS)

XID = 79  # fell off the bus: fatal
LAW_LAG_S = 0.2


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`what` is broken from `at_s` on, for `for_s` seconds. At `region`; a replica fault at `replica` (gpu-0, gpu-1,
    ...), a link between `region` and `to`. `factor`: how many times slower (slow), the share of reports that is
    lost (lose-reports).

    - of a replica, as the engine's `/lab/fault`: oom, fast-500, slow, stuck, dead-green, xid; of its process: pause
      (SIGSTOP), restart (killed, and back empty), refuse (its listener is closed, and streams go on);
    - of a region: kill (balancer and engines), restart-regional (the balancer alone), restart-global, drain,
      lose-reports;
    - of the world: freeze (a link: nothing passes, nothing is lost), blackhole (so, and what is connected stays dead),
      cut (connections break, none comes about), etcd (silent), law (an epoch that forbids the region, and one that
      allows it again).
    """

    at_s: float
    for_s: float
    what: str
    region: str = ""
    replica: str = ""
    to: str = ""
    factor: float = 1.0

    @property
    def until_s(self) -> float:
        """When it is repaired."""
        return self.at_s + self.for_s


class FaultInjector:
    """See the module's head. A `law` fault changes the law of `tenant`; no other tenant is in it then."""

    def __init__(self, world: World, tenant: str = "t") -> None:
        self._world, self._tenant = world, tenant
        self.law_epoch = world.law.epoch

    def plan(self, faults: Iterable[Fault]) -> None:
        """Schedule each fault and its end."""
        for fault in faults:
            self._world.at(fault.at_s, self._break, fault)
            self._world.at(fault.until_s, self._mend, fault)

    def _break(self, fault: Fault) -> None:
        world, region = self._world, fault.region
        if fault.what in REPLICA_KINDS:
            with suppress(KeyError):  # its region is dead, and the replica with it
                _break_replica(world.process(region, fault.replica), fault)
            return
        acts: dict[str, Callable[[], None]] = {
            "kill": lambda: world.kill(region),
            "restart-regional": lambda: world.kill_regional(region),
            "restart-global": lambda: world.kill_global(region),
            "drain": lambda: world.drain(region, "chaos"),
            "lose-reports": lambda: world.lose_reports(region, fault.factor),
            "freeze": lambda: world.freeze(region, fault.to),
            "cut": lambda: world.cut(region, fault.to),
            "blackhole": lambda: world.blackhole(region, fault.to),
            "etcd": world.stop_etcd,
            "law": lambda: self._publish([name for name in world.regions if name != region]),
        }
        acts[fault.what]()

    def _mend(self, fault: Fault) -> None:
        world, region = self._world, fault.region
        if fault.what in REPLICA_KINDS:
            with suppress(KeyError):
                _mend_replica(world.process(region, fault.replica), fault)
            return
        acts: dict[str, Callable[[], None]] = {
            "kill": lambda: world.revive(region),
            "restart-regional": lambda: world.revive(region),
            "restart-global": lambda: world.start_global(region),
            "drain": lambda: world.undrain(region),
            "lose-reports": lambda: world.lose_reports(region, 0.0),
            "freeze": lambda: world.heal(region, fault.to),
            "cut": lambda: world.heal(region, fault.to),
            "blackhole": lambda: world.heal(region, fault.to),
            "etcd": world.start_etcd,
            "law": lambda: self._publish(list(world.regions)),
        }
        acts[fault.what]()

    def _publish(self, allowed: list[str]) -> None:
        self.law_epoch += 1
        document = {
            "epoch": self.law_epoch,
            "author": "chaos",
            "why": "a fault of the schedule",
            "at": "2026-01-01T00:00:00Z",
            "tenants": [{"name": self._tenant, "residency": {"processing": {"allow": allowed}}}],
        }
        self._world.publish_law(json.dumps(document).encode(), LAW_LAG_S)


def _break_replica(process: ReplicaProcess, fault: Fault) -> None:
    if fault.what in ENGINE_KINDS:
        if not process.stopped:
            process.command(faults.Fault(fault.what, factor=max(1.0, fault.factor), xid=XID))  # type: ignore[arg-type]
    elif fault.what == "pause":
        if not process.stopped:
            process.pause()
    elif fault.what == "restart":
        process.stop()
    else:
        process.refuse(refusing=True)


def _mend_replica(process: ReplicaProcess, fault: Fault) -> None:
    if fault.what in ENGINE_KINDS:
        process.command(None)
    elif fault.what == "pause":
        process.resume()
    elif fault.what == "restart":
        process.start()
    else:
        process.refuse(refusing=False)
