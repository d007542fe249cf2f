"""The regions as numbers: one row for each, with what it reported, what was sent there and what it costs.

The rows are kept as the columns of one block of numbers, which a decision reads in a few numpy calls. What changes with
every request is in a small block of its own.

Invariants: a block is never written after it was handed out (a change makes a new one), so that a decision can be
looked at long after it was made; reading never writes. Never decides, and never knows where a number comes from.
"""

from __future__ import annotations

from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from farhop.balance.estimate import cost
from farhop.balance.estimate.drift import AGE_MAX_S, SILENT_MS_PER_S, UNCERTAINTY_MAX_MS
from farhop.balance.estimate.residual import corrected
from farhop.balance.machine import Request
from farhop.balance.prefix.partial_blocks import PartialBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farhop.balance.estimate.unacknowledged import Outstanding
    from farhop.store.documents.report import ModelReport

Column: TypeAlias = NDArray[np.float64]

# The weight (beta) of a later token's time against the first token's. With 0, all requests go to the nearest region
# until decoding collapses (GORGO). Objectives of 2 to 5 s for the first token and 150 to 250 ms per later token trade
# the two at about this rate for an answer of 200 tokens. On ten random worlds (3 seeds) 0.1 gives 1.02 times the good
# answers of 0.05, at most 8 % on agents, for 5 to 40 ms of the first token's p90 under light load; 0.15 gives no more.
# A client with tools reads nothing before the answer is whole: more weight gives it more turns, but later first tokens
# (docs/measurements/routing-trials.md). A weight of 1 would be right if decoding could be predicted as well as the
# first token.
BETA, BETA_TOOLS = 0.1, 0.25
# Of an SSE chunk that carries a token; an answer in one piece has the model's bytes per token.
STREAM_TOKEN_BYTES = 250.0

# A float beside a short column takes longer than the column itself.
_ZERO, _ONE, _TINY = (np.array(number) for number in (0.0, 1.0, 1e-9))
_AGE_MAX_S, _SILENT_MS_PER_S, _UNCERTAINTY_MAX_MS = (
    np.array(float(n)) for n in (AGE_MAX_S, SILENT_MS_PER_S, UNCERTAINTY_MAX_MS)
)
_NO_PARTIAL_BLOCKS = PartialBlocks()
_NO_REQUEST = Request("", "", "", 0, 0, (), 0.0)
_ALL_HERE: Mapping[str, str] = MappingProxyType({})
_NOWHERE: frozenset[int] = frozenset()  # Python makes each a new one, of 216 bytes
_LEAST_MS = 1e-6  # a penalty configured as 0 must still mark the regions that pay it


class Price(msgspec.Struct, frozen=True):
    """A region's prices in the topology, in USD: one GPU for an hour, and a GB of egress."""

    usd_per_gpu_hour: float = 0.0
    egress_usd_per_gb: float = 0.0


FREE = Price()


class Row(msgspec.Struct, frozen=True, gc=False):
    """One region for one model, as numbers. The order matters: the first three fields change with every request
    (`_SENT`), and groups of the others are multiplied by the sizes of a request in one operation (`_rows`). "Here" is
    the region of this balancer."""

    wait_ms: float
    slots_left: float  # free slots, less the requests sent there that it has not acknowledged
    cache_hit_calibration: float  # the share of predicted hits that engines found lately

    # Multiplied by a request's round trips and output tokens.
    rtt_ms: float
    token_ms: float  # the time that an output token costs all requests of its replica (cost.token_ms)
    prefill_ms_per_byte: float

    # Prices.
    usd_per_prompt_byte: float
    usd_per_output_token: float
    usd_per_body_byte: float  # egress; 0 for this region itself
    usd_per_answer_byte: float  # egress; 0 for this region itself

    # Capacity, as the region reported it.
    bytes_per_token: float
    slots_free: float
    slots_total: float
    foreign_tokens: float  # prompt tokens that it takes from here; infinite: it is here
    used_share: float
    full: float  # 1: `foreign_tokens` is 0 or less; else 0

    # Decoding at its replicas.
    tpot_ms: float
    batch: float  # requests at each replica
    alone_ms: float  # the time per token of a request that is alone. A prefill that takes longer stalls the others
    drift_at: float = 0.0  # when its figures were last reported; 0: unknown (farhop.balance.estimate.drift)
    drift_wait: float = 0.0  # how fast its wait changes, in ms per second
    drift_use: float = 0.0  # how fast its use changes, in slots per second
    residual_ms: float = 0.0  # how much later than predicted first tokens came lately
    context_tokens: float = inf  # the longest request that it can hold; infinite: it does not report it


