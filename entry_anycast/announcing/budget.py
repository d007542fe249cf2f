"""Limits how often neighbours see a change, so that their flap damping does not punish us.

A withdrawal is never delayed: the route of a dead entry must go. Only the return of a route is limited. Invariants:
after a route was withdrawn, for whatever reason, it is announced again only when the hold is over: `hold_s` at first,
doubled each time that the route is withdrawn again before it was announced for `window_s`, at most `hold_max_s`. One
hold in a window may be skipped (the last healthy site). Attributes change at most `changes` times in a window. So with
hold_s >= window_s no window contains more than two withdrawals, nor more than one unless a hold was skipped. Never
reads a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """Seconds, and changes of attributes (into a drain, and out of it) in a window.

    The defaults: a flap costs 1000 and an attribute change 500 at damping routers, half of which is forgotten after
    15 min; they suppress a route from 2000 on (RFC 2439's constants as implemented; RFC 7196 loosens them).
    """

    window_s: float = 900.0
    hold_s: float = 900.0
    hold_max_s: float = 14_400.0
    changes: int = 2


class Budget:
    """See the module's docstring."""

    def __init__(self, config: BudgetConfig) -> None:
        self.config = config
        self.hold_until = -inf
        self.doublings = 0
        self.announced_at = -inf
        self.skipped_at = -inf
        self._changed: deque[float] = deque(maxlen=max(1, config.changes))

    def announce_at(self, now: float, *, last: bool) -> float:
        """When the route may be announced; at most `now` for at once. `last`: no other site is healthy."""
        if last and now >= self.skipped_at + self.config.window_s:
            return now
        if last:
            return min(self.hold_until, self.skipped_at + self.config.window_s)
        return self.hold_until

    def announced(self, now: float) -> None:
        """The route was announced."""
        if now < self.hold_until:
            self.skipped_at = now
        self.announced_at = now

    def withdrawn(self, now: float) -> None:
        """The route is gone: withdrawn, or the speaker ended."""
        config = self.config
        stood = now - self.announced_at >= config.window_s
        self.doublings = 0 if stood or self.hold_until == -inf else self.doublings + 1
        self.hold_until = max(
            self.hold_until, now + min(config.hold_s * 2.0 ** min(self.doublings, 32), config.hold_max_s)
        )

    def change_at(self, now: float) -> float:
        """When attributes may change; at most `now` for at once."""
        if self.config.changes == 0:
            return inf
        full = len(self._changed) == self.config.changes
        return self._changed[0] + self.config.window_s if full else now

    def changed(self, now: float) -> None:
        """Attributes change now."""
        self._changed.append(now)

    def remember(
        self, hold_left_s: float, doublings: int, now: float, *, announced_s: float | None = None,
        skipped_s: float = inf,
    ) -> None:  # fmt: skip
        """Take over the budget of the process before this one. `announced_s`: for how long it had announced the route,
        if it was killed meanwhile: the route was withdrawn for it. `skipped_s`: since it skipped a hold."""
        self.skipped_at = now - max(0.0, skipped_s)
        if hold_left_s > 0.0 or announced_s is not None:
            self.hold_until = now + min(hold_left_s, self.config.hold_max_s)
            self.doublings = max(0, doublings)
        if announced_s is not None:
            self.announced_at = now - max(0.0, announced_s)
            self.withdrawn(now)
