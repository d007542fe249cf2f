"""Whether a region is alive, as seen from here: by its reports, its channel, and what relaying to it met.

Invariants: reading never changes; one signal alone is never death; what an operator forced wins over every signal but
death, and expires by itself. Never reads a clock: `now` is monotonic seconds and does not run backwards.
"""

from math import inf

import msgspec

from farhop.balance.health.reading import ForcedState, Health, State


class LivenessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When a signal counts against a region. Times are in seconds."""

    report_age_s: float = 3.0  # reports come every second at least: three missed
    relay_streak: int = 3  # relayed requests in a row that met a transport failure
    relay_hold_s: float = 10.0  # how long after the last of them they count

    def __post_init__(self) -> None:
        if self.relay_streak < 1:
            raise ValueError(f"relay_streak must be 1 or more, not {self.relay_streak!r}")
        for name in ("report_age_s", "relay_hold_s"):
            if not 0.0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")


_LIVENESS = LivenessConfig()
_SIGNALS = ("no recent report", "channel broken", "relay failures")


def _fine(until: float) -> Health:
    return Health(State.UP, "reports, channel and relay agree", until)


class Liveness:
    """A region's liveness as seen from here by three signals: the age of its report, the gRPC channel, relayed
    requests. DOWN needs two of them.

    One alone is SUSPECT: a silent etcd, a broken channel or an unlucky path is not a dead region. A region starts with
    no report and no channel, hence DOWN. Relay failures are forgotten after a while, since a region that is sent
    nothing cannot show that it has recovered.
    """

    __slots__ = (
        "_channel_up", "_config", "_fine", "_relay_failed_at", "_relay_fails", "forced", "lost_at", "report_at",
    )  # fmt: skip

    def __init__(self, config: LivenessConfig = _LIVENESS) -> None:
        self._config = config
        self.forced = ForcedState()
        self.report_at, self._channel_up = -inf, False
        # When its channel broke or relaying failed, if neither has worked since (monotonic seconds).
        self.lost_at: float | None = None
        self._relay_fails, self._relay_failed_at = 0, -inf
        self._fine: Health | None = None  # the reading before `_fine.until`, where all signals agree: nearly always

    def reported(self, now: float, *, renewed: bool = False) -> None:
        """A report of the region was received here at `now`, on whatever path; its own clock does not matter.

        `renewed`: of a new incarnation, which has nothing to do with how relaying to the one before failed.
        """
        self.report_at = now
        if renewed:
            self._relay_fails = 0
        self._agree()

    def channel(self, up: bool, now: float) -> None:
        """The gRPC channel to the region connected or broke. What relaying met in an outage ends with the outage."""
        if up and not self._channel_up:
            self._relay_fails = 0
        elif self._channel_up and not up:
            self.lost_at = now if self.lost_at is None else self.lost_at
        self._channel_up = up
        self._agree()

    def relay_failed(self, now: float) -> None:
        """A relayed request met a transport failure."""
        if now >= self._relay_failed_at + self._config.relay_hold_s:
            self._relay_fails = 0
            if self._channel_up:
                self.lost_at = None  # what relaying met long ago is forgotten
        self.lost_at = now if self.lost_at is None else self.lost_at
        self._relay_fails = min(self._relay_fails + 1, self._config.relay_streak)
        self._relay_failed_at = now
        self._agree()

    def relay_succeeded(self) -> None:
        """The region answered a relayed request, or refused it."""
        if self._relay_fails:
            self._relay_fails = 0
            self._agree()

    def _agree(self) -> None:
        if self._channel_up and not self._relay_fails:
            self.lost_at = None
        agreed = self._channel_up and self._relay_fails < self._config.relay_streak
        self._fine = _fine(self.report_at + self._config.report_age_s) if agreed else None

    def read(self, now: float) -> Health:
        """The liveness at `now`, with the signals against the region as `why`. Changes nothing."""
        forced = self.forced.read(now) if self.forced.health is not None else None
        if forced is None:
            fine = self._fine
            return fine if fine is not None and now < (fine.until or -inf) else self._signalled(now)
        if forced.share and self._signalled(now).state is State.DOWN:
            return msgspec.structs.replace(forced, share=0.0)
        return forced

    def _signalled(self, now: float) -> Health:
        config = self._config
        report_until = self.report_at + config.report_age_s
        relay_until = self._relay_failed_at + config.relay_hold_s
        silent = now >= report_until
        failing = self._relay_fails >= config.relay_streak and now < relay_until
        if self._channel_up and not silent and not failing:
            return _fine(report_until)
        against = (silent, not self._channel_up, failing)
        why = " and ".join(signal for signal, on in zip(_SIGNALS, against, strict=True) if on)
        # Time changes two things: a fresh report grows old, and relay failures are forgotten.
        turns = [at for at, on in ((report_until, not silent), (relay_until, failing)) if on]
        state = State.DOWN if sum(against) >= 2 else State.SUSPECT
        return Health(state, why, min(turns, default=None))
