"""Bounds hold whatever is taken and given."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.bounds import ByteBudget, SlotLimit

RUN = settings(max_examples=200, deadline=None, derandomize=True)


@given(st.integers(0, 100), st.lists(st.tuples(st.booleans(), st.integers(-5, 60)), max_size=60))
@RUN
def test_a_byte_budget_is_never_overdrawn_nor_overfilled(capacity: int, calls: list[tuple[bool, int]]) -> None:
    budget = ByteBudget(capacity)
    used = 0
    for takes, n in calls:
        if takes and n >= 0:
            fits = used + n <= capacity
            assert budget.take(n) is fits
            used += n if fits else 0
        elif takes:
            with pytest.raises(ValueError, match="take"):
                budget.take(n)
        elif 0 <= n <= used:
            budget.give(n)
            used -= n
        else:
            with pytest.raises(ValueError, match="give"):
                budget.give(n)
        assert budget.used_bytes == used
        assert 0 <= used <= budget.capacity_bytes == capacity


@given(st.integers(0, 6), st.lists(st.booleans(), max_size=60))
@RUN
def test_slots_are_never_overdrawn_nor_overfilled(capacity: int, calls: list[bool]) -> None:
    limit = SlotLimit(capacity)
    used = 0
    for takes in calls:
        if takes:
            assert limit.take() is (used < capacity)
            used = min(used + 1, capacity)
        elif used:
            limit.give()
            used -= 1
        else:
            with pytest.raises(ValueError, match="give"):
                limit.give()
        assert limit.used == used
        assert 0 <= used <= limit.capacity == capacity


def test_a_capacity_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes"):
        ByteBudget(-1)
    with pytest.raises(ValueError, match="capacity"):
        SlotLimit(-1)
