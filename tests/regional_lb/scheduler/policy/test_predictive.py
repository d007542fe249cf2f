"""The predictive score of a replica, term by term, and in one figure with farhop.balance.estimate.cost's for a
single one.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import replica, replicas_of

from farhop.balance.estimate import cost
from farhop.balance.ledger import Reservation
from farhop.balance.prefix import chain
from regional_lb.scheduler.pick import uncached_tokens
from regional_lb.scheduler.policy import Need, Predictive
from regional_lb.scheduler.policy.predictive import BETA

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def score(*replicas, hits=None, reserved=()):
    """Uncached tokens and score of each."""
    table = replicas_of(*replicas, reserved=reserved).whole
    held = [(chain.bytes_at(depth), table.of.at[name]) for name, depth in (hits or {}).items() if name in table.of.at]
    uncached = uncached_tokens(NEED, table, held)
    return list(
        zip(
            uncached.tolist(),
            Predictive().score(NEED, table, uncached, table.backlog_tokens, 0.0).tolist(),
            strict=True,
        )
    )


def test_prefill_of_what_is_not_cached() -> None:
    cold, warm = score(replica("r1"), replica("r2"), hits={"r2": 2})
    assert cold == (256.0, pytest.approx(25.6))
    assert warm == (128.0, pytest.approx(12.8))


def test_a_hit_is_never_more_than_the_prompt() -> None:
    assert score(replica("r1"), hits={"r1": 16}) == [(0.0, 0.0)]


def test_backlog_and_slow_decode_cost() -> None:
    (_, behind), (_, slow) = score(replica("r1"), replica("r2", tpot_ms=30.0), reserved=[Reservation("r1", 1000, 1000)])
    assert behind == pytest.approx(125.6 + BETA * (25.6 - 20.0))  # running requests wait for the prefill
    assert slow == pytest.approx(25.6 + BETA * 100 * (30.0 - (20.0 + 2 * 0.007 * 20.0)))


@given(
    st.lists(st.tuples(st.integers(0, 100_000), st.floats(0.01, 10.0), st.floats(1.0, 100.0)), min_size=1, max_size=20),
    st.dictionaries(st.integers(0, 19), st.integers(1, 8)),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_all_at_once_is_the_cost_model_one_by_one(each, hits) -> None:
    replicas = [replica(f"r{i}", prefill_ms_per_token=p, tpot_ms=t) for i, (_, p, t) in enumerate(each)]
    reserved = [Reservation(f"r{i}", backlog, backlog) for i, (backlog, _, _) in enumerate(each)]
    got = score(*replicas, hits={f"r{i}": depth for i, depth in hits.items()}, reserved=reserved)
    # Each has one running request, which makes a token 0.7 % longer.
    tokens_ms = [cost.token_ms(1.007 * t, 0.007 * t, 1.0) for _, _, t in each]
    for (uncached, score_ms), (backlog, prefill_ms, tpot_ms), token_ms in zip(got, each, tokens_ms, strict=True):
        later_ms = NEED.output_tokens * (token_ms - min(tokens_ms))
        stalled_ms = cost.stalled_ms(uncached * prefill_ms, tpot_ms, 1.0)
        assert score_ms == pytest.approx((backlog + uncached) * prefill_ms + BETA * (later_ms + stalled_ms))


def test_a_less_crowded_replica_scores_better_by_what_all_of_a_batch_gain() -> None:
    ten = [Reservation("r1", 0, 10)] * 10
    (_, crowded), (_, empty) = score(replica("r1", slots=64), replica("r2", slots=64), reserved=ten)
    later_ms, stalled_ms = 100 * 2 * 10 * 0.007 * 20.0, 10 * (25.6 - 20.0)
    assert (crowded - empty) == pytest.approx(BETA * (later_ms + stalled_ms))


def blocked(*backlogs: int, uncached: float = 60_000.0) -> list[float] | None:
    """What taking a long prompt would cost those who come, where replicas prefill so many tokens already."""
    replicas = [replica(f"r{n}", prefill_tokens_max=8192, tpot_ms=10.0) for n in range(len(backlogs))]
    held = [Reservation(f"r{n}", tokens, 1000) for n, tokens in enumerate(backlogs)]
    table = replicas_of(*replicas, reserved=held).whole
    cost_ms = Predictive().blocking_ms(table, np.full(len(backlogs), uncached))
    return None if cost_ms is None else cost_ms.tolist()


def test_last_replica_without_a_long_prefill_costs_blocking() -> None:
    assert blocked(0, 0) is None  # the other is left
    assert blocked(100_000, 0, 0) is None
    first, second = blocked(100_000, 0)
    assert first == 0.0
    assert second > 1_000.0
    assert blocked(100_000, 0, uncached=120_000.0)[1] == pytest.approx(4.0 * second, rel=0.01)  # twice as many and long
    assert min(blocked(100_000, 100_000)) > 1_000.0  # none is left: whichever it is, it blocks them for longer
    assert blocked(100_000, 0, uncached=2_000.0) is None  # over before many come
    assert blocked(100_000) is None  # there was never another replica
