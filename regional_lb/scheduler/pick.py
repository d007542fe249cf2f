"""Picks the replica for a request: keeps those with room, scores them, and lets the policy choose.

Now and then the least known of the replicas that may be as good is tried instead.

Room (`Table.room`) is what makes late binding work: if no replica has it, the request waits here, where it can still go
to the first replica that has room again. Never reserves: the flow does, before anything else can happen.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
from numpy import empty, ndarray  # each `np.` of numpy's lazy module is a look-up of its own

from farhop.balance.estimate.cost import LONG_TOKENS, prefill_work
from farhop.balance.estimate.residual import corrected
from farhop.balance.prefix import chain
from regional_lb.fleet.blocks import Known
from regional_lb.fleet.table import ANY, LEAST, ScoreInputs
from regional_lb.scheduler.deferred import NO_DEFERRED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from random import Random

    from numpy.typing import NDArray

    from farhop.balance.estimate.cost import Amount
    from regional_lb.fleet.table import Column, Hits, Line, Rows, Table
    from regional_lb.scheduler.deferred import Deferred
    from regional_lb.scheduler.policy import Need, Policy
    from regional_lb.scheduler.split import Assigned

_PART_MIN = 16
_MASK = np.dtype(np.bool_)
BLOCKING_TOKENS = 1000.0  # shorter prompts are prefilled before many other requests arrive, at any replica
DEFER_S = 2.0  # how long a request waits for a full replica that serves it sooner: others may keep arriving there
EXPLORED_SHARE = 0.05  # the share of picks that look for a less certain replica among near ties
_MORE = 0.05  # by how much less certain it must be: if all are idle, all are uncertain, and there is nothing to find
_OWN, _IN_FLIGHT = 4, 3  # a pick's own columns, and which is ScoreInputs.in_flight
REMEMBERED_MAX = 64  # of how many replicas a pick is remembered: of more, the best


class Scored(msgspec.Struct, frozen=True, gc=False):
    """A replica's score, in its policy's unit, and what is known about it for this request. `work_tokens`: the prefill
    work of the prompt's uncached part (cost.prefill_work); `backlog_tokens`: the same for the requests before it, less
    what is computed already."""

    replica: str
    score: float
    hit_tokens: float
    uncached_tokens: float
    work_tokens: float
    backlog_tokens: float
    prefill_ms_per_token: float
    tpot_ms: float
    exact: bool = False  # whether the hit comes from its KV events, not from an estimate
    delay_ms: float = 0.0  # before its prefill can begin: an adapter has to be loaded


NOTHING = Known({}, {})


class Pick(msgspec.Struct, eq=False, gc=False):
    """The choice and the replicas it was made from, as scored. `chosen` None: no replica has room, or those with room
    are worse than one that soon will have it: `deferred_to`, see Deferral. `explored`: it was chosen to learn how fast
    it is. `prefill`: the replica that prefills the prompt for the chosen one, None if that one does it. `version` is
    the chosen replica's, `assigned` the one that a split gave the request, if one is in force. `residual_ms`: by how
    much first tokens lately came later than predicted. Keeps only the request's sizes: picks are remembered, and a
    prefix chain is large.
    """

    policy: Policy
    _names: tuple[str, ...]
    _prompt_tokens: float
    _output_tokens: float
    _speeds: Column  # shared with other picks
    _columns: bytes  # its own, in half of what arrays take: uncached tokens, score, and the rest of its ScoreInputs
    _room: NDArray[np.bool_] | None
    chosen: Scored | None = None
    _exact: Collection[str] = ()
    _delay: Column | None = None
    _blocking: Column | None = None
    deferred_to: tuple[str, float, int, float] | None = None
    explored: bool = False
    version: str = ""
    assigned: Assigned | None = None
    prefill: Scored | None = None
    residual_ms: float = 0.0

    @property
    def block(self) -> Column:
        return np.frombuffer(self._columns).reshape(_OWN, -1)

    @property
    def _inputs(self) -> ScoreInputs:
        return ScoreInputs(*self._speeds, *self.block[2:])

    def _scored(self) -> list[Scored]:
        """The remembered replicas, in the table's order."""
        inputs, (uncached, score) = self._inputs, self.block[:2]
        delay = np.zeros(len(score)) if self._delay is None else self._delay
        work = work_tokens(uncached, self._prompt_tokens)
        told = uncached, work, score, inputs.backlog_tokens, inputs.prefill_ms_per_token, inputs.tpot_ms, delay
        return [
            Scored(name, ms, self._prompt_tokens - left, left, own, backlog, prefill, tpot, name in self._exact, late)
            for name, left, own, ms, backlog, prefill, tpot, late in zip(
                self._names, *(of.tolist() for of in told), strict=True
            )
        ]

    def terms(self) -> dict[str, dict[str, float]]:
        """The terms of each replica's score, if scores are milliseconds: they add up to the score. Empty for policies
        with another unit."""
        policy = self.policy
        if policy.unit != "ms":
            return {}
        added = {"adapter": self._delay, "blocking": self._blocking}
        more = {of: ms for of, ms in added.items() if ms is not None}
        uncached, own_ms = self.block[:2]
        work = work_tokens(uncached, self._prompt_tokens)
        for ms in more.values():
            own_ms = own_ms - ms
        terms = policy.terms(self._inputs, work, self._output_tokens, own_ms) | more
        parts = zip(*(ms.tolist() for ms in terms.values()), strict=True)
        return {name: dict(zip(terms, part, strict=True)) for name, part in zip(self._names, parts, strict=True)}

    @property
    def split(self) -> str:
        """Why it has this version, as one of a few words: "" if no split decided, `fallback` if another version
        served."""
        if self.assigned is None:
            return ""
        return self.assigned.why.partition(" ")[0] if self.version == self.assigned.version else "fallback"

    @property
    def prefill_ms(self) -> float:
        """Milliseconds until the prompt is prefilled, including the work before it, at the replica that does it; 0 if
        none was chosen."""
        one = self.prefill or self.chosen
        if one is None:
            return 0.0
        return (one.backlog_tokens + one.work_tokens) * one.prefill_ms_per_token + one.delay_ms

    @property
    def predicted_ms(self) -> float:
        """Milliseconds until the first token, by what is known about the chosen replica: half of the step that it is
        at, if any, and one that takes as long as the longer of the prompt and a token of those under way. 0 without
        one."""
        chosen = self.chosen
        if chosen is None:
            return 0.0
        names = self._names
        busy = chosen.replica in names and self.block.item(_IN_FLIGHT, names.index(chosen.replica)) > 0.0
        return max(self.prefill_ms, chosen.tpot_ms) + (0.5 * chosen.tpot_ms if busy else 0.0)

    @property
    def ttft_ms(self) -> float:
        """The promised time to the first token (ms): `predicted_ms` corrected by `residual_ms`; 0 if none was
        chosen."""
        return corrected(self.predicted_ms, self.residual_ms) if self.chosen is not None else 0.0

    @property
    def most_cached_tokens(self) -> float:
        """The most tokens of its prompt that any of the remembered replicas has cached."""
        return self._prompt_tokens - float(LEAST(self.block[0]))

    @property
    def ranked(self) -> tuple[Scored, ...]:
        """The replicas, best first. Built when asked for, since hardly any pick is looked at. Not every policy takes
        one of the best: the chosen one comes last if it is not among those remembered.
        """
        best = tuple(sorted(self._scored(), key=attrgetter("score")))
        return best if self.chosen is None or self.chosen.replica in self._names else (*best, self.chosen)

    def ready(self) -> Iterator[str]:
        """The remembered ones with room, best first: as many as are asked for."""
        for place in self.block[1].argsort(kind="stable").tolist():
            if self._room is None or self._room.item(place):
                yield self._names[place]

    @property
    def full(self) -> tuple[str, ...]:
        """The remembered ones without room."""
        if self._room is None:
            return ()
        return tuple(name for name, room in zip(self._names, self._room.tolist(), strict=True) if not room)


