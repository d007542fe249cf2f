"""Slow start: of its capacity, the share that a target may use in the first seconds after it came up.

    share(t) = max(0.10, t / window)          Envoy's slow start with aggression 1, t since it came up

Invariants: the share is within 0.10 and 1 and does not fall while the target stays up; a target that was out for less
than the window loses only that much of it, so that a short outage costs little. Never reads a clock, and never decides
which targets are up.
"""

from math import inf

LEAST_SHARE = 0.10


class Ramp:
    """`window_s` 0: no slow start. `warm`: it has been at work before we saw it, and needs none at its first coming."""

    __slots__ = ("_left_at", "_since", "_window_s")

    def __init__(self, window_s: float, *, warm: bool = False) -> None:
        self._window_s = window_s
        self._since: float | None = None  # None: out
        # When it left, were it wholly warm then: a target still in its slow start left the earlier for it.
        self._left_at = inf if warm else -inf

    def turn(self, up: bool, now: float) -> None:
        """The target is up, or out, from `now` on. Repeating the same state changes nothing."""
        if up and self._since is None:
            lost_s = min(max(now - self._left_at, 0.0), self._window_s)
            self._since = now - (self._window_s - lost_s)
        elif not up and self._since is not None:
            warm_s = min(now - self._since, self._window_s)
            self._since, self._left_at = None, now - (self._window_s - warm_s)

    def cool(self) -> None:
        """The target is out, and will come back as a new process, however soon: ramp from the beginning."""
        self._left_at = -inf

    def share(self, now: float) -> float:
        """The share (0..1) of its capacity that may be used. It is 1 while the target is out: health excludes it
        then.
        """
        if self._since is None or now - self._since >= self._window_s:
            return 1.0
        return max(LEAST_SHARE, (now - self._since) / self._window_s)
