"""The price book: by epoch, and what makes no sense is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from farhop.accounts.money import Rates
from farhop.accounts.prices import Prices, price_book
from farhop.config import ConfigError

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
JANUARY, FEBRUARY = 1_768_435_200.0, 1_771_113_600.0  # the 15th


@pytest.fixture
def prices(tmp_path: Path) -> Prices:
    (tmp_path / "prices.yaml").write_text(BOOK)
    return price_book(tmp_path / "prices.yaml")


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("[]", "must be a mapping"),
        ("epochs: []", "epochs"),
        (BOOK.replace("epoch: 2", "epoch: 1"), "must come after"),
        (BOOK.replace("2026-02-01T00:00:00Z", "2025-02-01T00:00:00Z"), "must come after"),
        (BOOK.replace("00:00:00Z", "00:00:00"), "time zone"),
        (BOOK.replace("input: 1.0", "input: -1.0"), "0 or more"),
        (BOOK.replace("input: 1.0", "input: .nan"), "0 or more"),
        (BOOK.replace("output: 4.0", "outputs: 4.0"), 'did you mean "output"?'),
    ],
)
def test_a_book_that_makes_no_sense_is_refused_with_field_and_remedy(tmp_path: Path, document: str, says: str) -> None:
    (tmp_path / "prices.yaml").write_text(document)
    with pytest.raises(ConfigError, match=says):
        price_book(tmp_path / "prices.yaml")


def test_tokens_are_priced_by_the_epoch_in_force(prices: Prices) -> None:
    january = prices.rates("llama", JANUARY)
    assert january == Rates(1_000_000, 250_000, 4_000_000)
    assert (prices.rates("gemma", JANUARY), prices.rates("llama", 0.0)) == (None, None)
    assert prices.rates("gemma", FEBRUARY) == Rates(2_000_000, 2_000_000, 8_000_000)
    assert prices.rates("llama", FEBRUARY, 1) == january
    assert JANUARY < prices.until(JANUARY) < FEBRUARY
    assert prices.epoch_at(prices.until(JANUARY)) == 2
    assert prices.until(FEBRUARY) == float("inf")