def work_tokens(uncached: Amount, prompt_tokens: float) -> Amount:
    """See cost.prefill_work."""
    return prefill_work(uncached, prompt_tokens) if prompt_tokens >= LONG_TOKENS else uncached


def _latest_ms(need: Need, table: Table, to_prefill: Column) -> Column:
    """The longest time (ms) that each replica takes for the request, if it is slower than estimated by twice its
    uncertainty. `to_prefill`: tokens, the request's own and those before it."""
    prefill_ms = to_prefill * table.prefill_ms_per_token
    latest_ms: Column = (1.0 + 2.0 * table.uncertainty) * (prefill_ms + need.output_tokens * table.tpot_ms)
    return latest_ms


def _work(table: Table, work: Column, backlog: Column, row: int) -> tuple[float, float, float, float]:
    """One replica's work: tokens to prefill for the prompt and before it, ms for each of them, and ms per answer
    token."""
    return (
        work.item(row),
        backlog.item(row),
        table.prefill_ms_per_token.item(row),
        table.tpot_ms.item(row),
    )


def _surest(need: Need, table: Table, to_prefill: Column, ready: Column) -> int:
    """The replica with room that finishes first if every one is as slow as its uncertainty allows."""
    return int(np.where(ready < inf, _latest_ms(need, table, to_prefill), inf).argmin())


