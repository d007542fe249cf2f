"""How each replica does beside those that serve the same model: who fails, or has become slow, more than the others.

Failures: a share of its latest answers, a moving average. Slowness: the time per uncached token until its first token,
lately, against its own usual: so prompts compare, and a slower kind of GPU is no outlier among faster ones, since each
is held against itself. Of five or more, an outlier lies above the median by 3 × 1.4826 × MAD (three standard
deviations, were they normal), and by a margin at least; of fewer, where a MAD says nothing, above the median of the
others by a wider margin. Alone, nobody is one. When all are slow or fail alike, the median moves with them.

Never ejects, and never reads a clock: `now` is monotonic seconds.
"""

from __future__ import annotations

from math import exp, inf, log
from statistics import median
from typing import TYPE_CHECKING

from farhop.balance.ewma import Ewma

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FAILING = "fails more than its peers"
SLOW = "slower than its peers, by its own usual"

ANSWERS_MIN = 10  # fewer say nothing of a replica's failures
FIRSTS_MIN = 20  # first tokens before its usual speed counts as known
_WEIGHT = 0.1  # of one answer in the share that fails
_NONE = 0.005  # a share below it is none: then an answer that is well costs nothing to note
_FADE_S = 60.0  # how fast failures fade where nothing more is heard
_LATELY_S, _USUALLY_S = 15.0, 600.0  # what stays slow for minutes becomes usual, rather than an outlier for ever
_PACED_S = 0.2  # how often a pace is taken down
_PEERS_MIN = 5
_DEVIATIONS = 3.0 * 1.4826
_MARGIN, _MARGIN_FEW = 0.3, 0.5  # in shares of failures
_FEW = 2.0  # times the factor, for slowness among few


class Record:
    """One replica's doings. `failing` is a share 0..1, `answers` since it was last forgiven (counted to a bound)."""

    __slots__ = ("_lately", "_paced_at", "_usually", "answers", "failing", "firsts", "lately", "usual_failing")

    def __init__(self) -> None:
        self.failing, self.answers, self.firsts = 0.0, 0, 0
        self.lately = 0  # first tokens since it was last forgiven, counted to a bound
        self.usual_failing = 0.0  # the least median of its peers when they were last compared
        self._lately, self._usually, self._paced_at = Ewma(_LATELY_S), Ewma(_USUALLY_S), -inf

    def began(self, ms_per_token: float, now: float) -> None:
        """A first token came, at this pace. Of many in a short time one is as good as all."""
        if now - self._paced_at >= _PACED_S and self._lately.update(ms_per_token, now):
            self._paced_at = now
            self._usually.update(ms_per_token, now)
            self.firsts = min(self.firsts + 1, FIRSTS_MIN)
            self.lately = min(self.lately + 1, ANSWERS_MIN)

    def slowness(self) -> float | None:
        """Lately against usually, as a logarithm; None while either is not known."""
        lately, usually = self._lately.value, self._usually.value
        if self.firsts < FIRSTS_MIN or self.lately < ANSWERS_MIN or not lately or not usually:
            return None
        return log(lately / usually)

    def forgive(self) -> None:
        """What it did lately counts no more; what is usual for it does."""
        self.failing, self.answers, self.lately = 0.0, 0, 0
        self._lately = Ewma(_LATELY_S)


class Peers:
    """Records by name. `factor`: so many times slower than usual is an outlier; 0: nothing is, and nothing is kept."""

    def __init__(self, factor: float) -> None:
        self._margin_slow = log(factor) if factor else inf
        self._records: dict[str, Record] = {}
        self._compared_at: float | None = None

    def adopt(self, names: Iterable[str]) -> None:
        """These are the replicas now; who left is forgotten."""
        self._records = {name: self._records.get(name) or Record() for name in names}

    def answered(self, name: str, ok: bool) -> None:
        """An answer began, or failed to. Who has left is nobody."""
        record = self._records.get(name)
        if record is None or (ok and not record.failing and record.answers == ANSWERS_MIN):
            return  # nearly always
        record.answers = min(record.answers + 1, ANSWERS_MIN)
        if not ok:
            record.failing += _WEIGHT * (1.0 - record.failing)
        elif record.failing:
            record.failing = 0.0 if record.failing < _NONE else record.failing * (1.0 - _WEIGHT)

    def began(self, name: str, ms_per_token: float, now: float) -> None:
        """A first token came: milliseconds per uncached token, its own and those before it."""
        record = self._records.get(name)
        if record is not None and self._margin_slow < inf:
            record.began(ms_per_token, now)

    def failing(self, name: str) -> float:
        """The share of its latest answers that failed."""
        record = self._records.get(name)
        return record.failing if record is not None else 0.0

    def excess(self, name: str) -> float:
        """By how much that is more than is usual among its peers, 0..1. 0 for one without peers."""
        record = self._records.get(name)
        return max(0.0, record.failing - record.usual_failing) if record is not None else 0.0

    def forgive(self, name: str) -> None:
        """It is out, and begins anew when it is back."""
        self._records[name].forgive()

    def outliers(self, by_model: Mapping[str, tuple[str, ...]], now: float) -> list[tuple[str, str]]:
        """Who is one, and why, the worst first. Call it about once a second: it also lets old failures fade."""
        self._fade(now)
        found: dict[str, tuple[float, str]] = {}
        usual: dict[str, float] = {}
        for names in by_model.values():
            records = [(name, self._records[name]) for name in names]
            middle = self._usual(records)
            for name, _ in records:
                usual[name] = min(usual.get(name, inf), middle)
            told = [(name, r.failing) for name, r in records if r.answers >= ANSWERS_MIN]
            slow = [(name, pace) for name, r in records if (pace := r.slowness()) is not None]
            margin = self._margin_slow
            for name, above in _above(told, _MARGIN, _MARGIN_FEW):
                found.setdefault(name, (above, FAILING))
            for name, above in _above(slow, margin, margin + log(_FEW)):
                found.setdefault(name, (above, SLOW))
        for name, middle in usual.items():
            self._records[name].usual_failing = middle
        worst_first = sorted(found.items(), key=lambda item: (item[1][1] != FAILING, -item[1][0], item[0]))
        return [(name, why) for name, (_, why) in worst_first]

    def _usual(self, records: list[tuple[str, Record]]) -> float:
        """The median of all; of few, the least: two of three that fail are not the measure."""
        if len(records) == 1:
            return 1.0
        shares = [record.failing for _, record in records]
        return median(shares) if len(shares) >= _PEERS_MIN else min(shares)

    def _fade(self, now: float) -> None:
        if self._compared_at is not None and now > self._compared_at:
            keep = exp((self._compared_at - now) / _FADE_S)
            for record in self._records.values():
                faded = record.failing * keep
                record.failing = faded if faded >= _NONE else 0.0
        self._compared_at = now


def _above(told: list[tuple[str, float]], margin: float, margin_few: float) -> list[tuple[str, float]]:
    """Whose number is too far above those of the others, and by how much. See the module's head."""
    if len(told) < 2 or max(number for _, number in told) <= margin:
        return []
    numbers = [number for _, number in told]
    if len(told) >= _PEERS_MIN:
        middle = median(numbers)
        limit = middle + max(margin, _DEVIATIONS * median(abs(number - middle) for number in numbers))
        return [(name, number - middle) for name, number in told if number > limit]
    found = []
    for place, (name, number) in enumerate(told):
        middle = median(numbers[:place] + numbers[place + 1 :])
        if number > middle + margin_few:
            found.append((name, number - middle))
    return found
