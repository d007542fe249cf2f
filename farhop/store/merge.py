"""Merges the contents of several hubs (etcd clusters that know nothing of each other) into one.

A key exists while any hub holds it. If hubs differ, the document with the higher (epoch, incarnation, seq) counts, as
far as documents have these; then a hub in contact before one that is not; then the first hub by name. Clocks never
count. Invariants: losing a hub ends nothing and changes nothing; the last contents of a hub out of contact stay until
it is back, or until another hub is seen to delete the key. Never decides what a document means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.store.contract import Change, ChangeKind, KeyValue
from farhop.store.envelope import bare

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class _Stamp(msgspec.Struct):
    """The fields that show a document's age; others are ignored."""

    epoch: int = 0
    incarnation: int = 0
    seq: int = 0


_decoder = msgspec.json.Decoder(_Stamp)
_UNREAD = (-1, -1, -1)


def stamp(document: bytes) -> tuple[int, int, int]:
    """How new a document says it is, inside its envelope if it has one; what cannot be read is older than anything."""
    try:
        read = _decoder.decode(bare(document))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _UNREAD
    return read.epoch, read.incarnation, read.seq


def chosen(copies: Iterable[tuple[str, KeyValue]], lost: Collection[str] = ()) -> KeyValue | None:
    """The copy that counts, of those of one key by hub; None if there is none."""
    best: tuple[tuple[tuple[int, int, int], bool], KeyValue] | None = None
    for hub, entry in sorted(copies, key=lambda copy: copy[0]):
        rank = stamp(entry.value), hub not in lost
        if best is None or rank > best[0]:
            best = rank, entry
    return best[1] if best is not None else None


class Merged:
    """The changes of one watch at every hub, made one watch of them all. Revisions are counted here, from 1."""

    def __init__(self, hubs: Iterable[str]) -> None:
        self._listed: dict[str, dict[str, KeyValue]] = {hub: {} for hub in hubs}
        self._silent = set(self._listed)  # that have not said anything yet
        self._lost: dict[str, str] = {}
        self._all_lost = False
        self._emitted: dict[str, KeyValue] | None = None
        self._revision = 0

    def take(self, hub: str, change: Change) -> list[Change]:
        """One step of one hub's watch; what the merged watch reports because of it.

        The first snapshot waits until every hub has answered or is lost: a document that only the slower one holds must
        not seem absent meanwhile.
        """
        self._silent.discard(hub)
        if change.kind is ChangeKind.LOST:
            return self._lose(hub, change.why)
        self._lost.pop(hub, None)
        self._all_lost = False
        if change.kind is ChangeKind.SNAPSHOT:
            self._listed[hub] = {entry.key: entry for entry in change.entries}
            return [] if self._silent else [self._snapshot()]
        if change.kind is ChangeKind.PUT:
            self._listed[hub][change.key] = KeyValue(change.key, change.value, change.revision)
        else:
            for other in (hub, *self._lost):
                self._listed[other].pop(change.key, None)
        return self._emit(change.key)

    def _lose(self, hub: str, why: str) -> list[Change]:
        self._lost[hub] = why
        if len(self._lost) < len(self._listed):
            return [self._snapshot()] if self._emitted is None and not self._silent else []
        if self._all_lost:
            return []
        self._all_lost = True
        why = "; ".join(f"{name}: {why}" for name, why in sorted(self._lost.items()))
        return [Change(ChangeKind.LOST, why=why)]

    def _snapshot(self) -> Change:
        keys = sorted({key for listed in self._listed.values() for key in listed})
        self._emitted = {key: entry for key in keys if (entry := self._chosen(key)) is not None}
        self._revision += 1
        return Change(ChangeKind.SNAPSHOT, self._revision, entries=tuple(self._emitted.values()))

    def _emit(self, key: str) -> list[Change]:
        if self._emitted is None:
            return []
        before, now = self._emitted.get(key), self._chosen(key)
        if now is None:
            if before is None:
                return []
            del self._emitted[key]
            self._revision += 1
            return [Change(ChangeKind.DELETE, self._revision, key)]
        self._emitted[key] = now
        if before is not None and before.value == now.value:
            return []  # another hub's copy of what was emitted
        self._revision += 1
        return [Change(ChangeKind.PUT, self._revision, key, now.value)]

    def _chosen(self, key: str) -> KeyValue | None:
        return chosen(((hub, listed[key]) for hub, listed in self._listed.items() if key in listed), self._lost)
