"""Peak EWMA of the time to the first byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import replica, replicas_of

from farhop.balance.estimate.ewma import PeakEwma
from farhop.balance.ledger import Reservation
from regional_lb.scheduler.policy import Need
from regional_lb.scheduler.policy.latency import PEAK_MAX, TAU_S, LeastLatency

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def scores(policy: LeastLatency, table, now: float, uncached: float = 0.0) -> list[float]:
    return policy.score(NEED, table, np.full(len(table), uncached), table.backlog_tokens, now).tolist()


def adopted(*names: str) -> LeastLatency:
    policy = LeastLatency()
    policy.adopt(names)
    return policy


def test_a_slow_replica_costs_more_and_its_penalty_fades() -> None:
    table = replicas_of(replica("slow"), replica("quick")).whole
    policy = adopted("slow", "quick")
    policy.answered("slow", 900.0, 10.0)
    policy.answered("quick", 90.0, 10.0)
    assert scores(policy, table, 10.0) == [900.0, 90.0]
    assert scores(policy, table, 10.0 + TAU_S) == [pytest.approx(900 / np.e), pytest.approx(90 / np.e)]
    assert scores(policy, table, 1e6) == [1.0, 1.0]
    policy.answered("quick", 5000.0, 11.0)  # an increase is accepted at once
    assert scores(policy, table, 11.0)[1] == 5000.0


def test_what_a_stall_held_up_is_no_peak_of_a_minute() -> None:
    table = replicas_of(replica("stood"), replica("r2"), replica("r3")).whole
    policy = adopted("stood", "r2", "r3")
    for name, ms in (("stood", 30.0), ("r2", 30.0), ("r3", 50.0)):
        policy.answered(name, ms, 10.0)
    policy.answered("stood", 9000.0, 10.0)
    assert scores(policy, table, 10.0)[0] == PEAK_MAX * 50.0
    policy.answered("stood", 9000.0, 11.0)  # from then on the value follows from its own peak
    assert scores(policy, table, 11.0)[0] < 9000.0
    assert scores(policy, table, 36.0)[0] < 50.0


def test_running_requests_count_and_an_unmeasured_replica_gets_no_advantage() -> None:
    table = replicas_of(replica("busy"), replica("new"), reserved=[Reservation("busy", 0, 10)]).whole
    policy = adopted("busy", "new")
    policy.answered("busy", 30.0, 1.0)
    assert scores(policy, table, 1.0, uncached=256.0) == [60.0, pytest.approx(25.6)]


def test_latencies_of_a_replica_that_left_the_view_are_forgotten() -> None:
    policy = adopted("r1", "r2")
    policy.answered("r1", 900.0, 1.0)
    policy.adopt(("r2",))
    policy.adopt(("r1", "r2"))
    assert scores(policy, replicas_of(replica("r1"), replica("r2")).whole, 1.0) == [1.0, 1.0]


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 30.0)), min_size=1, max_size=20), st.floats(0.0, 100.0))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_score_is_the_peak_ewma_of_farhop_balance(samples, later_s) -> None:
    policy, one, now = adopted("r1"), PeakEwma(TAU_S), 0.0
    for elapsed_ms, pause_s in samples:
        now += pause_s
        policy.answered("r1", elapsed_ms, now)
        one.update(elapsed_ms, now)
    table = replicas_of(replica("r1")).whole
    assert scores(policy, table, now + later_s) == [pytest.approx(max(one.at(now + later_s) or 0.0, 1.0))]
