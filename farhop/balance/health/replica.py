"""Whether a replica may take work, by probes and by what its requests met; and how a set of replicas may be used.

Invariants: reading never changes; nothing is UP without evidence younger than its expiry, unless an operator forced
it; what is forced wins over every signal and expires by itself; a back-off is bounded; no ejection is for ever. Never
probes and never reads a clock: `now` is monotonic seconds and does not run backwards.
"""

from enum import StrEnum
from math import inf

import msgspec

from farhop.balance.health.ramp import Ramp
from farhop.balance.health.reading import ForcedState, Health, State


class Mode(StrEnum):
    """How a set of targets may be used. PANIC: so few are ready that ejections for what requests met are overlooked
    rather than the rest crushed. ALL_DOWN is named so that a caller must choose what to do, inside the law."""

    NORMAL = "normal"
    PANIC = "panic"
    ALL_DOWN = "all_down"
    EMPTY = "empty"


def panic(targets_ready: int, total: int, panic_share: float = 0.0) -> Mode:
    """EMPTY without targets, ALL_DOWN if none of them is ready: then trying a DOWN one may beat refusing everybody.

    PANIC if some are, but fewer than `panic_share` of all (Envoy: 0.5).
    """
    if total <= 0:
        return Mode.EMPTY
    if targets_ready <= 0:
        return Mode.ALL_DOWN
    return Mode.NORMAL if targets_ready >= panic_share * total else Mode.PANIC


