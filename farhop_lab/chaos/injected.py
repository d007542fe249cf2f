"""Breaks and mends a simulated world as a schedule says. The live twin is `live`: the same names, real processes.

Invariant: what a fault broke is whole again once it is mended, whatever else was broken meanwhile. Never judges.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from farhop_lab.chaos.schedule import REPLICA_KINDS
from farhop_lab.engine import faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.chaos.schedule import Fault, Schedule
    from farhop_lab.sim.hosts import Host
    from farhop_lab.sim.world import World

TENANT = "t"
XID = 79  # fell off the bus: fatal
LAW_LAG_S = 0.2


class Breaker:
    """See the module's head."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.law_epoch = world.law.epoch

    def plan(self, schedule: Schedule) -> None:
        """Every fault at its time, and its mending at its own."""
        for fault in schedule.faults:
            self._world.at(fault.at_s, self._break, fault)
            self._world.at(fault.until_s, self._mend, fault)

    def _break(self, fault: Fault) -> None:
        world, region = self._world, fault.region
        if fault.what in REPLICA_KINDS:
            with suppress(KeyError):  # its region is dead, and the replica with it
                _break_replica(world.host(region, fault.replica), fault)
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
            "etcd": world.silence_etcd,
            "law": lambda: self._publish([name for name in world.regions if name != region]),
        }
        acts[fault.what]()

    def _mend(self, fault: Fault) -> None:
        world, region = self._world, fault.region
        if fault.what in REPLICA_KINDS:
            with suppress(KeyError):
                _mend_replica(world.host(region, fault.replica), fault)
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
            "etcd": world.etcd_speaks,
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
            "tenants": [{"name": TENANT, "residency": {"processing": {"allow": allowed}}}],
        }
        self._world.publish_law(json.dumps(document).encode(), LAW_LAG_S)


def _break_replica(host: Host, fault: Fault) -> None:
    if fault.what in faults.KINDS:
        if not host.stopped:
            host.command(faults.Fault(fault.what, factor=max(1.0, fault.factor), xid=XID))  # type: ignore[arg-type]
    elif fault.what == "pause":
        if not host.stopped:
            host.pause()
    elif fault.what == "restart":
        host.stop()
    else:
        host.refuse(refusing=True)


def _mend_replica(host: Host, fault: Fault) -> None:
    if fault.what in faults.KINDS:
        host.command(None)
    elif fault.what == "pause":
        host.resume()
    elif fault.what == "restart":
        host.start()
    else:
        host.refuse(refusing=False)