def uncached_tokens(need: Need, table: Table, hits: Hits, known: Known = NOTHING) -> Column:
    """The uncached tokens of the prompt at each row. `hits`: by place, how many of its bytes the mirrors say are held;
    `known` (KV events) takes precedence.
    """
    uncached: Column = empty(len(table.of.names))
    uncached.fill(need.prompt_tokens)  # np.full takes three times as long
    for held, places in hits:
        left = max(need.prompt_tokens - held / need.bytes_per_token, 0.0)
        if isinstance(places, ndarray) and places.dtype is _MASK:
            np.putmask(uncached, cast("NDArray[np.bool_]", places), left)  # a masked assignment takes thrice as long
        else:
            uncached[places] = left
    if known is not NOTHING:
        at = table.of.at
        for name, tokens in known.least.items():
            if name in at:
                uncached[at[name]] = min(uncached[at[name]], max(need.prompt_tokens - tokens, 0.0))
        for name, tokens in known.exact.items():
            if name in at:
                uncached[at[name]] = max(need.prompt_tokens - tokens, 0.0)
    return uncached


def pick(
    need: Need,
    table: Table,
    hits: Hits,
    policy: Policy,
    now: float,
    rng: Random,
    known: Known = NOTHING,
    delay_ms: Column | None = None,
    *,
    waited_s: float = 0.0,
    home: str = "",
    line: Line | None = None,
    deferred: Deferred = NO_DEFERRED,
) -> Pick:
    """Choose among the rows of `table`: at least one, all of them healthy and serving the model. `home`: where its
    session was, which decides only near ties. `hits`, `known`: see uncached_tokens. `delay_ms`: what the request waits
    at each row before its prefill can begin; policies that score in ms count it. `waited_s`: in the queue; for
    DEFER_S none is chosen rather than a replica much worse than one that only has to finish its prompts and those of
    all that wait for it (`deferred`), or for as long as the chosen one's prefill would delay those who come. `line`:
    see Table.room.
    """
    # -- the score of every replica
    uncached = uncached_tokens(need, table, hits, known)
    long = need.prompt_tokens >= LONG_TOKENS
    work = prefill_work(uncached, need.prompt_tokens) if long else uncached  # as work_tokens does, without its frame
    backlog = table.backlog_left(now)
    score = policy.score(need, table, work, backlog, now)
    if delay_ms is not None and policy.unit == "ms":
        score = score + delay_ms
    blocking_ms = policy.blocking_ms(table, work) if need.prompt_tokens >= BLOCKING_TOKENS else None
    if blocking_ms is not None:
        score = score + blocking_ms
    # -- the best one that has room
    room = table.room(uncached, need.output_tokens, now, line)
    # Mostly all have room: looking for the first one without costs a sixth of masking.
    all_room = room.item(room.argmin())
    ready = score if all_room else np.where(room, score, inf)
    best = int(ready.argmin())
    names = table.of.names
    chosen, deferred_to, explored = None, None, False
    best_score = ready.item(best)
    # -- or none: a full one will soon serve it better
    if not all_room and best_score < inf and policy.waits_ms is not None:
        most_s = DEFER_S
        if blocking_ms is not None:
            most_s = _most_s(need, table, backlog + work, blocking_ms.item(best), best, waited_s, now)
        if waited_s < most_s:
            sooner = _sooner(need, table, uncached, score, best_score - policy.waits_ms, deferred, now)
            if sooner is not None:
                deferred_to = names[sooner], work.item(sooner), _node(need, uncached.item(sooner)), most_s
    # -- or another near tie: the session's, or one to learn from; but one that meets the deadline
    if best_score < inf and deferred_to is None:
        row = policy.choose(best, ready, need, table, rng)
        at_home = _tied(home, best, ready, table, policy) if home else None
        if at_home is not None:
            row = at_home
        elif policy.explores and rng.random() < EXPLORED_SHARE:
            usual, row = row, _explored(need, table, backlog + work, ready, policy, row, now, rng)
            explored = row != usual
        own, before, per_token_ms, tpot_ms = _work(table, work, backlog, row)
        if policy.explores:  # it might miss the request's deadline, by _latest_ms
            latest_ms = (1.0 + 2.0 * table.uncertainty.item(row)) * (
                (before + own) * per_token_ms + need.output_tokens * tpot_ms
            )
            if latest_ms > (need.deadline - now) * 1e3:
                row = _surest(need, table, backlog + work, ready)
                own, before, per_token_ms, tpot_ms = _work(table, work, backlog, row)
        left = uncached.item(row)
        chosen = Scored(
            names[row], score.item(row), need.prompt_tokens - left, left, own, before, per_token_ms, tpot_ms,
            names[row] in known.exact, delay_ms.item(row) if delay_ms is not None else 0.0,
        )  # fmt: skip
    # -- what is remembered of it all
    speeds = table.speeds()
    columns: Sequence[Any] = (uncached, score, backlog, table.in_flight)
    if len(names) > REMEMBERED_MAX:  # the best of them are remembered
        best_rows = least(score, REMEMBERED_MAX)
        names = tuple([names[place] for place in best_rows.tolist()])
        speeds, columns = speeds[:, best_rows], [column[best_rows] for column in columns]
        room = room[best_rows]
        delay_ms = delay_ms[best_rows] if delay_ms is not None else None
        blocking_ms = blocking_ms[best_rows] if blocking_ms is not None else None
    return Pick(
        policy, names, need.prompt_tokens, need.output_tokens, speeds, b"".join(columns),
        None if all_room else room, chosen, known.exact, delay_ms, blocking_ms, deferred_to, explored,
    )  # fmt: skip


