"""Compares replicas of the same model: which one fails more, or has become slower, than the others.

Failures: a share of its latest answers, a moving average. Of five or more, an outlier lies above the median by
3 × 1.4826 × MAD (three standard deviations, were they normal), and by a margin at least; of fewer, where a MAD says
nothing, above the median of the others by a wider margin. If one tenant had most of the failures, and others' requests
were answered well lately, only the others' answers count: that tenant's requests may be what no engine can bear.

Slowness: the time per uncached prompt token until the first token. One such figure proves nothing: a prefix that the
engine had evicted makes it 50 times too long, and a stall delays all requests under way alike. So requests under way
together count as one, by the fastest. An outlier is slow in each of its last RUN of these, at least one of which had
most of its prompt to compute. Slow means three things: `factor` times its own usual (a median over minutes, so that a
slower kind of GPU is not slow), by more than its peers exceeded theirs in the same time, and `factor` times as slow as
they are.

Invariants: a single replica is never an outlier, nor is one whose latest answers were good; what affects all replicas
alike moves the reference as well; a peer that is faster than usual makes no other slow. Never ejects, and never reads a
clock: `now` is monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from math import exp, inf, log
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from farhop.balance.health.replica import OTHERS_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FAILING = "fails more than its peers"
SLOW = "slower than its peers, by its own usual"

ANSWERS_MIN = 10  # fewer say nothing about a replica's failures
WELL_MIN = 3  # after this many good answers in a row, earlier failures are over
_WEIGHT = 0.1  # of one answer in the share that fails
_NONE = 0.005  # a smaller share counts as none: then a good answer costs nothing to note
_LEAD_MAX = 50  # after so many of one tenant's failures, as many of others' until another's count as most
_FADE_S = 60.0  # how fast failures fade without further answers
_PEERS_MIN = 5
_DEVIATIONS = 3.0 * 1.4826
_MARGIN, _MARGIN_FEW = 0.3, 0.5  # in shares of failures

# Healthy replicas under the traces and scenarios at hand (chats, trees, agents, Azure's and Mooncake's prompts, 0.5 to
# 1.2 of capacity) reach at most 2.0 times by five in a row and 2.7 by three; one that is 5 times slower, 4 to 9.
RUN = 5
RUN_S = 60.0  # what is older than this says nothing of now
USUAL_MIN = 10  # samples before its usual is known
USUAL_S, USUAL_EVERY_S = 600.0, 2.0  # a replica slow for minutes becomes usual, not an outlier for ever
_USUAL_MAX = int(USUAL_S / USUAL_EVERY_S)
_THEN_MIN = 2  # first tokens of a peer in the same time
_THEN_S = 15.0  # how short that time may be, and how old the last of a run
_SUSPECTS_MAX = 16  # the most that are compared with all others at a time: if all of 1,000 are slow, none is an outlier
_STEP_LEAST = 0.1


class First(NamedTuple):
    """A first token: when its request was sent, when it came, and the logarithm of milliseconds per uncached token;
    `sure` where most of the prompt was to be computed, whatever was cached."""

    sent_at: float
    at: float
    log_ms: float
    sure: bool


class AnswerRecord:
    """What one replica's answers were like. `failing` is a share 0..1, `answers` since it was last forgiven and `well`
    in a row (both counted to a bound). `tenant` had most of the failures, `lead` more than all others; `others_failing`
    is the share among the others' answers, the last good one of which came at `others_at`. `run` are its latest first
    tokens, `usual` its usual `log_ms`, None while unknown. On `trial` it was taken out as slow, and has not shown yet
    that it is not: its next first token does."""

    __slots__ = (
        "_usually", "answers", "failing", "lead", "others_at", "others_failing", "run", "tenant", "trial", "usual",
        "usual_failing", "well",
    )  # fmt: skip

    def __init__(self) -> None:
        self.failing, self.answers, self.well = 0.0, 0, 0
        self.tenant, self.lead, self.others_failing, self.others_at = "", 0, 0.0, -inf
        self.usual_failing = 0.0  # the least median of its peers when they were last compared
        self.run: deque[First] = deque(maxlen=RUN)
        self.usual: float | None = None
        self.trial = False
        self._usually: deque[tuple[float, float]] = deque(maxlen=_USUAL_MAX)

    def failed(self, tenant: str, others_at: float) -> None:
        """An answer to this tenant failed; other tenants were last answered well at `others_at`."""
        if not self.failing:
            self.tenant, self.lead, self.others_failing = tenant, 0, 0.0
        self.failing = _more(self.failing)
        if tenant == self.tenant:
            self.lead = min(self.lead + 1, _LEAD_MAX)
        else:
            self.others_failing = _more(self.others_failing)
            self.lead -= 1
            if self.lead < 0:
                self.tenant, self.lead = tenant, 1
        if tenant == self.tenant:
            self.others_at = others_at

    def succeeded(self, tenant: str) -> None:
        """An answer to this tenant is good."""
        self.failing = _less(self.failing)
        if tenant != self.tenant:
            self.others_failing = _less(self.others_failing)

    def faults(self, now: float) -> float:
        """The share of failures that says something about the replica."""
        return self.others_failing if now - self.others_at < OTHERS_S else self.failing

    def began(self, first: First) -> None:
        """A first token came."""
        run = self.run
        if run and first.sent_at < run[-1].at:  # beside the one before: the same moment of the engine
            if first.log_ms < run[-1].log_ms:
                run[-1] = run[-1]._replace(log_ms=first.log_ms, sure=first.sure)
            return
        run.append(first)
        usually = self._usually
        if not usually or first.at - usually[-1][0] >= USUAL_EVERY_S:
            while usually and first.at - usually[0][0] > USUAL_S:
                usually.popleft()
            usually.append((first.at, first.log_ms))
            self.usual = median([log_ms for _, log_ms in usually]) if len(usually) >= USUAL_MIN else None

    def lately(self, now: float) -> tuple[First, ...]:
        """The first tokens it is judged by: its last RUN, on trial its last. Empty where they are too few or old, or
        may all be slow since nothing was cached there after all."""
        wanted = 1 if self.trial else RUN
        taken = tuple(self.run)[-wanted:]
        fresh = len(taken) == wanted and now - taken[0].at <= RUN_S and now - taken[-1].at <= _THEN_S
        return taken if fresh and any(first.sure for first in taken) else ()

    def then(self, since: float) -> float | None:
        """Its median `log_ms` since a moment; None where too little is known."""
        logs = [first.log_ms for first in self.run if first.at >= since]
        return median(logs) if len(logs) >= _THEN_MIN and self.usual is not None else None

    def forgive(self, *, slow: bool) -> None:
        """The replica is out, as `slow` or otherwise; its record starts afresh when it is back, except for its usual
        speed."""
        self.failing, self.answers, self.well = 0.0, 0, 0
        self.tenant, self.lead, self.others_failing, self.others_at = "", 0, 0.0, -inf
        self.run.clear()
        self.trial = slow


class Outliers:
    """The records by replica. `factor`: how many times slower than usual an outlier is; 0: none is, and nothing is
    recorded."""

    def __init__(self, factor: float) -> None:
        self._margin = log(factor) if factor else inf
        self.records: dict[str, AnswerRecord] = {}
        self._compared_at: float | None = None

    def adopt(self, names: Iterable[str]) -> None:
        """Take the replicas of a new view; those that left are forgotten."""
        self.records = {name: self.records.get(name) or AnswerRecord() for name in names}

    def answered(self, name: str, ok: bool, tenant: str = "", others_at: float = -inf) -> None:
        """An answer to a tenant's request began, or failed to while other tenants were last answered well at
        `others_at`. Replicas that have left are ignored."""
        record = self.records.get(name)
        if record is None or (ok and not record.failing and record.answers == ANSWERS_MIN):
            return  # nearly always
        record.answers = min(record.answers + 1, ANSWERS_MIN)
        record.well = min(record.well + 1, WELL_MIN) if ok else 0
        if not ok:
            record.failed(tenant, others_at)
        elif record.failing:
            record.succeeded(tenant)

    def began(
        self, name: str, elapsed_ms: float, tokens: float, step_ms: float, now: float, *, sure: bool = True
    ) -> None:
        """A first token came `elapsed_ms` after dispatch; `tokens` (above 0) are the uncached ones before it and its
        own; not `sure`: more than those were expected to be cached.

        `step_ms`, a decode step, is subtracted: the request waits for one before its own prompt's turn comes.
        """
        record = self.records.get(name)
        if record is None or self._margin == inf or elapsed_ms <= 0.0:
            return
        log_ms = log(max(elapsed_ms - step_ms, _STEP_LEAST * elapsed_ms) / tokens)
        record.began(First(now - elapsed_ms / 1e3, now, log_ms, sure))
        if record.trial and record.usual is not None and record.run[-1].log_ms - record.usual < self._margin:
            record.trial = False

    def failing(self, name: str) -> float:
        """The share of its latest answers that failed."""
        record = self.records.get(name)
        return record.failing if record is not None else 0.0

    def excess(self, name: str, now: float) -> float:
        """By how much its failing share exceeds what is usual among its peers, 0..1. 0 for one without peers."""
        record = self.records.get(name)
        return max(0.0, record.faults(now) - record.usual_failing) if record is not None else 0.0

    def on_trial(self, name: str) -> bool:
        """Whether the replica was ejected as slow, and nothing has yet shown that it is not."""
        record = self.records.get(name)
        return record is not None and record.trial

    def forgive(self, name: str, *, slow: bool = False) -> None:
        """The replica was taken out, as `slow` or for another reason; its record starts again when it is back."""
        self.records[name].forgive(slow=slow)

    def found(self, by_model: Mapping[str, tuple[str, ...]], now: float) -> list[tuple[str, str]]:
        """The outliers and the reason for each, the worst first. Call it about once a second: it also lets old failures
        fade."""
        self._fade(now)
        found: dict[str, tuple[float, str]] = {}
        usual: dict[str, float] = {}
        for names in by_model.values():
            records = [(name, self.records[name]) for name in names]
            middle = self._usual(records, now)
            for name, _ in records:
                usual[name] = min(usual.get(name, inf), middle)
            rates = [(name, r.faults(now)) for name, r in records if r.answers >= ANSWERS_MIN]
            for name, above in _above(rates, _MARGIN, _MARGIN_FEW):
                if self.records[name].well < WELL_MIN:
                    found.setdefault(name, (above, FAILING))
            for name, above in self._slow(records, now):
                found.setdefault(name, (above, SLOW))
        for name, middle in usual.items():
            self.records[name].usual_failing = middle
        worst_first = sorted(found.items(), key=lambda item: (item[1][1] != FAILING, -item[1][0], item[0]))
        return [(name, why) for name, (_, why) in worst_first]

    def _usual(self, records: list[tuple[str, AnswerRecord]], now: float) -> float:
        """The median of all; of few, the minimum: two failing replicas of three must not set the standard."""
        if len(records) == 1:
            return 1.0
        shares = [record.faults(now) for _, record in records]
        return median(shares) if len(shares) >= _PEERS_MIN else min(shares)

    def _slow(self, records: list[tuple[str, AnswerRecord]], now: float) -> list[tuple[str, float]]:
        """Which of these replicas are slow compared with the others, and by how much beyond the margin."""
        suspects = []
        for name, record in records:
            lately = record.lately(now)
            if lately and record.usual is not None:
                least = min(first.log_ms for first in lately)
                if least - record.usual >= self._margin:
                    since = min(lately[0].sent_at, now - _THEN_S)
                    suspects.append((least - record.usual, least, since, name))
        found = []
        for slower, least, since, name in sorted(suspects, reverse=True)[:_SUSPECTS_MAX]:
            others = [
                (log_ms, log_ms - other.usual)
                for peer, other in records
                if peer != name and (log_ms := other.then(since)) is not None and other.usual is not None
            ]
            if others:
                # One that is faster than usual (after a long stall its usual is too slow) makes no other slow.
                theirs = max(0.0, median([slower for _, slower in others]))
                above = min(slower - theirs, least - median([log_ms for log_ms, _ in others]))
                if above >= self._margin:
                    found.append((name, above))
        return found

    def _fade(self, now: float) -> None:
        if self._compared_at is not None and now > self._compared_at:
            keep = exp((self._compared_at - now) / _FADE_S)
            for record in self.records.values():
                record.others_failing *= keep
                faded = record.failing * keep
                record.failing = faded if faded >= _NONE else 0.0
        self._compared_at = now


def _more(share: float) -> float:
    return share + _WEIGHT * (1.0 - share)


def _less(share: float) -> float:
    return 0.0 if share < _NONE else share * (1.0 - _WEIGHT)


def _above(rates: list[tuple[str, float]], margin: float, margin_few: float) -> list[tuple[str, float]]:
    """Which replicas' numbers are too far above those of the others, and by how much. See the module's docstring."""
    if len(rates) < 2 or max(number for _, number in rates) <= margin:
        return []
    numbers = [number for _, number in rates]
    if len(rates) >= _PEERS_MIN:
        middle = median(numbers)
        limit = middle + max(margin, _DEVIATIONS * median(abs(number - middle) for number in numbers))
        return [(name, number - middle) for name, number in rates if number > limit]
    found = []
    for place, (name, number) in enumerate(rates):
        middle = median(numbers[:place] + numbers[place + 1 :])
        if number > middle + margin_few:
            found.append((name, number - middle))
    return found
