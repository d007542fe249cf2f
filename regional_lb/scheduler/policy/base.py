"""The interface of a policy: it scores replicas for one request, and chooses among those with room.

Invariants: scoring and choosing write nothing (`explain` asks, too); what a policy counts moves on when a request is
really sent (`placed`) or answered. Never filters: which replicas may be scored, and which have room, is `pick`'s
business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from farhop.balance import choose

if TYPE_CHECKING:
    from random import Random

    from regional_lb.fleet.blocks import Path
    from regional_lb.fleet.table import Column, ScoreInputs, Table


class Need(msgspec.Struct, frozen=True, gc=False):
    """One request in the model's tokens. `chain`, `session` (0: none) and `tenant` may keep it at a replica.

    `path` are the tokens themselves, where they are known; `deadline` is in monotonic seconds. `variant`: what it waits
    for, its model or a version of it. `recomputed`: nothing that is cached is of use to it. `context_tokens`: what an
    engine must be able to hold for it, prompt and answer together.
    """

    prompt_tokens: float
    output_tokens: float
    bytes_per_token: float
    chain: tuple[int, ...] = ()
    session: int = 0
    tenant: str = ""
    path: Path | None = None
    deadline: float = inf
    variant: str = ""
    recomputed: bool = False
    context_tokens: float = 0.0


class Policy(ABC):
    """How a replica is preferred. `unit` is that of its scores, for people; `ties_share` and `ties_floor` say how much
    worse than the best still counts as equal: of the best score, and at least, in its unit. `explores`: whether a share
    of the picks may go to uncertain replicas, since scores rest on measured speed (`at_stake`) and would otherwise be
    believed for ever. `waits_ms`: by how much sooner a replica that is still prefilling must serve it to be waited for;
    None: none is waited for. `learns`: whether it is informed of what was `placed` and `answered`."""

    name: ClassVar[str]
    unit: ClassVar[str]
    ties_share: ClassVar[float] = 0.0
    ties_floor: ClassVar[float] = 0.0
    explores: ClassVar[bool] = False
    wants_session: ClassVar[bool] = False
    waits_ms: ClassVar[float | None] = None
    learns: ClassVar[bool] = False

    @abstractmethod
    def score(self, need: Need, table: Table, work_tokens: Column, backlog_tokens: Column, now: float) -> Column:
        """One score per row of the table, lower is better, as a new array.

        What is left to prefill at each (cost.prefill_work): `work_tokens` of the prompt, `backlog_tokens` of those
        before it (Table.backlog_left). `now`: monotonic seconds.
        """

    def at_stake(self, need: Need, table: Table, prefill_ms: Column) -> Column:  # noqa: ARG002
        """The part of each row's score that depends on its measured speed. For a policy that `explores`: twice what
        would be saved if the replica were twice as fast."""
        return prefill_ms

    def blocking_ms(self, table: Table, work_tokens: Column) -> Column | None:  # noqa: ARG002
        """What taking the request would cost those that come during its prefill, for policies that score in ms: a part
        of the score. None where it costs them nothing anywhere."""
        return None

    def terms(
        self,
        inputs: ScoreInputs,  # noqa: ARG002
        work_tokens: Column,  # noqa: ARG002
        output_tokens: float,  # noqa: ARG002
        score: Column,
    ) -> dict[str, Column]:
        """The terms of a score in ms, in order; they add up to it. `inputs`: the values at the time of scoring."""
        return {"score": score}

    def choose(self, best: int, ready: Column, need: Need, table: Table, rng: Random) -> int:  # noqa: ARG002
        """The row to take. `ready` are the scores, infinite without room; `best` is the row of the least, finite.

        Here: the less busy of two drawn among near ties, and of two as busy the one with more room in its cache.
        """
        least = ready.item(best)
        ties = (ready <= np.array(least + max(self.ties_floor, self.ties_share * least))).nonzero()[0]
        if len(ties) < 2:
            return best
        first, second = map(ties.item, choose.two_of(len(ties), rng))  # idle replicas are all ties: no list is made
        lead = table.in_flight.item(first) - table.in_flight.item(second)
        if not lead:
            return second if table.filled_at(second) < table.filled_at(first) else first
        return second if lead > 0 else first

    def adopt(self, names: tuple[str, ...]) -> None:  # noqa: B027 - most keep nothing
        """These are the replicas now, of whatever model, in the order of the table's rows."""

    def placed(self, name: str, variant: str, whole: Table) -> None:  # noqa: B027
        """A request of this variant (see Need) was sent to a replica. `whole` is the table of all replicas."""

    def answered(self, name: str, elapsed_ms: float, now: float) -> None:  # noqa: B027
        """An answer that is no error began `elapsed_ms` after its request was sent. The replica may have left."""


def with_room(ready: Column) -> list[int]:
    """The rows with room, ascending."""
    rows: list[int] = (ready < np.inf).nonzero()[0].tolist()
    return rows


class PerReplica:
    """A number for each replica of the view, kept across view swaps. A new replica starts with `first`."""

    __slots__ = ("_at", "_first", "_names", "_values")

    def __init__(self, first: float) -> None:
        self._first = first
        self._names: tuple[str, ...] = ()
        self._at: dict[str, int] = {}
        self._values: Column = np.empty(0)

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy.adopt."""
        if names == self._names:
            return
        self._values = np.array([self.get(name) for name in names], dtype=np.float64)
        self._names, self._at = names, {name: row for row, name in enumerate(names)}

    def of(self, table: Table) -> Column:
        """Those of the table's rows, as a new array."""
        values: Column = self._values[table.of.rows]
        return values

    def get(self, name: str) -> float:
        """One replica's."""
        row = self._at.get(name)
        return self._first if row is None else self._values.item(row)

    def set(self, name: str, value: float) -> None:
        """Set one replica's number. Replicas that have left are ignored."""
        row = self._at.get(name)
        if row is not None:
            self._values[row] = value