def remaining(capacity: ModelReport, load: Outstanding, *, foreign: bool) -> tuple[float, float]:
    """An instance's wait in ms and its slots left: its report, corrected by the unacknowledged load of all instances
    that share its replicas. `foreign`: in another region, whose own requests go before ours. A plain tuple: a named one
    takes twice as long to make, and every request makes one.
    """
    wait_ms = capacity.wait_ms
    if foreign and capacity.foreign_wait_ms > wait_ms:
        wait_ms = capacity.foreign_wait_ms
    if not load.outstanding_bytes:
        return wait_ms, float(capacity.slots_free)
    work_bytes = load.outstanding_work_bytes
    if work_bytes > 0.0:  # shared by as many replicas as are ready
        ms_per_token = capacity.prefill_ms_per_token / max(1, capacity.replicas_ready)
        wait_ms += work_bytes / capacity.bytes_per_token * ms_per_token
    return wait_ms, capacity.slots_free - load.outstanding_requests


def row_of(
    capacity: ModelReport,
    load: Outstanding,
    *,
    rtt_ms: float,
    cache_hit_calibration: float,
    rates: tuple[float, float, float],
    price: Price,
    price_here: Price | None,
    residual_ms: float = 0.0,
) -> Row:
    """A region by what it reported and what was sent there. `price_here`: that of here, None if it is here itself.

    Hardware by the hour, of which a request takes its prefill and, per token of its answer, a slot's share of a step:
    (prefill + output tokens * tpot / slots of a replica) * USD per hour. Egress on both ways.
    """
    wait_ms, slots_left = remaining(capacity, load, foreign=price_here is not None)
    headroom = capacity.headroom_foreign_tokens if price_here is not None else inf
    usd_per_ms = price.usd_per_gpu_hour / 3.6e6
    prefill_ms_per_byte = capacity.prefill_ms_per_token / capacity.bytes_per_token
    batch = max(0, capacity.slots_total - capacity.slots_free) / max(1, capacity.replicas_ready)
    step_ms = capacity.tpot_ms * capacity.replicas_ready / max(1, capacity.slots_total)
    token_ms = cost.token_ms(capacity.tpot_ms, capacity.batch_interference_ms, batch)
    alone_ms = max(0.0, capacity.tpot_ms - capacity.batch_interference_ms * batch)
    return Row(  # in order: by name takes 8 us, and a report has a row for each model
        wait_ms, slots_left, cache_hit_calibration, rtt_ms, token_ms, prefill_ms_per_byte,
        usd_per_ms * prefill_ms_per_byte, usd_per_ms * step_ms,
        price_here.egress_usd_per_gb / 1e9 if price_here is not None else 0.0,
        price.egress_usd_per_gb / 1e9 if price_here is not None else 0.0,
        capacity.bytes_per_token, capacity.slots_free, capacity.slots_total,
        headroom, capacity.used_share, float(headroom <= 0.0), capacity.tpot_ms, batch, alone_ms,
        *rates,
        residual_ms,
        capacity.context_tokens or inf,
    )  # fmt: skip


_LONG_BYTES = int(cost.LONG_TOKENS * 4)  # of a shorter prompt attention is not counted
_SENT = 3  # columns that change with every request
COLUMNS = Row.__struct_fields__[_SENT:]
_AT = {name: row for row, name in enumerate(COLUMNS)}


def _rows(*names: str) -> slice:
    """The block's rows of these columns, which are adjacent."""
    first = _AT[names[0]]
    assert COLUMNS[first : first + len(names)] == names
    return slice(first, first + len(names))


