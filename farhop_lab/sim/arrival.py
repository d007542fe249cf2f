"""One request in virtual time as its sender sees it, from the moment it is asked to the moment it is concluded.

Invariant: it is concluded once, and recorded then. Never chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance import outcome
from farhop_lab.sim.engines import UsageWithText
from farhop_lab.sim.measures import RequestRecord
from farhop_lab.sim.relay import ActiveRequest, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Answer, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.context import SimContext
    from farhop_lab.sim.relay import RequestRelay

NOTHING = UsageWithText(0, 0, 0)


class Arrival:
    """One request as its sender sees it. `direct`: it came to its region's own client listener."""

    __slots__ = ("_arrived_at", "_began_at", "_measures", "_over", "_timeline", "active", "direct", "entry", "relay")

    def __init__(
        self,
        context: SimContext,
        request: Request,
        prompt: Prompt,
        entry: str,
        relay: RequestRelay,
        over: Callable[[RequestRecord, bytes], None],
        *,
        direct: bool,
    ) -> None:
        self._timeline, self._measures, self._over = context.timeline, context.measures, over
        self.entry, self.relay, self.direct = entry, relay, direct
        self.active = ActiveRequest(request, prompt, self)
        self._arrived_at = context.timeline.now
        self._began_at: float | None = None
        self._measures.came(request.id, request.tenant, entry, self._arrived_at)

    def began(self, _status: int) -> None:
        """See relay.Client."""
        self._began_at = self._timeline.now

    def ended(self, status: int, usage: Usage | None) -> None:
        """See relay.Client."""
        self.over(outcome.of_answer(status), usage)

    def refused(self, answer: Answer) -> None:
        """See relay.Client."""
        self.over(answer.outcome)

    def broke(self, reason: Outcome) -> None:
        """See relay.Client."""
        started = self._began_at is not None
        self.over(outcome.DIED_MID_STREAM if started and reason is outcome.DIED_BEFORE_START else reason)

    def over(self, reason: Outcome, usage: Usage | None = None) -> None:
        """It is concluded."""
        request, active, began_at = self.active.request, self.active, self._began_at
        where = self.entry if self.direct else active.target
        used = usage or NOTHING
        record = RequestRecord(
            id=request.id,
            tenant=request.tenant,
            entry=self.entry,
            region=where if began_at is not None else "",
            outcome=reason.reason,
            arrived_at=self._arrived_at,
            ended_at=self._timeline.now,
            ttft_ms=None if began_at is None else (began_at - self._arrived_at) * 1e3,
            attempts=active.attempts,
            direct=self.direct,
            session=request.session,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens or 0,
            answer_tokens=used.completion_tokens,
        )
        self._measures.went(record)
        self._over(record, used.text if isinstance(used, UsageWithText) else b"")
