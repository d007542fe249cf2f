"""The last decisions, kept for `farhop explain` in a bounded ring. Never holds a prompt or an answer."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

DECISIONS_MAX = 10_000


class Decisions:
    """Records by decision id; the oldest goes first. A record is a function, called only if somebody asks."""

    __slots__ = ("_most", "_records")

    def __init__(self, most: int = DECISIONS_MAX) -> None:
        self._most = most
        self._records: OrderedDict[str, Callable[[], dict[str, Any]]] = OrderedDict()

    def put(self, decision_id: str, record: Callable[[], dict[str, Any]]) -> None:
        """Keep a record."""
        self._records[decision_id] = record
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def get(self, decision_id: str) -> dict[str, Any] | None:
        """The record as JSON-ready data; None if it is unknown or long ago."""
        record = self._records.get(decision_id)
        return record() if record is not None else None

    def __len__(self) -> int:
        return len(self._records)