# What a request brings is multiplied with each of these at once.
_TIMES = _rows("rtt_ms", "token_ms")
_USD_FIXED = _rows("usd_per_output_token", "usd_per_body_byte")
_DRIFT = _rows("drift_at", "drift_wait", "drift_use")
_RTT, _PREFILL, TOKEN = (_AT[n] for n in ("rtt_ms", "prefill_ms_per_byte", "token_ms"))
_USD_BODY, _USD_ANSWER = (_AT[n] for n in ("usd_per_body_byte", "usd_per_answer_byte"))
_USD_PROMPT = _AT["usd_per_prompt_byte"]
_TPOT, _BATCH, _ALONE = (_AT[n] for n in ("tpot_ms", "batch", "alone_ms"))
_FOREIGN, _USED, _FULL = (_AT[n] for n in ("foreign_tokens", "used_share", "full"))
_BYTES_PER_TOKEN, _SLOTS_FREE, _SLOTS = (_AT[n] for n in ("bytes_per_token", "slots_free", "slots_total"))
_CONTEXT = _AT["context_tokens"]
_WAIT, _LEFT, _CALIBRATION = range(_SENT)  # the rows of the small block


class Scored(msgspec.Struct, frozen=True):
    """A region's score, in its policy's unit, with all predictions for this request there."""

    region: str
    score: float
    ttft_ms: float  # the predicted time to the first token, `residual_ms` included
    rtt_ms: float
    upload_ms: float
    wait_ms: float
    predicted_tokens: float  # the predicted cache hit before it is multiplied by cache_hit_calibration
    hit_tokens: float  # after
    uncached_tokens: float
    prefill_ms: float
    tpot_ms: float
    slots_free: int
    # Slots: the free ones, less the requests sent there that it has not acknowledged, and limited by the tokens that it
    # takes from other regions.
    headroom: float = 0.0
    penalty_ms: float = 0.0  # the charge on a hot or returning region
    hot: bool = False
    usd: float = 0.0  # the cost of the request there: hardware, and traffic between regions
    bias_ms: float = 0.0  # added by the route or an operator

    # Terms of the score, weighted by beta.
    decode_ms: float = 0.0  # how much longer its tokens take than a token costs in the cheapest region
    interference_ms: float = 0.0  # the delay by its tokens of the requests that it joins
    stall_ms: float = 0.0  # the delay by its prefill of the requests that it joins
    behind_ms: float = 0.0  # the delay by its prefill of the requests that arrive while it waits; not weighted by beta
    # How much later than predicted first tokens came lately; part of `ttft_ms`, and of no score.
    residual_ms: float = 0.0
    # The prefill work of the uncached prompt, as bytes at the beginning of a text that take as long
    # (cost.prefill_work).
    work_bytes: float = 0.0

    @property
    def bare_ttft_ms(self) -> float:
        """Time to the first token by round trip, wait and prefill alone (ms). This is the promise sent to a region,
        which compares it with its own wait and prefill."""
        return self.rtt_ms + self.upload_ms + self.wait_ms + self.prefill_ms


