"""Which replica: filter (room), score, and let the policy choose among those with room.

Room is what makes late binding work: without it (`Table.room`) the request waits here, where it can still go to
whichever replica frees first. Never reserves: the flow does, in the same breath.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import numpy as np
from numpy import empty, ndarray  # each `np.` of numpy's lazy module is a look-up of its own

from farhop.balance import chain

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from random import Random

    from numpy.typing import NDArray

    from regional_lb.policy import Need, Policy
    from regional_lb.split import Assigned
    from regional_lb.table import Column, Hits, Rows, Table

_PART_MIN = 16
_MASK = np.dtype(np.bool_)
FIELD_MAX = 64  # of how many replicas a pick is remembered: of more, the best


class Scored(msgspec.Struct, frozen=True):
    """A replica's score, in its policy's unit, and what is known of it for this request."""

    replica: str
    score: float
    hit_tokens: float
    uncached_tokens: float
    backlog_tokens: float
    prefill_ms_per_token: float
    tpot_ms: float
    exact: bool = False  # whether what it holds is its own word, not a guess
    delay_ms: float = 0.0  # before its prefill can begin: an adapter is to be loaded


class Known(NamedTuple):
    """What replicas told of their caches themselves, for one prompt: tokens of it by name.

    `exact` is all they hold of it, `least` what they hold at the least.
    """

    exact: Mapping[str, float]
    least: Mapping[str, float]


NOTHING = Known({}, {})


class Pick:
    """The choice and the field it was made from. `chosen` None: nobody has room, or, if that is `declined`, only who is
    worse than somebody who soon will. `prefill`: who computes the prompt for the chosen one, None if that does so.

    `version` is the chosen replica's, `assigned` the one that a split gave the request, if one is in force.
    """

    __slots__ = (
        "_delay", "_exact", "_names", "_prompt_tokens", "_rates", "_room", "_score", "_uncached", "assigned", "chosen",
        "declined", "policy", "prefill", "version",
    )  # fmt: skip

    def __init__(
        self,
        policy: Policy,
        names: tuple[str, ...],
        prompt_tokens: float,
        uncached: Column,
        score: Column,
        rates: Column,
        room: NDArray[np.bool_] | None,
        chosen: Scored | None = None,
        exact: Collection[str] = (),
        delay_ms: Column | None = None,
        *,
        declined: bool = False,
    ) -> None:
        self.policy, self._names, self._prompt_tokens = policy, names, prompt_tokens
        self._uncached, self._score, self._rates, self._room = uncached, score, rates, room
        self._exact, self._delay = exact, delay_ms
        self.chosen, self.declined = chosen, declined
        self.version = ""
        self.assigned: Assigned | None = None
        self.prefill: Scored | None = None

    def scored(self, place: int) -> Scored:
        """One replica of the field."""
        name, rates = self._names[place], self._rates[:, place].tolist()
        delay_ms = self._delay.item(place) if self._delay is not None else 0.0
        return _scored(
            name, self._prompt_tokens, self._uncached.item(place), self._score.item(place), rates, name in self._exact,
            delay_ms,
        )  # fmt: skip

    @property
    def split(self) -> str:
        """Why it has this version, in one word of few: "" if no split decided, `fallback` if another one served."""
        if self.assigned is None:
            return ""
        return self.assigned.why.partition(" ")[0] if self.version == self.assigned.version else "fallback"

    @property
    def prefill_ms(self) -> float:
        """Until the prompt is computed, with all that is before it wherever that is done; 0 if nobody was chosen."""
        one = self.prefill or self.chosen
        if one is None:
            return 0.0
        return (one.backlog_tokens + one.uncached_tokens) * one.prefill_ms_per_token + one.delay_ms

    @property
    def field(self) -> tuple[Scored, ...]:
        """The replicas, best first; spelled out when asked for, since hardly any pick is looked at.

        Not every policy takes one of the best: what it took stands last if it is not among those remembered.
        """
        best = tuple(self.scored(place) for place in self._score.argsort(kind="stable").tolist())
        return best if self.chosen is None or self.chosen.replica in self._names else (*best, self.chosen)

    @property
    def full(self) -> tuple[str, ...]:
        """Those of the field without room."""
        if self._room is None:
            return ()
        return tuple(name for name, room in zip(self._names, self._room.tolist(), strict=True) if not room)


def uncached_tokens(need: Need, table: Table, hits: Hits, known: Known = NOTHING) -> Column:
    """What is left of the prompt to prefill at each row.

    `hits` gives the matched depth of its chain by place, by our mirrors; what is `known` goes before.
    """
    uncached: Column = empty(len(table.of.names))
    uncached.fill(need.prompt_tokens)  # np.full takes three times as long
    for depth, places in hits:
        left = max(need.prompt_tokens - chain.bytes_at(depth) / need.bytes_per_token, 0.0)
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
    choosy: bool = True,
) -> Pick:
    """Choose among the rows of `table`: at least one, all of them healthy and serving the model.

    `hits`, `known`: see uncached_tokens. `delay_ms`: what the request waits at each row before its prefill can begin;
    policies that score in ms count it. `choosy`: better none than one much worse than who only has a prompt to finish.
    """
    uncached = uncached_tokens(need, table, hits, known)
    score = policy.score(need, table, uncached, now)
    if delay_ms is not None and policy.unit == "ms":
        score = score + delay_ms
    room = table.room(uncached, need.output_tokens, now)
    # Mostly all have room: to ask for the first without costs a sixth of what masking does.
    all_room = room.item(room.argmin())
    ready = score if all_room else np.where(room, score, inf)
    best = int(ready.argmin())
    names, prompt_tokens, exact = table.of.names, need.prompt_tokens, known.exact
    chosen, declined = None, False
    if choosy and not all_room and (best_score := ready.item(best)) < inf:
        declined = _worth_waiting(need, table, uncached, score, policy, best_score, now)
    if ready.item(best) < inf and not declined:
        row = policy.choose(best, ready, need, table, rng)
        chosen = _scored(
            names[row], prompt_tokens, uncached.item(row), score.item(row), table.rates_of(row), names[row] in exact,
            delay_ms.item(row) if delay_ms is not None else 0.0,
        )  # fmt: skip
    if len(names) <= FIELD_MAX:
        return Pick(
            policy, names, prompt_tokens, uncached, score, table.rates(), None if all_room else room, chosen, exact,
            delay_ms, declined=declined,
        )  # fmt: skip
    kept = least(score, FIELD_MAX)
    names = tuple([names[place] for place in kept.tolist()])
    return Pick(
        policy, names, prompt_tokens, uncached[kept], score[kept], table.rates(kept),
        None if all_room else room[kept], chosen, exact, delay_ms[kept] if delay_ms is not None else None,
        declined=declined,
    )  # fmt: skip


def _worth_waiting(
    need: Need, table: Table, uncached: Column, score: Column, policy: Policy, least: float, now: float
) -> bool:
    """Whether somebody who would start on it but for what is being prefilled there serves it sooner all the same.

    A long context that goes to whoever is free at the moment is computed once more, and held twice from then on.
    """
    if policy.waits_ms is None:
        return False
    fits = table.fits(uncached, need.output_tokens, now)
    return bool((score[fits] < least - policy.waits_ms).any())


def least(score: Column, most: int) -> Rows:
    """The rows of the `most` least scores, in no order. There are more.

    Of very many, in `most` parts: what is above the greatest of the parts' least scores is none of them. What is at it
    makes up the number: as many parts as there are rows below it, at most, begin below it.
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


