"""What the global tier knows of the regions at one moment: frozen, built by the watcher, swapped whole.

Never holds what must survive a swap: liveness, reservations and reckonings are in the flow.
"""

from __future__ import annotations

from math import inf

import msgspec

from farhop.balance.machine import Address, Event


class Capacity(msgspec.Struct, frozen=True):
    """What one instance of a region offers for one model. Tokens are the model's, times in milliseconds.

    `used_share` is 0 and up; `headroom_foreign_tokens` are prompt tokens it takes from other regions before it refuses.
    """

    wait_ms: float
    prefill_ms_per_token: float
    tpot_ms: float
    bytes_per_token: float
    replicas_ready: int
    slots_free: int
    slots_total: int = 0
    used_share: float = 0.0
    headroom_foreign_tokens: float = inf
    usd_per_mtok: float = 0.0


class Instance(msgspec.Struct, frozen=True):
    """One regional balancer. `clock_offset_ms` is its clock less ours as last heard: to stamp expiries meant for it.

    `accepted` is what it acknowledges to us, in prompt bytes.
    """

    name: str
    region: str
    tier: Address
    incarnation: int
    received_at: float
    clock_offset_ms: float
    draining: bool
    accepted: float
    models: dict[str, Capacity]


class Region(msgspec.Struct, frozen=True):
    """One region as reported. `rtt_ms` is the wire time from here."""

    name: str
    rtt_ms: float
    instances: tuple[Instance, ...]


class View(msgspec.Struct, frozen=True):
    """All regions that report."""

    regions: dict[str, Region]

    def models(self, regions: frozenset[str]) -> list[str]:
        """The models on offer in these regions, sorted."""
        return sorted({m for r in regions if r in self.regions for i in self.regions[r].instances for m in i.models})


class ViewSwapped(Event, frozen=True):
    """The watcher has a new view."""

    view: View


class RegionHeard(Event, frozen=True):
    """A report of the region was received, on whatever path. `renewed`: of an incarnation not heard of before."""

    region: str
    renewed: bool = False


class ChannelChanged(Event, frozen=True):
    """The gRPC channel to the region is up or broken."""

    region: str
    up: bool


class RegionForced(Event, frozen=True):
    """An operator's word: drain the region until `until` (monotonic seconds; None: until lifted), or lift that.

    `over_s` is the pace: new work moves away over so many seconds.
    """

    region: str
    drain: bool
    why: str = ""
    until: float | None = None
    over_s: float = 0.0