class Table:
    """All regions that serve one model: `names`, each one's place (`at`), and the block of columns, a row per COLUMN;
    `sent` are the three that change with every request: wait, slots left, cache-hit calibration.

    `here`: the place of the region that is not foreign, None without it. `full` and `moving`: which regions are.
    `waited`: where requests wait. `token_least_ms`: the quickest decoding. `context_least_bytes`: prompt and answer of
    the shortest request that one of them may be unable to hold; `contexts_differ`: whether another holds longer ones.
    """

    __slots__ = (
        "at", "block", "bytes_per_token", "context_least_bytes", "contexts_differ", "full", "here", "moving", "names",
        "sent", "token_least_ms", "waited",
    )  # fmt: skip

    def __init__(self, names: tuple[str, ...], here: str) -> None:
        self.names = names
        self.at = {name: place for place, name in enumerate(names)}
        self.here = self.at.get(here)
        self.block: Column = np.zeros((len(COLUMNS), len(names)))
        self.sent: Column = np.zeros((_SENT, len(names)))
        self.full: set[str] = set()
        self.moving: set[str] = set()
        self.waited: set[str] = set()
        self.token_least_ms = 0.0
        self.context_least_bytes, self.bytes_per_token, self.contexts_differ = inf, 0.0, False

    def write(self, rows: Iterable[tuple[str, Row]], sent: Iterable[tuple[str, float, float, float]] = ()) -> None:
        """Replace these regions' rows; of the regions in `sent` only the wait, the slots left and the cache-hit
        calibration, which change with every request. Earlier decisions keep the blocks that they were made from."""
        kept = self.sent = self.sent.copy()
        for name, wait_ms, slots_left, calibration in sent:  # one by one: to make a column of them takes longer
            at = self.at[name]
            kept[_WAIT, at], kept[_LEFT, at], kept[_CALIBRATION, at] = wait_ms, slots_left, calibration
            (self.waited.add if wait_ms else self.waited.discard)(name)
        places: list[int] = []
        figures: list[tuple[float, ...]] = []
        for name, row in rows:
            place = self.at[name]
            places.append(place)
            figures.append(msgspec.structs.astuple(row))
            (self.full.add if row.full else self.full.discard)(name)
            (self.moving.add if row.drift_wait or row.drift_use else self.moving.discard)(name)
            (self.waited.add if row.wait_ms else self.waited.discard)(name)
        if places:
            columns = np.array(figures).T
            self.sent[:, places], block = columns[:_SENT], self.block.copy()
            block[:, places] = columns[_SENT:]
            self.block, self.token_least_ms = block, least_token_ms(block)
            self.bytes_per_token = float(block[_BYTES_PER_TOKEN].max())
            self.contexts_differ = bool(block[_CONTEXT].min() < block[_CONTEXT].max())
            self.context_least_bytes = float((block[_CONTEXT] * block[_BYTES_PER_TOKEN]).min())


def least_token_ms(block: Column) -> float:
    """The least that a token costs at any of these; inf without any."""
    return float(block[TOKEN].min(initial=inf))


