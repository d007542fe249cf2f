"""Whether a failed attempt may be retried elsewhere: never after an engine's own answer (but that it takes nothing now,
outcome.DECLINED), once for free, then within a budget.

Invariants: a budgeted retry starts only while those in flight, itself included, stay within 3 + 20 % of the requests
active; counts are never negative; no request makes more than ATTEMPTS_MAX attempts. Deciding changes nothing.
"""

from collections.abc import Sized

from farhop.balance.outcome import Outcome, Source

BUDGET_FLOOR = 3
BUDGET_SHARE = 0.2  # with the floor: Envoy's retry budget, which takes the greater of the two
TRANSPORT_RETRIES_MAX = 2  # per request: the free one and one from the budget
ATTEMPTS_MAX = 8  # per request, whatever the reason: a refusal costs the client a round trip, too


class RetryBudget:
    """A count of budgeted retries in flight in this process; `requests` are those that are active."""

    __slots__ = ("_requests", "_retrying")

    def __init__(self, requests: Sized) -> None:
        self._requests = requests
        self._retrying = 0

    @property
    def retrying(self) -> int:
        """Budgeted retries between take() and give()."""
        return self._retrying

    def allows(self) -> bool:
        """Whether one more budgeted retry fits. Changes nothing."""
        return self._retrying + 1 <= BUDGET_FLOOR + BUDGET_SHARE * len(self._requests)

    def take(self) -> bool:
        """Start a budgeted retry, if the budget allows one. Returns whether it does."""
        if not self.allows():
            return False
        self._retrying += 1
        return True

    def give(self) -> None:
        """A budgeted retry is over. ValueError if none is in flight."""
        if self._retrying == 0:
            raise ValueError("give() without take(): every budgeted retry ends once")
        self._retrying -= 1


def draws_on_budget(outcome: Outcome, transport_retries: int) -> bool:
    """Whether re-dispatching after `outcome` must take() from the budget: a transport failure after the free retry."""
    return outcome.source is Source.TRANSPORT and transport_retries >= 1


def may_redispatch(outcome: Outcome, attempts: int, transport_retries: int, budget: RetryBudget) -> bool:
    """Whether a request that has not started may be sent to its next candidate.

    `attempts` were made so far (1 or more); `transport_retries` of the re-dispatches followed a transport failure.

    A refusal (a region's, or its own copy of the law's, or a stopping balancer's) is not counted in the budget: nothing
    was sent to an engine, so going on multiplies no work, and each candidate is asked at most once, so the caller's
    list of runners-up bounds it besides ATTEMPTS_MAX. A transport failure may have left work behind at the target; the
    first one is answered all the same, since admission at the next target bounds the load.
    """
    if not outcome.retryable or outcome.source is Source.ENGINE or attempts >= ATTEMPTS_MAX:
        return False
    if outcome.source is not Source.TRANSPORT:
        return True
    if transport_retries == 0:
        return True
    return transport_retries < TRANSPORT_RETRIES_MAX and budget.allows()
