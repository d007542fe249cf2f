"""A lower bound of a request's service time, by how many are under way and how many leave: Little's law, L = lambda *
W.

    service_ms = time that requests were under way / how many of them left,   at most AGES * their mean age

The mean over those that ended is too small while load begins or grows: the short ones end first, and before the first
has ended there is none. This counts those under way, too, and applies until as many have left as are under way: then
those that ended are the better estimate. The age bounds it: while none has left, the ratio alone grows with how many
there are, not with how long they take. Invariants: never negative; 0 if nothing is under way. Never reads a clock:
`now` is in monotonic seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farhop.balance.ledger import Load

# Where all take alike, those under way have been for half of that in the mean; twice that, since who has not ended says
# nothing of when it will (as long again in the mean, where ends have no memory).
AGES = 4.0
LEFT_LEAST = 64.0  # as many who left are remembered, or as many as are under way: an eighth of noise, or a generation


class Occupancy:
    """The requests in flight at some targets together, and what was seen of them lately."""

    __slots__ = ("_at", "_began_s", "_decoding", "_left", "_under_way_s", "in_flight")

    def __init__(self) -> None:
        self.in_flight = self._decoding = 0
        self._began_s = self._under_way_s = self._left = self._at = 0.0

    def changed(self, before: Load, load: Load, now: float) -> None:
        """One target's load changes from `before` to `load`."""
        if now > self._at:  # as in _advance: twice for each request
            self._under_way_s += self.in_flight * (now - self._at)
            self._at = now
        more = load.in_flight - before.in_flight
        self.in_flight += more
        self._decoding += load.decoding - before.decoding
        self._began_s += load.began_s - before.began_s
        if more < 0:
            self._left -= more
            most = max(LEFT_LEAST, float(self.in_flight))
            if self._left > most:
                self._under_way_s, self._left = self._under_way_s * most / self._left, most

    def are_now(self, loads: list[Load], now: float) -> None:
        """The targets are others now, with these loads; what was seen before stays."""
        self._advance(now)
        self.in_flight = sum(load.in_flight for load in loads)
        self._decoding = sum(load.decoding for load in loads)
        self._began_s = sum(load.began_s for load in loads)

    def _advance(self, now: float) -> None:
        if now > self._at:
            self._under_way_s += self.in_flight * (now - self._at)
            self._at = now

    def service_ms(self, now: float) -> float:
        """See the module's docstring."""
        if not self._decoding or self._left >= self.in_flight:
            return 0.0
        self._advance(now)
        age_s = max(0.0, now - self._began_s / self._decoding)
        return min(self._under_way_s / max(self._left, 1.0), AGES * age_s) * 1e3
