"""Operators' overrides of where requests go: biases of regions, pins of tenants or models. Never reads a clock.

Invariants: an override ends at its `until` by this process's monotonic clock, whatever etcd says; a pin only narrows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance.machine import Event

if TYPE_CHECKING:
    from collections.abc import Mapping


class Bias(msgspec.Struct, frozen=True):
    """A region counts as `ms` milliseconds worse (below 0: better) than it is."""

    region: str
    ms: float
    why: str
    author: str
    until: float


class Pin(msgspec.Struct, frozen=True):
    """What a tenant, or all for a model, ask goes to one region while that is lawful and serves.

    `strict`: and nowhere else.
    """

    region: str
    strict: bool
    why: str
    author: str
    until: float


class OperatorOverrides(msgspec.Struct, frozen=True):
    """All overrides in force: biases by region, pins by ("tenant", name) or ("model", name)."""

    biases: Mapping[str, Bias] = {}
    pins: Mapping[tuple[str, str], Pin] = {}

    def bias_ms(self, now: float) -> dict[str, float]:
        """The biases in force (ms), by region."""
        return {bias.region: bias.ms for bias in self.biases.values() if now < bias.until}

    def pin(self, tenant: str, model: str, now: float) -> Pin | None:
        """The one for a request; a tenant's goes before a model's."""
        for key in (("tenant", tenant), ("model", model)):
            pin = self.pins.get(key)
            if pin is not None and now < pin.until:
                return pin
        return None


class OverridesChanged(Event, frozen=True):
    """Operators' overrides are these from now on, and no others."""

    overrides: OperatorOverrides
