"""What is counted never lets more through than it says, and is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from global_lb.routing.policy.account import CREDIT_MAX, EgressBudget, ForeignQuota


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=300))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_foreign_quota_is_never_exceeded(share: float, preferences: list[bool]) -> None:
    quota, left = ForeignQuota(share), 0
    for n, wish in enumerate(preferences, 1):
        leaves = wish and quota.allows()
        quota.sent(foreign=leaves)
        left += leaves
        assert left <= share * n + 1e-6


def test_a_quiet_time_saves_up_only_so_much() -> None:
    quota = ForeignQuota(0.5)
    for _ in range(1000):
        quota.sent(foreign=False)
    left = 0
    while quota.allows():
        quota.sent(foreign=True)
        left += 1
    assert left <= 2 * CREDIT_MAX


@given(st.lists(st.tuples(st.floats(0, 600), st.floats(0, 5)), max_size=60))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_hour_spends_more_than_twice_its_budget_and_one_request(spends: list[tuple[float, float]]) -> None:
    budget, now, paid = EgressBudget(10.0), 0.0, []
    for pause_s, usd in spends:
        now += pause_s
        if not budget.spent(now):
            budget.spend(usd, now)
            paid.append((now, usd))
        assert sum(usd for at, usd in paid if at > now - 3600.0) <= 20.0 + 5.0 + 1e-6


def test_a_zero_budget_is_spent_at_once_and_estimates_are_corrected() -> None:
    assert EgressBudget(0.0).spent(5.0)
    budget = EgressBudget(1.0)
    budget.spend(1.5, 0.0)
    assert budget.spent(0.0)
    budget.spend(-1.0, 0.0)
    assert budget.spent_usd(0.0) == pytest.approx(0.5)
    budget.spend(-9.0, 0.0)
    assert budget.spent_usd(0.0) == 0.0
