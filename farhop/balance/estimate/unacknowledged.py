"""Unacknowledged load: the part of what was sent to a region that its last report cannot include yet.

Counts are cumulative prompt bytes on both sides (the sender's here, the receiver's in its report), so that reports may
be lost, repeated or late. Invariants: outstanding is never negative and never more than what still awaits its first
byte; an older report never undoes a newer one; at rest nothing is outstanding. Where a count is in doubt, the doubt is
taken as arrived: too little heals with the next report, too much would stay. Never guesses, never reads a clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class Outstanding(Protocol):
    """Requests that were sent and are neither acknowledged nor answered yet."""

    @property
    def outstanding_bytes(self) -> float:
        """The prompt bytes of these requests."""
        ...

    @property
    def outstanding_work_bytes(self) -> float:
        """Of these bytes, those that still have to be prefilled."""
        ...

    @property
    def outstanding_requests(self) -> float:
        """The number of these requests."""
        ...


class CombinedLoad:
    """The sum of what is outstanding at several instances that share their replicas."""

    __slots__ = ("outstanding_bytes", "outstanding_requests", "outstanding_work_bytes")

    def __init__(self, loads: Iterable[Outstanding]) -> None:
        self.outstanding_bytes = self.outstanding_work_bytes = self.outstanding_requests = 0.0
        for one in loads:
            self.outstanding_bytes += one.outstanding_bytes
            self.outstanding_work_bytes += one.outstanding_work_bytes
            self.outstanding_requests += one.outstanding_requests


class UnacknowledgedLoad:
    """The counts towards one regional balancer instance. Every `sent` is followed by one `answered` or `came_back`,
    with the same figures: a request's prompt, and the part of it that is not expected to be cached there (all, if left
    out).

    `turn` is kept for the sender: a number that shows which target was sent something last.
    """

    __slots__ = ("_accepted", "_incarnation", "_pending", "_requests", "_resting", "_sent", "_work", "turn")

    def __init__(self) -> None:
        self.turn = 0
        self._sent = 0.0
        self._accepted = 0.0
        self._pending = 0.0
        self._work = 0.0  # of the pending
        self._requests = 0  # that await their first byte
        self._incarnation = -1
        self._resting = False

    @property
    def incarnation(self) -> int:
        """The incarnation that sent the last report; -1 before the first report."""
        return self._incarnation

    @property
    def outstanding_bytes(self) -> float:
        """Prompt bytes sent, not acknowledged, and not answered."""
        if self._pending == 0.0:
            return 0.0
        return max(0.0, min(self._sent - self._accepted, self._pending))

    @property
    def outstanding_work_bytes(self) -> float:
        """Of the outstanding bytes those to be prefilled, taking all that await their first byte as cached alike."""
        return self._work * self.outstanding_bytes / self._pending if self._pending > 0.0 else 0.0

    @property
    def outstanding_requests(self) -> float:
        """How many requests the outstanding bytes are, taking those that await their first byte as equally large."""
        return self._requests * self.outstanding_bytes / self._pending if self._pending > 0.0 else 0.0

    def sent(self, n_bytes: float, work_bytes: float | None = None) -> None:
        """A request of this size was sent."""
        self._requests += 1
        self._sent += n_bytes
        self._pending += n_bytes
        self._work += n_bytes if work_bytes is None else work_bytes
        self._resting = False

    def answered(self, n_bytes: float, work_bytes: float | None = None) -> None:
        """The receiver answered the request, or refused it: it has counted the request, which no longer waits there."""
        self._requests = max(0, self._requests - 1)
        self._pending = max(0.0, self._pending - n_bytes)
        less = n_bytes if work_bytes is None else work_bytes
        # What rounding leaves over must not stay.
        self._work = max(0.0, self._work - less) if self._requests else 0.0

    def came_back(self, n_bytes: float, work_bytes: float | None = None) -> None:
        """The request never arrived, or it is unknown whether it did: expect no acknowledgement."""
        self.answered(n_bytes, work_bytes)
        self._sent = max(self._accepted, self._sent - n_bytes)

    def acknowledged(self, incarnation: int, accepted: float) -> None:
        """A report says how many bytes the receiver has counted since its start."""
        if incarnation < self._incarnation:
            return
        if incarnation > self._incarnation:
            # A new process counts from zero: what is still on its way is what was, less what it has counted since.
            self._sent = max(accepted, self._sent - self._accepted)
            self._incarnation, self._accepted = incarnation, accepted
            self._resting = False
        progress = accepted > self._accepted
        self._accepted = max(self._accepted, accepted)
        # Two reports at rest that say the same: whatever they lack was never counted and never will be.
        still = self._pending == 0.0
        if self._sent < self._accepted or (still and self._resting and not progress):
            self._sent = self._accepted
        self._resting = still
