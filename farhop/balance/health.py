"""Whether a target may take work: a replica (HealthMachine) or a region (Liveness). State + expiry + forced.

Invariants: reading never changes; nothing is UP without evidence younger than its expiry, unless an operator forced
it; what is forced wins over every signal and expires by itself; a back-off is bounded. Never probes and never reads a
clock: `now` is monotonic seconds and does not run backwards.
"""

from enum import StrEnum
from math import inf

import msgspec


class State(StrEnum):
    """UP and SUSPECT may take work (SUSPECT less gladly), DOWN may not, DRAINING takes no new work."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"


class Health(msgspec.Struct, frozen=True):
    """One reading. `until`: when it changes if nothing more is heard (monotonic seconds), None if it does not.

    `forced`: an operator's word; `why` is then theirs, else one of this module's fixed phrases. `share`: of new work
    that a DRAINING target may still take, while it is drained at a pace.
    """

    state: State
    why: str
    until: float | None = None
    forced: bool = False
    share: float = 0.0


class Mode(StrEnum):
    """How a set of targets may be used. ALL_DOWN is named so that a caller must choose what to do, inside the law."""

    NORMAL = "normal"
    ALL_DOWN = "all_down"
    EMPTY = "empty"


def panic(targets_ready: int, total: int) -> Mode:
    """EMPTY without targets, ALL_DOWN if none of them is ready: then trying a DOWN one may beat refusing everybody."""
    if total <= 0:
        return Mode.EMPTY
    return Mode.NORMAL if targets_ready > 0 else Mode.ALL_DOWN


def may_eject(ejected: int, total: int, share_max: float = 0.5) -> bool:
    """Whether one more of `total` targets may be ejected for bad answers: never the last, never above the share."""
    return ejected + 1 < total and ejected + 1 <= share_max * total


class Override:
    """An operator's word about one target: a state, why, and until when (None: until lifted)."""

    __slots__ = ("_faded_at", "_health", "_over_s")

    def __init__(self) -> None:
        self._health: Health | None = None
        self._over_s = 0.0
        self._faded_at = -inf

    def force(
        self, state: State, why: str, until: float | None = None, *, now: float = -inf, over_s: float = 0.0
    ) -> None:
        """Pin `state` until `until` (monotonic seconds). The newest word replaces the one before.

        The share of new work it may still take falls from what it is at `now` as 1 does to 0 in `over_s`: a word
        repeated gives nothing back.
        """
        before = self.read(now)
        share = 1.0 if before is None else before.share
        self._health = Health(state, why, until, forced=True)
        self._over_s = over_s
        self._faded_at = now + share * over_s if over_s > 0.0 else -inf

    def lift(self) -> None:
        """Take the word back. Idempotent."""
        self._health = None

    def fading(self, now: float) -> bool:
        """Whether what it leaves of new work is still shrinking."""
        return self._health is not None and now < self._faded_at

    def read(self, now: float) -> Health | None:
        """The word if it is in force at `now`."""
        health = self._health
        if health is None or (health.until is not None and now >= health.until):
            return None
        if now < self._faded_at:
            return msgspec.structs.replace(health, share=min(1.0, (self._faded_at - now) / self._over_s))
        return health


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds of a HealthMachine. Counts of consecutive events, and seconds."""

    rise: int = 2  # probes that succeed before a DOWN target is UP (one is enough for a target never heard of)
    fall: int = 3  # probes that fail before it is DOWN
    streak: int = 5  # requests that fail before it is ejected (Envoy's consecutive 5xx)
    eject_s: float = 30.0  # the first back-off; doubles at every ejection in a row, to 10 times
    refused_s: float = 1.0  # the back-off after a refused connection; doubles likewise
    trial_s: float = 30.0  # how long a trial may go unanswered before another is let through
    fresh_s: float = 30.0  # how long evidence of life is good for

    def __post_init__(self) -> None:
        for name in ("rise", "fall", "streak"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)!r}")
        for name in ("eject_s", "refused_s", "trial_s", "fresh_s"):
            if not 0.0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")


_BACKOFF_MAX = 10.0  # times the base; 30 s -> 300 s, as Envoy
_DEFAULT = HealthConfig()

_STREAK = "requests failed in a row"
_REFUSED = "connection refused"
_UNPROVEN = Health(State.DOWN, "not heard of yet")
_PROBES_FAIL = Health(State.DOWN, "probes fail")
_A_PROBE_FAILED = Health(State.SUSPECT, "a probe failed")
_REQUESTS_FAIL = Health(State.SUSPECT, "requests fail")
_STALE = Health(State.SUSPECT, "no recent evidence")
_HALF_OPEN = Health(State.SUSPECT, "one trial after ejection")


class HealthMachine:
    """One target's health from active probes and from what its requests met.

    Probes alone move it between UP and DOWN by `rise` and `fall`. An ejection (a streak of failed requests, or a
    refused connection) lies over that: DOWN until its back-off ends, then half open: one trial goes through, whose
    success ends the ejection and whose failure renews it for twice as long. A probe's success ends the ejection of a
    refused connection early, but not that of a streak: a probe does not see what requests see.
    """

    __slots__ = (
        "_backoff",
        "_config",
        "_ejected_until",
        "_ejected_why",
        "_evidence_until",
        "_fault",
        "_probe_fails",
        "_probe_oks",
        "_probed_up",
        "_request_fails",
        "_trial_until",
        "override",
    )

    def __init__(self, config: HealthConfig = _DEFAULT) -> None:
        self._config = config
        self.override = Override()
        self._probed_up: bool | None = None  # None: never heard of
        self._probe_oks = 0
        self._probe_fails = 0
        self._request_fails = 0
        self._evidence_until = -inf
        self._ejected_until: float | None = None  # None: not ejected
        self._ejected_why = ""
        self._trial_until = -inf
        self._backoff = 1.0
        self._fault: Health | None = None

    def probed(self, ok: bool, now: float, fault: str = "") -> None:
        """An active probe came back. A `fault` that no probe sees (broken hardware) takes it out at once; once it is
        mended the probes must succeed as after any failure."""
        self._fault = Health(State.DOWN, fault) if fault else None
        if fault:
            self._probe_oks, self._probed_up = 0, False
        elif not ok:
            self._probe_oks = 0
            self._probe_fails = min(self._probe_fails + 1, self._config.fall)
            if self._probe_fails >= self._config.fall or self._probed_up is None:
                self._probed_up = False
        else:
            self._answered_probe(now)

    def _answered_probe(self, now: float) -> None:
        self._probe_fails = 0
        self._probe_oks = min(self._probe_oks + 1, self._config.rise)
        self._evidence_until = now + self._config.fresh_s
        if self._probe_oks >= self._config.rise or self._probed_up is None:
            self._probed_up = True
        if self._ejected_why == _REFUSED:
            self._readmit()

    def succeeded(self, now: float) -> None:
        """A request is being answered well (tell at its first byte): evidence of life, and the end of a streak.

        It ends an ejection only once a trial was let through: an answer to a request sent before the ejection proves
        nothing about what came after it.
        """
        if self._ejected_until is not None:
            if self._trial_until == -inf:
                return
            self._readmit()
        if self._probed_up is None:
            self._probed_up = True
        self._request_fails = 0
        self._backoff = 1.0
        self._evidence_until = now + self._config.fresh_s

    def failed(self, now: float, *, may_eject: bool = True) -> None:
        """A request failed by the target's fault (5xx, died, out of memory). `may_eject`: the function of that name."""
        config = self._config
        self._request_fails = min(self._request_fails + 1, config.streak)
        if self._ejected_until is not None:
            if now >= self._ejected_until:  # the trial failed; what was in flight at the ejection counts once, as that
                self._eject(config.eject_s, _STREAK, now)
        elif self._request_fails >= config.streak and may_eject:
            self._eject(config.eject_s, _STREAK, now)

    def refused(self, now: float) -> None:
        """A connection was refused: nobody is at home, so the target is out at once, whatever share is out already."""
        if self._ejected_until is None or now >= self._ejected_until:
            self._eject(self._config.refused_s, _REFUSED, now)

    def admit(self, now: float) -> bool:
        """Whether a request may be dispatched now; half open, the first to ask takes the one trial. Not for scoring."""
        health = self.read(now)
        if health is _HALF_OPEN:
            self._trial_until = now + self._config.trial_s
            return True
        return health.state is State.UP or health.state is State.SUSPECT

    @property
    def steady(self) -> bool:
        """Whether it is able to take work, and nothing but a failure, a probe or an override will end that."""
        return self._probed_up is True and self._ejected_until is None

    def read(self, now: float) -> Health:
        """The health at `now`. Changes nothing."""
        forced = self.override.read(now)
        if forced is not None:
            return forced
        if self._probed_up is None:
            return _UNPROVEN
        if self._probed_up is False:
            return self._fault or _PROBES_FAIL
        if self._ejected_until is not None:
            if now < self._ejected_until:
                return Health(State.DOWN, self._ejected_why, self._ejected_until)
            if now < self._trial_until:
                return Health(State.DOWN, "a trial is under way", self._trial_until)
            return _HALF_OPEN
        if now >= self._evidence_until:
            return _STALE
        if self._probe_fails:
            return _A_PROBE_FAILED
        if self._request_fails >= self._config.streak:
            return _REQUESTS_FAIL
        return Health(State.UP, "proven", self._evidence_until)

    def _eject(self, base_s: float, why: str, now: float) -> None:
        self._ejected_until = now + base_s * self._backoff
        self._ejected_why = why
        self._trial_until = -inf
        self._backoff = min(self._backoff * 2.0, _BACKOFF_MAX)

    def _readmit(self) -> None:
        """End the ejection. The back-off is kept until a request succeeds, or a flapping target would never grow it."""
        self._ejected_until = None
        self._ejected_why = ""
        self._trial_until = -inf
        self._request_fails = 0


class LivenessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as a signal against a region."""

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
    """A region's life as seen from here by three signals: report age, the channel, the relay. DOWN needs two of them.

    One alone is SUSPECT: a silent etcd, a broken channel or an unlucky path is not a dead region. A region starts with
    no report and no channel, hence DOWN. Relay failures are forgotten after a while, since a region that is sent
    nothing cannot show that it has recovered.
    """

    __slots__ = ("_channel_up", "_config", "_fine", "_relay_failed_at", "_relay_fails", "_report_at", "override")

    def __init__(self, config: LivenessConfig = _LIVENESS) -> None:
        self._config = config
        self.override = Override()
        self._report_at = -inf
        self._channel_up = False
        self._relay_fails = 0
        self._relay_failed_at = -inf
        self._fine: Health | None = None  # the reading before `_fine.until`, where all signals agree: nearly always

    def reported(self, now: float, *, renewed: bool = False) -> None:
        """A report of the region was received here at `now`, on whatever path; its own clock does not matter.

        `renewed`: of a new incarnation, which has nothing to do with how relaying to the one before failed.
        """
        self._report_at = now
        if renewed:
            self._relay_fails = 0
        self._agree()

    def channel(self, up: bool) -> None:
        """The gRPC channel to the region connected or broke."""
        self._channel_up = up
        self._agree()

    def relay_failed(self, now: float) -> None:
        """A relayed request met a transport failure."""
        if now >= self._relay_failed_at + self._config.relay_hold_s:
            self._relay_fails = 0
        self._relay_fails = min(self._relay_fails + 1, self._config.relay_streak)
        self._relay_failed_at = now
        self._agree()

    def relay_succeeded(self) -> None:
        """A relayed request was answered by the region, be it by a refusal."""
        if self._relay_fails:
            self._relay_fails = 0
            self._agree()

    def _agree(self) -> None:
        agreed = self._channel_up and self._relay_fails < self._config.relay_streak
        self._fine = _fine(self._report_at + self._config.report_age_s) if agreed else None

    def read(self, now: float) -> Health:
        """The liveness at `now`, with the signals against the region as `why`. Changes nothing."""
        forced = self.override.read(now)
        if forced is None:
            fine = self._fine
            return fine if fine is not None and now < (fine.until or -inf) else self._signalled(now)
        if forced.share and self._signalled(now).state is State.DOWN:
            return msgspec.structs.replace(forced, share=0.0)
        return forced

    def _signalled(self, now: float) -> Health:
        config = self._config
        report_until = self._report_at + config.report_age_s
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
