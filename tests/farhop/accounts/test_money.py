"""Money in whole numbers: a begun microdollar counts, and nothing costs more than it may cost at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farhop.accounts.money import Rates, usd

TOKENS = st.integers(0, 1 << 22)


def test_the_cost_of_tokens_is_in_whole_microdollars() -> None:
    january = Rates(1_000_000, 250_000, 4_000_000)
    assert january.micro_usd(600, 400, 100) == 1100
    assert january.micro_usd(0, 1, 0) == 1, "a begun one counts whole"
    assert Rates(10, 50, 0).at_most(1_000_000, 9) == 50
    assert [usd(micro) for micro in (0, 1, 250_000, 50_000_000, 1_234_567_890)] == [
        "0", "0.000001", "0.25", "50", "1,234.56789"
    ]  # fmt: skip


@given(st.tuples(*[st.integers(0, 10**10)] * 3), TOKENS, TOKENS, TOKENS, st.integers(1, 10**12))
def test_no_request_costs_more_than_it_may_cost_at_most(
    of: tuple[int, int, int], fresh: int, cached: int, output: int, size: int
) -> None:
    rates = Rates(*of)
    most = rates.at_most(fresh + cached, output)
    assert 0 <= rates.micro_usd(fresh, cached, output) <= most
    within = rates.output_within(size, fresh)
    if within >= 0:
        assert rates.at_most(fresh, within if rates.output else output) <= size
