"""Which requests a replica should long have begun, judged by what a healthy replica with its load would have done.

A frozen replica closes no connection and refuses nothing: requests sent there wait until probes take it down. So each
request has a due time: the expected time for the prompts before it and its own, times how late first tokens usually are
here, as measured. A due request is overdue once its replica has shown no sign of life for as long: no answer began or
ended, no number on its metrics page changed, no KV event came. A slow replica shows those, however late it is.

Invariants: no fixed age is used, except the CONFIRM_S that a sign of life has to arrive; time in which this balancer
was stalled counts against no replica; memory is bounded by what is under way. Never moves anything, never reads a
clock.
"""

from __future__ import annotations

from math import exp, inf, log

from farhop.balance.machine import Event

CONFIRM_S = 0.6  # after it was due: metrics are looked at more often than that
CHECK_S = 0.2  # how often to ask; with CONFIRM_S what is overdue moves within a second
_STALLED_S = 1.0  # if not called for this long, this balancer itself was stalled
_NOISE_MS = 20.0  # differences of short times below this mean nothing
_WEIGHT = 0.02
_LATE, _SPREAD = 0.5, 0.5  # of logarithms, before anything was measured: some 12 times what was expected
_SPREADS = 4.0  # of a normal distribution 1 in 30,000 lies beyond, and signs of life must be missing, too
_FACTORS = 3.0, 30.0


class OverdueCheckDue(Event, frozen=True):
    """CHECK_S have passed. Needed because a silent engine causes no event."""


def _factor(late: float, spread: float) -> float:
    lo, hi = _FACTORS
    return min(max(exp(late + _SPREADS * spread), lo), hi)


class OverdueRequests:
    """See the module's docstring. `factor`: a request is due after this many times the expected time to its first
    token."""

    def __init__(self) -> None:
        self._late, self._spread = _LATE, _SPREAD
        self.factor = _factor(_LATE, _SPREAD)
        self.waiting: dict[str, dict[str, tuple[float, float]]] = {}  # by replica and request: sent at, due in s
        self.alive_at: dict[str, float] = {}
        self._asked_at = -inf
        self.due = inf  # when to ask next

    def sent(self, replica: str, request_id: str, expected_ms: float, now: float) -> None:
        """A request was sent there, whose answer should begin `expected_ms` from now."""
        due_s = self.factor * (expected_ms + _NOISE_MS) / 1e3
        self.waiting.setdefault(replica, {})[request_id] = now, due_s
        if self.due == inf:
            self.due, self._asked_at = now + CHECK_S, now

    def began(self, elapsed_ms: float, expected_ms: float) -> None:
        """An answer began after this time."""
        late = log((elapsed_ms + _NOISE_MS) / (expected_ms + _NOISE_MS))
        self._late += _WEIGHT * (late - self._late)
        self._spread += _WEIGHT * (abs(late - self._late) - self._spread)
        self.factor = _factor(self._late, self._spread)

    def over(self, replica: str, request_id: str, alive_at: float | None = None) -> None:
        """The request waits there no longer: it began, ended, or left. `alive_at`: when its replica showed a sign of
        life."""
        waiting = self.waiting.get(replica)
        if waiting is None:
            return
        waiting.pop(request_id, None)
        if not waiting:
            del self.waiting[replica]
            self.alive_at.pop(replica, None)
        elif alive_at is not None:
            self.alive_at[replica] = alive_at

    def alive(self, replica: str, now: float) -> None:
        """It showed a sign of life."""
        if replica in self.waiting:
            self.alive_at[replica] = now

    def overdue(self, now: float) -> list[tuple[str, str]]:
        """The overdue requests, with their replicas, to be moved if possible. Ask again at `due`."""
        stalled, self._asked_at = now - self._asked_at > _STALLED_S, now
        self.due = now + CHECK_S if self.waiting else inf
        if stalled:
            self.alive_at = dict.fromkeys(self.waiting, now)
            return []
        found: list[tuple[str, str]] = []
        for replica, waiting in self.waiting.items():
            alive_at = self.alive_at.get(replica, -inf)
            if now - alive_at <= CONFIRM_S:
                continue
            found += [
                (replica, request_id)
                for request_id, (sent_at, due_s) in waiting.items()
                if now - max(sent_at, alive_at) > due_s + CONFIRM_S
            ]
        return found