def _scored(
    name: str, prompt_tokens: float, uncached: float, score: float, rates: list[float], exact: bool, delay_ms: float
) -> Scored:
    backlog, prefill_ms, tpot_ms = rates
    hit_tokens = prompt_tokens - uncached
    return Scored(name, score, hit_tokens, uncached, backlog, prefill_ms, tpot_ms, exact, delay_ms)


def least_prefill(need: Need, table: Table, hits: Hits, known: Known = NOTHING) -> tuple[float, float]:
    """Uncached tokens and prefill in ms at the replica where that is shortest, were it idle. At least one row."""
    uncached = uncached_tokens(need, table, hits, known)
    prefill_ms = uncached * table.prefill_ms_per_token
    place = int(prefill_ms.argmin())
    return uncached.item(place), prefill_ms.item(place)


def expected_wait_ms(table: Table, queued: int, now: float, elsewhere: int = 0) -> float:
    """What one more request would wait before its prefill begins, at these healthy replicas; 0 if there are none.

    With room: the prefill backlog of the least burdened replica with room. Without: by Little's law one request leaves
    a replica every service_ms / in_flight, and all who are queued, here or in an engine, go first; with them as many as
    are served `elsewhere`.
    """
    if not len(table):
        return 0.0
    if queued == 0:
        room = table.room(0.0, 0.0, now)
        if room.any():
            return float((table.backlog_tokens * table.prefill_ms_per_token)[room].min())
    heard = table.heard(now)
    # Others may use the engine, too: what it says it runs counts if that is more than ours.
    running = np.maximum(np.maximum(table.in_flight, np.where(heard, table.running, 0.0)), 1.0)
    ahead = queued + elsewhere + float(table.waiting[heard].sum())
    return (ahead + 1.0) / float((running / table.service_ms).sum())
