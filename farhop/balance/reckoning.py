"""Dead reckoning: how much of what was sent to a region its last report cannot know of yet.

Counts are cumulative prompt bytes on both sides (the sender's here, the receiver's in its report), so that reports may
be lost, repeated or late. Invariants: outstanding is never negative; an older report never undoes a newer one; with
nothing in flight nothing is outstanding, so an error in the counts cannot live on. Never guesses.
"""

from __future__ import annotations


class Reckoning:
    """The counts towards one regional balancer instance."""

    __slots__ = ("_accepted", "_incarnation", "_sent")

    def __init__(self) -> None:
        self._sent = 0.0
        self._accepted = 0.0
        self._incarnation = -1

    @property
    def outstanding_bytes(self) -> float:
        """Prompt bytes sent and not yet acknowledged."""
        return max(0.0, self._sent - self._accepted)

    def sent(self, n_bytes: float) -> None:
        """A request of this size is on its way."""
        self._sent += n_bytes

    def came_back(self, n_bytes: float) -> None:
        """It was refused, or never arrived: the receiver has not counted it."""
        self._sent = max(self._accepted, self._sent - n_bytes)

    def acknowledged(self, incarnation: int, accepted: float, in_flight: int) -> None:
        """A report says how much it has accepted since its start; `in_flight` are our requests there now."""
        if incarnation < self._incarnation:
            return
        if incarnation > self._incarnation:
            # A new process counts from zero; what it has not accepted yet is what is still on its way.
            outstanding = self.outstanding_bytes if self._incarnation >= 0 else self._sent
            self._incarnation, self._accepted, self._sent = incarnation, accepted, accepted + outstanding
        self._accepted = max(self._accepted, accepted)
        if in_flight == 0 or self._sent < self._accepted:
            self._sent = self._accepted
