"""GORGO's tuner: a (1+1) evolution strategy over weights, judged by a percentile of the time to the first token.

As its author's package does it (gorgo-lb 0.2.0, `OnlineTuner` in mode online-es over `GaussianESTuner`): each `HOP`
requests the last `WINDOW` are scored, the current candidate is accepted or not, and the next one is drawn in log space
around the best; the step's width follows Rechenberg's rule of one success in five. A test compares it with that
package, proposal by proposal. Pure: takes random generators.
"""

from __future__ import annotations

from collections import deque
from math import exp, log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

WINDOW, HOP = 100, 50
LEAST, MOST = 1e-5, 5.0  # of each weight
STEPS_MAX = 10_000
_SIGMA, _SIGMA_MIN, _DECAY = 0.5, 0.05, 0.817
_SUCCESSES, _TARGET, _TOLERANCE = 8, 0.2, 0.005
_QUANTILE = 0.95


class EvolutionStrategy:
    """The search alone: `propose` a candidate, `report` its score (higher is better)."""

    def __init__(self, initial: dict[str, float], rng: Random) -> None:
        self.best = {name: _within(value) for name, value in initial.items()}
        self._best_score: float | None = None
        self._sigma, self._steps = _SIGMA, 0
        self._recent: deque[bool] = deque(maxlen=_SUCCESSES)
        self._rng = rng

    def propose(self) -> dict[str, float] | None:
        """The next candidate; None once the search is over."""
        if self._best_score is None:
            return dict(self.best)
        if self._steps >= STEPS_MAX or self._sigma < _SIGMA_MIN:
            return None
        return {
            name: _within(exp(log(value) + self._sigma * self._rng.gauss(0.0, 1.0)))
            for name, value in self.best.items()
        }

    def report(self, candidate: dict[str, float], score: float) -> None:
        """A candidate's score. The first candidate is where the search begins."""
        if self._best_score is None:
            self._best_score, self.best = score, dict(candidate)
            return
        self._steps += 1
        # Scores are negative, so that the tolerance lets in what is a little worse: as published.
        accepted = score > self._best_score * (1.0 + _TOLERANCE)
        if accepted:
            self._best_score, self.best = score, dict(candidate)
        self._recent.append(accepted)
        if len(self._recent) == _SUCCESSES:
            rate = sum(self._recent) / _SUCCESSES
            if rate > _TARGET:
                self._sigma /= _DECAY
            elif rate < _TARGET:
                self._sigma *= _DECAY


class OnlineTuner:
    """The current weights, and the search that changes them. `on_sample` is called for every request that was
    served.
    """

    def __init__(self, initial: dict[str, float], rng: Random) -> None:
        self.weights = dict(initial)
        self._search = EvolutionStrategy(initial, rng)
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._since, self._over = 0, False
        self._pending: dict[str, float] | None = None

    def on_sample(self, ttft_s: float) -> None:
        """A request was served, with this time to its first token."""
        self._samples.append(ttft_s)
        if self._over:
            return
        self._since += 1
        if self._since < HOP or len(self._samples) < WINDOW:
            return
        self._search.report(self._pending or dict(self._search.best), -_quantile(self._samples))
        proposal = self._search.propose()
        if proposal is None:
            self._over, self.weights = True, dict(self._search.best)
            return
        self._pending, self.weights, self._since = proposal, dict(proposal), 0


def _quantile(samples: deque[float]) -> float:
    ordered = sorted(samples)
    return ordered[round(_QUANTILE * (len(ordered) - 1))]


def _within(value: float) -> float:
    return max(LEAST, min(MOST, value))
