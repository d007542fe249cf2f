"""What each tier adds to the first token: the statistics, and one short run over the real processes."""

from __future__ import annotations

import pytest

from farhop_lab.bench import ttft
from farhop_lab.bench.harness import BenchError
from farhop_lab.bench.ttft_client import Sample


def sample(way: str, ttft_ms: float, cpu_ms: float = 0.5) -> Sample:
    return Sample(way, ttft_ms, cpu_ms)


def test_the_medians_interval_is_by_order_and_narrows_with_more() -> None:
    few, many = ttft.median_of([float(n) for n in range(11)]), ttft.median_of([n / 100 for n in range(1100)])
    assert (few.ms, few.low_ms, few.high_ms) == (5.0, 2.0, 8.0)  # the binomial's: 3rd and 9th of 11, 96.1 %
    assert many.ms == pytest.approx(5.495)
    assert many.high_ms - many.low_ms < 1.0
    assert ttft.median_of([7.0]) == ttft.Median(7.0, 7.0, 7.0)


def test_additions_are_paired_within_a_round_so_that_a_slow_round_shifts_nothing() -> None:
    rounds = []
    for slow_ms in (0.0, 50.0, 5.0):
        there = [
            sample(ttft.DIRECT, 1.0 + slow_ms), sample(ttft.BARE, 1.2 + slow_ms),
            sample(ttft.REGIONAL, 2.0 + slow_ms), sample(ttft.BOTH, 3.5 + slow_ms),
        ]  # fmt: skip
        rounds.append([*there, *reversed(there)])
    rows = {row.way: row for row in ttft.rows_of("off", "short", rounds)}
    added = {way: row.added.ms for way, row in rows.items() if row.added is not None}
    assert added == pytest.approx({ttft.BARE: 0.2, ttft.REGIONAL: 1.0, ttft.BOTH: 1.5})  # to the regional way
    assert rows[ttft.DIRECT].added is None
    assert rows[ttft.DIRECT].p50_ms == 6.0
    assert rows[ttft.BOTH].cpu_ms == 0.5


@pytest.mark.long
async def test_a_short_run_over_both_tiers() -> None:
    lines: list[str] = []
    rows = await ttft.measure(1, modes=ttft.MODES[2:], progress=lines.append)
    assert [(row.tokenizer, row.prompt, row.way) for row in rows] == [
        ("on, KV events", prompt, way)
        for prompt in ("short", "long")
        for way in (ttft.DIRECT, ttft.BARE, ttft.REGIONAL, ttft.BOTH)
    ]
    assert all(0.0 < row.p50_ms <= row.p90_ms for row in rows)
    assert all((row.cpu_ms > 0.0) == (row.way != ttft.DIRECT) for row in rows)
    assert lines[-1] == "tokenizer on, KV events, long prompts"


@pytest.mark.parametrize(
    ("url", "says"),
    [("https://x:1", "--engine: give an origin"), ("http://127.0.0.1:1", "--engine: http://127.0.0.1:1/v1/models: ")],
)
async def test_an_unusable_engine_url_is_reported(url: str, says: str) -> None:
    with pytest.raises(BenchError, match=says):
        await ttft.measure(1, ttft.Engine(url), ttft.MODES[:1])
