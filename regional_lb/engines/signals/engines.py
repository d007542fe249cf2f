"""Turns the metrics of engines and GPUs, each in its own format, into one Sample.

The names of an engine's metrics are a Dialect: a row of a table, not code. Invariants: a value outside its domain is
never used: if it is required the page is refused, otherwise it is dropped and counted. Counts of several engines behind
one address (data parallel) are summed, shares are averaged. Never fetches anything and never decides.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from regional_lb.engines.signals.exposition import Page, PageError, Places, labels_of
from regional_lb.engines.signals.slots import SLOTS_MAX
from regional_lb.fleet.view import Lora, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT_MAX = 1_000_000_000
_COUNTER_MAX = 1e18
_DIGITS_MAX = 10
ADAPTERS_MAX = 1024


class Series(NamedTuple):
    """A metric by its whole name; with `label`, only lines where it has `value`.

    `per`: ranks that differ in this label are parts of the replica and add up, others of one rank repeat each other.
    """

    name: bytes
    label: bytes = b""
    value: bytes = b""
    per: bytes = b""


class Info(NamedTuple):
    """A metric whose labels give the number of KV blocks and the tokens in a block."""

    name: bytes
    blocks: bytes
    size: bytes


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """The metric names of one engine. Of several series the first that is on the page counts: later ones are older
    names.

    `waiting`, and `running` unless it is empty, are required. `held`: what waits before that queue, in the server. The
    KV cache in tokens is the product of the `capacity` series, or read from the `info` metric's labels. `lora`: a
    metric whose labels name adapters, and whose value is the time of that state. `computed`: prompt tokens that were
    not cached, if an engine counts these instead of all `queries`. `slots`: how many requests it runs at once. `awake`:
    0 while it sleeps, whatever its health page says.
    """

    waiting: Series
    running: tuple[Series, ...] = ()
    held: tuple[Series, ...] = ()
    kv_usage: tuple[Series, ...] = ()
    queries: tuple[Series, ...] = ()
    hits: tuple[Series, ...] = ()
    computed: tuple[Series, ...] = ()
    capacity: tuple[Series, ...] = ()
    info: Info | None = None
    lora: bytes = b""
    slots: tuple[Series, ...] = ()
    awake: tuple[Series, ...] = ()


class Engine(msgspec.Struct, frozen=True):
    """Where an engine answers, and how its page may be worded. `metrics_port`: where not the one it serves on."""

    dialects: tuple[Dialect, ...]
    metrics: str = "/metrics"
    health: str = "/health"
    metrics_port: int | None = None


def _as_vllm(stem: bytes) -> Dialect:
    """vLLM's, or that of a fork, which has another name before the colon."""
    return Dialect(
        waiting=Series(stem + b"num_requests_waiting"),
        running=(Series(stem + b"num_requests_running"),),
        kv_usage=(Series(stem + b"kv_cache_usage_perc"), Series(stem + b"gpu_cache_usage_perc")),
        queries=(Series(stem + b"prefix_cache_queries_total"), Series(stem + b"gpu_prefix_cache_queries_total")),
        hits=(Series(stem + b"prefix_cache_hits_total"), Series(stem + b"gpu_prefix_cache_hits_total")),
        info=Info(stem + b"cache_config_info", b"num_gpu_blocks", b"block_size"),
        lora=stem + b"lora_requests_info",
        awake=(Series(stem + b"engine_sleep_state", b"sleep_state", b"awake"),),
    )


