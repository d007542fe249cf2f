"""How full a replica's KV cache will get from the requests under way there: the expected peak, plus a margin for
chance.

A sequence takes its prompt and its answer so far, grows by a token a step, and frees all of it when it ends. If answers
are staggered, some end while others grow, and the cache never holds all of them at full length; if they began together,
it does. So the peak is looked for over the time to come (the Past-Future scheduler, Gong et al., ASPLOS 2025): how long
each answer has been coming is known, and how long answers get, as a share of what was expected of each, is learned from
those that ended.

Pure. Invariants:
- the peak is at least what is held now and at most what all would hold if none ended, never falls with one more
  sequence, and never by a sequence's being larger;
- no sequence is assumed to be longer than all but CHANCE of the answers before: its length is computed from its age and
  a speed that may be wrong by a factor while load rises and no answer has ended yet; what is held now is reported by
  the engine;
- the cache is outgrown at any one moment with a probability of CHANCE at most, as far as answers are independent of
  each other and as long as earlier ones.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.float64]

CHANCE = 0.05
_Z = 1.645  # of the normal distribution, CHANCE lies above
_MEMORY = 128.0  # answers: one that came this many ago counts 1/e
# Initial answers, spread evenly in the logarithm from an eighth of what was expected to all of it: a guess. In three
# public traces (Azure's two of 2023, Mooncake's conversations) half of the answers are no longer than 0.37 of it. If
# all were equally long, all requests at starting replicas would be expected to reach full length together, and
# half-empty engines would count as full until the first answers end.
_PRIOR, _SPREAD_DOUBLINGS = 4.0, 3
_SELDOM = 0.01  # the share of answers that may get longer than any that is remembered

_STEPS_PER_DOUBLING = 4
_SHARES = 2.0 ** (np.arange(-4 * _STEPS_PER_DOUBLING, 3 * _STEPS_PER_DOUBLING + 1) / _STEPS_PER_DOUBLING)
_BOUNDS: list[float] = _SHARES.tolist()  # one is looked up in these in a tenth of the time
_EXPECTED = int(np.searchsorted(_SHARES, 1.0))
_PRIOR_FROM = _EXPECTED - _SPREAD_DOUBLINGS * _STEPS_PER_DOUBLING
# Tokens ahead at which the cache is looked at: an interval counts the sequences left at its beginning, at their size at
# its end.
_AHEAD = np.concatenate([[0.0], 4.0 * 1.2 ** np.arange(47)])
_AHEADS: list[float] = _AHEAD.tolist()
_FAR = 2.0  # times the longest answer expected: the search ends there
_REBASE = 1e9
_ONES = np.ones(256)
MOST = np.maximum.reduce  # what an array's `max` calls in the end, after as long again


class AnswerLengths:
    """The share of answers that get longer than a given multiple of their expected length. Recent answers count
    more."""

    __slots__ = ("_counts", "_longer", "_usual", "_weight")

    def __init__(self) -> None:
        # Answers by their share: at most _SHARES[i], and more than that before it; the last, more than all.
        self._counts = np.zeros(len(_SHARES) + 1)
        self._counts[_PRIOR_FROM : _EXPECTED + 1] = _PRIOR / (_EXPECTED + 1 - _PRIOR_FROM)
        self._weight = 1.0  # weight of the next answer: it grows, so that the stored weights need not fade
        self._longer: Tokens | None = None
        self._usual: float | None = None

    def learn(self, tokens: float, expected: float) -> None:
        """An answer had `tokens` tokens, where `expected` were expected; both are above 0."""
        self._counts[bisect_left(_BOUNDS, tokens / expected)] += self._weight
        self._weight *= 1.0 + 1.0 / _MEMORY
        self._longer = self._usual = None
        if self._weight > _REBASE:
            self._counts /= self._weight
            self._weight = 1.0

    def longer(self, shares: Tokens) -> Tokens:
        """The share of answers that get longer than these multiples of the expected length. Never 0."""
        if self._longer is None:
            ended = self._counts.cumsum()
            self._longer = 1.0 - (1.0 - _SELDOM) * np.concatenate([[0.0], ended[:-1] / ended[-1]])
        longer: Tokens = self._longer.take(_SHARES.searchsorted(shares, side="right"))
        return longer

    @property
    def usual_share(self) -> float:
        """Just below the multiple of the expected length by which all but CHANCE of answers have ended."""
        if self._usual is None:
            place = int(np.count_nonzero(self.longer(_SHARES) > CHANCE))
            self._usual = float(_SHARES[min(place, len(_SHARES) - 1)]) * (1.0 - 1e-9)
        return self._usual


def peak_tokens(sequences: Tokens, lengths: AnswerLengths, others: float = 0.0) -> float:
    """The most that sequences will take at any time from now on, except with a probability of CHANCE.

    A column for each, one or more: the tokens that its prompt holds, those expected of its answer (0: it has none), and
    those answered so far. `others`: how many sequences the last two columns represent, half of them each, if they are
    no sequences themselves.
    """
    prompts, answers, generated = sequences
    count = len(prompts)
    longest = float(MOST(answers))
    most = min(bisect_left(_AHEADS, _FAR * longest) + 2, len(_AHEADS))
    grown = np.minimum(generated, lengths.usual_share * answers)[:, None] + _AHEAD[:most]
    shares = grown[:, :-1] / np.maximum(answers, 1.0)[:, None]
    left = lengths.longer(shares)
    left /= left[:, :1].copy()
    size = grown[:, 1:]
    if not answers.all():
        size[answers == 0.0] = 0.0
    size = size + prompts[:, None]
    counts = _ONES[:count]
    if count >= len(_ONES) or others:
        counts = np.ones(count)
        if others:
            counts[-2:] = others / 2.0
    whole = counts @ size
    mean = left
    mean *= size
    size -= mean
    size *= mean  # the variance
    peaks = np.sqrt(counts @ size)
    peaks *= _Z
    peaks += counts @ mean
    np.minimum(peaks, whole, out=peaks)  # of few, chance as a normal distribution has it adds more than there are
    return float(MOST(peaks))
