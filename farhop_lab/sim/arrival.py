"""One client request in virtual time, with its retries, until it is concluded.

Retries follow OpenAI's Python SDK: after a broken connection and statuses 408, 409, 429 and 500 or above; after the
answer's Retry-After, otherwise after 0.5 s, doubled each time, less a random part of up to a quarter. Never after an
answer has begun, since the caller has already received a part of it.

Invariant: the request is concluded and recorded exactly once, with all the time that its client waited. Never routes.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from farhop.balance import outcome
from farhop.balance.outcome import Source
from farhop_lab.sim.engines import UsageWithText
from farhop_lab.sim.measures import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Answer, Usage
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.context import SimContext
    from farhop_lab.sim.relay import ActiveRequest, RequestRelay
    from farhop_lab.sim.timeline import Call

NOTHING = UsageWithText(0, 0, 0)
_FIRST_PAUSE_S, _PAUSE_MAX_S, _JITTER = 0.5, 8.0, 0.25
_RETRY_AFTER_MAX_S = 60.0  # a longer Retry-After is ignored
_ASKED_AGAIN = frozenset((408, 409, 429))  # and all from 500 on


class Arrival:
    """One client request. `entry` is the region where it is sent; `direct`: to that region's own client listener. `ask`
    sends it once under the given id, and sets `active` and `relay`; after that up to `retries` times more, while no
    answer has begun.
    """

    __slots__ = (
        "_again",
        "_arrived_at",
        "_ask",
        "_attempts",
        "_began_at",
        "_measures",
        "_over",
        "_retries",
        "_timeline",
        "_times",
        "active",
        "direct",
        "entry",
        "id",
        "relay",
    )  # fmt: skip

    active: ActiveRequest
    relay: RequestRelay

    def __init__(
        self,
        context: SimContext,
        request_id: str,
        tenant: str,
        entry: str,
        ask: Callable[[Arrival, str], None],
        over: Callable[[RequestRecord, bytes], None],
        *,
        direct: bool,
        retries: int = 0,
    ) -> None:
        self._timeline, self._measures, self._over, self._ask = context.timeline, context.measures, over, ask
        self.id, self.entry, self.direct, self._retries = request_id, entry, direct, retries
        self._times = self._attempts = 0
        self._again: Call | None = None
        self._arrived_at = context.timeline.now
        self._began_at: float | None = None
        self._measures.add_arrival(request_id, tenant, entry, self._arrived_at)

    def go(self) -> None:
        """Send it, for the first time or again."""
        self._again = None
        self._times += 1
        self._ask(self, self.id if self._times == 1 else f"{self.id}-{self._times}")

    def leave(self) -> None:
        """The client disconnects; does nothing if the request is concluded."""
        if self._again is not None:
            self._again.cancel()
            self.over(outcome.CLIENT_LEFT)
        elif self.relay.client_left(self.active.request.id):
            self.over(outcome.CLIENT_LEFT)

    def _asks_again(self, retry_after_s: float | None = None) -> bool:
        """Retry after a failure that allows it; False if no retry is left."""
        if self._times > self._retries:
            return False
        if retry_after_s is not None and 0.0 < retry_after_s <= _RETRY_AFTER_MAX_S:
            pause_s = retry_after_s
        else:
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** (self._times - 1), _PAUSE_MAX_S)
            pause_s *= 1.0 - _JITTER * Random(f"{self.id} {self._times}").random()
        self._attempts += self.active.attempts
        self._began_at = None
        self._again = self._timeline.after(pause_s, self.go)
        return True

    def began(self, _status: int) -> None:
        """See relay.Client."""
        self._began_at = self._timeline.now

    def ended(self, status: int, usage: Usage | None) -> None:
        """See relay.Client."""
        if (status >= 500 or status in _ASKED_AGAIN) and self._asks_again():
            return
        self.over(outcome.of_answer(status), usage)

    def refused(self, answer: Answer) -> None:
        """See relay.Client."""
        final = answer.outcome.source in (Source.CLIENT, Source.LAW)
        if not final and self._asks_again(answer.retry_after_s):
            return
        self.over(answer.outcome)

    def broke(self, reason: Outcome) -> None:
        """See relay.Client."""
        started = self._began_at is not None
        if not started and self._asks_again():
            return
        self.over(outcome.DIED_MID_STREAM if started and reason is outcome.DIED_BEFORE_START else reason)

    def over(self, reason: Outcome, usage: Usage | None = None) -> None:
        """The request is concluded."""
        request, active, began_at = self.active.request, self.active, self._began_at
        served_by = self.entry if self.direct else active.target
        used = usage or NOTHING
        record = RequestRecord(
            id=self.id,
            tenant=request.tenant,
            entry=self.entry,
            region=served_by if began_at is not None else "",
            outcome=reason.reason,
            arrived_at=self._arrived_at,
            ended_at=self._timeline.now,
            ttft_ms=None if began_at is None else (began_at - self._arrived_at) * 1e3,
            attempts=self._attempts + active.attempts,
            direct=self.direct,
            session=request.session,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens or 0,
            answer_tokens=used.completion_tokens,
        )
        self._measures.add_record(record)
        self._over(record, used.text if isinstance(used, UsageWithText) else b"")
