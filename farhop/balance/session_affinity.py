"""Where each session's last request for a model was sent: a preference if nothing better is known.

Bounded: the longest silent sessions are forgotten, separately in each of several parts: a single dictionary would hold
the loop for 7 ms whenever it is resized. A session is a hash that includes its tenant, so that tenants never share one.
Never decides how much the preference weighs.
"""

from __future__ import annotations

from collections import OrderedDict

SESSIONS_MAX = 65_536
PARTS = 64


class SessionAffinity:
    """Where sessions were last: a region or a replica, by session and model."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[OrderedDict[tuple[int, str], str]] = [OrderedDict() for _ in range(PARTS)]

    def of(self, session: int, model: str) -> str | None:
        """Where the session was last, if that is known."""
        return self._parts[session % PARTS].get((session, model))

    def near(self, session: int, parent: int, model: str) -> str:
        """Where it was last, or where its parent was, if it is new; "" where neither is known."""
        if not session:
            return ""
        return self.of(session, model) or (self.of(parent, model) if parent else None) or ""

    def moved_in(self, session: int, model: str, target: str) -> None:
        """A request of the session was sent to `target`."""
        part = self._parts[session % PARTS]
        part[session, model] = target
        part.move_to_end((session, model))
        if len(part) > SESSIONS_MAX // PARTS:
            part.popitem(last=False)

    def __len__(self) -> int:
        return sum(map(len, self._parts))
