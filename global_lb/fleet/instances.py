"""Which instances of a region can be asked for a model, and what each offers by the latest report or refusal.

Invariants: a newer report replaces what a refusal said; a draining instance is never asked. Never counts what was sent,
and never chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from farhop.balance import outcome
from global_lb.fleet.view import pooled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.balance.outcome import Outcome
    from farhop.store.documents.report import ModelReport
    from global_lb.fleet.view import Instance, Region

_NOTHING: dict[str, list[Instance]] = {}


class Instances:
    """The instances of all known regions. `take` updates those of one region."""

    def __init__(self) -> None:
        self._ready: dict[str, dict[str, list[Instance]]] = {}  # who can be asked, by region and model
        self._pool: dict[str, dict[tuple[str, str], ModelReport]] = {}  # of regions with several: what each can use
        self._refusals: dict[str, dict[tuple[str, str], tuple[float, ModelReport]]] = {}  # since that report

    def take(self, name: str, known: Region | None) -> bool:
        """The region is known like this from now on; None: no more. Whether it can be asked for other models than
        before."""
        before = self._ready.pop(name, {})
        self._pool.pop(name, None)
        refusals = self._refusals.pop(name, None)
        if known is None:
            return bool(before)
        ready = _ready(known)
        if ready:
            self._ready[name] = ready
        if len(known.instances) > 1:
            self._pool[name] = pooled(known)
        if refusals:
            reported = {instance.name: instance.received_at for instance in known.instances}
            self._refusals[name] = {
                key: refusal for key, refusal in refusals.items() if reported.get(key[0]) == refusal[0]
            }
        return before.keys() != ready.keys()

    def refused(self, instance: Instance, model: str, reason: Outcome, wait_ms: float | None) -> None:
        """A refusal is more recent than the instance's report, and counts until the next report."""
        capacity = self.capacity(instance, model)
        if wait_ms is not None:
            capacity = replace(capacity, wait_ms=wait_ms)
        if reason is outcome.FOREIGN_FULL:
            capacity = replace(capacity, headroom_foreign_tokens=0)
        self._refusals.setdefault(instance.region, {})[instance.name, model] = (instance.received_at, capacity)

    def capacity(self, instance: Instance, model: str) -> ModelReport:
        """The instance's capacity for a model, from its report and from refusals since then."""
        refusals = self._refusals.get(instance.region) if self._refusals else None
        refusal = refusals.get((instance.name, model)) if refusals else None
        if refusal is not None and refusal[0] == instance.received_at:
            return refusal[1]
        return self.reported(instance, model)

    def reported(self, instance: Instance, model: str) -> ModelReport:
        """What it can use by the reports alone: all of the region's replicas, if several instances share them."""
        pool = self._pool.get(instance.region) if self._pool else None
        return pool[instance.name, model] if pool else instance.models[model]

    def able(self, region: str, model: str) -> list[Instance]:
        """The region's instances that can be asked for the model."""
        return self._ready.get(region, _NOTHING).get(model, [])

    def served(self, region: str) -> Mapping[str, list[Instance]]:
        """The models that the region can be asked for, and whom."""
        return self._ready.get(region, _NOTHING)

    def serving(self, model: str) -> tuple[str, ...]:
        """The regions that can be asked for the model, by name."""
        return tuple(sorted(name for name, ready in self._ready.items() if model in ready))

    def used_share(self, region: str, model: str) -> float:
        """How much of the region is used, 0 and up. ValueError if no instance is able.

        Each reports on all replicas that it can send to; if nothing is shared, in proportion to what it has.
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
        if instance.draining:
            continue
        for model, capacity in instance.models.items():
            # It may send to what others report. That a replica changes hands must not hide it for a moment.
            if capacity.replicas_ready or capacity.usable_share:
                ready.setdefault(model, []).append(instance)
    return ready
