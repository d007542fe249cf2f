"""Regions as columns of numbers: what a decision reads of all of them at once, in a few numpy calls.

Invariants: a block is never written after it was handed out (a change makes a new one), so that a decision can be
spelled out long after it was taken; reading never writes. Never decides, and never knows why a number is what it is.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from farhop.balance import chain, cost
from farhop.balance.drift import AGE_MAX_S, DOUBT_MAX_MS, SILENT_MS_PER_S
from global_lb.row import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farhop.balance.machine import Request

Column: TypeAlias = NDArray[np.float64]

# How much of a later token counts against the first: some, or all goes to the nearest region until decoding collapses
# (GORGO). Between 0.02 and 0.25 throughput is the same within 2 % in the ready-made scenarios; at 0.25 up to a sixth of
# the requests cross oceans that hardly anybody gains by, and the first token's tail shows it.
BETA = 0.05
STREAM_TOKEN_BYTES = (
    250.0  # of an SSE chunk that carries a token; an answer in one piece has the model's bytes per token
)


_LEAST_MS = 1e-6  # a penalty that is configured to nothing still tells who pays it

COLUMNS = Row.__struct_fields__
_AT = {name: row for row, name in enumerate(COLUMNS)}
_TIMES, _USD_FIXED, _USD_BODY, _USD_ANSWER = slice(0, 4), slice(4, 7), 6, 7
_RTT, _WAIT, _PREFILL, TOKEN = range(4)
_TPOT, _BATCH, _ALONE = (_AT[n] for n in ("tpot_ms", "batch", "alone_ms"))
_CACHED, _BYTES_PER_TOKEN, _RESIDENCE = (_AT[n] for n in ("usd_per_prompt_byte", "bytes_per_token", "residence"))
_LEFT, _FOREIGN, _USED, _FULL = (_AT[n] for n in ("left", "foreign_tokens", "used_share", "full"))
_SLOTS_FREE, _SLOTS = _AT["slots_free"], _AT["slots_total"]
_DRIFT = slice(_AT["drift_at"], _AT["drift_use"] + 1)


class Scored(msgspec.Struct, frozen=True):
    """A region's score, in its policy's unit, and what is predicted there for this request.

    `believed_tokens` are the hit before it was discounted by residence. `headroom` is in slots: those free, less what
    was sent there and is not acknowledged, and no more than it takes from other regions. `usd`: what the request would
    cost there, hardware and traffic between regions. As they count in the score: `decode_ms`, what its tokens take
    longer than a token costs where that is least; `crowding_ms` and `stall_ms`, what its tokens and its prefill cost
    those it joins.
    """

    region: str
    score: float
    ttft_ms: float
    rtt_ms: float
    upload_ms: float
    wait_ms: float
    believed_tokens: float
    hit_tokens: float
    uncached_tokens: float
    prefill_ms: float
    tpot_ms: float
    slots_free: int
    headroom: float = 0.0
    penalty_ms: float = 0.0
    hot: bool = False
    usd: float = 0.0
    bias_ms: float = 0.0
    decode_ms: float = 0.0
    crowding_ms: float = 0.0
    stall_ms: float = 0.0

    @property
    def uncached_share(self) -> float:
        """What of the prompt is not believed to be cached there, 0..1."""
        tokens = self.uncached_tokens + self.hit_tokens
        return self.uncached_tokens / tokens if tokens > 0.0 else 1.0


class Table:
    """All regions that serve one model: `names`, each one's place (`at`), and the block of columns, a row per COLUMN.

    `here`: the place of the region that is not foreign, None without it. `full` and `moving`: who is. `token_least_ms`:
    the quickest decoding.
    """

    __slots__ = ("at", "block", "full", "here", "moving", "names", "token_least_ms")

    def __init__(self, names: tuple[str, ...], here: str) -> None:
        self.names = names
        self.at = {name: place for place, name in enumerate(names)}
        self.here = self.at.get(here)
        self.block: Column = np.zeros((len(COLUMNS), len(names)))
        self.full: set[str] = set()
        self.moving: set[str] = set()
        self.token_least_ms = 0.0

    def write(self, rows: Iterable[tuple[str, Row]], sent: Iterable[tuple[str, float, float, float]] = ()) -> None:
        """These regions are so now, and of those their wait, slots left and residence are (`sent`: what changes with
        every request). The decisions that look at the block of before go on seeing that."""
        block, token_moved = self.block.copy(), False
        places: list[int] = []
        figures: list[tuple[float, ...]] = []
        for name, row in rows:
            place = self.at[name]
            token_moved |= block.item(TOKEN, place) != row.token_ms
            places.append(place)
            figures.append(msgspec.structs.astuple(row))
            (self.full.add if row.full else self.full.discard)(name)
            (self.moving.add if row.drift_wait or row.drift_use else self.moving.discard)(name)
        if places:
            block[:, places] = np.array(figures).T
        for name, wait_ms, left, residence in sent:
            place = self.at[name]
            block[_WAIT, place], block[_LEFT, place], block[_RESIDENCE, place] = wait_ms, left, residence
        self.block = block
        if token_moved:
            self.token_least_ms = float(block[TOKEN].min())


class Field:
    """Who may be asked for one request, as columns; `request` and `output_tokens` are what is asked.

    `penalty_ms` (None: nobody pays any) and `hot` (places) are the hot guard's word; `absent` says why the other lawful
    ones are not here. `moving`: whether any of them changes.
    """

    __slots__ = (
        "_covered",
        "_predicted",
        "_token_least_ms",
        "absent",
        "at",
        "block",
        "body_bytes",
        "here",
        "hot",
        "moving",
        "names",
        "output_tokens",
        "penalty_ms",
        "prompt_bytes",
        "request",
        "spill_ms",
        "stream",
    )  # fmt: skip

    def __init__(
        self, request: Request, output_tokens: float, names: tuple[str, ...], at: Mapping[str, int], block: Column,
        here: int | None, token_least_ms: float | None = None,
    ) -> None:  # fmt: skip
        self.request, self.output_tokens = request, output_tokens
        self.prompt_bytes, self.body_bytes, self.stream = request.prompt_bytes, request.body_bytes, request.stream
        self.names, self.at, self.block, self.here = names, at, block, here
        self.absent: Mapping[str, str] = {}
        self.penalty_ms: Column | None = None
        self.hot: frozenset[int] = frozenset()
        self.moving = False
        self.spill_ms = 0.0
        self._covered: Column | None = None
        self._predicted: Column | None = None
        self._token_least_ms = token_least_ms

    def __len__(self) -> int:
        return len(self.names)

    def forget(self) -> None:
        """Let go of the request, but for its sizes: decisions are remembered, and a chain is large."""
        del self.request

    def hits(self, depths: Mapping[str, int]) -> None:
        """These regions hold the prefix chain to these depths."""
        at, n_bytes = self.at, self.prompt_bytes
        for name, depth in depths.items():
            place = at.get(name)
            if place is not None:
                if self._covered is None:
                    self._covered = np.zeros(len(self.names))
                self._covered[place] = min(chain.bytes_at(depth), n_bytes)

    def only(self, places: Sequence[int], why: str) -> Field:
        """These places of it; `why` the others are left out."""
        kept = list(places)
        names = tuple(self.names[place] for place in kept)
        at = {name: place for place, name in enumerate(names)}
        here = kept.index(self.here) if self.here in kept else None
        field = Field(self.request, self.output_tokens, names, at, self.block[:, kept], here)
        field.absent = {**self.absent, **{name: why for name in self.names if name not in at}}
        field.penalty_ms = self.penalty_ms[kept] if self.penalty_ms is not None else None
        field.hot = frozenset(at[self.names[place]] for place in self.hot if self.names[place] in at)
        field.moving, field.spill_ms = self.moving, self.spill_ms
        field._covered = self._covered[kept] if self._covered is not None else None
        return field

    def penalise(self, places: NDArray[np.bool_]) -> None:
        """These pay what the hot guard asks, too."""
        penalty_ms = self.penalty_ms if self.penalty_ms is not None else np.zeros(len(self.names))
        self.penalty_ms = np.where(places, np.maximum(penalty_ms, max(self.spill_ms, _LEAST_MS)), penalty_ms)

    # -- columns

    @property
    def rtt_ms(self) -> Column:
        """Wire time."""
        rtt_ms: Column = self.block[_RTT]
        return rtt_ms

    @property
    def slots(self) -> Column:
        """All slots."""
        slots: Column = self.block[_SLOTS]
        return slots

    @property
    def left(self) -> Column:
        """Slots free, less what was sent there and is not acknowledged."""
        left: Column = self.block[_LEFT]
        return left

    def full(self, since: float = -inf) -> list[int]:
        """Places that take nothing from here, by reports no older than that."""
        places: list[int] = (self.block[_FULL] * (self.block[_DRIFT][0] >= since)).nonzero()[0].tolist()
        return places

    def used_share(self) -> Column:
        """The share of it that is used, with what was sent there and is not acknowledged."""
        block = self.block
        sent: Column = block[_USED] + (block[_SLOTS_FREE] - block[_LEFT]) / np.maximum(block[_SLOTS], 1.0)
        return sent

    def predicted_ms(self) -> Column:
        """rtt + upload + wait + uncached prefill + BETA * (m * token + what the others there are stalled): the
        predictive score but for a constant."""
        if self._predicted is None:
            block = self.block
            brings = (1.0 + self._flights(), 1.0, self.prompt_bytes, BETA * self.output_tokens)
            predicted: Column = np.array(brings).dot(block[_TIMES])
            prefill_ms = self.prompt_bytes * block[_PREFILL]
            if self._covered is not None:
                saved_ms = self._covered * block[_RESIDENCE] * block[_PREFILL]
                predicted -= saved_ms
                prefill_ms = prefill_ms - saved_ms
            predicted += BETA * block[_BATCH] * np.maximum(prefill_ms - block[_ALONE], 0.0)
            self._predicted = predicted
        return self._predicted

    def usd(self) -> Column:
        """What the request would cost in each: hardware as measured (cost.gpu_usd) or reported, and egress."""
        block, tokens = self.block, self.output_tokens
        answer_bytes = self._answer_bytes(block[_BYTES_PER_TOKEN])
        usd: Column = np.array((self.prompt_bytes, tokens, self.body_bytes)).dot(block[_USD_FIXED])
        usd += answer_bytes * block[_USD_ANSWER]
        if self._covered is not None:
            usd -= self._covered * block[_RESIDENCE] * block[_CACHED]
        return usd

    def egress_usd(self, place: int, output_tokens: float | None = None) -> float:
        """What the traffic to and from one of them costs, for so many tokens of answer; None: as many as expected."""
        tokens = self.output_tokens if output_tokens is None else output_tokens
        bytes_per_token = STREAM_TOKEN_BYTES if self.stream else self.block.item(_BYTES_PER_TOKEN, place)
        to, back = self.block.item(_USD_BODY, place), self.block.item(_USD_ANSWER, place)
        return self.body_bytes * to + tokens * bytes_per_token * back

    def _answer_bytes(self, bytes_per_token: Column) -> Column | float:
        return self.output_tokens * (STREAM_TOKEN_BYTES if self.stream else bytes_per_token)

    def _flights(self) -> float:
        """Round trips beyond the first that the body takes on an idle connection."""
        body_bytes = self.body_bytes
        return cost.upload_ms(body_bytes, 1.0) if body_bytes > cost.INIT_WINDOW_BYTES else 0.0

    def headroom(self) -> Column:
        """Slots left, and no more than what each takes from other regions has room for."""
        uncached: Column = np.full(len(self.names), float(self.prompt_bytes))
        if self._covered is not None:
            uncached -= self._covered * self.block[_RESIDENCE]
        tokens = np.maximum(uncached / self.block[_BYTES_PER_TOKEN], 1e-9)  # of a prompt that is cached whole
        headroom: Column = np.minimum(self.block[_LEFT], self.block[_FOREIGN] / tokens)
        return headroom

    def doubt_ms(self, now: float) -> Column:
        """By how much each one's wait may be off at `now`: farhop.balance.drift.Drift.doubt_ms, of all at once.

        By Little's law, one of so many slots frees every service time / slots.
        """
        at, wait, use = self.block[_DRIFT]
        slot_ms = self.output_tokens * self.block[_TPOT] / np.maximum(self.block[_SLOTS], 1.0)
        old_s = np.where(at, np.maximum(now - at, 0.0), 0.0)  # 0: nothing is known of it
        age_s = np.minimum(old_s, AGE_MAX_S)
        overflow = np.maximum(age_s * use - np.maximum(self.headroom(), 0.0), 0.0)
        doubt_ms: Column = np.minimum(
            age_s * wait + overflow * slot_ms + SILENT_MS_PER_S * (old_s - age_s), DOUBT_MAX_MS
        )
        return doubt_ms

    def least_token_ms(self) -> float:
        """The least that a token costs at any of them."""
        if self._token_least_ms is None:
            self._token_least_ms = float(self.block[TOKEN].min())
        return self._token_least_ms

    # -- one of them

    def scored(self, place: int, score: float, bias_ms: float = 0.0) -> Scored:
        """One of them, spelled out."""
        row = Row(*self.block[:, place].tolist())
        n = self.prompt_bytes / row.bytes_per_token
        covered = self._covered.item(place) if self._covered is not None else 0.0
        believed = covered / row.bytes_per_token
        hit = believed * row.residence
        uncached = n - hit
        prefill_ms = (self.prompt_bytes - covered * row.residence) * row.prefill_ms_per_byte
        upload_ms = self._flights() * row.rtt_ms
        headroom = row.left
        if headroom * uncached > row.foreign_tokens:
            headroom = row.foreign_tokens / uncached
        answer_bytes = self.output_tokens * (STREAM_TOKEN_BYTES if self.stream else row.bytes_per_token)
        usd = (
            self.prompt_bytes * row.usd_per_prompt_byte
            + self.output_tokens * row.usd_per_output_token
            + self.body_bytes * row.usd_per_body_byte
            + answer_bytes * row.usd_per_answer_byte
            - covered * row.residence * row.usd_per_prompt_byte
        )
        penalty_ms = self.penalty_ms.item(place) if self.penalty_ms is not None else 0.0
        decode_ms = self.output_tokens * (row.tpot_ms - self.least_token_ms())
        crowding_ms = self.output_tokens * (row.token_ms - row.tpot_ms)
        stall_ms = cost.stalled_ms(prefill_ms, row.alone_ms, row.batch)
        return Scored(
            self.names[place], score, row.rtt_ms + upload_ms + row.wait_ms + prefill_ms, row.rtt_ms, upload_ms,
            row.wait_ms, believed, hit, uncached, prefill_ms, row.tpot_ms, int(row.slots_free), headroom, penalty_ms,
            place in self.hot, usd, bias_ms, BETA * decode_ms, BETA * crowding_ms, BETA * stall_ms,
        )  # fmt: skip
