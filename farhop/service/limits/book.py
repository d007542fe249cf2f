"""The limits in etcd, and the names by which all processes know their buckets.

Invariants: limits that cannot be read leave the previous ones in force, and are counted; losing etcd changes nothing.
Never knows how much is used.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance.quota import EACH
from farhop.store.contract import LIMIT_PREFIX
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import kind_of
from farhop.store.follow import Documents, Refused, follow

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.quota import Quota
    from farhop.store.contract import Change, Store
    from farhop.store.documents.limits import Limit, TenantLimits

TENANTS_MAX = 10_000
BEGIN_S = 5.0
PROBLEMS_SHOWN_MAX, TENANTS_SHOWN_MAX = 20, 1000


def bucket_of(tenant: str, limit: Limit, name: str) -> str:
    """The name of a limit's bucket, alike in all processes."""
    named = msgspec.json.encode((tenant, limit.key, limit.model, name)).decode()
    return named + EACH if limit.each_user else named


def kind_and_whose(bucket: str) -> tuple[str, str]:
    """The kind that a bucket counts, by the bucket's name, and its subject: tenant, key, model or user."""
    _, key, model, name = msgspec.json.decode(bucket.partition(EACH)[0])
    return kind_of(name), "user" if EACH in bucket else "key" if key else "model" if model else "tenant"


class LimitBook:
    """The limits in etcd. `refused` counts rejected documents; `changes` are called at each change."""

    def __init__(self, store: Store, refused: Callable[[str], None]) -> None:
        self._store = store
        self.changes: list[Callable[[], None]] = []
        self._documents: Documents[TenantLimits] = Documents(self._read, refused, "limit")
        self._answered = asyncio.Event()

    async def follow(self) -> None:
        """Follow the documents until cancelled, or until the store is closed."""
        await follow(self._store, LIMIT_PREFIX, self.changed)

    async def begun(self) -> None:
        """Wait, for a bounded time, until the limits are known from etcd or from disk."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                await self._answered.wait()

    @property
    def answered(self) -> bool:
        """Whether the limits are known."""
        return self._answered.is_set()

    def changed(self, change: Change) -> None:
        """Process one change from the watch."""
        first = not self._answered.is_set()
        self._answered.set()
        if self._documents.take(change) or first:
            for changed in self.changes:
                changed()

    def tenants(self) -> dict[str, TenantLimits]:
        """The limits by tenant."""
        return {one.tenant: one for one in self._documents.values() if one.limits}

    def lent_by(self, home: str) -> dict[str, Quota]:
        """The buckets that the root of a region lends from."""
        return {
            bucket_of(one.tenant, limit, name): one.parts(limit, name, n)[0]
            for one in self.tenants().values() if one.home == home
            for limit in one.limits
            for name, n in limit.sizes().items()
        }  # fmt: skip

    def status(self) -> dict[str, Any]:
        """The state as a JSON-ready value, for operators."""
        newest = sorted(self._documents.values(), key=lambda one: one.at, reverse=True)[:TENANTS_SHOWN_MAX]
        problems = dict(sorted(self._documents.problems.items())[:PROBLEMS_SHOWN_MAX])
        return {
            "limited": len(self.tenants()),
            "tenants": {one.tenant: one.at.isoformat() for one in newest},
            "problems": problems,
        }

    def _read(self, key: str, document: bytes) -> TenantLimits:
        one = documents.decode(document)
        if one.place != key:
            raise Refused("limit_misplaced", f"{key}: holds the limits of {one.tenant}, whose place is {one.place}")
        if key not in self._documents and len(self._documents) >= TENANTS_MAX:
            raise Refused("too_many_limits", f"limits of more than {TENANTS_MAX} tenants: take some away")
        return one
