"""The state of each entry as seen from here: whether it answers, the share of its clients that it takes, and why.

Events come in (`probed`, `loaded`, `drained`, `biased`); `read` returns the state at a moment and how long it will
last. Invariants: an entry is DOWN only after `down_after` probes in a row failed, and not if all entries failed at once
(then our own uplink is taken to be down: the last state is frozen for `frozen_s`, and ignored after that); a drain
overrides everything except DOWN, and of several drains of one entry the one that leaves it least holds; an entry that
comes back gets a growing share. Never reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING

from farhop.balance.health.ramp import Ramp

if TYPE_CHECKING:
    from collections.abc import Iterable

STEPS = 16  # steps of a share: a finer change is no reason to prepare every answer again


class State(StrEnum):
    """What answers need to know of an entry."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINED = "drained"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class EntryHealthConfig:
    """Seconds; how many probes in a row; and how full a region is when its entry begins to take less."""

    probe_s: float = 1.0
    up_after: int = 2
    down_after: int = 2
    ramp_s: float = 120.0
    frozen_s: float = 300.0
    load_age_s: float = 15.0
    shed_at: float = 0.9


@dataclass(frozen=True, slots=True)
class EntryHealth:
    """One entry at one moment. `share`: of the clients it is the best for, 0 to 1. `stable_s`: how long this cannot
    change for the worse, at least."""

    entry: str
    state: State
    share: float
    bias_ms: float
    stable_s: float
    why: str = ""

    @property
    def answers(self) -> bool:
        """Whether it may be answered with while there is a choice."""
        return self.state is not State.DOWN


@dataclass(slots=True)
class _Entry:
    ramp: Ramp
    good: int = 0
    bad: int = 0
    up: bool | None = None  # None: not probed yet
    load: float = 0.0
    loaded_at: float = -inf
    why: str = ""
    # By what they are known by: from, over_s, until, why, keep_share.
    drains: dict[str, tuple[float, float, float, str, float]] = field(default_factory=dict)


@dataclass(slots=True)
class EntryHealthTracker:
    """The health of all entries."""

    config: EntryHealthConfig
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _regions: dict[str, str] = field(default_factory=dict)
    _bias: dict[str, tuple[float, float]] = field(default_factory=dict)  # by region: ms, until
    _answered_at: float | None = None  # when any probe last succeeded
    _began_at: float | None = None

    def know(self, regions: dict[str, str], now: float) -> None:
        """These are the entries, with the region of each. What was known of those that stay stays."""
        self._regions = dict(regions)
        self._entries = {
            name: self._entries.get(name) or _Entry(Ramp(self.config.ramp_s, warm=True)) for name in regions
        }
        self._began_at = now if self._began_at is None else self._began_at

    def probed(self, name: str, good: bool, why: str, now: float) -> None:
        """A probe of an entry ended: it answered that it is ready, or not, and `why`."""
        one = self._entries.get(name)
        if one is None:
            return
        one.good, one.bad = (one.good + 1, 0) if good else (0, one.bad + 1)
        one.why = why
        if good:
            self._answered_at = now
        if good and (one.up is None or (not one.up and one.good >= self.config.up_after)):
            one.up = True
            one.ramp.turn(True, now)
        elif not good and one.up is not False and one.bad >= self.config.down_after and not self.cut_off(now):
            one.up = False
            one.ramp.turn(False, now)

    def loaded(self, region: str, used: float, now: float) -> None:
        """What share of a region's slots is in use, 0 to 1, as it just reported."""
        for name, of in self._regions.items():
            if of == region:
                self._entries[name].load, self._entries[name].loaded_at = used, now

    def drained(
        self, names: Iterable[str], over_s: float, until: float, why: str, now: float, keep_share: float = 0.0,
        by: str = "",
    ) -> None:  # fmt: skip
        """An operator drains these entries until then. The same drain written again does not restart, but may last
        longer: an operator who renews a short drain repeatedly has it end soon after he stops. `by`: what the drain is
        known by, of several of one entry. One whose end has passed changes nothing."""
        for name in names:
            one = self._entries.get(name)
            if one is None or now >= until:
                continue
            known = one.drains.get(by)
            since = known[0] if known is not None and known[3] == why and now < known[2] else now
            one.drains[by] = (since, over_s, until, why, keep_share)

    def undrained(self, names: Iterable[str], now: float, by: str = "") -> None:
        """That drain of these is over: without another, they come back by the ramp."""
        for name in names:
            one = self._entries.get(name)
            if one is not None and one.drains.pop(by, None) is not None and not one.drains:
                self._back(one, now)

    def biased(self, biases: dict[str, tuple[float, float]]) -> None:
        """Operators' biases in force: by region, milliseconds and until when."""
        self._bias = dict(biases)

    def cut_off(self, now: float) -> bool:
        """Whether no entry at all answers: then our own network is taken to be down. With a single entry this cannot be
        known."""
        if len(self._entries) < 2:
            return False
        last = self._answered_at if self._answered_at is not None else self._began_at
        patience_s = (self.config.down_after + 1) * self.config.probe_s
        return last is not None and now - last > patience_s and all(one.bad > 0 for one in self._entries.values())

    def read(self, now: float) -> tuple[EntryHealth, ...]:
        """Every entry's health at `now`, in the order they were made known."""
        cut = self.cut_off(now)
        for one in self._entries.values():
            over = [by for by, drain in one.drains.items() if now >= drain[2]]
            for by in over:
                del one.drains[by]
            if over and not one.drains:
                self._back(one, now)
        return tuple(self._read(name, one, cut, now) for name, one in self._entries.items())

    @staticmethod
    def _back(one: _Entry, now: float) -> None:
        if one.up:
            one.ramp.turn(False, now)
            one.ramp.cool()
            one.ramp.turn(True, now)

    def _read(self, name: str, one: _Entry, cut: bool, now: float) -> EntryHealth:
        config = self.config
        ms, until = self._bias.get(self._regions[name], (0.0, 0.0))
        bias_ms = ms if now < until else 0.0
        last = self._answered_at if self._answered_at is not None else (self._began_at or 0.0)
        if cut and now - last > config.frozen_s:
            return EntryHealth(
                name, State.UNKNOWN, 1.0, bias_ms, 0.0, "cut off for too long: nothing is known any more"
            )
        if one.up is False:
            return EntryHealth(name, State.DOWN, 0.0, bias_ms, config.up_after * config.probe_s, one.why)
        if one.drains:
            share, why = min(
                (max(keep_share, 0.0 if over_s <= 0 else 1.0 - (now - since) / over_s), why)
                for since, over_s, _, why, keep_share in one.drains.values()
            )
            return EntryHealth(name, State.DRAINED, _stepped(share), bias_ms, 0.0, why)
        share, why = _stepped(one.ramp.share(now)), "comes back"
        if now - one.loaded_at <= config.load_age_s and one.load > config.shed_at:
            room = max(0.1, (1.0 - one.load) / (1.0 - config.shed_at))
            share, why = min(share, _stepped(room)), f"{one.load:.0%} of its region's slots are in use"
        suspect = one.up is None or one.bad > 0
        state = State.SUSPECT if suspect else State.UP
        if one.up is None:
            why = "not probed yet"
        elif suspect:
            why = one.why if not cut else "no entry answers: the last view holds"
        elif share >= 1.0:
            why = ""
        stable_s = 0.0 if suspect or share < 1.0 else inf
        return EntryHealth(name, state, share, bias_ms, stable_s, why)


def _stepped(share: float) -> float:
    return round(share * STEPS) / STEPS
