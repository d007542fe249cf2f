"""An announcer's documents from etcd: an operator's drain of its entry, and the reports of other entries' announcers.

Invariants: an invalid or misplaced document changes nothing and is counted; a drain ends with its key or after its own
length by our clock; while etcd is lost, the state of other entries is unknown. Never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from entry_anycast.announcing.machine import DrainChanged, Event, OthersChanged
from farhop.store.contract import ANNOUNCE_PREFIX, ChangeKind, announce_key, entry_drain_key
from farhop.store.documents import announce
from farhop.store.documents.overrides import EntryDrainOverride, decode_entry_drain
from farhop.store.follow import Documents, Refused, follow

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from farhop.store.contract import Change, Store
    from farhop.store.documents.announce import AnnounceReport


class Others:
    """Follows both. `react` takes events; `refused` counts documents not believed; `later` runs something after that
    many s.

    `prefixes` are ours: another entry counts if it announces all of them.
    """

    def __init__(
        self,
        store: Store,
        region: str,
        entry: str,
        prefixes: Collection[str],
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._store, self._entry, self._prefixes = store, entry, frozenset(prefixes)
        self._react, self._later = react, later
        self._drain_key = entry_drain_key(region, entry)
        self._drains: Documents[EntryDrainOverride] = Documents(
            lambda _key, value: decode_entry_drain(value), refused, "override", self._drain_key
        )
        self._reports: Documents[AnnounceReport] = Documents(_report, refused, "announce")

    async def follow_drains(self) -> None:
        """Follow the documents in etcd until cancelled, or until the store is closed."""
        await follow(self._store, self._drain_key, self.drains_changed)

    async def follow_others(self) -> None:
        """Follow the documents in etcd until cancelled, or until the store is closed."""
        await follow(self._store, ANNOUNCE_PREFIX, self.others_changed)

    def drains_changed(self, change: Change) -> None:
        """Apply one change from the etcd watch."""
        for drain in self._drains.take(change).values():
            if drain is None:
                self._react(DrainChanged(None))
                continue
            self._react(DrainChanged(f"{drain.why} (by {drain.author})"))
            self._later(drain.for_s, lambda drain=drain: self._over(drain))  # type: ignore[misc]

    def _over(self, drain: EntryDrainOverride) -> None:
        if self._drains.get(self._drain_key) is drain:
            self._react(DrainChanged(None))

    def others_changed(self, change: Change) -> None:
        """Apply one change from the etcd watch."""
        if change.kind is ChangeKind.LOST or change.from_disk:
            self._react(OthersChanged(None))
            return
        self._reports.take(change)
        healthy = {one.entry for one in self._reports.values() if one.healthy and self._prefixes <= set(one.prefixes)}
        self._react(OthersChanged(len(healthy - {self._entry})))


def _report(key: str, value: bytes) -> AnnounceReport:
    report = announce.decode(value)
    if key != announce_key(report.region, report.instance):
        raise Refused("announce_misplaced")
    return report
