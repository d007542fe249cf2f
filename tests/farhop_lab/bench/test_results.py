from __future__ import annotations

import json

import msgspec
import pytest

from farhop_lab.bench.client import Window
from farhop_lab.bench.results import (
    Comparison,
    Figure,
    Latency,
    Plan,
    Row,
    Taken,
    document,
    figure,
    planned,
    ratio,
    row_of,
)


def window(cpu_s: float, requests: int = 0, chunks: int = 0, errors: int = 0) -> Window:
    return Window(1.0, cpu_s, requests, chunks, errors, 0, 0)


def test_a_figure_is_the_median_and_counts_what_went_wrong() -> None:
    assert figure([(1.0, 1000, 0), (2.0, 1000, 0), (9.0, 1000, 0)]) == Figure(2000.0, 1000.0, 9000.0)
    assert figure([(1.0, 1000, 2), (1.0, 0, 0)]) == Figure(1000.0, 1000.0, 1000.0, 3)
    assert figure([(1.0, 0, 0)]) == Figure(0.0, 0.0, 0.0, 1)
    assert figure([]).errors == 0


def test_idle_cpu_of_a_proxy_is_not_charged_to_requests() -> None:
    taken = Taken("p", {1024: [window(0.6, 1000)] * 3}, {32: [window(0.3, chunks=1000)] * 3}, rest=[0.1, 0.1, 0.2])
    row = row_of(taken)
    assert row.request_us[1024].median == pytest.approx(500.0)
    assert row.chunk_us[32].median == pytest.approx(200.0)
    assert row.rest_ms_per_s == pytest.approx(100.0)
    assert row.peak_per_s == 1000.0
    assert row.latency is None


def test_latencies_are_medians_and_their_errors_a_sum() -> None:
    taken = [
        Latency(100.0, 2.0, 9.0, 1.0, 2.0),
        Latency(200.0, 3.0, 8.0, 1.0, 2.0, 1),
        Latency(300.0, 4.0, 7.0, 1.0, 2.0),
    ]
    assert row_of(Taken("p", latencies=taken)).latency == Latency(200.0, 3.0, 8.0, 1.0, 2.0, 1)


def test_no_ratio_to_or_of_what_is_not_to_be_used() -> None:
    good, bad = Figure(2.0, 2.0, 2.0), Figure(2.0, 2.0, 2.0, 1)
    assert ratio(Figure(3.0, 3.0, 3.0), good) == 1.5
    assert ratio(good, bad) is ratio(bad, good) is ratio(None, good) is ratio(good, None) is None


def test_document_holds_ratios_and_figures() -> None:
    rows = [Row(name=name, request_us={1024: Figure(us, us, us)}) for name, us in (("a", 10.0), ("b", 25.0))]
    found = Comparison(plan=Plan(), rounds=3, load="wrk", upstream="nginx", rows=rows, absent={"c": "not installed"})
    made = json.loads(msgspec.json.encode(document(found)))
    assert made["ratios"]["b"]["request_us"] == {"1024": 2.5}
    assert made["rows"][1]["request_us"]["1024"]["median"] == 25.0
    assert made["absent"] == {"c": "not installed"}
    assert document(msgspec.structs.replace(found, rows=[]))["ratios"] == {}


def test_the_benchmark_plan_follows_its_options() -> None:
    assert planned() == Plan()
    assert planned(quick=True).limit_s == 60.0
    assert planned(quick=True, idle_streams=10_000).idle_streams == 10_000
    assert planned(repeats=5).repeats == 5
    assert planned(repeats=5).limit_s > Plan().limit_s  # a user who asks for more has the time
