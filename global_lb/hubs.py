"""Watches the regions' reports in one hub: what stands there, what was not believed of it, whether it is in contact.

Invariants: a report that is absurd or under another's key is dropped and counted; that contact is lost changes nothing
of what is known. Never compares hubs, and never decides.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from farhop.store.contract import REGION_PREFIX, ChangeKind, parse_report_key
from farhop.store.report import ReportError, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.store.contract import Change, Store
    from farhop.store.report import RegionReport

REASONS_MAX = 64


class Hub:
    """One hub. `heard` takes a report and says why it is not believed, None if it is; `refused` is told of others.

    `recalled` takes one that was kept on disk, of long ago. `listed` are the balancers whose reports stand there:
    (region, instance).
    """

    def __init__(
        self,
        name: str,
        store: Store,
        heard: Callable[[RegionReport], str | None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        recalled: Callable[[RegionReport], str | None] | None = None,
    ) -> None:
        self._recalled = recalled or heard
        self.name, self._store = name, store
        self._heard, self._refused, self._clock = heard, refused, clock
        self.trouble: str | None = None
        self.listed: set[tuple[str, str]] = set()
        self._doubted: Counter[str] = Counter()
        self._reports = 0
        self._revision = 0
        self._told_at: float | None = None  # when it last told anything
        self._outages = 0

    async def follow(self) -> None:
        """Until cancelled, or the store is closed."""
        async with contextlib.aclosing(self._store.watch(REGION_PREFIX)) as changes:
            async for change in changes:
                self.changed(change)

    def changed(self, change: Change) -> None:
        """Take one step of the watch."""
        if change.kind is ChangeKind.LOST:
            self.trouble = change.why
            self._outages += 1
            return
        self.trouble, self._told_at, self._revision = None, self._clock(), change.revision
        if change.kind is ChangeKind.SNAPSHOT:
            names = (parse_report_key(entry.key) for entry in change.entries)
            self.listed = {name for name in names if name is not None}
            for entry in change.entries:
                self._read(entry.key, entry.value, self._recalled if change.kept else self._heard)
        elif change.kind is ChangeKind.PUT:
            name = parse_report_key(change.key)
            if name is not None:
                self.listed.add(name)
            self._read(change.key, change.value, self._heard)
        elif change.kind is ChangeKind.DELETE:
            self.listed.discard(parse_report_key(change.key) or ("", ""))

    def _read(self, key: str, value: bytes, tell: Callable[[RegionReport], str | None]) -> None:
        try:
            report = decode(value)
        except ReportError:
            self._doubt("malformed")
            return
        if (report.region, report.instance) != parse_report_key(key):
            self._doubt("misplaced")
            return
        self._reports += 1
        reason = tell(report)
        if reason is not None:
            self._count(reason)

    def _doubt(self, reason: str) -> None:
        self._refused(reason)
        self._count(reason)

    def _count(self, reason: str) -> None:
        if reason in self._doubted or len(self._doubted) < REASONS_MAX:
            self._doubted[reason] += 1

    def told(self) -> dict[str, Any]:
        """Its state, for people. `age_s`: since it last told of any change; None if it never has."""
        return {
            "hub": self.name,
            "in_contact": self.trouble is None and self._told_at is not None,
            "trouble": self.trouble,
            "outages": self._outages,
            "revision": self._revision,
            "age_s": None if self._told_at is None else self._clock() - self._told_at,
            "balancers": len(self.listed),
            "reports": self._reports,
            "refused": dict(self._doubted),
        }
