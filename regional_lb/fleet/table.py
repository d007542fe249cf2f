"""Replicas as columns of numbers, one row each: what a pick reads of all of them at once, in a few numpy calls.

Invariants: a row says of its replica what ledger, speed and scrape last said (the fleet writes it in the same
breath); reading never writes. Never decides, and never knows why a number is what it is.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from farhop.balance.ledger import Load
    from regional_lb.fleet.speeds import Speeds
    from regional_lb.fleet.view import Replica, Sample

Column: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[np.intp]
# How many bytes of a prompt are held, and at which places of a subset: one, some, or whether at each.
Hits: TypeAlias = "Sequence[tuple[float, int | Rows | NDArray[np.bool_]]]"
# Of a replica by its name, the most KV tokens that its load will take, if this share of its prompts is really held.
Peak: TypeAlias = "Callable[[str, Load, float], float]"

SAMPLE_FRESH_S = 3.0  # an older scrape says nothing about the queue of now
# Where all answers whole would fit this share of the cache, so much is what they are thought to take: by far not all
# are there at once, and how many does not matter yet.
WHOLE_SHARE = 0.5
# Where several wait, for how long of prefill a step is filled, or for as long as one takes anyway, which reads the
# weights: what is in a step waits until its end, as do all who decode beside it, and nobody goes before it any more. A
# longer one saves but what the engine takes between two, 1 to 2 ms; 2,048 tokens keep an L4 busy for 1.2 s. By what is
# configured, not by what was measured: there, whatever else keeps first tokens back would leave engines idle.
STEP_MS = 75.0

_SURELY_GENERATED = 0.75  # of what those under way are thought to have been answered by now

# What an array's `sum`, `any` and `min` call in the end: half their time for few rows.
TOTAL, ANY, LEAST = np.add.reduce, np.logical_or.reduce, np.minimum.reduce
_MANY_ROWS = 256
_RUNS_MAX = 64


class Columns:
    """What a table knows of each replica, a column each, in the order in which they lie in its block."""

    __slots__ = ()

    prefill_ms_per_token: Column
    batch_interference_ms: Column  # what each request adds to a token of every other
    tpot_alone_ms: Column
    backlog_tokens: Column  # dispatched, and not prefilled yet
    in_flight: Column  # the first five: see Rates
    tpot_ms: Column  # with one request more than there are
    prefill_room_tokens: Column  # what is left of a step: with any, it starts on a prompt at once, in chunks if need be
    kv_room_tokens: Column  # KV cache it would still give
    slots: Column  # requests it may have under way: its own slots, fewer while it starts slowly or fails
    kv_tokens: Column
    kv_taken_tokens: Column  # by those under way, at their peak: as counted, less what their engine does not hold
    service_ms: Column
    sampled_at: Column
    running: Column  # as the engine counts
    waiting: Column  # the same: who queues there (Sample.queued)
    filled: Column  # share of its cache that is thought to be taken, as of what was last sent there
    uncertainty: Column  # by what share its speed may be other than it is thought to be
    step_tokens: Column  # of a prompt, what it computes in a step
    short_step_tokens: Column  # the same, but for no longer than STEP_MS


_COLUMNS = tuple(Columns.__annotations__)


class Rates(NamedTuple):
    """What scores are made of, as it was when they were made: a column each, one row per replica scored. The first
    columns of a table, in its order; the first PACES of them change now and then only."""

    prefill_ms_per_token: Column
    batch_interference_ms: Column
    tpot_alone_ms: Column
    backlog_tokens: Column
    in_flight: Column

    @property
    def tpot_ms(self) -> Column:
        """See Columns."""
        return self.tpot_alone_ms + self.batch_interference_ms * self.in_flight


class Sums(NamedTuple):
    """What replicas have together, and what of it is taken."""

    in_flight: float
    slots: float
    kv_tokens: float
    kv_taken_tokens: float


assert Rates._fields == _COLUMNS[: len(Rates._fields)]
_SIZES = slice(_COLUMNS.index("slots"), _COLUMNS.index("slots") + len(Sums._fields) - 1)
assert Sums._fields[1:] == _COLUMNS[_SIZES]
PACES = 3
_ZERO = np.array(0.0)  # a float beside a short column takes longer than the column itself
_NO_ROWS: Rows = np.empty(0, dtype=np.intp)


class ReducedCapacity(msgspec.Struct, frozen=True):
    """What a replica is held to: `slots` in place of its own, and what counts there although it failed."""

    slots: int
    requests: int = 0
    kv_tokens: int = 0


class Subset:
    """Some replicas of a table, in its order: their names, each one's place among them, and its row in the table.

    For Memory.hits as of the trie's `version`: `by_slot` has each slot's place (-1: none), and `places_by_mask` the
    places of small sets of slots asked for lately.
    """

    __slots__ = ("_runs", "_slot_runs", "_slots", "at", "by_slot", "names", "places_by_mask", "rows", "version")

    def __init__(self, names: tuple[str, ...], rows: Rows) -> None:
        self.names, self.rows = names, rows
        self.at = {name: place for place, name in enumerate(names)}
        self._runs = _runs(rows)
        self._slots = self.by_slot = _NO_ROWS
        self._slot_runs: list[slice] = []
        self.places_by_mask: dict[int, Rows] = {}
        self.version = -1

    def __len__(self) -> int:
        return len(self.names)

    def of_column(self, column: Column) -> Column:
        """Their part of a column of the table. Few runs are copied ten times as fast as many rows are gathered."""
        return np.concatenate([column[run] for run in self._runs]) if self._runs else column.take(self.rows)

    def place_slots(self, slots: Rows, n_slots: int, version: int) -> None:
        """The slot of each, of so many there are."""
        self._slots, self._slot_runs = slots, _runs(slots)
        self.by_slot = np.full(n_slots, -1, dtype=np.intp)
        self.by_slot[slots] = np.arange(len(self))
        self.places_by_mask.clear()
        self.version = version

    def of_slots(self, held: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Of what is known slot by slot, their part."""
        runs = self._slot_runs
        return np.concatenate([held[run] for run in runs]) if runs else held.take(self._slots)

    def without(self, names: Collection[str]) -> Subset:
        """Those not named."""
        if not names:
            return self
        left_out = frozenset(names) if len(names) > 8 else names
        kept = [place for place, name in enumerate(self.names) if name not in left_out]
        return Subset(tuple(self.names[place] for place in kept), self.rows[kept])


