"""What is counted over requests: the share that left the entry region, USD spent on traffic.

Invariants: what left is never more than its share of all that was sent; an account changes when a request is really
sent, never by a decision; all of it is bounded. Never reads a clock: `now` is monotonic seconds.
"""

from __future__ import annotations

CREDIT_MAX = 10.0  # requests that may leave at once after a quiet time: a night at home is no licence for the morning
_ROUNDING = 1e-9
_HOUR_S = 3600.0


class ForeignQuota:
    """At most `share` (0..1) of what is sent leaves: each request sent earns that much, each that leaves costs 1."""

    __slots__ = ("_credit", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self._credit = 0.0

    def allows(self) -> bool:
        """Whether the next request may be sent to another region."""
        return self._credit + self.share >= 1.0 - _ROUNDING

    def sent(self, *, foreign: bool) -> None:
        """A request was sent."""
        self._credit = min(self._credit + self.share, CREDIT_MAX) - foreign


class EgressBudget:
    """A budget in USD per hour. Spending is forgotten at the rate of the budget, so no hour exceeds twice the
    budget.
    """

    __slots__ = ("_at", "_spent_usd", "usd_per_hour")

    def __init__(self, usd_per_hour: float) -> None:
        self.usd_per_hour = usd_per_hour
        self._spent_usd = 0.0
        self._at = 0.0

    def spent_usd(self, now: float) -> float:
        """What counts as spent now (USD)."""
        return max(0.0, self._spent_usd - max(0.0, now - self._at) * self.usd_per_hour / _HOUR_S)

    def spent(self, now: float) -> bool:
        """Whether the budget is exhausted."""
        return self.spent_usd(now) >= self.usd_per_hour

    def spend(self, usd: float, now: float) -> None:
        """Add to what was spent; below 0: an earlier estimate was too high."""
        self._spent_usd = max(0.0, self.spent_usd(now) + usd)
        self._at = max(self._at, now)
