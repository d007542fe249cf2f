"""Watches operators' drains of regions in etcd, and makes an event of each drain and of its end. Never decides.

Invariants: a document that is invalid, of an unknown region or under another's key changes nothing and is counted; a
drain ends with its key, with a snapshot that lacks it, or, if etcd is out of reach by then, after its own length by
this process's clock; losing etcd ends nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.store.contract import OVERRIDE_PREFIX, override_key
from farhop.store.documents.overrides import decode_drain, region_of
from farhop.store.follow import Documents, Refused, follow
from global_lb.fleet.view import RegionForced

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from farhop.balance.machine import Event
    from farhop.store.contract import Change, Store
    from farhop.store.documents.overrides import DrainOverride


class Drains:
    """The drains in force. `react` takes events; `refused` counts refused documents, by reason."""

    def __init__(
        self,
        store: Store,
        regions: Container[str],
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._store, self.regions = store, regions
        self._react, self._clock = react, clock
        self._drains: Documents[tuple[DrainOverride, float]] = Documents(self._read, refused, "override")
        self._fresh = True

    async def follow(self) -> None:
        """Follow the documents in etcd until cancelled, or until the store is closed."""
        await follow(self._store, OVERRIDE_PREFIX, self.changed)

    def changed(self, change: Change) -> None:
        """Apply one change from the etcd watch."""
        for key, drain in self._drains.take(change).items():
            if drain is None:
                self._react(RegionForced(region_of(key) or "", drain=False))
                continue
            override, until = drain
            why = f"{override.why} (by {override.author})"
            over_s = 0.0 if self._fresh else override.over_s
            pace = {"over_s": over_s, "keep_share": override.keep_share}
            moves = override.move_streams
            self._react(RegionForced(override.region, drain=True, why=why, until=until, **pace, moves=moves))
        # A balancer that has just started has no traffic to move away, hence no pace to keep.
        self._fresh = False

    def status(self, region: str) -> dict[str, Any] | None:
        """The drain in force of a region, for people; None without one."""
        override, until = self._drains.get(override_key(region)) or (None, 0.0)
        left_s = until - self._clock()
        if override is None or left_s <= 0.0:
            return None
        return {
            "action": "drain",
            "why": override.why,
            "author": override.author,
            "until": override.until.isoformat(timespec="seconds"),
            "left_s": left_s,
        }

    def _read(self, key: str, value: bytes) -> tuple[DrainOverride, float]:
        """The drain, and when it ends by the local clock."""
        override = decode_drain(value)
        if override.region not in self.regions:
            raise Refused("override_of_unknown_region")
        if region_of(key) != override.region:
            raise Refused("override_misplaced")
        return override, self._clock() + override.for_s
