"""The predictive score of a replica, term by term."""

from __future__ import annotations

import pytest
from worlds import replica

from farhop.balance.estimate import Speed
from farhop.balance.ledger import Ledger, Reservation
from regional_lb.policy import BETA, Need, Predictive

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def score(*replicas, hits=None, ledger=None):
    speeds = {r.name: Speed(r.prefill_ms_per_token, r.tpot_ms) for r in replicas}
    return Predictive().score(NEED, replicas, hits or {}, ledger or Ledger(), speeds)


def test_prefill_of_what_is_not_cached() -> None:
    cold, warm = score(replica("r1"), replica("r2"), hits={"r2": 2})
    assert (cold.hit_tokens, cold.uncached_tokens, cold.score_ms) == (0.0, 256.0, pytest.approx(25.6))
    assert (warm.hit_tokens, warm.uncached_tokens, warm.score_ms) == (128.0, 128.0, pytest.approx(12.8))


def test_a_hit_is_never_more_than_the_prompt() -> None:
    (one,) = score(replica("r1"), hits={"r1": 16})
    assert (one.hit_tokens, one.uncached_tokens) == (256.0, 0.0)


def test_backlog_and_slow_decode_cost() -> None:
    ledger = Ledger()
    ledger.reserve("q", Reservation("r1", 1000, 1000))
    behind, slow = score(replica("r1"), replica("r2", tpot_ms=30.0), ledger=ledger)
    assert behind.score_ms == pytest.approx(125.6)
    assert slow.score_ms == pytest.approx(25.6 + BETA * 100 * 10.0)


def test_nobody_to_score() -> None:
    assert score() == []
