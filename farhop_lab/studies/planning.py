"""How many replicas each region needs: the smallest fleet that meets an objective, by search over simulated runs.

Without routing between regions each one needs what its own clients need (region-local); all are searched at once, by
doubling and then by thirds. With routing (Farhop) the search begins with that fleet: the least multiple of it that is
enough, by doubling and halving, then one replica less wherever that is still enough, the dearest first. N-1 asks the
same with any one region lost, in parallel with N. A fleet is enough if in every region the share of good answers
reaches `good`. Assumed: more replicas never serve worse. So what follows from a trial of a larger or a smaller fleet is
not tried, nor, for N-1, the rest once one lost region is too much. Bounded by ROUNDS_MAX and by `over()`: the answer is
then what is known, with `settled` False. Does no IO; `ask` runs trials.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, TypeVar

import msgspec

from farhop.balance.scaling import made_up_for
from farhop_lab.sim.stats import share_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

REPLICAS_MAX = 64
ROUNDS_MAX = 200
FIRST = 4  # replicas of each region in the first trial: large fleets take longer to run


class Trial(msgspec.Struct, frozen=True):
    """A fleet to try: replicas by region, with or without routing between regions, with a region lost or none. The
    number of replicas of a lost one does not matter: it is 1.
    """

    replicas: tuple[tuple[str, int], ...]
    routed: bool
    lost: str = ""

    def within(self, other: Trial) -> bool:
        """Whether the other has as many replicas or more in every region that is not lost."""
        return all(
            name == self.lost or (name != other.lost and n <= m)
            for (name, n), (_, m) in zip(self.replicas, other.replicas, strict=True)
        )


class Outcome(msgspec.Struct, frozen=True):
    """A trial's result: shares of good answers by the clients' region, dollars per hour, and the number of requests
    behind the shares, if known.
    """

    good: dict[str, float]
    usd_per_hour: float
    asked: dict[str, int] = {}

    @property
    def worst(self) -> tuple[float, float]:
        """The worst region's share, and half the width of its 95 % interval (0: unknown)."""
        if not self.good:
            return 1.0, 0.0
        region = min(self.good, key=lambda name: self.good[name])
        if not (asked := self.asked.get(region, 0)):
            return self.good[region], 0.0
        low, high = share_interval(self.good[region] * asked, asked)
        return self.good[region], (high - low) / 2.0


class Need(msgspec.Struct, frozen=True):
    """A fleet that is enough: replicas by region, its cost, and the worst region's share of good answers, give or take
    `half` (95 %; 0: unknown). `replicas` None: none within the bounds is enough, and `why` says so. `settled`: the
    search was completed.
    """

    replicas: dict[str, int] | None
    usd_per_hour: float = 0.0
    worst: float = 0.0
    half: float = 0.0
    settled: bool = True
    why: str = ""

    @property
    def total(self) -> int:
        """Replicas in all."""
        return sum((self.replicas or {}).values())


class Planned(msgspec.Struct, frozen=True):
    """The answer: alone (without routing) and together, each with all regions up (N) and any one lost (N-1)."""

    alone: Need
    alone_spare: Need
    together: Need
    together_spare: Need
    rounds: int


if TYPE_CHECKING:
    _T = TypeVar("_T")
    # Yields the trials that it needs next, and returns its answer.
    _Search = Generator[Sequence[Trial], None, _T]