def _tied(home: str, best: int, ready: Column, table: Table, policy: Policy) -> int | None:
    """The place of the replica where the session was, if its score is a near tie of the best; None otherwise."""
    place = table.of.at.get(home)
    if place is None or not (policy.ties_floor or policy.ties_share):
        return None
    limit = ready.item(best) + max(policy.ties_floor, policy.ties_share * ready.item(best))
    return place if ready.item(place) <= limit else None


def _explored(
    need: Need, table: Table, to_prefill: Column, ready: Column, policy: Policy, chosen: int, now: float, rng: Random
) -> int:
    """The least certain replica that may be as good as the chosen one; the chosen one if there is none.

    A replica may be as good if it would be a near tie when faster than estimated by its uncertainty. Certain parts of
    its score, such as a prefix that it lacks, must not be worse.
    """
    uncertainty = table.uncertainty
    most = uncertainty.item(chosen) + _MORE
    if uncertainty.item(uncertainty.argmax()) < most:
        return chosen
    limit = ready.item(chosen) + max(policy.ties_floor, policy.ties_share * ready.item(chosen))
    prefill_ms = to_prefill * table.prefill_ms_per_token
    may = ready - uncertainty * policy.at_stake(need, table, prefill_ms) <= limit
    may &= (1.0 - uncertainty) * prefill_ms <= limit
    may &= _latest_ms(need, table, to_prefill) <= (need.deadline - now) * 1e3
    may &= uncertainty >= most
    uncertain = np.where(may, uncertainty, 0.0)
    greatest = uncertain.item(uncertain.argmax())
    if not greatest:
        return chosen
    rows = (uncertain >= greatest - 1e-3).nonzero()[0]
    return int(rows[int(rng.random() * len(rows))])


def _most_s(
    need: Need, table: Table, to_prefill: Column, blocking_ms: float, best: int, waited_s: float, now: float
) -> float:
    """How long (s) the request may wait by choice rather than take the last replica that is open to others: until that
    has cost as much as it spares them, which at worst costs twice what knowing the wait would have (ski rental). But
    not so long that its deadline comes near: by then as much time must be left again as it takes."""
    takes_s = _latest_ms(need, table, to_prefill).item(best) / 1e3
    spare_s = need.deadline - now - 2.0 * takes_s
    return max(DEFER_S, min(blocking_ms / 1e3, waited_s + spare_s))


def _sooner(
    need: Need, table: Table, uncached: Column, score: Column, below: float, deferred: Deferred, now: float
) -> int | None:
    """The place of the replica that lacks only prefill room and would still serve the request best, after all that wait
    for it, if its score is then below this. None if there is none.

    Otherwise a long context would go to whichever replica is free at the moment, be computed again, and be held twice
    from then on. But of n requests that wait for the same prefix, t each behind the one before, all together n^2 t / 2,
    a second replica that holds it would save half: whoever has it computed there spares the others n / 4 of its own
    wait, and counts that.
    """
    score = np.where(table.fits(uncached, need.output_tokens, now), score, inf)
    for name, tokens in deferred.tokens.items():
        place = table.of.at.get(name)
        if place is not None:
            alike = deferred.alike.get((name, _node(need, uncached.item(place))), 0)
            score[place] += tokens * table.prefill_ms_per_token.item(place) * (1.0 + 0.25 * alike)
    best = int(score.argmin())
    return best if score.item(best) < below else None


