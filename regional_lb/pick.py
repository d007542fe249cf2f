"""Which replica: filter (room), score, and let the policy choose among those with room.

Room is what makes late binding work: without it (`Table.room`) the request waits here, where it can still go to
whichever replica frees first. Never reserves: the flow does, in the same breath.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farhop.balance import chain

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from numpy.typing import NDArray

    from regional_lb.policy import Need, Policy
    from regional_lb.table import Column, Table

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


class Pick:
    """The choice and the field it was made from. `chosen` None: nobody has room. `prefill`: who computes the prompt for
    the chosen one, None if that does it itself."""

    __slots__ = ("_names", "_prompt_tokens", "_rates", "_room", "_score", "_uncached", "chosen", "policy", "prefill")

    def __init__(
        self,
        policy: Policy,
        names: tuple[str, ...],
        prompt_tokens: float,
        uncached: Column,
        score: Column,
        rates: Column,
        room: NDArray[np.bool_],
    ) -> None:
        self.policy, self._names, self._prompt_tokens = policy, names, prompt_tokens
        self._uncached, self._score, self._rates, self._room = uncached, score, rates, room
        self.chosen: Scored | None = None
        self.prefill: Scored | None = None

    def scored(self, place: int) -> Scored:
        """One replica of the field."""
        uncached = self._uncached.item(place)
        backlog, prefill_ms, tpot_ms = self._rates[:, place].tolist()
        score = self._score.item(place)
        return Scored(self._names[place], score, self._prompt_tokens - uncached, uncached, backlog, prefill_ms, tpot_ms)

    def best(self, most: int) -> Pick:
        """The same, remembering the best `most` of the field."""
        kept = np.argpartition(self._score, most)[:most]
        names = tuple(self._names[place] for place in kept.tolist())
        shorter = Pick(
            self.policy, names, self._prompt_tokens, self._uncached[kept], self._score[kept], self._rates[:, kept],
            self._room[kept],
        )  # fmt: skip
        shorter.chosen = self.chosen
        return shorter

    @property
    def prefill_ms(self) -> float:
        """Until the prompt is computed, with all that is before it wherever that is done; 0 if nobody was chosen."""
        one = self.prefill or self.chosen
        return (one.backlog_tokens + one.uncached_tokens) * one.prefill_ms_per_token if one is not None else 0.0

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
        return tuple(name for name, room in zip(self._names, self._room.tolist(), strict=True) if not room)


def uncached_tokens(need: Need, table: Table, hits: Mapping[str, int]) -> Column:
    """What is left of the prompt to prefill at each row. `hits` gives the matched depth of its chain by name."""
    uncached = np.empty(len(table))
    uncached.fill(need.prompt_tokens)  # np.full takes three times as long
    at = table.of.at
    for name, depth in hits.items():
        place = at.get(name)
        if place is not None:
            left = need.prompt_tokens - chain.bytes_at(depth) / need.bytes_per_token
            uncached[place] = left if left > 0.0 else 0.0
    return uncached


def pick(need: Need, table: Table, hits: Mapping[str, int], policy: Policy, now: float, rng: Random) -> Pick:
    """Choose among the rows of `table`: at least one, all of them healthy and serving the model."""
    names = table.of.names
    uncached = uncached_tokens(need, table, hits)
    score = policy.score(need, table, uncached, now)
    room = table.room(uncached, need.output_tokens, now)
    ready = np.where(room, score, np.inf)
    best = int(ready.argmin())
    choice = Pick(policy, names, need.prompt_tokens, uncached, score, table.rates(), room)
    if ready.item(best) < np.inf:
        choice.chosen = choice.scored(policy.choose(best, ready, need, table, rng))
    return choice.best(FIELD_MAX) if len(names) > FIELD_MAX else choice


def least_prefill(need: Need, table: Table, hits: Mapping[str, int]) -> tuple[float, float]:
    """Uncached tokens and prefill in ms at the replica where that is shortest, were it idle. At least one row."""
    uncached = uncached_tokens(need, table, hits)
    prefill_ms = uncached * table.prefill_ms_per_token
    place = int(prefill_ms.argmin())
    return uncached.item(place), prefill_ms.item(place)


def expected_wait_ms(table: Table, queued: int, now: float) -> float:
    """What one more request would wait before its prefill begins, at these healthy replicas; 0 if there are none.

    With room: the prefill backlog of the least burdened replica with room. Without: by Little's law one request leaves
    a replica every service_ms / in_flight, and all who are queued, here or in an engine, go first.
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
    ahead = queued + float(table.waiting[heard].sum())
    return (ahead + 1.0) / float((running / table.service_ms).sum())
