"""The hot guard: when requests avoid a target, and how fast they return. One mechanism for overload, outage and drain.

A target above `spill_at` for `hold_s` is hot, until it falls below `return_at`. Coming back from hot, or from being
away, it is cold for a growing share of the requests only: `ramp_per_s` a second. Time without a report for SILENT_S
does not count as time above. Invariants: the share lies in 0..1 and never grows faster than the ramp; between
`return_at` and `spill_at` nothing changes, so noise there moves nothing. Reading changes nothing; `now` is monotonic
seconds.
"""

from __future__ import annotations

from math import inf

import msgspec

SILENT_S = 3.0  # reports come once a second at least


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of usable capacity, seconds, and shares a second."""

    spill_at: float = 0.90
    return_at: float = 0.75
    hold_s: float = 2.0
    ramp_per_s: float = 0.05

    def __post_init__(self) -> None:
        if not 0.0 < self.return_at < self.spill_at:
            raise ValueError(f"return_at {self.return_at!r} must be above 0 and below spill_at {self.spill_at!r}")
        if self.hold_s < 0.0 or self.ramp_per_s <= 0.0:
            raise ValueError("hold_s must be 0 or more and ramp_per_s above 0")


_DEFAULT = GuardConfig()


class HotGuard:
    """The guard of one target, created when the target can first be used: one that was never used has no share to
    return to.
    """

    __slots__ = ("_above_since", "_away", "_config", "_hot", "_ramp_from", "_used_at", "cap")

    def __init__(self, config: GuardConfig = _DEFAULT) -> None:
        self._config = config
        self._hot = False
        self._away = False
        self._above_since: float | None = None
        self._used_at = -inf
        self.cap = 1.0  # never more than this, whatever the ramp: the part of a waking pilot light that is ready
        self._ramp_from: float | None = None  # None: no ramp, the whole share

    def configure(self, config: GuardConfig) -> None:
        """Use these bounds from now on; the state stays as it is until the next report."""
        self._config = config

    @property
    def hot(self) -> bool:
        """Whether the target is hot now."""
        return self._hot

    def used(self, share: float, now: float) -> None:
        """Take the reported utilisation, 0 and above. NaN is ignored."""
        config = self._config
        fresh, self._used_at = now - self._used_at <= SILENT_S, now
        if share >= config.spill_at:
            if self._above_since is None or not fresh:
                self._above_since = now
            if now - self._above_since >= config.hold_s:
                self._hot = True
        else:
            self._above_since = None
            if self._hot and share < config.return_at:
                self._hot = False
                self._ramp_from = now

    def left(self) -> None:
        """The target cannot be used at all (down, draining); when it comes back, requests return gradually."""
        self._away = True

    def came_back(self, now: float) -> None:
        """The target can be used again. Ignored if it was not away."""
        if self._away:
            self._away = False
            self._ramp_from = now

    def admitted_share(self, now: float) -> float:
        """The share (0..1) of requests for which the target counts as cold: 0 while hot or away, then growing to 1."""
        if self._hot or self._away:
            return 0.0
        if self._ramp_from is None:
            return self.cap
        # The first request after a return must be possible at all, hence one second's worth to begin with.
        return min(self.cap, (max(0.0, now - self._ramp_from) + 1.0) * self._config.ramp_per_s)