def may_eject(ejected: int, total: int, share_max: float = 0.5) -> bool:
    """Whether one more of `total` targets may be ejected for bad answers: never the last, never above the share."""
    return ejected + 1 < total and ejected + 1 <= share_max * total


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds of a HealthMachine, and of a set of them. Counts of consecutive events, seconds, and shares 0..1."""

    rise: int = 2  # probes that succeed before a DOWN target is UP (one is enough for a target never heard of)
    fall: int = 3  # probes that fail before it is DOWN
    streak: int = 5  # requests that fail before it is ejected (Envoy's consecutive 5xx)
    eject_s: float = 5.0  # the first back-off; doubles at every ejection in a row, to 4 times
    refused_s: float = 1.0  # the back-off after a refused connection; doubles likewise, on its own, to 10 times
    trial_s: float = 30.0  # how long a trial may go unanswered before another is let through
    fresh_s: float = 30.0  # how long evidence of life is good for
    slow_start_s: float = 10.0  # for how long one that comes up gets less than its share; 0: not
    eject_share_max: float = 0.5  # of the targets that do the same work, at most this share is ejected
    panic_share: float = 0.5  # with fewer of them ready, ejections are overlooked; 0: never
    outlier_factor: float = (
        3.0  # this many times slower than usual, compared with its peers, is an outlier; 0: nothing is
    )

    def __post_init__(self) -> None:
        for name in ("rise", "fall", "streak"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)!r}")
        for name in ("eject_s", "refused_s", "trial_s", "fresh_s"):
            if not 0.0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")
        for name in ("eject_share_max", "panic_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be a share from 0 to 1, not {getattr(self, name)!r}")
        if not 0.0 <= self.slow_start_s < inf:
            raise ValueError(f"slow_start_s must be 0 or more seconds, not {self.slow_start_s!r}")
        if not (self.outlier_factor == 0.0 or 1.0 < self.outlier_factor < inf):
            raise ValueError(f"outlier_factor must be 0 or above 1, not {self.outlier_factor!r}")


# Times the base. Envoy's back-off is 30 s to 300 s, after which a possibly broken host gets full traffic; here one
# trial request is sent after each back-off, so that a short one costs little, and a recovered target is back within 20
# s.
_EJECT_MOST, _REFUSED_MOST = 4.0, 10.0
OTHERS_S = 10.0
"""How long the target answered other tenants well counts against the failures of one tenant alone. An engine that broke
gets their requests, too, which fail; so at most this much later it is ejected nevertheless.
"""
_STRAINED_SHARE = 0.5  # of its capacity: what is too hot or too full gets less to do, and is not taken out
_DEFAULT = HealthConfig()

_STREAK = "requests failed in a row"
_REFUSED = "connection refused"
_UNPROVEN = Health(State.DOWN, "not heard of yet")
_UNREADY = Health(State.DOWN, "alive, not ready")
_PROBES_FAIL = Health(State.DOWN, "probes fail")
_A_PROBE_FAILED = Health(State.SUSPECT, "a probe failed")
_REQUESTS_FAIL = Health(State.SUSPECT, "requests fail")
_STALE = Health(State.SUSPECT, "no recent evidence")
_HALF_OPEN = Health(State.SUSPECT, "one trial after ejection")


class _Backoff:
    """How long a target is out for causes of one kind: twice as long each time, up to `most` times the base, until it
    has been back for twice that. To be found out again takes a while, and is no sign of health."""

    __slots__ = ("_back_at", "_base_s", "_most_s", "_out_s")

    def __init__(self, base_s: float, most: float) -> None:
        self._base_s, self._most_s = base_s, base_s * most
        self._out_s, self._back_at = 0.0, -inf

    def out_s(self, now: float) -> float:
        """Take the replica out at `now`; returns for how many seconds."""
        forgotten = now - self._back_at >= 2.0 * self._most_s
        self._out_s, self._back_at = self._base_s if forgotten else min(2.0 * self._out_s, self._most_s), inf
        return self._out_s

    def back(self, now: float) -> None:
        """The replica is back. Repeating it changes nothing."""
        self._back_at = min(self._back_at, now)


class HealthMachine:
    """One target's health from active probes and from the results of its requests.

    Only probes move it between UP and DOWN, by `rise` and `fall`. An ejection (a streak of failed requests, an answer
    that reports something broken, an outlier among its peers, or a refused connection) comes on top of that: DOWN until
    its back-off ends, then half open: one trial is let through, whose success ends the ejection and whose failure
    renews it for twice as long. A streak of one tenant's requests ejects nothing while other tenants' are answered
    well: then its requests are what the target cannot bear. A probe's success ends the ejection of a refused connection
    early, but no other: a probe does not see what requests see. The result of a request sent before the target was last
    taken out, or came back, says nothing about the present. `warm`: it worked before this process saw it, so its first
    successful probe brings it up with its whole share.
    """

    __slots__ = (
        "_config",
        "_eject_backoff",
        "_ejected_until",
        "_ejected_why",
        "_evidence_until",
        "_failing_tenant",
        "_fault",
        "_probe_fails",
        "_probe_oks",
        "_probed_up",
        "_ramp",
        "_refused_backoff",
        "_request_fails",
        "_since",
        "_strain",
        "_tenant",
        "_tenants_before_at",
        "_trial_until",
        "_unready",
        "answered_at",
        "ejections",
        "forced",
    )

    def __init__(self, config: HealthConfig = _DEFAULT, *, warm: bool = False) -> None:
        self._config = config
        self.forced = ForcedState()
        self._ramp = Ramp(config.slow_start_s, warm=warm)
        self._probed_up: bool | None = None  # None: never heard of
        self._unready = False
        self._probe_oks = 0
        self._probe_fails = 0
        self._request_fails = 0
        self._evidence_until = -inf
        self._ejected_until: float | None = None  # None: not ejected
        self._ejected_why = ""
        self._trial_until = -inf
        self._eject_backoff = _Backoff(config.eject_s, _EJECT_MOST)
        self._refused_backoff = _Backoff(config.refused_s, _REFUSED_MOST)
        self._since = -inf  # when it was last taken out, or came back
        self.ejections = 0  # how often it was taken out for what its requests met
        self._fault: Health | None = None
        self._strain = ""
        self.answered_at = -inf  # when a request was last answered well
        self._tenant = ""  # whose that was
        self._tenants_before_at = -inf  # when one of another tenant was
        self._failing_tenant: str | None = None  # whose requests the streak is of; None: several tenants'

    def probed(self, ok: bool, now: float, fault: str = "", *, ready: bool = True, strain: str = "") -> None:
        """An active probe came back. A `fault` that no probe sees (broken hardware) takes it out at once; once it is
        gone the probes must succeed as after any failure. Not `ready`: it is alive, and takes no work until it is
        ready, which is no failure. `strain`: why it should have less to do."""
        self._fault = Health(State.DOWN, fault) if fault else None
        self._strain = strain
        if self._probed_up is None and not (ok and ready and not fault):
            self._ramp.cool()  # whatever it was to be, it was not at work
        if fault:
            self._probe_oks, self._probed_up, self._unready = 0, False, False
        elif not ok:
            self._probe_oks = 0
            self._probe_fails = min(self._probe_fails + 1, self._config.fall)
            if self._probe_fails >= self._config.fall or self._probed_up is None or self._unready:
                self._probed_up = False
            self._unready = False
        elif not ready:
            self._probe_fails, self._unready = 0, True
            self._probed_up = self._probed_up or None  # it was ready before, so one probe is enough
        else:
            self._answered_probe(now)
        self._ramp.turn(self.steady, now)

    def _answered_probe(self, now: float) -> None:
        self._probe_fails, self._unready = 0, False
        self._probe_oks = min(self._probe_oks + 1, self._config.rise)
        self._evidence_until = now + self._config.fresh_s
        if self._probe_oks >= self._config.rise or self._probed_up is None:
            if not self._probed_up:
                self._since = now
            self._probed_up = True
        if self._ejected_why == _REFUSED:
            self._readmit(now)

    def succeeded(self, now: float, sent_at: float = inf, tenant: str = "") -> bool:
        """A tenant's request is being answered well (tell at its first byte): evidence of life, and the end of a
        streak. Whether the target was steady before.

        It ends an ejection only once a trial was let through: an answer to a request sent before the ejection proves
        nothing about what came after it.
        """
        steady = self._probed_up is True and not self._unready and self._ejected_until is None
        if self._ejected_until is not None:
            if self._trial_until == -inf or sent_at < self._since:
                return steady
            self._readmit(now)
            self._ramp.turn(self.steady, now)
        if self._probed_up is None:  # nothing was sent to it yet: another process answered, which had its name before
            return steady
        self._request_fails = 0
        self._evidence_until = now + self._config.fresh_s
        if tenant != self._tenant:
            self._tenant, self._tenants_before_at = tenant, self.answered_at
        self.answered_at = now
        return steady

    def counts(self, sent_at: float) -> bool:
        """Whether the failure of a request sent at that time counts: not if it was sent before the target was last
        taken out or came back, nor while probes already report it down."""
        return self._probed_up is not False and sent_at >= self._since

    def failed(self, now: float, *, may_eject: bool = True, sent_at: float = inf, tenant: str = "") -> None:
        """A tenant's request failed by the target's fault (5xx, died, out of memory). `may_eject`: the function of that
        name."""
        if not self.counts(sent_at):
            return
        if not self._request_fails:
            self._failing_tenant = tenant
        elif tenant != self._failing_tenant:
            self._failing_tenant = None
        self._request_fails = min(self._request_fails + 1, self._config.streak)
        if self._ejected_until is not None:
            if now >= self._ejected_until:  # the trial failed
                self._eject(self._eject_backoff, _STREAK, now)
        elif self._request_fails >= self._config.streak and may_eject and not self.only_one_tenant_fails(now):
            self._eject(self._eject_backoff, _STREAK, now)

    def only_one_tenant_fails(self, now: float) -> bool:
        """Whether all of the streak are one tenant's requests, and others' were answered well less than OTHERS_S ago:
        then it may well be the requests."""
        if self._failing_tenant is None:
            return False
        return now - self.others_at(self._failing_tenant) < OTHERS_S

    def others_at(self, tenant: str) -> float:
        """When a request of another tenant was last answered well, -inf if never."""
        return self._tenants_before_at if tenant == self._tenant else self.answered_at

    def eject(self, why: str, now: float) -> None:
        """Out at once, because an answer reports something broken, or as an outlier. Ask `may_eject`."""
        if self._ejected_until is None or now >= self._ejected_until:
            self._eject(self._eject_backoff, why, now)

    def refused(self, now: float) -> None:
        """A connection was refused: no process listens, so the target is out at once, however many others are."""
        if self._ejected_until is None or now >= self._ejected_until:
            self._eject(self._refused_backoff, _REFUSED, now)
            self._ramp.cool()

    def admit(self, now: float, *, panic: bool = False) -> bool:
        """Whether a request may be dispatched now; half open, the first to ask takes the one trial. Not for scoring.

        In `panic` an ejection is overlooked, and an answer then is as good as a trial's.
        """
        if panic and self.held_out(now):
            self._trial_until = max(self._trial_until, now)
            return True
        health = self.read(now)
        if health is _HALF_OPEN:
            self._trial_until = now + self._config.trial_s
            return True
        return health.state is State.UP or health.state is State.SUSPECT

    @property
    def steady(self) -> bool:
        """Whether it is able to take work, and nothing but a failure, a probe or an override will end that."""
        return self._probed_up is True and not self._unready and self._ejected_until is None

    def admits_without_trial(self, now: float) -> bool:
        """Whether it is UP or SUSPECT, steady, and under no override: it may be sent requests."""
        steady = self._probed_up is True and not self._unready and self._ejected_until is None
        return steady and (self.forced.health is None or self.forced.read(now) is None)

    @property
    def one_failure_from_ejection(self) -> bool:
        """Whether one more failed request would eject it, if it may be."""
        return self._request_fails + 1 >= self._config.streak

    def held_out(self, now: float) -> bool:
        """Whether only an ejection for the results of its requests keeps it out, which panic ignores. A refused
        connection is not of that kind, since no process listens."""
        alive = self._probed_up is True and not self._unready and self.forced.read(now) is None
        return alive and self._ejected_until is not None and self._ejected_why != _REFUSED

    def share(self, now: float) -> float:
        """How much of its capacity it may use (0..1]: less in its slow start, or while it is strained."""
        share = self._ramp.share(now)
        return share * _STRAINED_SHARE if self._strain else share

    def read(self, now: float) -> Health:
        """The health at `now`. Changes nothing."""
        forced = self.forced.read(now)
        if forced is not None:
            return forced
        if self._unready:
            return _UNREADY
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
        return Health(State.SUSPECT if self._strain else State.UP, self._strain or "proven", self._evidence_until)

    def _eject(self, backoff: _Backoff, why: str, now: float) -> None:
        if why != _REFUSED and self._ejected_until is None:
            self.ejections += 1
        self._ejected_until = now + backoff.out_s(now)
        self._ejected_why = why
        self._trial_until = -inf
        self._since = now
        self._ramp.turn(False, now)

    def _readmit(self, now: float) -> None:
        """End the ejection. Its back-off is kept for a while, or a flapping target would never grow it."""
        self._ejected_until = None
        self._ejected_why = ""
        self._trial_until = -inf
        self._request_fails = 0
        self._since = now
        self._eject_backoff.back(now)
        self._refused_backoff.back(now)
