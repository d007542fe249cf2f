"""Whether an attempt that fell silent is lost: by its upstream's answer to an inquiry, or by its own pauses.

A network path may drop a request or an answer without closing the connection. When asked, an upstream names the
attempts it does not know, and for how long it has sent nothing of those it does. Invariants: an attempt that its
upstream works on, or is slow with, is never called lost; a begun answer gets the time in which TCP may still bring what
the upstream has sent. Never reads a clock.
"""

from __future__ import annotations

QUIET_S = 1.0  # silence after which an attempt is asked about: a round trip to anywhere, and time to read a body
ASKED_MAX = 256  # in one ping; the longest silent first
LATER_S = 2.0  # this much longer silent here than there, beyond the round trip: what was sent since is lost
# A stream on a path that is broken by other evidence has stalled once it is silent for several times its own pauses. A
# first pause has nothing to be compared with: another's prompt of 100k tokens stalls decoding for about as long.
STALL_FLOOR_S = 10.0
STALL_PAUSES = 4.0


def stall_s(longest_pause_s: float, most_s: float) -> float:
    """For how long a begun stream may be silent while the way to its upstream is broken; never above `most_s`."""
    return min(most_s, max(STALL_FLOOR_S, STALL_PAUSES * longest_pause_s))


class Inquiry:
    """What is known of one silent attempt. `path_broke`: the way to its upstream broke while it was under way."""

    __slots__ = ("_lost_answers", "_since", "_wait_s", "path_broke")

    def __init__(self) -> None:
        self.path_broke = False
        self._lost_answers = 0
        self._since = self._wait_s = 0.0

    def clear(self) -> None:
        """A sign of life: what was counted against it no longer counts."""
        self._lost_answers = 0

    def lost(self, silent_s: float, quiet_s: float | None, rtt_s: float, now: float, *, began: bool) -> bool:
        """Whether the attempt is lost, by an inquiry answer received at `now`. `quiet_s`: since its upstream last sent
        a byte of it, None if the upstream does not know it; `rtt_s`: a round trip; `silent_s`: since a byte of it last
        arrived here.

        An attempt that has not begun can be sent again without loss: at once if the path broke, else after two such
        answers, as an answer may have ended at this very moment. One that has begun cannot: TCP, whose timeouts double,
        may still deliver after a silence as long as the one so far.
        """
        gone = quiet_s is None or (began and silent_s - quiet_s > LATER_S + rtt_s)
        if not gone:
            self._lost_answers = 0
            return False
        self._lost_answers += 1
        if not began:
            return self.path_broke or self._lost_answers >= 2
        if self._lost_answers == 1:
            self._since, self._wait_s = now, max(LATER_S, silent_s)
        return self._lost_answers >= 2 and now - self._since >= self._wait_s
