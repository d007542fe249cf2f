"""One trial: a schedule run in virtual time, and the properties that do not hold QUIET_S after its last fault.

    findings = run(schedule.drawn(7)).findings

Invariant: equal schedules give equal findings in every process. Reads no clock except for `cpu_s`.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from farhop_lab.chaos import properties, workload
from farhop_lab.chaos.schedule import Schedule
from farhop_lab.chaos.workload import EngineTimings, OpenLoad
from farhop_lab.sim.faults import FaultInjector
from farhop_lab.studies.cell import rare_collections

if TYPE_CHECKING:
    from farhop_lab.chaos.properties import Finding
    from farhop_lab.sim.world import World

QUIET_S = 30.0
# When properties are checked, after the quiet: by the first time there are 50 answers of each replica since the last
# fault, 30 of them after the quiet. Only shares that chance may explain are checked again.
LOOKS_S = (25.0, 60.0, 150.0)
SETTLE_S = 15.0  # by then all is answered (workload.SERVED_WITHIN_S), and reports say so


class Outcome(msgspec.Struct, frozen=True):
    """The result of a trial. `answers` is their number, `looked_s` the time of the last check."""

    schedule: Schedule
    findings: tuple[Finding, ...]
    answers: int = 0
    looked_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether any property does not hold."""
        return bool(self.findings)

    @property
    def failures(self) -> tuple[str, ...]:
        """The properties that do not hold."""
        found = {finding.property for finding in self.findings}
        return tuple(name for name in properties.PROPERTIES if name in found)


def run(schedule: Schedule) -> Outcome:
    """Run it."""
    began, truth = time.process_time(), EngineTimings()
    with rare_collections():
        world = workload.world_of(schedule, truth)
        world.journal.violations_only()
        try:
            findings = _played(world, schedule, truth)
        except Exception as error:  # noqa: BLE001 - a machine that raises is a finding, whatever it raises
            text = f"{type(error).__name__}: {error}"
            findings = [properties.Finding("sound", "world", f"{world.now:.3f} s: {text[:300]}")]
    cpu_s = time.process_time() - began
    return Outcome(schedule, tuple(sorted(findings)), world.measures.concluded, round(world.now, 3), round(cpu_s, 3))


def _played(world: World, schedule: Schedule, truth: EngineTimings) -> list[Finding]:
    injector = FaultInjector(world, workload.TENANT)
    injector.plan(schedule.faults)
    load = OpenLoad(world, schedule)
    quiet_s = schedule.mended_s + QUIET_S
    world.run(quiet_s)
    truth.forget(quiet_s)
    found = set(properties.open_requests(world, quiet_s - workload.SERVED_WITHIN_S))
    found |= _looked(world, truth, quiet_s)
    found |= {
        *properties.estimates(world, truth),
        *properties.standing(world),
        *properties.answers(world, quiet_s),
        *properties.open_requests(world, world.now - workload.SERVED_WITHIN_S),
        *properties.law(world, injector.law_epoch),
    }
    load.stop()
    world.run(world.now + SETTLE_S)
    return [*found, *properties.ledgers(world), *properties.open_requests(world, world.now), *properties.sound(world)]


def _looked(world: World, truth: EngineTimings, quiet_s: float) -> set[Finding]:
    """Shares, over as many answers as it takes to be sure."""
    found: set[Finding] = set()
    for look_s in LOOKS_S:
        world.run(quiet_s + look_s)
        found = set(properties.shares(world, truth, _asked(world, truth.since_s)))
        if not found or any(finding.sure for finding in found):
            break
    return {msgspec.structs.replace(finding, sure=True) for finding in found}


def _asked(world: World, since_s: float) -> dict[str, int]:
    """Requests of each region's clients since then, without those under way."""
    asked = Counter(record.entry for record in world.measures.records if record.arrived_at >= since_s)
    return {name: asked[name] for name in world.regions}