def _node(need: Need, uncached: float) -> int:
    """The last node of the request's prefix within what is cached of it; 0 if nothing is."""
    depth = min(chain.depth_at(int((need.prompt_tokens - uncached) * need.bytes_per_token + 0.5)), len(need.chain))
    return need.chain[depth - 1] if depth else 0


def least(score: Column, most: int) -> Rows:
    """The rows of the `most` lowest scores, in no order. There are more rows than that.

    Very many rows are divided into `most` parts: a score above the largest of the parts' minima is not among the
    lowest. Rows equal to it fill up the number: at most as many parts as there are rows below it have a minimum below
    it.
    """
    size = len(score) // most
    if size < _PART_MIN:
        few: Rows = np.argpartition(score, most)[:most]
        return few
    firsts: Rows = score[: size * most].reshape(most, size).argmin(axis=1) + np.arange(0, size * most, size)
    bound = score[firsts].max()
    below: Rows = (score < bound).nonzero()[0]
    if len(below) > most:
        return below[np.argpartition(score[below], most)[:most]]
    at = firsts[score[firsts] == bound]
    return np.concatenate((below, at[: most - len(below)]))


def least_prefill(need: Need, table: Table, hits: Hits, known: Known = NOTHING) -> tuple[float, float]:
    """Uncached tokens, and ms to prefill them, at the replica where that would be shortest if it were idle. At least
    one row."""
    uncached = uncached_tokens(need, table, hits, known)
    prefill_ms = work_tokens(uncached, need.prompt_tokens) * table.prefill_ms_per_token
    place = int(prefill_ms.argmin())
    return uncached.item(place), prefill_ms.item(place)


def expected_wait_ms(table: Table, queued: int, now: float, elsewhere: int = 0) -> float:
    """How long one more request would wait before its prefill begins, in ms, at these healthy replicas; 0 if there are
    none.

    With room: the smallest prefill backlog of the replicas with room. Without: by Little's law a request leaves a
    replica every service_ms / in_flight, and all that are queued, here or in an engine, go first, as do those served
    `elsewhere`. But never sooner than the smallest backlog is done: while an engine works on a long prefill no request
    begins there, however many leave.
    """
    if not len(table):
        return 0.0
    backlog_ms = table.backlog_tokens * table.prefill_ms_per_token
    if queued == 0:
        room = table.room(0.0, 0.0, now)
        if ANY(room):
            return float(LEAST(backlog_ms[room]))
    fresh = table.fresh(now)
    # Others may use the engine, too: the number that it reports running counts if it is more than ours.
    running = np.maximum(np.maximum(table.in_flight, np.where(fresh, table.running, 0.0)), 1.0)
    ahead = queued + elsewhere + float(table.waiting[fresh].sum())
    return max((ahead + 1.0) / float((running / table.service_ms).sum()), float(LEAST(backlog_ms)))


def prefill_wait_ms(table: Table, need: Need, queued: int, now: float, line: Line | None = None) -> float:
    """How long the request would wait, in ms, at replicas that only have to finish prefills before they begin it and
    those queued: slots and KV cache would hold them all. Infinite if there is no such replica.

    Where few requests are under way Little's law expects hardly any to leave, and so nobody to begin, although
    everybody may as soon as the prompts before it are prefilled. `line`: those queued and on time.
    """
    uncached = whole = 0.0
    if line is not None:
        uncached, whole = line.uncached_tokens, line.prompt_tokens + line.answer_tokens
    fits = table.fits(need.prompt_tokens, need.output_tokens, now)
    each = queued / max(1, int(fits.sum()))  # of those queued, at each replica
    fits &= table.fits(need.prompt_tokens, need.output_tokens + each * whole, now)
    fits &= table.slots - table.in_flight > each
    per_token_ms = table.prefill_ms_per_token[fits]
    if not len(per_token_ms):
        return inf
    tokens_per_ms = float((1.0 / per_token_ms).sum())  # of all of them
    return float(LEAST(table.backlog_tokens[fits] * per_token_ms)) + queued * uncached / tokens_per_ms
