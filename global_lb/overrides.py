"""Watches operators' words about regions in etcd, and tells the flow of each and of its end. Never decides.

Invariants: a document that is absurd, of an unknown region or under another's key changes nothing and is counted; a
word ends with its key, with a snapshot that lacks it, or after its own length by this process's clock, should etcd be
out of reach by then; losing etcd ends nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from farhop.store.contract import OVERRIDE_PREFIX, ChangeKind
from farhop.store.override import OverrideError, decode, region_of
from global_lb.view import RegionForced

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from farhop.balance.machine import Event
    from farhop.store.contract import Change, Store
    from farhop.store.override import Override


class Overrides:
    """The words in force. `react` is told events; `refused` counts documents not believed, by reason."""

    def __init__(
        self,
        store: Store,
        regions: Container[str],
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._regions = store, regions
        self._react, self._refused, self._clock = react, refused, clock
        self._words: dict[str, tuple[bytes, Override, float]] = {}  # as written, as read, until when by our clock
        self._fresh = True

    async def follow(self) -> None:
        """Until cancelled, or the store is closed."""
        async with contextlib.aclosing(self._store.watch(OVERRIDE_PREFIX)) as changes:
            async for change in changes:
                self.changed(change)

    def changed(self, change: Change) -> None:
        """Take one step of the watch."""
        if change.kind is ChangeKind.SNAPSHOT:
            listed = {region_of(entry.key) for entry in change.entries}
            for region in [r for r in self._words if r not in listed]:
                self._lift(region)
            for entry in change.entries:
                self._read(entry.key, entry.value)
        elif change.kind is ChangeKind.PUT:
            self._read(change.key, change.value)
        elif change.kind is ChangeKind.DELETE:
            self._lift(region_of(change.key))
        # Whoever has only begun has no traffic to move away, hence no pace to keep.
        self._fresh = False

    def told(self, region: str) -> dict[str, Any] | None:
        """The word in force about a region, for people; None without one."""
        _, override, until = self._words.get(region, (b"", None, 0.0))
        left_s = until - self._clock()
        if override is None or left_s <= 0.0:
            return None
        return {
            "action": override.action,
            "why": override.why,
            "author": override.author,
            "until": override.until.isoformat(timespec="seconds"),
            "left_s": left_s,
        }

    def _read(self, key: str, value: bytes) -> None:
        known = self._words.get(region_of(key) or "")
        if known is not None and known[0] == value:
            return  # listed anew after a gap
        try:
            override = decode(value)
        except OverrideError:
            self._refused("override_malformed")
            return
        region = override.region
        if region not in self._regions:
            self._refused("override_of_unknown_region")
            return
        if region_of(key) != region:
            self._refused("override_misplaced")
            return
        until = self._clock() + override.for_s
        self._words[region] = (value, override, until)
        why = f"{override.why} (by {override.author})"
        over_s = 0.0 if self._fresh else override.over_s
        self._react(RegionForced(region, drain=True, why=why, until=until, over_s=over_s))

    def _lift(self, region: str | None) -> None:
        if region is not None and self._words.pop(region, None) is not None:
            self._react(RegionForced(region, drain=False))
