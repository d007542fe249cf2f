"""Pages as large as real ones, with the engine's words in them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from farhop_lab.bench import pages
from regional_lb.engines.signals.engines import ENGINES, read_page


@pytest.mark.parametrize("engine", sorted(pages.LINES))
def test_a_page_is_one_and_as_large_as_was_asked(engine: str) -> None:
    page = pages.page(engine, 20_000)
    assert 20_000 <= len(page) < 28_000
    names = {sample.name for family in text_string_to_metric_families(page.decode()) for sample in family.samples}
    assert {line.partition("{")[0].partition(" ")[0] for line in pages.LINES[engine]} <= names


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_its_words_are_the_same_in_every_engine(engine: str) -> None:
    sample = read_page(pages.page(engine), 0.0, pytest.fail, ENGINES[engine])
    assert (sample.waiting, sample.running) == (3, 7)
    dialect = ENGINES[engine].dialects[0]
    assert sample.kv_usage == (0.25 if dialect.kv_usage else None)
    assert sample.kv_tokens == (432_000 if dialect.capacity or dialect.info else None)
