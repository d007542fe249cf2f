"""What `bench hits` measures, on real processes, briefly: the engines' own word is nearer to what is found."""

from __future__ import annotations

import pytest

from farhop_lab.bench import hits
from farhop_lab.bench.harness import BenchError
from farhop_lab.bench.hits import VARIANTS, measure


def test_the_engines_own_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "ENGINES", 2)
    monkeypatch.setattr(hits, "CONVERSATIONS", 6)
    monkeypatch.setattr(hits, "SPEEDUP", 500.0)
    seen: list[str] = []
    (row,) = measure(seen.append, 24, (VARIANTS[2],))
    assert seen == [row.what] == ["KV events and tokenizer"]
    assert row.requests == 24
    assert row.exact_share == 1.0
    assert row.prompt_tokens > 400
    assert 0 < row.found_tokens < row.prompt_tokens
    assert abs(row.expected_tokens - row.found_tokens) <= row.error_tokens + 1e-6 < row.found_tokens
    assert 0.0 < row.ttft_p50_ms <= row.ttft_p95_ms


def test_a_world_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_given: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(hits, "_row", never)
    with pytest.raises(BenchError, match=r"our mirror alone: it took too long"):
        measure(lambda _: None)
