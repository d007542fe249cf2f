"""Which instances of a region can be asked for a model, and what each offers by what was heard last.

Invariants: a report newer than a refusal ends what the refusal told; who is draining is never asked. Never counts what
was sent, and never chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from farhop.balance import outcome
from global_lb.view import pooled

if TYPE_CHECKING:
    from collections.abc import Collection

    from farhop.balance.outcome import Outcome
    from global_lb.view import Capacity, Instance, Region

_NOTHING: dict[str, list[Instance]] = {}


class Instances:
    """Those of the regions as they are known. `take` takes what is known of one region anew."""

    def __init__(self) -> None:
        self._ready: dict[str, dict[str, list[Instance]]] = {}  # who can be asked, by region and model
        self._pool: dict[str, dict[tuple[str, str], Capacity]] = {}  # of regions with several: what each can use
        self._told: dict[str, dict[tuple[str, str], tuple[float, Capacity]]] = {}  # by refusals, since that report

    def take(self, name: str, known: Region | None) -> bool:
        """The region is known like this from now on; None: no more. Whether it can be asked for other models than
        before."""
        before = self._ready.pop(name, {})
        self._pool.pop(name, None)
        told = self._told.pop(name, None)
        if known is None:
            return bool(before)
        ready = _ready(known)
        if ready:
            self._ready[name] = ready
        if len(known.instances) > 1:
            self._pool[name] = pooled(known)
        if told:
            reported = {instance.name: instance.received_at for instance in known.instances}
            self._told[name] = {line: said for line, said in told.items() if reported.get(line[0]) == said[0]}
        return before.keys() != ready.keys()

    def refused(self, instance: Instance, model: str, reason: Outcome, wait_ms: float | None) -> None:
        """What a refusal tells is newer than the instance's report, and holds until the next one."""
        capacity = self.capacity(instance, model)
        if wait_ms is not None:
            capacity = replace(capacity, wait_ms=wait_ms)
        if reason is outcome.FOREIGN_FULL:
            capacity = replace(capacity, headroom_foreign_tokens=0.0)
        self._told.setdefault(instance.region, {})[instance.name, model] = (instance.received_at, capacity)

    def capacity(self, instance: Instance, model: str) -> Capacity:
        """What it offers: by a refusal since its report, else by the reports."""
        said = self._told.get(instance.region) if self._told else None
        told = said.get((instance.name, model)) if said else None
        return told[1] if told is not None and told[0] == instance.received_at else self.reported(instance, model)

    def reported(self, instance: Instance, model: str) -> Capacity:
        """What it can use by the reports alone: all of the region's, where several have parts of it."""
        pool = self._pool.get(instance.region) if self._pool else None
        return pool[instance.name, model] if pool else instance.models[model]

    def able(self, region: str, model: str) -> list[Instance]:
        """The region's instances that can be asked for the model."""
        return self._ready.get(region, _NOTHING).get(model, [])

    def served(self, region: str) -> Collection[str]:
        """The models that the region can be asked for."""
        return self._ready.get(region, _NOTHING).keys()

    def serving(self, model: str) -> tuple[str, ...]:
        """The regions that can be asked for the model, by name."""
        return tuple(sorted(name for name, ready in self._ready.items() if model in ready))

    def used_share(self, region: str, model: str) -> float:
        """How much of the region is used, 0 and up. ValueError where nobody is able.

        Each speaks of all that it can send to; where nothing is shared, in proportion to what it has.
        """
        able = self.able(region, model)
        if len(able) == 1:
            return able[0].models[model].used_share
        used = [(i.models[model].used_share, i.models[model].slots_total) for i in able]
        slots = sum(n for _, n in used)
        return sum(u * n for u, n in used) / slots if slots else max(u for u, _ in used)


def _ready(region: Region) -> dict[str, list[Instance]]:
    ready: dict[str, list[Instance]] = {}
    for instance in region.instances:
        for model, capacity in instance.models.items() if not instance.draining else ():
            # It may send to what others report. That a replica changes hands must not hide it for a moment.
            if capacity.replicas_ready or capacity.usable_share:
                ready.setdefault(model, []).append(instance)
    return ready
