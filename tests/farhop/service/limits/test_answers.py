"""Limits in answers, in the form that OpenAI's SDK and the draft on RateLimit headers read."""

from __future__ import annotations

import msgspec
import pytest

from farhop.balance.quota import Grant, Quota
from farhop.balance.quota_holder import new_holding
from farhop.service.limits import answers
from farhop.service.limits.match import MONEY, REQUESTS, Lender, Matched


def test_lengths_of_time_are_written_as_openai_does() -> None:
    assert [answers.span(s) for s in (0.12, 1.0, 6.0, 90.0, 7200.0)] == ["120ms", "1s", "6s", "1m30s", "2h0m0s"]


def matched(kind: int = REQUESTS, size: int = 10, period: int = 60) -> Matched:
    holding = new_holding("b", Quota(size, size / period), None, 0.0)
    return Matched(Lender("tokyo"), ((kind, size, period, holding),))


def test_refusal_above_the_whole_limit_has_should_retry_false() -> None:
    reply = answers.refusal(matched(), REQUESTS, 10, 60, 11, None, 0.0)
    assert reply.status == 429
    assert b"x-should-retry: false" in reply.extra
    assert b"retry-after" not in reply.extra
    assert "ask for less" in msgspec.json.decode(reply.body)["error"]["message"]


@pytest.mark.parametrize(("used_up", "again"), [(True, b"false"), (False, b"true")])
def test_refusal_by_a_budget_is_insufficient_quota(used_up: bool, again: bytes) -> None:
    reply = answers.refusal(
        matched(MONEY, 5_000_000, 86_400), MONEY, 5_000_000, 86_400, 250_000, 7.5, 0.0, used_up=used_up
    )
    error = msgspec.json.decode(reply.body)["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert "5 USD per day, and this request may cost 0.25; try again in 8s" in error["message"]
    assert b"retry-after-ms: 7500\r\nx-should-retry: " + again in reply.extra


@pytest.mark.parametrize(("retry_s", "whole", "ms"), [(0.006, "1", 6), (1.0, "1", 1000), (2.3, "3", 2300)])
def test_the_message_and_retry_after_give_the_same_time(retry_s: float, whole: str, ms: int) -> None:
    """Which has whole seconds alone (RFC 9110 §10.2.3); SDKs read the milliseconds beside it."""
    reply = answers.refusal(matched(), REQUESTS, 10, 60, 1, retry_s, 0.0)
    assert msgspec.json.decode(reply.body)["error"]["message"].endswith(f"; try again in {whole}s")
    assert f"retry-after: {whole}\r\n".encode() in reply.extra
    assert b"retry-after-ms: %d\r\n" % ms in reply.extra


def test_a_tenants_granted_requests_remain_though_others_overdrew_the_limit() -> None:
    one = matched()
    holding = one.of[0][3]
    holding.apply(Grant("b", 4, -7.5), 0.0)
    assert b"x-ratelimit-remaining-requests: 4\r\n" in answers.headers(one, 0.0)


@pytest.mark.parametrize(("has_book", "says"), [(True, "no price in the price book"), (False, "no price book")])
def test_a_refusal_for_a_missing_price_names_the_model(has_book: bool, says: str) -> None:
    error = msgspec.json.decode(answers.not_priced("m", has_book=has_book).body)["error"]
    assert (error["param"], error["code"], says in error["message"]) == ("model", "model_not_priced", True)
