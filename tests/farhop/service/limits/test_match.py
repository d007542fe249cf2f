"""What a request may use of each kind at most: each of its answers, and no more than a limit that it could ever fit."""

from __future__ import annotations

from typing import Any

from farhop.accounts.money import Rates
from farhop.balance.machine import Request
from farhop.balance.quota import Quota
from farhop.balance.quota_holder import new_holding
from farhop.service.limits.match import MONEY, OUTPUT_FLOOR, OUTPUT_TOKENS, TOKENS, Lender, Matched


def matched(kind: int = TOKENS, size: int = 1_000_000) -> Matched:
    return Matched(Lender("tokyo"), ((kind, size, 60, new_holding("b", Quota(size, 1.0), None, 0.0)),))


def request(**more: Any) -> Request:
    return Request("1", "acme", "m", 40, 100, (), 9e9, **{"max_tokens": None, **more})


def test_every_choice_of_a_request_is_reserved() -> None:
    assert matched().amounts(request(max_tokens=50)) == (1, 10, 50, 60, 1, 0)
    assert matched().amounts(request(max_tokens=50, answers=3)) == (1, 10, 150, 160, 1, 0), "n of them"
    assert matched().amounts(request(answers=2))[2] == 2 * OUTPUT_TOKENS


def test_an_answer_without_a_bound_is_as_those_before_and_fits_where_any_could() -> None:
    one = matched()
    one.learn(request(answers=2), 200, 1.0)
    assert one.amounts(request())[2] == 200, "twice what one was"
    one.learn(request(), 0, 0.0)
    for _ in range(100):
        one.learn(request(), 1, 0.0)
    assert one.amounts(request())[2] == OUTPUT_FLOOR
    assert matched(size=100).amounts(request())[3] == 100
    priced = matched(MONEY, 500)
    priced.rates = Rates(1_000_000, 250_000, 4_000_000)
    assert priced.amounts(request())[5] <= 500
