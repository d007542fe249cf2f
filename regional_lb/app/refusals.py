"""Follows the documents in etcd by which this region must refuse new work, and informs the flow. Never decides.

Invariants: a document that is invalid, or is under another's key, changes nothing and is counted; a refusal ends
with its key, with a snapshot that lacks it, or after its own length by this process's clock; losing etcd changes
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.store.contract import refuse_key
from farhop.store.documents import overrides
from farhop.store.documents.report import MODELS_LIMIT
from farhop.store.follow import Documents, Refused, follow
from regional_lb.scheduler.refusals import OrderedRefusal, RefusalsChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Event
    from farhop.store.contract import Change, Store


class RefusalBook:
    """The refusals in force for this region. `react` takes events; `refused` is called with the reason of each rejected
    document.
    """

    what = "refusals"

    def __init__(
        self,
        store: Store,
        region: str,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._prefix, self._react, self._clock = store, refuse_key(region, ""), react, clock
        self._documents: Documents[tuple[str, OrderedRefusal]] = Documents(self._read, refused, "refuse")

    async def follow(self) -> None:
        """Follow the documents in etcd until cancelled, or until the store is closed."""
        await follow(self._store, self._prefix, self.changed)

    def changed(self, change: Change) -> None:
        """Apply one change from the etcd watch."""
        if self._documents.take(change):
            self._react(RefusalsChanged(dict(self._documents.values())))

    def status(self) -> list[dict[str, Any]]:
        """For operators: the refusals in force."""
        now = self._clock()
        return [
            {
                "model": model,
                "share": refusal.share,
                "why": refusal.why,
                "author": refusal.author,
                "left_s": refusal.until - now,
            }
            for model, refusal in self._documents.values()
            if now < refusal.until
        ]

    def _read(self, key: str, value: bytes) -> tuple[str, OrderedRefusal]:
        override = overrides.decode_refusal(value)
        if override.key != key or not key.startswith(self._prefix):
            raise Refused("refuse_misplaced")
        if key not in self._documents and len(self._documents) > MODELS_LIMIT:
            raise Refused("too_many_overrides")
        return override.model, OrderedRefusal(
            override.share, self._clock() + override.for_s, override.why, override.author
        )
