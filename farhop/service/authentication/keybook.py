"""The issued API keys in etcd, followed (beside the law's keys) by every balancer that clients connect to.

Invariants: a document that is invalid, or belongs to another key (by its place or its hash), admits no caller and is
counted; a running process never returns to an earlier version of a key (after a restored etcd, or an old document
written again); a key in force whose new document cannot be read is no longer in force; losing etcd changes nothing; a
snapshot that lacks a key ends it. Never does IO for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from math import inf
from typing import TYPE_CHECKING, Any

from farhop.identity.api_keys import Issued, Principal
from farhop.store.contract import KEY_PREFIX, ChangeKind
from farhop.store.documents import issued_keys
from farhop.store.follow import Documents, Refused, follow

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from farhop.store.contract import Change, Store
    from farhop.store.documents.issued_keys import IssuedKey

ISSUED_MAX = 100_000
BEGIN_S = 5.0
PROBLEMS_SHOWN_MAX = 20


class KeyBook:
    """What is issued. `refused` counts refused documents, by reason; `changes` are called once it is another."""

    def __init__(self, store: Store, refused: Callable[[str], None]) -> None:
        self._store, self._refused = store, refused
        self._documents: Documents[IssuedKey] = Documents(self._read, refused, "key")
        self._newest: dict[str, IssuedKey] = {}  # the newest document of a key, deleted or not
        self._by_sha256: dict[str, Issued] = {}
        self._sha256_of: dict[str, str] = {}  # by etcd key, of each readable document
        self._holders: dict[str, set[str]] = {}  # by hash, the etcd keys of the documents that have it
        self.changes: list[Callable[[], None]] = []
        self._answered = asyncio.Event()

    async def follow(self) -> None:
        """Follow the documents until cancelled, or until the store is closed."""
        await follow(self._store, KEY_PREFIX, self.changed)

    async def begun(self) -> None:
        """Wait until etcd, or this process's own disk, has provided the issued keys. Only briefly: etcd may be down."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                await self._answered.wait()

    def changed(self, change: Change) -> None:
        """Process one change from the watch."""
        self._answered.set()
        # What one key costs does not grow with the number of all: an operator may issue or delete thousands in a row.
        whole, problems = change.kind is ChangeKind.SNAPSHOT, self._documents.problems
        before = set(problems) if whole else problems.keys() & {change.key}
        changed = self._documents.take(change)
        after = problems.keys() if whole else problems.keys() & {change.key}
        touched = changed.keys() | (before ^ after)
        for key in touched:
            self._update(key)
        if touched:
            for tell in self.changes:
                tell()

    def _update(self, key: str) -> None:
        """Replace what the document at this etcd key gave before by what it gives now."""
        # An unreadable document may narrow it, or revoke it.
        document = None if key in self._documents.problems else self._documents.get(key)
        before, now = self._sha256_of.pop(key, None), None if document is None else document.sha256
        if before is not None:
            self._holders[before].discard(key)
        if now is not None:
            self._sha256_of[key] = now
            self._holders.setdefault(now, set()).add(key)
        for sha256 in {one for one in (before, now) if one is not None}:
            holders = self._holders[sha256]
            self._by_sha256.pop(sha256, None)
            if not holders:
                del self._holders[sha256]
            elif len(holders) > 1:
                self._refused("key_twice")  # whose is it?
            elif (one := self._documents.get(next(iter(holders)))) is not None:
                self._by_sha256[sha256] = _issued(one)

    def get(self, sha256: str) -> Issued | None:
        """The key with this lower-case hex SHA-256. One dictionary look-up."""
        return self._by_sha256.get(sha256)

    def status(self) -> dict[str, Any]:
        """For operators: the number of valid keys, and the problems of the others."""
        last = max((one.at for one in self._documents.values()), default=None)
        return {
            "issued": len(self._by_sha256),
            "last": None if last is None else last.isoformat(),
            "problems": dict(sorted(self._documents.problems.items())[:PROBLEMS_SHOWN_MAX]),
        }

    def _read(self, key: str, document: bytes) -> IssuedKey:
        one = issued_keys.decode(document)
        if one.key != key:
            raise Refused("key_misplaced", f"{key}: holds the key {one.id}, whose place is {one.key}")
        newest = self._newest.get(key)
        if newest is not None and one.seq < newest.seq:
            self._refused("key_older")
            return newest
        if key not in self._documents and len(self._documents) >= ISSUED_MAX:
            raise Refused("too_many_keys", f"more than {ISSUED_MAX} keys: take some away")
        if newest is None and len(self._newest) >= ISSUED_MAX:
            del self._newest[next(iter(self._newest))]
        self._newest[key] = one
        return one


def _issued(one: IssuedKey) -> Issued:
    principal = Principal(one.tenant, "", one.within, one.id, one.models, one.paths, explain=one.explain)
    return Issued(principal, _seconds(one.not_before, 0.0), _seconds(one.expires, inf), one.revoked is not None)


def _seconds(time: datetime | None, default: float) -> float:
    return default if time is None else time.timestamp()
