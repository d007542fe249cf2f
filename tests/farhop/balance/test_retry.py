"""Which requests may be retried elsewhere: over the whole catalogue of outcomes, and never beyond the bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance import outcome as endings
from farhop.balance.outcome import Outcome, Source, catalogue
from farhop.balance.retry import ATTEMPTS_MAX, TRANSPORT_RETRIES_MAX, RetryBudget, draws_on_budget, may_redispatch

RUN = settings(max_examples=200, deadline=None, derandomize=True)


def spent_budget() -> RetryBudget:
    budget = RetryBudget(())
    while budget.take():
        pass
    return budget


@pytest.mark.parametrize("outcome", catalogue(), ids=lambda outcome: outcome.reason)
@given(attempts=st.integers(1, 20), transport_retries=st.integers(0, 5))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_retry_is_allowed_by_outcome_attempts_and_budget_alone(
    outcome: Outcome, attempts: int, transport_retries: int
) -> None:
    for budget in (RetryBudget(()), spent_budget()):
        may = may_redispatch(outcome, attempts, transport_retries, budget)
        if not outcome.retryable or attempts >= ATTEMPTS_MAX:
            assert may is False
        elif outcome.source is not Source.TRANSPORT or transport_retries == 0:
            assert may is True
        else:
            assert may is (transport_retries < TRANSPORT_RETRIES_MAX and budget.allows())


def test_an_engines_own_answer_is_never_retried_even_if_it_claimed_to_be() -> None:
    assert not may_redispatch(endings.ENGINE_ERROR, 1, 0, RetryBudget(()))
    assert not may_redispatch(Outcome(Source.ENGINE, "made_up", retryable=True), 1, 0, RetryBudget(()))


def test_the_first_transport_failure_is_free_the_second_is_budgeted_the_third_is_the_end() -> None:
    spent, fresh = spent_budget(), RetryBudget(())
    assert may_redispatch(endings.CONNECT_FAILED, 1, 0, spent)
    assert not draws_on_budget(endings.CONNECT_FAILED, 0)
    assert may_redispatch(endings.CONNECT_FAILED, 2, 1, fresh)
    assert draws_on_budget(endings.CONNECT_FAILED, 1)
    assert not may_redispatch(endings.CONNECT_FAILED, 2, 1, spent)
    assert not may_redispatch(endings.CONNECT_FAILED, 3, 2, fresh)


def test_a_refusal_moves_on_without_the_budget() -> None:
    for refusal in (endings.QUEUE_FULL, endings.UNLAWFUL_HERE, endings.STOPPING):
        assert may_redispatch(refusal, 3, 2, spent_budget())
        assert not draws_on_budget(refusal, 2)


def test_a_request_whose_answer_began_is_not_sent_again() -> None:
    assert not may_redispatch(endings.DIED_MID_STREAM, 1, 0, RetryBudget(()))


@given(st.lists(st.sampled_from(["began", "ended", "take", "give"]), max_size=120))
@RUN
def test_budgeted_retries_start_only_within_the_bound(calls: list[str]) -> None:
    requests: list[int] = []
    budget = RetryBudget(requests)
    retrying = active_most = 0
    for call in calls:
        if call == "began":
            requests.append(0)
        elif call == "take":
            allowed = budget.allows()
            assert budget.take() is allowed
            assert allowed == (retrying + 1 <= 3 + 0.2 * len(requests))
            retrying += allowed
        elif call == "ended":
            del requests[:1]
        elif retrying == 0:
            with pytest.raises(ValueError, match="without"):
                budget.give()
        else:
            budget.give()
            retrying -= 1
        active_most = max(active_most, len(requests))
        assert budget.retrying == retrying
        assert 0 <= retrying <= 3 + 0.2 * active_most


def test_an_idle_process_may_retry_three_at_once_and_a_busy_one_a_fifth_more() -> None:
    requests: list[int] = []
    budget = RetryBudget(requests)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    requests += range(10)
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_no_request_makes_more_than_eight_attempts() -> None:
    assert ATTEMPTS_MAX == 8