def _runs(rows: Rows) -> list[slice]:
    """The runs of consecutive rows; none if they are few rows or many runs."""
    if len(rows) < _MANY_ROWS:
        return []
    ends = [*((rows[1:] != rows[:-1] + 1).nonzero()[0] + 1).tolist(), len(rows)]
    if len(ends) > _RUNS_MAX:
        return []
    return [slice(rows.item(a), rows.item(b - 1) + 1) for a, b in zip((0, *ends), ends, strict=False)]


class Table(Columns):
    """One row per replica of `of`, which gives a replica's place by its name."""

    __slots__ = (*_COLUMNS, "block", "_counted", "_paces", "_peak", "_unheld", "of", "queued_until")

    def __init__(
        self, of: Subset, block: Column | None = None, queued_until: float = -inf, peak: Peak | None = None
    ) -> None:
        self.of, self._peak = of, peak
        self.block = np.zeros((len(_COLUMNS), len(of))) if block is None else block
        self._paces: Column | None = None
        (
            self.prefill_ms_per_token, self.batch_interference_ms, self.tpot_alone_ms,
            self.backlog_tokens, self.in_flight, self.tpot_ms, self.prefill_room_tokens,
            self.kv_room_tokens, self.slots, self.kv_tokens, self.kv_taken_tokens, self.service_ms, self.sampled_at,
            self.running, self.waiting, self.filled, self.uncertainty, self.step_tokens, self.short_step_tokens,
        ) = self.block  # fmt: skip
        self.queued_until = queued_until  # until then some engine's word that it queues is fresh
        # By row, of what is counted for each request there, the tokens that its engine was last seen not to hold, and
        # of how many requests.
        self._unheld: dict[int, tuple[float, float]] = {}
        self._counted: dict[int, tuple[float, Load]] = {}  # by row, for all under way, answers whole

    def __len__(self) -> int:
        return len(self.of.names)

    # -- reading

    def only(self, some: Subset) -> Table:
        """The rows of a subset of this table; this table itself if that is all of it."""
        n_rows = len(some.names)
        if n_rows == len(self.of.names):
            return self
        if n_rows < _MANY_ROWS:
            return Table(some, self.block.take(some.rows, 1), self.queued_until)
        return _Part(some, self)

    def room(
        self, uncached_tokens: Column | float, output_tokens: float, now: float, *, ahead: bool = False
    ) -> NDArray[np.bool_]:
        """Which replicas would start on a request at once; `ahead`: or in the step that follows.

        Not while an engine says that it queues, its slots are taken, its KV cache would not hold the request, or a
        step's worth of prefill is on its way to it (more than is left of the step may be: were a prompt to fit whole,
        those longer than a step would go to idle engines alone, and shorter ones overtake them for ever). An idle
        engine takes anything: what it can never hold it refuses. With a step's worth alone, an engine whose step ends
        has nothing to prefill until its balancer hears of that: where several wait, the next step is filled, too, but
        neither for longer than STEP_MS.
        """
        room = self.backlog_tokens < 2.0 * self.short_step_tokens if ahead else self.prefill_room_tokens > _ZERO
        room &= self.kv_room_tokens >= uncached_tokens + np.array(output_tokens)
        return room if now >= self.queued_until else room & self._unqueued(now)

    def fits(self, uncached_tokens: Column | float, output_tokens: float, now: float) -> NDArray[np.bool_]:
        """The same, whatever is being prefilled there: that is over soon, and what it takes is known."""
        fits: NDArray[np.bool_] = self.kv_room_tokens >= uncached_tokens + output_tokens
        return fits if now >= self.queued_until else fits & self._unqueued(now)

    def _unqueued(self, now: float) -> NDArray[np.bool_]:
        """Who did not say just now that it queues."""
        unqueued: NDArray[np.bool_] = (self.waiting == 0.0) | (now - self.sampled_at >= SAMPLE_FRESH_S)
        return unqueued

    def sums(self) -> Sums:
        """Of all of them together."""
        slots, kv_tokens, kv_taken_tokens = TOTAL(self.block[_SIZES], 1).tolist()
        return Sums(float(TOTAL(self.in_flight)), slots, kv_tokens, kv_taken_tokens)

    def holds(self, name: str, tokens: float) -> bool:
        """Whether a replica's KV cache has room for so many tokens."""
        return self.kv_room_tokens.item(self.of.at[name]) >= tokens

    def paces(self) -> Column:
        """The first PACES of its Rates, as one block the same for all who ask until they change."""
        paces = self._paces
        if paces is None:
            paces = self._paces = self.block[:PACES].copy()
        return paces

    def filled_at(self, place: int) -> float:
        """One row's, without the whole column."""
        return self.filled.item(place)

    def fresh(self, now: float) -> NDArray[np.bool_]:
        """Whose scrape is fresh."""
        return now - self.sampled_at < SAMPLE_FRESH_S

    # -- writing, by the fleet

    def describe(self, row: int, replica: Replica) -> None:
        """What the view says of a replica."""
        self.kv_tokens[row], self.step_tokens[row] = replica.kv_tokens, replica.prefill_tokens_max
        short_tokens = max(replica.tpot_ms, STEP_MS) / replica.prefill_ms_per_token
        self.short_step_tokens[row] = min(replica.prefill_tokens_max, short_tokens)
        sample = replica.sample
        if sample is None:
            self.sampled_at[row], self.running[row], self.waiting[row] = -inf, 0.0, 0.0
            return
        queued = sample.waiting if sample.queued is None else sample.queued
        self.sampled_at[row], self.running[row], self.waiting[row] = sample.at, sample.running, queued
        if queued > 0:
            self.queued_until = max(self.queued_until, sample.at + SAMPLE_FRESH_S)
        self._see_kv(row, sample)

    def _see_kv(self, row: int, sample: Sample) -> None:
        """How much less than counted an engine holds for those who run there.

        What prompts share is counted once only as far as whole blocks of them agree, and once by each balancer of the
        region: with one long system prompt before all, an engine is half full where it was thought to have no room.
        What is counted for prompts, beyond what it holds and what it still has to compute, is shared; of what it holds
        something is answers, by how long they have been coming.
        """
        known = self._counted.get(row)
        counted, in_flight, unheld = known[0] if known is not None else 0.0, self.in_flight.item(row), 0.0
        self._unheld.pop(row, None)
        if known is not None and sample.kv_usage is not None and sample.running and in_flight:
            load = known[1]
            prompts = (counted - load.answer_tokens) * min(1.0, sample.running / in_flight)
            decoding_ms = (load.decoding * sample.at - load.began_s) * 1e3
            generated = min(_SURELY_GENERATED * decoding_ms / self.tpot_ms.item(row), float(load.answer_tokens))
            holds = sample.kv_usage * self.kv_tokens.item(row) + self.backlog_tokens.item(row)
            unheld = max(0.0, prompts - holds + max(generated, 0.0))
            unheld = min(unheld, prompts)
            if unheld:
                self._unheld[row] = unheld / in_flight, in_flight
        taken = self._taken(row, counted, unheld, known[1]) if known is not None else 0.0
        self.kv_room_tokens[row] += self.kv_taken_tokens.item(row) - taken  # none and all stay what they are
        self.kv_taken_tokens[row] = taken

    def _taken(self, row: int, counted: float, unheld: float, load: Load) -> float:
        """The most that those under way will take, of `counted` tokens in all, of which their engine does not hold
        some."""
        taken = max(float(load.answer_tokens), counted - unheld)
        known = WHOLE_SHARE * self.kv_tokens.item(row)
        if taken <= known or self._peak is None:
            return taken
        # Of prompts alone there is something that is not held. What lingers (ReducedCapacity) is no sequence: it stays.
        lingers, prompts = counted - load.kv_tokens, counted - load.answer_tokens
        held_share = (taken - load.answer_tokens) / prompts if prompts else 1.0
        return max(known, held_share * lingers + self._peak(self.of.names[row], load, held_share))

    def allow(self, row: int, slots: int) -> None:
        """How many requests a replica may have under way: 1 or more."""
        self.slots[row] = slots

    def write_load(self, row: int, replica: Replica, load: Load, reduced: ReducedCapacity | None = None) -> None:
        """What is under way at a replica, and so what it has room for."""
        in_flight, backlog, taken = load.in_flight, load.prefill_tokens, float(load.kv_tokens)
        slots = replica.slots
        if reduced is not None:
            slots, in_flight, taken = reduced.slots, in_flight + reduced.requests, taken + reduced.kv_tokens
        self._counted[row] = taken, load
        each, of = self._unheld.get(row, (0.0, 0.0))
        self.tpot_ms[row] = self.tpot_alone_ms.item(row) + self.batch_interference_ms.item(row) * in_flight
        counted, unheld = taken, each * min(of, in_flight)
        taken = max(float(load.answer_tokens), counted - unheld)
        if taken > WHOLE_SHARE * replica.kv_tokens:  # hardly ever
            taken = self._taken(row, counted, unheld, load)
        self.in_flight[row], self.backlog_tokens[row], self.kv_taken_tokens[row] = in_flight, backlog, taken
        self.prefill_room_tokens[row] = replica.prefill_tokens_max - backlog if backlog else inf
        if in_flight >= slots:
            self.kv_room_tokens[row] = -inf
        else:
            self.kv_room_tokens[row] = replica.kv_tokens - taken if load.in_flight else inf

    def rate(self, speeds: Speeds) -> None:
        """How fast all of them work."""
        self._paces = None
        self.prefill_ms_per_token[:] = speeds.prefill_ms_per_token
        self.service_ms[:] = speeds.service_ms
        self.batch_interference_ms[:], self.tpot_alone_ms[:] = speeds.batch_interference_ms, speeds.tpot_alone_ms
        self.tpot_ms[:] = speeds.tpot_alone_ms + speeds.batch_interference_ms * self.in_flight
        self.uncertainty[:] = speeds.uncertainty


class _Part(Table):
    """A large part of a table takes each column from it when it is first read: most reads need half of them.

    A class of its own, since reading anything of one that has a `__getattr__` takes twice as long.
    """

    __slots__ = ("_whole",)

    def __init__(self, of: Subset, whole: Table) -> None:
        self.of, self.queued_until, self._whole = of, whole.queued_until, whole

    def __getattr__(self, name: str) -> Column:
        # Asked for what has no value yet: a column.
        if name not in _COLUMNS:
            raise AttributeError(name)
        column = self.of.of_column(getattr(self._whole, name))
        setattr(self, name, column)
        return column

    def sums(self) -> Sums:
        """See Table."""
        return Sums(*(float(TOTAL(getattr(self, name))) for name in Sums._fields))

    def paces(self) -> Column:
        """See Table."""
        return np.array([getattr(self, name) for name in Rates._fields[:PACES]])

    def filled_at(self, place: int) -> float:
        """See Table."""
        return self._whole.filled.item(self.of.rows.item(place))