_VLLM, _APHRODITE = _as_vllm(b"vllm:"), _as_vllm(b"aphrodite:")
_SGLANG = Dialect(  # every tensor-parallel rank may repeat its data-parallel rank's gauges
    waiting=Series(b"sglang:num_queue_reqs", per=b"dp_rank"),
    running=(Series(b"sglang:num_running_reqs", per=b"dp_rank"),),
    kv_usage=(Series(b"sglang:token_usage", per=b"dp_rank"),),
    queries=(Series(b"sglang:prompt_tokens_total"),),
    hits=(Series(b"sglang:cached_tokens_total"),),
    capacity=(Series(b"sglang:max_total_num_tokens", per=b"dp_rank"),),
    info=Info(b"sglang:cache_config_info", b"num_pages", b"page_size"),
)
_TGI = Dialect(waiting=Series(b"tgi_queue_size"), running=(Series(b"tgi_batch_current_size"),))
_TRTLLM = Dialect(
    waiting=Series(b"trtllm_num_requests_waiting"),
    running=(Series(b"trtllm_num_requests_running"),),
    kv_usage=(Series(b"trtllm_kv_cache_utilization"),),
    capacity=(Series(b"trtllm_kv_cache_max_blocks"), Series(b"trtllm_kv_cache_tokens_per_block")),
    slots=(Series(b"trtllm_max_num_active_requests"),),
)
_BLOCKS, _BLOCK_TYPE = b"nv_trt_llm_kv_cache_block_metrics", b"kv_cache_block_type"
_TRITON_TRTLLM = Dialect(
    waiting=Series(b"nv_trt_llm_request_metrics", b"request_type", b"waiting"),
    running=(Series(b"nv_trt_llm_request_metrics", b"request_type", b"scheduled"),),
    kv_usage=(Series(_BLOCKS, _BLOCK_TYPE, b"fraction"),),
    capacity=(Series(_BLOCKS, _BLOCK_TYPE, b"max"), Series(_BLOCKS, _BLOCK_TYPE, b"tokens_per")),
    slots=(Series(b"nv_trt_llm_request_metrics", b"request_type", b"max"),),
)
_LLAMA_CPP = Dialect(
    waiting=Series(b"llamacpp:requests_deferred"),
    running=(Series(b"llamacpp:requests_processing"),),
    hits=(Series(b"llamacpp:prompt_tokens_cached_total"),),
    computed=(Series(b"llamacpp:prompt_tokens_total"),),
)
_LMDEPLOY = Dialect(
    waiting=Series(b"lmdeploy:num_requests_waiting"),
    running=(Series(b"lmdeploy:num_requests_running"),),
    held=(Series(b"lmdeploy:num_api_requests_waiting"),),  # for a handle of its engine
    kv_usage=(Series(b"lmdeploy:gpu_cache_usage_perc"),),
)
_TRITON = Dialect(waiting=Series(b"nv_inference_pending_request_count"))

ENGINES = {
    "vllm": Engine((_VLLM,)),
    "sglang": Engine((_SGLANG,)),
    "tgi": Engine((_TGI,)),
    "trtllm": Engine((_TRTLLM,), metrics="/prometheus/metrics"),
    "llamacpp": Engine((_LLAMA_CPP,)),
    "lmdeploy": Engine((_LMDEPLOY,)),
    "aphrodite": Engine((_APHRODITE,)),
    "triton": Engine((_TRITON_TRTLLM, _TRITON), health="/v2/health/ready", metrics_port=8002),
}
_STARTED = Series(b"process_start_time_seconds")  # of Prometheus' own client libraries, whichever engine it is
# An engine without a configured kind is recognised from its page.
ANY = Engine(tuple(dialect for engine in ENGINES.values() for dialect in engine.dialects))


def read_page(
    text: bytes, at: float, dropped: Callable[[str], None], engine: Engine = ANY, places: Places | None = None
) -> Sample:
    """The sample in a metrics page received at `at`; `dropped` is called with what could not be used; `places`: see
    Page.

    Raises PageError.
    """
    page = Page(text, places)
    for dialect in engine.dialects:
        waiting = _needed(page, dialect.waiting)
        if waiting is not None:
            break
    else:
        known = ", ".join(sorted(dialect.waiting.name.decode() for dialect in engine.dialects))
        raise PageError("missing", f"none of {known} is on the page: is this the engine's metrics page?")
    running = next((n for s in dialect.running if (n := _needed(page, s)) is not None), None)
    if running is None and dialect.running:
        raise PageError("missing", f"{dialect.running[0].name.decode()} is missing")
    if dialect.held:
        waiting += sum(_first(page, dialect.held, COUNT_MAX, dropped))
    usage = _first(page, dialect.kv_usage, 1.0, dropped)
    started = _first(page, (_STARTED,), _COUNTER_MAX, dropped)
    hits = sum(_first(page, dialect.hits, _COUNTER_MAX, dropped))
    computed = sum(_first(page, dialect.computed, _COUNTER_MAX, dropped))
    return Sample(
        at=at,
        waiting=int(waiting),
        running=int(running or 0),
        kv_usage=sum(usage) / len(usage) if usage else None,
        kv_tokens=_kv_tokens(page, dialect, dropped),
        prefix_queries=sum(_first(page, dialect.queries, _COUNTER_MAX, dropped)) or computed + hits,
        prefix_hits=hits,
        lora=_lora(page, dialect.lora, dropped) if dialect.lora else None,
        started_at=max(started, default=None),
        slots=_slots(page, dialect, dropped),
        asleep=0.0 in _first(page, dialect.awake, 1.0, dropped),
    )


