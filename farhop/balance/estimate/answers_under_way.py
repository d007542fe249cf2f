"""A lower bound of the mean answer length, from answers under way and how many end: the mean of censored lengths.

    tokens = (tokens of answers that ended + tokens so far of those under way + GUESS_WORTH * the guess)
             / (answers that ended + GUESS_WORTH),   at most AGES * the mean of those under way so far

The mean over answers that ended is too small while load begins or grows: the short ones end first, and if an answer
takes a minute, nothing is known for a minute. This counts those under way, too (the maximum-likelihood mean of
exponential lengths with right censoring: all exposure over all ends), and applies until as many have ended as are under
way: then those that ended are the better estimate. It is `occupancy` in tokens. Invariants: never negative; 0 if
nothing is under way. Never reads a clock: `now` is in monotonic seconds.
"""

from __future__ import annotations

from farhop.balance.estimate.occupancy import AGES, LEFT_LEAST

GUESS_WORTH = 8.0  # answers: by fewer that ended it would be off by more than a third


class AnswersUnderWay:
    """Answers of one kind. Pass the same expected speed (tokens a second) when an answer begins and when it is over."""

    __slots__ = ("_ended", "_offset", "_per_s", "_tokens", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self._per_s = self._offset = 0.0  # of all under way, by now: _per_s * now - _offset tokens
        self._tokens = self._ended = 0.0  # of those that are over; how many of them ended

    def began(self, tokens_per_s: float, now: float) -> None:
        """An answer begins, at this expected speed."""
        self.in_flight += 1
        self._per_s += tokens_per_s
        self._offset += tokens_per_s * now

    def over(self, tokens_per_s: float, began_at: float, tokens: float, *, ended: bool) -> None:
        """An answer that began at `began_at` is over after `tokens` tokens: it `ended`, or was broken off before its
        end.
        """
        self.in_flight -= 1
        self._per_s -= tokens_per_s
        self._offset -= tokens_per_s * began_at
        self._tokens += tokens
        if ended:
            self._ended += 1.0
            most = max(LEFT_LEAST, float(self.in_flight))
            if self._ended > most:
                self._tokens, self._ended = self._tokens * most / self._ended, most

    def least_tokens(self, now: float, thought: float) -> float:
        """See the module's docstring."""
        if self._ended >= self.in_flight:
            return 0.0
        so_far = max(0.0, self._per_s * now - self._offset)
        tokens = (self._tokens + so_far + GUESS_WORTH * thought) / (self._ended + GUESS_WORTH)
        return min(tokens, AGES * so_far / self.in_flight)
