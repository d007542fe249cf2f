"""Watches the regions' reports in one hub: the current reports, the rejected ones, and whether the hub is in contact.

Invariants: a report that is invalid or under another's key is dropped and counted; losing contact changes nothing.
Never compares hubs, and never decides.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from farhop.store.contract import REGION_PREFIX, ChangeKind, parse_report_key
from farhop.store.documents.document import DocumentError
from farhop.store.documents.report import decode
from farhop.store.follow import follow

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.store.contract import Change, Store
    from farhop.store.documents.report import RegionReport

REASONS_MAX = 64


class Hub:
    """One hub. `on_report` takes a report and gives why it is refused, None if it is taken; `refused` counts them.

    `on_report_from_disk` takes one that was kept on disk, of long ago.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        on_report: Callable[[RegionReport], str | None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        on_report_from_disk: Callable[[RegionReport], str | None] | None = None,
    ) -> None:
        self._on_report_from_disk = on_report_from_disk or on_report
        self.name, self._store = name, store
        self._on_report, self._refused, self._clock = on_report, refused, clock
        self.trouble: str | None = None
        self._keys: set[str] = set()
        self._refusals: Counter[str] = Counter()
        self._reports = 0
        self._revision = 0
        self._changed_at: float | None = None  # when anything last came of it
        self._outages = 0

    async def follow(self) -> None:
        """Follow the documents in etcd until cancelled, or until the store is closed."""
        await follow(self._store, REGION_PREFIX, self.changed)

    def changed(self, change: Change) -> None:
        """Apply one change from the etcd watch."""
        if change.kind is ChangeKind.LOST:
            self.trouble = change.why
            self._outages += 1
            return
        self.trouble, self._changed_at, self._revision = None, self._clock(), change.revision
        self._keys.difference_update(change.ended(self._keys))
        for entry in change.written:
            self._keys.add(entry.key)
            self._read(entry.key, entry.value, self._on_report_from_disk if change.from_disk else self._on_report)

    @property
    def is_read(self) -> bool:
        """Whether what it holds is known here, or it is out of contact."""
        return self._changed_at is not None or self.trouble is not None

    @property
    def listed(self) -> set[tuple[str, str]]:
        """The (region, instance) of all balancers whose reports are in this hub."""
        return {name for key in self._keys if (name := parse_report_key(key)) is not None}

    def _read(self, key: str, value: bytes, take: Callable[[RegionReport], str | None]) -> None:
        try:
            report = decode(value)
        except DocumentError:
            self._refuse("malformed")
            return
        if (report.region, report.instance) != parse_report_key(key):
            self._refuse("misplaced")
            return
        self._reports += 1
        reason = take(report)
        if reason is not None:
            self._count(reason)

    def _refuse(self, reason: str) -> None:
        self._refused(reason)
        self._count(reason)

    def _count(self, reason: str) -> None:
        if reason in self._refusals or len(self._refusals) < REASONS_MAX:
            self._refusals[reason] += 1

    def status(self) -> dict[str, Any]:
        """Its state, for people. `age_s`: since the last change came; None if it never has."""
        return {
            "hub": self.name,
            "in_contact": self.trouble is None and self._changed_at is not None,
            "trouble": self.trouble,
            "outages": self._outages,
            "revision": self._revision,
            "age_s": None if self._changed_at is None else self._clock() - self._changed_at,
            "balancers": len(self.listed),
            "reports": self._reports,
            "refused": dict(self._refusals),
        }