def _slots(page: Page, dialect: Dialect, dropped: Callable[[str], None]) -> int | None:
    """How many requests the engine runs at once; None if it is not reported, or implausible."""
    slots = sum(_first(page, dialect.slots, COUNT_MAX, dropped))
    return int(slots) if 1 <= slots <= SLOTS_MAX else None


def _lora(page: Page, name: bytes, dropped: Callable[[str], None]) -> Lora | None:
    """The adapters in the latest line; None without one. Each combination of adapters keeps its own line for ever."""
    try:
        newest = page.newest(name)
    except PageError as error:  # the rest of the page counts
        dropped(error.reason)
        return None
    if newest is None:
        return None
    known = labels_of(newest)
    most = known.get(b"max_lora", b"")
    if not most.isdigit() or len(most) > _DIGITS_MAX:
        dropped("value")
        return None
    running, waiting = (_names(known.get(key, b"")) for key in (b"running_lora_adapters", b"waiting_lora_adapters"))
    return Lora(min(int(most), ADAPTERS_MAX), running, waiting)


def _names(listed: bytes) -> frozenset[str]:
    """The adapter names in a list, at most ADAPTERS_MAX."""
    names = listed.decode("utf-8", "replace").split(",", ADAPTERS_MAX)[:ADAPTERS_MAX]
    return frozenset(name for name in names if name)


def _needed(page: Page, series: Series) -> float | None:
    """The sum of a series, None if it is not there. Raises PageError if one of its values makes no sense."""
    found = _lines(page, series)
    if not found:
        return None
    ranks: dict[object, float] = {}
    for rank, number in found:
        value = _sound(number, COUNT_MAX)
        if value is None:
            shown = number[:32].decode("ascii", "backslashreplace")
            raise PageError("value", f"{series.name.decode()}: {shown!r} is not in 0..{COUNT_MAX}")
        ranks[rank] = max(value, ranks.get(rank, 0.0))
    return min(sum(ranks.values()), float(COUNT_MAX))


def _first(page: Page, names: tuple[Series, ...], most: float, dropped: Callable[[str], None]) -> list[float]:
    """Each rank's value of the first series that is there."""
    for series in names:
        if not series.label and len(alone := page.series(series.name)) == 1:  # nearly always
            value = _sound(alone[0][1], most)
            if value is None:
                dropped("value")
            return [] if value is None else [value]
        found = _lines(page, series)
        if found:
            ranks: dict[object, float] = {}
            for rank, number in found:
                value = _sound(number, most)
                if value is None:
                    dropped("value")
                else:
                    ranks[rank] = max(value, ranks.get(rank, 0.0))
            return list(ranks.values())
    return []


def _lines(page: Page, series: Series) -> list[tuple[object, bytes]]:
    """The rank and the number of each line of a series."""
    found, label, per = page.series(series.name), series.label, series.per
    if not label and not per:
        return [(place, number) for place, (_, number) in enumerate(found)]
    lines: list[tuple[object, bytes]] = []
    for place, (labels, number) in enumerate(found):
        mine = page.labels(labels)
        if not label or mine.get(label) == series.value:
            lines.append((mine.get(per) if per else place, number))
    return lines


def _sound(number: bytes, most: float) -> float | None:
    try:
        value = float(number)
    except ValueError:
        return None
    return value if 0.0 <= value <= most else None  # NaN is not, either


def _kv_tokens(page: Page, dialect: Dialect, dropped: Callable[[str], None]) -> int | None:
    """The size of the whole KV cache in tokens; None if it is not reported, or implausible."""
    parts = [sum(_first(page, (series,), COUNT_MAX, dropped)) for series in dialect.capacity]
    tokens = prod(parts) if parts else 0.0
    if not tokens and dialect.info is not None:
        tokens = sum(_blocks(page.labels(labels), dialect.info) for labels, _ in page.series(dialect.info.name))
    return int(tokens) if 1 <= tokens <= COUNT_MAX else None


def _blocks(labels: dict[bytes, bytes], info: Info) -> int:
    """Blocks × tokens a block; 0 as long as the engine says None."""
    blocks, size = labels.get(info.blocks, b""), labels.get(info.size, b"")
    if not (blocks.isdigit() and size.isdigit() and len(blocks) <= _DIGITS_MAX and len(size) <= _DIGITS_MAX):
        return 0
    return int(blocks) * int(size)
