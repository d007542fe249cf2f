"""Follows documents under an etcd prefix: reads each document that a watch reports.

Invariants: an invalid document leaves the previous document of its key in force, and is counted; a document ends with
its key, by a deletion or a snapshot that lacks it; a document listed again after a gap is not read again; losing etcd
changes nothing. Never writes, and never decides what a document means.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farhop.store.contract import Change, Store

T = TypeVar("T")


class Refused(ValueError):  # noqa: N818 -- says what is the case
    """A document that is refused. `reason` is one word of few, for counting; the text says why."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


async def follow(store: Store, prefix: str, take: Callable[[Change], object]) -> None:
    """Give `take` every step of the watch of `prefix`, until cancelled or the store is closed."""
    async with contextlib.aclosing(store.watch(prefix)) as changes:
        async for change in changes:
            take(change)


class Documents(Generic[T]):
    """The documents of one watch. `read(key, value)` makes one, or raises ValueError (Refused, to give a reason).

    `refused` counts rejected documents by reason (`<what>_malformed` by default). `key`: only the document at exactly
    this key counts, though other keys may begin with it. `problems`: by key, why the present document is rejected.
    """

    def __init__(
        self, read: Callable[[str, bytes], T], refused: Callable[[str], None], what: str, key: str | None = None
    ) -> None:
        self._read, self._refused, self._what, self._key = read, refused, what, key
        self._documents: dict[str, tuple[bytes, T]] = {}
        self.problems: dict[str, str] = {}

    def take(self, change: Change) -> dict[str, T | None]:
        """Process one step. Returns the changed documents by key, with None for deleted ones; deletions come first."""
        changed: dict[str, T | None] = dict.fromkeys(change.ended(self._documents))
        for key in changed:
            del self._documents[key]
        for key in change.ended(self.problems):
            del self.problems[key]
        for entry in change.written:
            key, value = entry.key, entry.value
            if self._key not in (None, key):
                continue
            if key in self._documents and self._documents[key][0] == value:
                self.problems.pop(key, None)
                continue
            try:
                document = self._read(key, value)
            except ValueError as error:
                self.problems[key] = str(error)
                self._refused(error.reason if isinstance(error, Refused) else f"{self._what}_malformed")
                continue
            self.problems.pop(key, None)
            self._documents[key] = value, document
            changed[key] = document
        return changed

    def get(self, key: str) -> T | None:
        """The document under this key; None if there is none."""
        return self._documents[key][1] if key in self._documents else None

    def __contains__(self, key: str) -> bool:
        return key in self._documents

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._documents))

    def __len__(self) -> int:
        return len(self._documents)

    def values(self) -> list[T]:
        """All documents, ordered by key."""
        return [self._documents[key][1] for key in self]
