"""Where each session's last request for a model was sent, to be looked at where nothing better is known.

Bounded: the longest silent sessions are forgotten. A session is a hash that holds its tenant, so that nobody meets
another tenant's. Never decides what that is worth.
"""

from __future__ import annotations

from collections import OrderedDict

SESSIONS_MAX = 65_536


class SessionAffinity:
    """By session and model: a region, or a replica."""

    __slots__ = ("_homes",)

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[int, str], str] = OrderedDict()

    def of(self, session: int, model: str) -> str | None:
        """Where it was last, if that is known."""
        return self._homes.get((session, model))

    def near(self, session: int, parent: int, model: str) -> str:
        """Where it was last, or where its parent was, if it is new; "" where neither is known."""
        if not session:
            return ""
        return self._homes.get((session, model)) or (self._homes.get((parent, model), "") if parent else "")

    def moved_in(self, session: int, model: str, where: str) -> None:
        """A request of it was sent there."""
        self._homes[session, model] = where
        self._homes.move_to_end((session, model))
        if len(self._homes) > SESSIONS_MAX:
            self._homes.popitem(last=False)

    def __len__(self) -> int:
        return len(self._homes)