class Search:
    """See the module's head. `prices` are dollars per replica and hour, by region."""

    def __init__(
        self,
        prices: Mapping[str, float],
        good: float,
        ask: Callable[[Sequence[Trial]], list[Outcome]],
        *,
        most: int = REPLICAS_MAX,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._prices, self._good, self._ask, self._most, self._over = prices, good, ask, most, over
        self._known: dict[Trial, Outcome] = {}
        self._tight: dict[str, float] = {}  # by lost region, the worst share seen last
        self._together_alone = False  # whether only one search is left: it may fill all cores
        self.rounds = 0

    def run(self) -> Planned:
        """All four."""
        (alone,) = self._side_by_side(self._alone())
        spare = Need(None, why="its clients have no other region while theirs is lost")
        if len(self._prices) == 1:
            (together,) = self._side_by_side(self._together(alone, ("",)))
            return Planned(alone, spare, together, spare, self.rounds)
        together, together_spare = self._side_by_side(
            self._together(alone, ("",)), self._together(alone, tuple(self._prices))
        )
        return Planned(alone, spare, together, together_spare, self.rounds)

    # -- trials

    def _side_by_side(self, *searches: _Search[Need]) -> list[Need]:
        """What all searches need next is one round."""
        needs: dict[int, Need] = {}
        live = dict(enumerate(searches))
        while live:
            self._together_alone = len(live) == 1
            wanted: dict[Trial, None] = {}
            for place, search in tuple(live.items()):
                try:
                    wanted |= dict.fromkeys(next(search))
                except StopIteration as end:
                    needs[place] = end.value
                    del live[place]
            if wanted:
                self.rounds += 1
                self._known.update(zip(wanted, self._ask(tuple(wanted)), strict=True))
        return [needs[place] for place in sorted(needs)]

    def _over_now(self) -> bool:
        return self.rounds >= ROUNDS_MAX or self._over()

    def _try(self, trials: Sequence[Trial]) -> _Search[list[Outcome]]:
        if new := [trial for trial in trials if trial not in self._known]:
            yield new
        return [self._known[trial] for trial in trials]

    def _is_enough(self, replicas: Mapping[str, int], lost: Sequence[str]) -> _Search[bool]:
        """Whether the fleet is enough, whichever of these regions is lost: the worst of the last time first."""
        trials = [_trial(replicas, True, region) for region in lost]
        if any(self._follows(trial, enough=False) for trial in trials):
            return False
        open_ = [trial for trial in trials if not self._follows(trial, enough=True)]
        open_.sort(key=lambda trial: self._tight.get(trial.lost, 1.0))
        while open_:
            count = 2 if self._together_alone else 1
            now, open_ = open_[:count], open_[count:]
            outcomes = yield from self._try(now)
            shares = [outcome.worst[0] for outcome in outcomes]
            self._tight.update({trial.lost: share for trial, share in zip(now, shares, strict=True)})
            if min(shares) < self._good:
                return False
        return True

    def _follows(self, trial: Trial, *, enough: bool) -> bool:
        """Whether the trial's result is known: its own, or that of a smaller fleet that is `enough`, or of a larger one
        that is not.
        """
        return any(
            known.routed
            and (known.within(trial) if enough else trial.within(known))
            and (outcome.worst[0] >= self._good) is enough
            for known, outcome in self._known.items()
        )

    def _need(self, replicas: dict[str, int], routed: bool, lost: Sequence[str], *, settled: bool) -> _Search[Need]:
        outcomes = yield from self._try([_trial(replicas, routed, region) for region in lost])
        usd = [
            outcome.usd_per_hour + (self._prices[region] * (replicas[region] - 1) if region else 0.0)
            for region, outcome in zip(lost, outcomes, strict=True)
        ]
        return Need(replicas, max(usd), *min(outcome.worst for outcome in outcomes), settled)

    # -- searches

    def _alone(self) -> _Search[Need]:
        """Regions do not affect one another: each narrows its own range, all in the same runs."""
        low = dict.fromkeys(self._prices, 1)
        high = dict.fromkeys(self._prices, min(FIRST, self._most))
        while True:
            (outcome,) = yield from self._try([_trial(high, False)])
            short = [region for region in high if outcome.good.get(region, 1.0) < self._good]
            if not short:
                break
            if any(high[region] == self._most for region in short):
                reached = ", ".join(f"{region} ({outcome.good[region]:.0%} good)" for region in short)
                return Need(None, why=f"{self._most} replicas are not enough in {reached}")
            for region in short:
                low[region] = high[region] + 1
                high[region] = self._most if self._over_now() else min(2 * high[region], self._most)
        while any(low[region] < high[region] for region in low) and not self._over_now():
            thirds = [{region: low[region] + n * (high[region] - low[region]) // 3 for region in low} for n in (1, 2)]
            outcomes = yield from self._try(list(dict.fromkeys(_trial(fleet, False) for fleet in thirds)))
            for fleet, outcome in zip(thirds, (outcomes[0], outcomes[-1]), strict=True):
                for region, replicas in fleet.items():
                    if not low[region] <= replicas < high[region]:
                        continue
                    if outcome.good.get(region, 1.0) >= self._good:
                        high[region] = replicas
                    else:
                        low[region] = replicas + 1
        return (yield from self._need(high, False, ("",), settled=low == high))

    def _together(self, alone: Need, lost: Sequence[str]) -> _Search[Need]:
        shape = alone.replicas or dict.fromkeys(self._prices, self._most)
        # The others must make up for the lost one: the largest region's share, and one more.
        largest = max(shape.values()) / sum(shape.values())
        top = 1.0 if not any(lost) else min(made_up_for(largest), self._most / max(shape.values()))
        low, most = 0.0, self._most / max(shape.values())
        while not (yield from self._is_enough(_scaled(shape, top), lost)):
            if top < most:  # by doubling: large fleets take longer to run
                low, top = top, most if self._over_now() else min(2.0 * top, most)
                continue
            # Its proportions are useless: the maximum everywhere.
            shape, low, top = dict.fromkeys(self._prices, self._most), 0.0, 1.0
            if not (yield from self._is_enough(shape, lost)):
                tried = (self._known.get(_trial(shape, True, region)) for region in lost)
                worst = min(outcome.worst[0] for outcome in tried if outcome is not None)
                why = f"{self._most} replicas in every region are not enough ({worst:.0%} good in the worst)"
                return Need(None, why=why)
            break
        fleet, settled = yield from self._halved(shape, low, top, lost)
        fleet, pared = yield from self._pared(fleet, lost)
        return (yield from self._need(fleet, True, lost, settled=settled and pared))

    def _halved(
        self, shape: Mapping[str, int], low: float, high: float, lost: Sequence[str]
    ) -> _Search[tuple[dict[str, int], bool]]:
        """The least multiple that is enough, above `low`, which is not, to a replica of the largest region."""
        while (high - low) * max(shape.values()) > 0.5:
            if self._over_now():
                return _scaled(shape, high), False
            middle = (low + high) / 2.0
            if (yield from self._is_enough(_scaled(shape, middle), lost)):
                high = middle
            else:
                low = middle
        return _scaled(shape, high), True

    def _pared(self, fleet: dict[str, int], lost: Sequence[str]) -> _Search[tuple[dict[str, int], bool]]:
        """One replica less wherever that is still enough, the dearest first, until none is."""
        again = True
        while again:
            again = False
            for region in sorted(fleet, key=lambda name: (-self._prices[name], name)):
                if fleet[region] <= 1:
                    continue
                if self._over_now():
                    return fleet, False
                less = {**fleet, region: fleet[region] - 1}
                if (yield from self._is_enough(less, lost)):
                    fleet, again = less, True
        return fleet, True


def _trial(replicas: Mapping[str, int], routed: bool, lost: str = "") -> Trial:
    return Trial(tuple((name, 1 if name == lost else n) for name, n in sorted(replicas.items())), routed, lost)


def _scaled(shape: Mapping[str, int], factor: float) -> dict[str, int]:
    return {region: max(1, ceil(replicas * factor - 1e-9)) for region, replicas in shape.items()}
