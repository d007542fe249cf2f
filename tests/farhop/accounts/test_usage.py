"""Records, and what they come to: sums that can be taken in any order, prices by epoch, each record once."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.accounts.prices import PriceEpoch, Prices, price_book
from farhop.accounts.usage import Data, Reading, Record, Sums, lines, read, value_of

BOOK = """
epochs:
- epoch: 1
  since: 2026-01-01T00:00:00Z
  models:
    llama: {input: 1.0, cached: 0.25, output: 4.0}
  regions:
    tokyo: {usd_per_gpu_hour: 3.6, egress_usd_per_gb: 0.1}
    virginia: {usd_per_gpu_hour: 7.2, egress_usd_per_gb: 0.05}
- epoch: 2
  since: 2026-02-01T00:00:00Z
  models:
    "*": {input: 2.0, output: 8.0}
"""
EPOCH = {"epoch": 1, "since": "2026-01-01T00:00:00Z", "models": {"llama": {"input": 0.15, "output": 0.6}}}
JANUARY, FEBRUARY = 1_768_435_200.0, 1_771_113_600.0  # the 15th


@pytest.fixture
def prices(tmp_path: Path) -> Prices:
    (tmp_path / "prices.yaml").write_text(BOOK)
    return price_book(tmp_path / "prices.yaml")


def record(name: str = "d1-1", at_s: float = JANUARY, **more: Any) -> Record:
    given = {
        "tenant": "acme", "key": "k", "model": "llama", "version": "", "region": "tokyo", "entry_region": "virginia",
        "status": 200, "outcome": "served", "stream": True, "measured": "engine", "input_tokens": 1000,
        "cached_tokens": 400, "output_tokens": 100, "reasoning_tokens": None, "regenerated_tokens": 0, "attempts": 1,
        "duration_ms": 9.0, "ttft_ms": 1.0, "gpu_ms": 3600.0, "request_bytes": 4000, "user": "", **more,
    }  # fmt: skip
    return Record(name, at_s, False, tuple(given.values()))


def test_a_record_is_a_cloud_event(prices: Prices) -> None:
    (line,) = lines([record()], "farhop/fleet", prices)
    document = msgspec.json.decode(line)
    assert {name: document[name] for name in ("specversion", "id", "source", "type", "subject", "time")} == {
        "specversion": "1.0", "id": "d1-1", "source": "farhop/fleet", "type": "farhop.request", "subject": "acme",
        "time": "2026-01-15T00:00:00.000Z",
    }  # fmt: skip
    assert document["data"]["price_epoch"] == 1
    assert "farhopstays" not in document
    event = read(line)
    assert event is not None
    assert event.data.input_tokens == 1000
    assert (value_of(event, "day"), value_of(event, "model")) == ("2026-01-15", "llama")


def test_priced_by_the_epoch_it_was_made_under(prices: Prices) -> None:
    sums = Sums()
    for line in lines([record(), record("d2-1", FEBRUARY), record("d3-1", 0.0)], "f", prices):
        event = read(line)
        assert event is not None
        sums.add(event.data, prices)
    first = (600 * 1.0 + 400 * 0.25 + 100 * 4.0) / 1e6
    second = (1000 * 2.0 + 100 * 8.0) / 1e6
    assert sums.cost_usd == pytest.approx(first + second)
    assert sums.cache_saved_usd == pytest.approx(400 * 0.75 / 1e6)
    assert sums.unpriced == 1  # before the first epoch
    assert sums.gpu_s == pytest.approx(3 * 3.6)
    assert sums.gpu_usd == pytest.approx(3.6 / 3600 * 3.6)
    assert sums.routed_usd == pytest.approx(3.6 / 3600 * 3.6 - 4000 / 1e9 * 0.05)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=40), st.randoms())
def test_each_record_counts_once_in_any_order(made: list[tuple[int, int, int]], rng: Any) -> None:
    once = {name: (name, prompt, output) for name, prompt, output in made}
    sent = [*lines([record(f"d{n}-1", input_tokens=p, output_tokens=o) for n, p, o in once.values()], "f", None)] * 2
    rng.shuffle(sent)
    reading, sums = Reading(), Sums()
    for event in reading.events(sent):
        sums.add(event.data, None)
    assert sums.requests == len(once)
    assert reading.doubles == len(once)
    assert sums.input_tokens == sum(p for _, p, _ in once.values())
    assert sums.output_tokens == sum(o for _, _, o in once.values())


def test_lines_that_are_no_records_are_counted() -> None:
    reading = Reading()
    assert not list(reading.events([b"", b"{}\n", b"\xff\n", b'{"specversion":"1.0"}\n']))
    assert reading.unreadable == 4


def test_a_record_with_any_one_bit_flipped_is_none_or_has_a_moment() -> None:
    """A report reads the months and hours of all records, and one that a disk damaged is counted, and ends none."""
    (line,) = lines([record()], "farhop/fleet", None)
    for at in range(8 * line.index(b'"datacontenttype"')):
        flipped = bytearray(line)
        flipped[at // 8] ^= 1 << at % 8
        for event in Reading().events(bytes(flipped).splitlines(keepends=True)):
            assert datetime.fromisoformat(event.time).tzinfo is not None


def test_data_has_the_fields_that_the_loop_hands_on() -> None:
    """What is known of answers given again comes behind, where there is any."""
    assert len(record().data) == Data.__struct_fields__.index("answer_cache") - 1


def test_cached_answers_cost_nothing_and_are_counted_as_saved(prices: Prices) -> None:
    again = read(
        lines([record(measured="again", input_tokens=0, cached_tokens=None, output_tokens=0)], "test", prices)[0]
    )
    assert again is not None
    given = msgspec.structs.replace(
        again.data, answer_cache="hit", saved_input_tokens=1_000_000, saved_output_tokens=500_000, gpu_ms=None
    )
    sums = Sums()
    sums.add(given, prices)
    assert (sums.requests, sums.given_again, sums.unmeasured, sums.input_tokens, sums.cost_usd) == (1, 1, 0, 0, 0.0)
    assert (sums.saved_tokens, sums.answers_saved_usd) == (1_500_000, pytest.approx(1.0 + 0.5 * 4.0))


TOKENS = st.integers(0, 1 << 22)


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=20))
def test_a_budget_counts_what_usage_counts_but_for_begun_microdollars(of: list[tuple[int, int]]) -> None:
    prices, sums = Prices([PriceEpoch.model_validate(EPOCH)]), Sums()
    rates = prices.rates("llama", JANUARY)
    assert rates is not None
    for fresh, output in of:
        (line,) = lines([record(input_tokens=fresh, cached_tokens=0, output_tokens=output)], "s", prices)
        event = read(line)
        assert event is not None
        sums.add(event.data, prices)
    counted = sum(rates.micro_usd(fresh, 0, output) for fresh, output in of)
    assert -1e-3 <= counted - sums.cost_usd * 1e6 <= len(of) + 1e-3
