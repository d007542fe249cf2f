"""How many replicas each region needs: the least fleet that meets an objective, by search over simulated runs.

Without routing between regions each one needs what its own clients need (region-local), all searched for at once, by
halving. With it (Farhop) the search begins with that fleet: the least multiple of it that is enough, by doubling and
halving, then one replica less wherever that still is enough, the dearest first. N-1 asks the same with any one region
lost. A fleet is enough if in every region the share of good answers reaches `good`. Taken for granted: more replicas
never serve worse. Bounded by ROUNDS_MAX and by `over()`: what is known then is the answer, `settled` False. Opens
nothing; `ask` runs.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import msgspec

from farhop.balance.scaling import made_up_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REPLICAS_MAX = 64
ROUNDS_MAX = 200


class Trial(msgspec.Struct, frozen=True):
    """A fleet to try: replicas by region, with or without routing between regions, with a region lost or none."""

    replicas: tuple[tuple[str, int], ...]
    routed: bool
    lost: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """What came of a trial: shares of good answers by the region where clients are, dollars per hour."""

    good: dict[str, float]
    usd_per_hour: float


class Need(msgspec.Struct, frozen=True):
    """A fleet that is enough: by region, what it costs, and the worst region's share of good answers. `replicas` None:
    none within the bounds is, and `why` says it. `settled`: the search came to its end."""

    replicas: dict[str, int] | None
    usd_per_hour: float = 0.0
    worst: float = 0.0
    settled: bool = True
    why: str = ""

    @property
    def total(self) -> int:
        """All of them."""
        return sum((self.replicas or {}).values())


class Planned(msgspec.Struct, frozen=True):
    """The answer: alone (without routing) and together, each for all regions well (N) and any one lost (N-1)."""

    alone: Need
    alone_spare: Need
    together: Need
    together_spare: Need
    rounds: int


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
        self.rounds = 0

    def run(self) -> Planned:
        """All four."""
        alone = self._alone()
        spare = "its clients have nobody else while their region is lost"
        if len(self._prices) == 1:
            return Planned(
                alone, Need(None, why=spare), self._together(alone, ("",)), Need(None, why=spare), self.rounds
            )
        together = self._together(alone, ("",))
        together_spare = self._together(alone, tuple(self._prices))
        return Planned(alone, Need(None, why=spare), together, together_spare, self.rounds)

    # -- trials

    def _over_now(self) -> bool:
        return self.rounds >= ROUNDS_MAX or self._over()

    def _tried(self, replicas: Mapping[str, int], routed: bool, lost: Sequence[str]) -> list[Outcome]:
        trials = [Trial(tuple(sorted(replicas.items())), routed, region) for region in lost]
        new = [trial for trial in trials if trial not in self._known]
        if new:
            self.rounds += 1
            self._known.update(zip(new, self._ask(new), strict=True))
        return [self._known[trial] for trial in trials]

    def _worst(self, replicas: Mapping[str, int], lost: Sequence[str]) -> float:
        outcomes = self._tried(replicas, True, lost)
        return min((share for outcome in outcomes for share in outcome.good.values()), default=1.0)

    def _need(self, replicas: dict[str, int], routed: bool, lost: Sequence[str], *, settled: bool) -> Need:
        outcomes = self._tried(replicas, routed, lost)
        worst = min((share for outcome in outcomes for share in outcome.good.values()), default=1.0)
        return Need(replicas, max(outcome.usd_per_hour for outcome in outcomes), worst, settled)

    # -- searches

    def _alone(self) -> Need:
        """Regions do not touch one another: each halves its own range, all in the same runs."""
        low = dict.fromkeys(self._prices, 1)
        high = dict.fromkeys(self._prices, self._most)
        (most,) = self._tried(high, False, ("",))
        short = [region for region in high if most.good.get(region, 1.0) < self._good]
        if short:
            return Need(None, why=f"{self._most} replicas are not enough in {', '.join(short)}")
        while any(low[region] < high[region] for region in low) and not self._over_now():
            middle = {region: (low[region] + high[region]) // 2 for region in low}
            (outcome,) = self._tried(middle, False, ("",))
            for region, replicas in middle.items():
                if low[region] == high[region]:
                    continue
                if outcome.good.get(region, 1.0) >= self._good:
                    high[region] = replicas
                else:
                    low[region] = replicas + 1
        return self._need(high, False, ("",), settled=low == high)

    def _together(self, alone: Need, lost: Sequence[str]) -> Need:
        shape = alone.replicas or dict.fromkeys(self._prices, self._most)
        # What is lost must be made up for by the others: the largest region's share, and one over.
        largest = max(shape.values()) / sum(shape.values())
        top = 1.0 if not any(lost) else min(made_up_for(largest), self._most / max(shape.values()))
        low, most = 0.0, self._most / max(shape.values())
        while self._worst(_scaled(shape, top), lost) < self._good:
            if top < most:  # by doubling: large fleets take longer to run
                low, top = top, most if self._over_now() else min(2.0 * top, most)
                continue
            # Its proportions are of no use: all there may be, everywhere alike.
            shape, low, top = dict.fromkeys(self._prices, self._most), 0.0, 1.0
            if self._worst(shape, lost) < self._good:
                return Need(None, why=f"{self._most} replicas in every region are not enough")
            break
        fleet, settled = self._halved(shape, low, top, lost)
        fleet, pared = self._pared(fleet, lost)
        return self._need(fleet, True, lost, settled=settled and pared)

    def _halved(
        self, shape: Mapping[str, int], low: float, high: float, lost: Sequence[str]
    ) -> tuple[dict[str, int], bool]:
        """The least multiple that is enough, above `low`, which is not, to a replica of the largest region."""
        while (high - low) * max(shape.values()) > 0.5:
            if self._over_now():
                return _scaled(shape, high), False
            middle = (low + high) / 2.0
            if self._worst(_scaled(shape, middle), lost) >= self._good:
                high = middle
            else:
                low = middle
        return _scaled(shape, high), True

    def _pared(self, fleet: dict[str, int], lost: Sequence[str]) -> tuple[dict[str, int], bool]:
        """One less wherever that is still enough, the dearest first, until none is."""
        again = True
        while again:
            again = False
            for region in sorted(fleet, key=lambda name: (-self._prices[name], name)):
                if fleet[region] <= 1:
                    continue
                if self._over_now():
                    return fleet, False
                less = {**fleet, region: fleet[region] - 1}
                if self._worst(less, lost) >= self._good:
                    fleet, again = less, True
        return fleet, True


def _scaled(shape: Mapping[str, int], factor: float) -> dict[str, int]:
    return {region: max(1, ceil(replicas * factor - 1e-9)) for region, replicas in shape.items()}
