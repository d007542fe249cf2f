"""One request in virtual time as its sender sees it, from the moment it is asked to the moment its fate is sealed.

Invariant: its fate is told once. Never chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance import outcome
from farhop_lab.sim.carrier import Journey, Prompt
from farhop_lab.sim.engines import Spoken
from farhop_lab.sim.measures import Fate

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Answer, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.carrier import Entrance
    from farhop_lab.sim.stage import Stage

NOTHING = Spoken(0, 0, 0)


class Arrival:
    """One request as its sender sees it. `direct`: it came to its region's own client listener."""

    __slots__ = ("_arrived_at", "_began_at", "_measures", "_over", "_timeline", "carrier", "direct", "entry", "journey")

    def __init__(
        self,
        stage: Stage,
        request: Request,
        prompt: Prompt,
        entry: str,
        carrier: Entrance,
        over: Callable[[Fate, bytes], None],
        *,
        direct: bool,
    ) -> None:
        self._timeline, self._measures, self._over = stage.timeline, stage.measures, over
        self.entry, self.carrier, self.direct = entry, carrier, direct
        self.journey = Journey(request, prompt, self)
        self._arrived_at = stage.timeline.now
        self._began_at: float | None = None
        self._measures.came(request.id, request.tenant, entry, self._arrived_at)

    def began(self, _status: int) -> None:
        """See carrier.Client."""
        self._began_at = self._timeline.now

    def ended(self, status: int, usage: Usage | None) -> None:
        """See carrier.Client."""
        self.over(outcome.SERVED if status < 400 else outcome.ENGINE_ERROR, usage)

    def refused(self, answer: Answer) -> None:
        """See carrier.Client."""
        self.over(answer.outcome)

    def broke(self, reason: Outcome) -> None:
        """See carrier.Client."""
        started = self._began_at is not None
        self.over(outcome.DIED_MID_STREAM if started and reason is outcome.DIED_BEFORE_START else reason)

    def over(self, reason: Outcome, usage: Usage | None = None) -> None:
        """Its fate is sealed."""
        request, journey, began_at = self.journey.request, self.journey, self._began_at
        where = self.entry if self.direct else journey.target
        used = usage or NOTHING
        fate = Fate(
            id=request.id,
            tenant=request.tenant,
            entry=self.entry,
            region=where if began_at is not None else "",
            outcome=reason.reason,
            arrived_at=self._arrived_at,
            ended_at=self._timeline.now,
            ttft_ms=None if began_at is None else (began_at - self._arrived_at) * 1e3,
            attempts=journey.attempts,
            direct=self.direct,
            session=request.session,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens or 0,
            answer_tokens=used.completion_tokens,
        )
        self._measures.went(fate)
        self._over(fate, used.text if isinstance(used, Spoken) else b"")
