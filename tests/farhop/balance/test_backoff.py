"""Back-off: grows, stays within its bounds, forgets on success."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.backoff import Backoff


@given(st.integers(0, 2**32), st.integers(1, 40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_each_wait_is_within_the_upper_half_of_a_doubling_ceiling(seed, tries):
    backoff = Backoff(Random(seed), first_s=0.05, limit_s=1.0)
    for number in range(tries):
        ceiling_s = min(0.05 * 2**number, 1.0)
        assert ceiling_s / 2 <= backoff.next_s() <= ceiling_s
    backoff.reset()
    assert backoff.next_s() <= 0.05


def test_two_processes_do_not_come_back_in_step():
    first, second = Backoff(Random(1)), Backoff(Random(2))
    assert [first.next_s() for _ in range(5)] != [second.next_s() for _ in range(5)]


@pytest.mark.parametrize(("first_s", "limit_s"), [(0, 1), (-1, 1), (2, 1)])
def test_bounds_must_make_sense(first_s, limit_s):
    with pytest.raises(ValueError, match="first_s"):
        Backoff(Random(1), first_s, limit_s)
