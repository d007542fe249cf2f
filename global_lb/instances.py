"""Which instances of a region can be asked for a model, and what each offers by what was heard last.

Invariants: a report newer than a refusal ends what the refusal told; who is draining is never asked. Never counts what
was sent, and never chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from farhop.balance import outcome
from global_lb.view import View, pooled

if TYPE_CHECKING:
    from farhop.balance.outcome import Outcome
    from global_lb.view import Capacity, Instance


class Instances:
    """Those of one view. `adopt` takes the next."""

    def __init__(self) -> None:
        self._ready: dict[tuple[str, str], list[Instance]] = {}  # who can be asked, by region and model
        self._pool: dict[tuple[str, str, str], Capacity] = {}  # of regions with several: what each can use
        self._told: dict[tuple[str, str, str], tuple[float, Capacity]] = {}  # by refusals, since that report

    def adopt(self, view: View) -> bool:
        """Take a new view. Whether other pairs of region and model can be asked than before."""
        before, self._ready = self._ready, _ready(view)
        self._pool = {line: c for region in view.regions.values() for line, c in pooled(region).items()}
        told: dict[tuple[str, str, str], tuple[float, Capacity]] = {}
        for name, region in view.regions.items() if self._told else ():
            for instance in region.instances:
                for model in instance.models:
                    refused = self._told.get((name, instance.name, model))
                    if refused is not None and refused[0] == instance.received_at:
                        told[name, instance.name, model] = refused
        self._told = told
        return before.keys() != self._ready.keys()

    def refused(self, instance: Instance, model: str, reason: Outcome, wait_ms: float | None) -> None:
        """What a refusal tells is newer than the instance's report, and holds until the next one."""
        capacity = self.capacity(instance, model)
        if wait_ms is not None:
            capacity = replace(capacity, wait_ms=wait_ms)
        if reason is outcome.FOREIGN_FULL:
            capacity = replace(capacity, headroom_foreign_tokens=0.0)
        self._told[instance.region, instance.name, model] = (instance.received_at, capacity)

    def capacity(self, instance: Instance, model: str) -> Capacity:
        """What it offers: by a refusal since its report, else by the reports."""
        line = (instance.region, instance.name, model)
        told = self._told.get(line) if self._told else None
        return told[1] if told is not None and told[0] == instance.received_at else self.reported(instance, model)

    def reported(self, instance: Instance, model: str) -> Capacity:
        """What it can use by the reports alone: all of the region's, where several have parts of it."""
        known = self._pool.get((instance.region, instance.name, model)) if self._pool else None
        return known or instance.models[model]

    def able(self, region: str, model: str) -> list[Instance]:
        """The region's instances that can be asked for the model."""
        return self._ready.get((region, model), [])

    def serving(self, model: str) -> tuple[str, ...]:
        """The regions that can be asked for the model, by name."""
        return tuple(sorted(name for name, known in self._ready if known == model))

    def used_share(self, region: str, model: str) -> float:
        """How much of the region is used, 0 and up. ValueError where nobody is able.

        Each speaks of all that it can send to; where nothing is shared, in proportion to what it has.
        """
        used = [(i.models[model].used_share, i.models[model].slots_total) for i in self.able(region, model)]
        slots = sum(n for _, n in used)
        return sum(u * n for u, n in used) / slots if slots else max(u for u, _ in used)


def _ready(view: View) -> dict[tuple[str, str], list[Instance]]:
    ready: dict[tuple[str, str], list[Instance]] = {}
    for name, region in view.regions.items():
        for instance in region.instances:
            for model, capacity in instance.models.items():
                # It may send to what others report. That a replica changes hands must not hide it for a moment.
                if (capacity.replicas_ready or capacity.usable_share) and not instance.draining:
                    ready.setdefault((name, model), []).append(instance)
    return ready
