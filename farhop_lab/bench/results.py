"""Plans and results of a relay benchmark: samples, medians, ratios. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from farhop_lab.bench.client import Window

SIZES = (1024, 32 * 1024, 200 * 1024)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. `streams` are (concurrent streams, ms between chunks); seconds are per window.

    `rest_s` is how long an idle proxy is measured; what would end after `limit_s` is not begun. With `once` proxies are
    started once a round, over the uvloop upstream alone.
    """

    repeats: int = 3
    limit_s: float = 1200.0
    once: bool = False
    warm_up: bool = True
    sizes: tuple[int, ...] = SIZES
    request_s: float = 1.0
    rest_s: float = 1.0
    streams: tuple[tuple[int, float], ...] = ((32, 10.0), (1000, 50.0))
    stream_s: float = 1.2
    idle_streams: int = 1000
    latency_s: float = 1.0
    tls: bool = False  # between clients and proxies


QUICK = Plan(
    repeats=1, limit_s=60.0, once=True, warm_up=False, sizes=SIZES[:2], rest_s=0.3, streams=((32, 10.0),),
    stream_s=0.6, idle_streams=0, latency_s=0.0,
)  # fmt: skip


def planned(
    *, quick: bool = False, repeats: int | None = None, idle_streams: int | None = None, tls: bool = False
) -> Plan:
    """The plan. Quick leaves out what takes long, unless asked for by itself."""
    plan = msgspec.structs.replace(QUICK if quick else Plan(), tls=tls)
    if repeats is not None:  # as many as asked for, however long they take
        plan = msgspec.structs.replace(plan, repeats=repeats, limit_s=plan.limit_s * max(1, repeats))
    return plan if idle_streams is None else msgspec.structs.replace(plan, idle_streams=idle_streams)


class Figure(msgspec.Struct, frozen=True):
    """Median, minimum and maximum of the repeats. `errors` of all repeats: with any, the figure is not to be used."""

    median: float
    least: float
    most: float
    errors: int = 0


class Latency(msgspec.Struct, frozen=True):
    """Latency in ms at percentiles 50 and 99 through the proxy, and straight to the upstream at the same rate."""

    rate_per_s: float
    p50_ms: float
    p99_ms: float
    direct_p50_ms: float
    direct_p99_ms: float
    errors: int = 0


@dataclass
class Taken:
    """The samples of one proxy so far. `rest` is its CPU per idle second."""

    name: str
    requests: dict[int, list[Window]] = field(default_factory=dict)
    streams: dict[int, list[Window]] = field(default_factory=dict)
    latencies: list[Latency] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    stream_bytes: float | None = None
    trouble: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One proxy. CPU in µs per request by body bytes, and per chunk by concurrent streams, above what it uses when idle
    (`rest_ms_per_s`); requests per second at its peak with bodies of 1 KB; memory of an open stream in bytes.

    `trouble` says why figures are missing.
    """

    name: str
    request_us: dict[int, Figure] = {}
    chunk_us: dict[int, Figure] = {}
    rest_ms_per_s: float = 0.0
    peak_per_s: float = 0.0
    latency: Latency | None = None
    stream_bytes: float | None = None
    trouble: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run. `rounds` were completed, and perhaps a part of one more; `absent` says why a proxy was left out.

    `others` is how many processes were ready to run before it began, on `cpus` processors: with more than these, times
    suffer.
    """

    plan: Plan
    others: float = 0.0
    cpus: int = 1
    rounds: int
    load: str
    upstream: str
    rows: list[Row]
    absent: dict[str, str] = {}


def row_of(taken: Taken) -> Row:
    """Medians of the samples."""
    rest = statistics.median(taken.rest) if taken.rest else 0.0
    peaks = [w.requests / w.seconds for w in taken.requests.get(SIZES[0], ())]
    return Row(
        name=taken.name,
        request_us={
            size: figure([(w.cpu_s - rest * w.seconds, w.requests, w.errors) for w in windows])
            for size, windows in taken.requests.items()
        },
        chunk_us={
            count: figure([(w.cpu_s - rest * w.seconds, w.chunks, w.errors) for w in windows])
            for count, windows in taken.streams.items()
        },
        rest_ms_per_s=rest * 1e3,
        peak_per_s=statistics.median(peaks) if peaks else 0.0,
        latency=_latency(taken.latencies),
        stream_bytes=taken.stream_bytes,
        trouble=taken.trouble,
    )


def figure(samples: Sequence[tuple[float, int, int]]) -> Figure:
    """A figure in µs from (CPU seconds, number of items, errors) of each repeat. A repeat of 0 items is an error."""
    costs = [spent_s * 1e6 / count for spent_s, count, _ in samples if count]
    errors = sum(errors for *_, errors in samples) + len(samples) - len(costs)
    if not costs:
        return Figure(0.0, 0.0, 0.0, errors)
    return Figure(statistics.median(costs), min(costs), max(costs), errors)


def _latency(taken: Sequence[Latency]) -> Latency | None:
    """The medians, field by field."""
    if not taken:
        return None
    middle = {
        name: statistics.median(getattr(one, name) for one in taken)
        for name in Latency.__struct_fields__
        if name != "errors"
    }
    return Latency(**middle, errors=sum(one.errors for one in taken))


def ratio(figure: Figure | None, first: Figure | None) -> float | None:
    """How many times the first row's; None if either is not to be used."""
    if figure is None or first is None or not first.median or first.errors or figure.errors:
        return None
    return figure.median / first.median


def document(comparison: Comparison) -> dict[str, object]:
    """The run as JSON types, with each figure's ratio to the first row's."""
    first = comparison.rows[0] if comparison.rows else Row(name="")
    made: dict[str, object] = msgspec.to_builtins(comparison, str_keys=True)
    made["ratios"] = {
        row.name: {
            "request_us": {str(size): ratio(f, first.request_us.get(size)) for size, f in row.request_us.items()},
            "chunk_us": {str(count): ratio(f, first.chunk_us.get(count)) for count, f in row.chunk_us.items()},
        }
        for row in comparison.rows
    }
    return made