class Candidates(msgspec.Struct, eq=False, gc=False):
    """The regions that may be asked for one request, as columns of numbers. "Places" are indices into `names`."""

    request: Request
    output_tokens: float  # the expected length of the answer
    names: tuple[str, ...]
    at: Mapping[str, int]  # each region's place
    block: Column  # a row per COLUMN
    sent: Column  # wait, slots left, cache-hit calibration
    here: int | None  # the place of this balancer's own region; None: it is not among them
    token_least_ms: float  # the least that a token costs in any of them
    prompt_bytes: int = 0
    body_bytes: int = 0
    stream: bool = False
    beta: float = BETA  # the weight of a later token against the first
    # The mean prefill work of requests for the model; None: unknown, and taken to be this prompt's.
    mean_work_bytes: float | None = None
    absent: Mapping[str, str] = _ALL_HERE  # why other lawful regions are not among them
    penalty_ms: Column | None = None  # charged by the hot guard; None: on none
    hot: frozenset[int] = _NOWHERE  # the places of hot regions
    moving: bool = False  # whether the figures of any are changing
    any_full: bool = True  # whether any may be full
    any_wait: bool = True  # whether requests may wait in any
    contexts_differ: bool = False  # whether some can hold longer requests than others
    spill_ms: float = 0.0  # the hot guard's penalty
    _flights: float = 0.0  # round trips beyond the first that the body takes on an idle connection
    _covered: Column | None = None  # bytes of the prompt that each holds; None: none holds any
    _predicted: Column | None = None  # the predictive scores, once computed

    def __post_init__(self) -> None:
        request = self.request
        self.prompt_bytes, self.body_bytes, self.stream = request.prompt_bytes, request.body_bytes, request.stream
        if request.tools:
            self.beta = BETA_TOOLS
        if self.body_bytes > cost.INIT_WINDOW_BYTES:
            self._flights = cost.upload_ms(self.body_bytes, 1.0)

    def __len__(self) -> int:
        return len(self.names)

    def forget(self) -> None:
        """Drop the request except for its sizes: decisions are remembered, and a prefix chain is large."""
        self.request = _NO_REQUEST

    def hits(self, depths: Mapping[str, int], partial_blocks: PartialBlocks = _NO_PARTIAL_BLOCKS) -> None:
        """Set how deep each of these regions holds the prefix chain, and how many bytes beyond it."""
        at, n_bytes, nodes = self.at, self.prompt_bytes, self.request.chain
        for name, depth in depths.items():
            place = at.get(name)
            if place is not None:
                if self._covered is None:
                    self._covered = np.zeros(len(self.names))
                self._covered[place] = min(partial_blocks.bytes_behind(nodes, depth), n_bytes)

    def only(self, places: Sequence[int], why: str) -> Candidates:
        """The candidates restricted to these places. `why`: why the others are excluded."""
        kept = list(places)
        names = tuple(self.names[place] for place in kept)
        at = {name: place for place, name in enumerate(names)}
        here = kept.index(self.here) if self.here in kept else None
        block, sent = self.block[:, kept], self.sent[:, kept]
        candidates = Candidates(self.request, self.output_tokens, names, at, block, sent, here, least_token_ms(block))
        candidates.absent = {**self.absent, **{name: why for name in self.names if name not in at}}
        candidates.penalty_ms = self.penalty_ms[kept] if self.penalty_ms is not None else None
        candidates.hot = frozenset(at[self.names[place]] for place in self.hot if self.names[place] in at)
        candidates.moving, candidates.any_full, candidates.any_wait = self.moving, self.any_full, self.any_wait
        candidates.spill_ms, candidates.contexts_differ = self.spill_ms, self.contexts_differ
        candidates.mean_work_bytes = self.mean_work_bytes
        candidates._covered = self._covered[kept] if self._covered is not None else None
        return candidates

    def that_hold_it(self) -> Candidates:
        """The regions that can hold the request, prompt and answer together; all of them if none can, since its length
        is an estimate, and the refusal is for the engine to give."""
        block, answer_tokens = self.block, self.request.max_tokens or self.output_tokens
        holds = block[_CONTEXT] >= self.prompt_bytes / block[_BYTES_PER_TOKEN] + answer_tokens
        places = holds.nonzero()[0].tolist()
        return self if len(places) in (0, len(holds)) else self.only(places, "cannot hold so long a request")

    def holds_longer(self, region: str) -> bool:
        """Whether another of them can hold longer requests than this region."""
        contexts = self.block[_CONTEXT]
        return bool(contexts.max() > contexts[self.at[region]])

    def penalise(self, places: NDArray[np.bool_]) -> None:
        """Make these regions pay the hot guard's penalty, too."""
        penalty_ms = self.penalty_ms if self.penalty_ms is not None else np.zeros(len(self.names))
        self.penalty_ms = np.where(places, np.maximum(penalty_ms, max(self.spill_ms, _LEAST_MS)), penalty_ms)

    # -- columns

    @property
    def rtt_ms(self) -> Column:
        """The round-trip times (ms)."""
        rtt_ms: Column = self.block[_RTT]
        return rtt_ms

    @property
    def slots(self) -> Column:
        """The total numbers of slots."""
        slots: Column = self.block[_SLOTS]
        return slots

    @property
    def left(self) -> Column:
        """Slots free, less what was sent there and is not acknowledged."""
        left: Column = self.sent[_LEFT]
        return left

    def full(self, since: float = -inf) -> list[int]:
        """The places of regions that take no requests from here, by reports no older than that."""
        if not self.any_full:
            return []
        places: list[int] = (self.block[_FULL] * (self.block[_DRIFT][0] >= since)).nonzero()[0].tolist()
        return places

    def used_share(self) -> Column:
        """The share of it that is used, with what was sent there and is not acknowledged."""
        block = self.block
        sent: Column = block[_USED] + (block[_SLOTS_FREE] - self.sent[_LEFT]) / np.maximum(block[_SLOTS], 1.0)
        return sent

    def predicted_ms(self) -> Column:
        """rtt + upload + wait + uncached prefill, beta * (m * token + what the others there are stalled), and what its
        prefill makes those wait who come behind it: the predictive score but for a constant."""
        if self._predicted is None:
            block, sent = self.block, self.sent
            brings = (1.0 + self._flights, self.beta * self.output_tokens)
            predicted: Column = np.array(brings).dot(block[_TIMES])
            work = self._work_bytes()
            prefill_ms = work * block[_PREFILL]
            predicted += prefill_ms
            if self.any_wait:
                wait_ms, mean = sent[_WAIT], np.array(self._mean_work())
                queue = np.minimum(wait_ms / np.maximum(mean * block[_PREFILL], _TINY), _ONE)
                predicted += wait_ms * (_ONE + queue * work / mean)
            predicted += np.array(self.beta) * block[_BATCH] * np.maximum(prefill_ms - block[_ALONE], _ZERO)
            self._predicted = predicted
        return self._predicted

    def _work_bytes(self) -> Column:
        """The uncached bytes of the prompt in each region."""
        uncached = np.array(float(self.prompt_bytes))
        if self._covered is not None:
            uncached = uncached - self._covered * self.sent[_CALIBRATION]
        return uncached if self.prompt_bytes < _LONG_BYTES else self._work(uncached, self.block[_BYTES_PER_TOKEN])

    def _work(self, uncached: cost.Amount, bytes_per_token: cost.Amount) -> cost.Amount:
        """The work of prefilling the prompt's last n bytes, as bytes at a text's beginning that take as long
        (cost.prefill_work)."""
        if self.prompt_bytes < _LONG_BYTES:
            return uncached
        return cost.prefill_work(uncached, self.prompt_bytes, cost.ATTENTION_TOKENS * bytes_per_token)

    def _mean_work(self) -> float:
        return max(1.0, self.prompt_bytes if self.mean_work_bytes is None else self.mean_work_bytes)

    def usd(self) -> Column:
        """What the request would cost in each: hardware as measured (row_of) or reported, and egress."""
        block, tokens = self.block, self.output_tokens
        answer_bytes = self._answer_bytes(block[_BYTES_PER_TOKEN])
        usd: Column = np.array((tokens, self.body_bytes)).dot(block[_USD_FIXED])
        usd += answer_bytes * block[_USD_ANSWER]
        usd += self._work_bytes() * block[_USD_PROMPT]
        return usd

    def egress_usd(self, place: int, output_tokens: float | None = None) -> float:
        """The egress cost (USD) of a request to one region and of its answer. `output_tokens` None: the expected
        number.
        """
        tokens = self.output_tokens if output_tokens is None else output_tokens
        bytes_per_token = STREAM_TOKEN_BYTES if self.stream else self.block.item(_BYTES_PER_TOKEN, place)
        to, back = self.block.item(_USD_BODY, place), self.block.item(_USD_ANSWER, place)
        return self.body_bytes * to + tokens * bytes_per_token * back

    def _answer_bytes(self, bytes_per_token: Column) -> Column | float:
        return self.output_tokens * (STREAM_TOKEN_BYTES if self.stream else bytes_per_token)

    def headroom(self) -> Column:
        """Slots left in each region, limited by the KV tokens that it takes from other regions."""
        uncached: Column = np.empty(len(self.names))
        uncached.fill(self.prompt_bytes)  # np.full takes three times as long
        if self._covered is not None:
            uncached -= self._covered * self.sent[_CALIBRATION]
        tokens = np.maximum(uncached / self.block[_BYTES_PER_TOKEN], _TINY)  # of a prompt that is cached whole
        headroom: Column = np.minimum(self.sent[_LEFT], self.block[_FOREIGN] / tokens)
        return headroom

    def uncertainty_ms(self, now: float) -> Column:
        """By how much each one's wait may be off at `now`: as farhop.balance.estimate.drift has it, of all at once.

        By Little's law, a slot becomes free every service time / slots.
        """
        at, wait, use = self.block[_DRIFT]
        slot_ms = np.array(self.output_tokens) * self.block[_TPOT] / np.maximum(self.block[_SLOTS], _ONE)
        old_s = np.maximum(np.array(now) - at, _ZERO) * (at != _ZERO)  # 0: nothing is known of it
        age_s = np.minimum(old_s, _AGE_MAX_S)
        overflow = np.maximum(age_s * use - np.maximum(self.headroom(), _ZERO), _ZERO)
        uncertainty_ms: Column = np.minimum(
            age_s * wait + overflow * slot_ms + _SILENT_MS_PER_S * (old_s - age_s), _UNCERTAINTY_MAX_MS
        )
        return uncertainty_ms

    # -- one of them

    def fill_ms(self, place: int, like: int) -> float:
        """The cost (ms) for one region of prefilling the part of the prompt that another holds and it does not: the
        prefill, and the stall of the requests under way there, as in the predictive score. 0 if it holds as much."""
        if self._covered is None:
            return 0.0
        return self.fill_up_ms(place, self._covered.item(like) * self.sent.item(_CALIBRATION, like))

    def fill_up_ms(self, place: int, n_bytes: float) -> float:
        """The same up to the prompt's first `n_bytes`."""
        block = self.block
        held = self._covered.item(place) * self.sent.item(_CALIBRATION, place) if self._covered is not None else 0.0
        more = n_bytes - held
        if more <= 0.0:
            return 0.0
        ms_per_byte, alone, batch = (block.item(row, place) for row in (_PREFILL, _ALONE, _BATCH))
        bytes_per_token = block.item(_BYTES_PER_TOKEN, place)
        with_more = self._work(self.prompt_bytes - held, bytes_per_token) * ms_per_byte
        without = self._work(self.prompt_bytes - held - more, bytes_per_token) * ms_per_byte
        stalled = cost.stalled_ms(with_more, alone, batch) - cost.stalled_ms(without, alone, batch)
        return with_more - without + self.beta * stalled

    def waits(self, place: int) -> bool:
        """Whether requests wait in the region at this place."""
        wait_ms: float = self.sent.item(_WAIT, place)
        return wait_ms > 0.0

    def scored(self, place: int, score: float, bias_ms: float = 0.0) -> Scored:
        """The region at this place, with its score and all predictions."""
        row = Row(*self.sent[:, place].tolist(), *self.block[:, place].tolist())
        n = self.prompt_bytes / row.bytes_per_token
        covered = self._covered.item(place) if self._covered is not None else 0.0
        predicted = covered / row.bytes_per_token
        hit = predicted * row.cache_hit_calibration
        uncached = n - hit
        uncached_bytes = self.prompt_bytes - covered * row.cache_hit_calibration
        work_bytes = self._work(uncached_bytes, row.bytes_per_token)
        prefill_ms = work_bytes * row.prefill_ms_per_byte
        upload_ms = self._flights * row.rtt_ms
        headroom = row.slots_left
        if headroom * uncached > row.foreign_tokens:
            headroom = row.foreign_tokens / uncached
        answer_bytes = self.output_tokens * (STREAM_TOKEN_BYTES if self.stream else row.bytes_per_token)
        usd = (
            work_bytes * row.usd_per_prompt_byte
            + self.output_tokens * row.usd_per_output_token
            + self.body_bytes * row.usd_per_body_byte
            + answer_bytes * row.usd_per_answer_byte
        )
        penalty_ms = self.penalty_ms.item(place) if self.penalty_ms is not None else 0.0
        decode_ms = self.output_tokens * (row.tpot_ms - self.token_least_ms)
        interference_ms = self.output_tokens * (row.token_ms - row.tpot_ms)
        stall_ms = cost.stalled_ms(prefill_ms, row.alone_ms, row.batch)
        # An engine's step takes as long as the longer of the prompt and a token of those under way, and where all
        # are busy whoever comes finds it half through one.
        step_ms = max(prefill_ms, row.tpot_ms) + (0.5 * row.tpot_ms if row.batch >= 1.0 else 0.0)
        predicted_ms = row.rtt_ms + upload_ms + row.wait_ms + step_ms
        ttft_ms = corrected(predicted_ms, row.residual_ms)
        behind_ms = 0.0
        if row.wait_ms:
            behind_ms = cost.behind_ms(
                row.wait_ms,
                work=work_bytes,
                mean_work=self._mean_work(),
                ms_per_unit=row.prefill_ms_per_byte,
            )
        return Scored(  # in order: by name takes 8 us
            self.names[place], score, ttft_ms, row.rtt_ms, upload_ms, row.wait_ms, predicted, hit, uncached, prefill_ms,
            row.tpot_ms, int(row.slots_free), headroom, penalty_ms, place in self.hot, usd, bias_ms,
            self.beta * decode_ms, self.beta * interference_ms, self.beta * stall_ms, behind_ms, ttft_ms - predicted_ms,
            work_bytes,
        )  # fmt: skip
