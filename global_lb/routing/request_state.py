"""The global machine's state for one request under way. Never decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome
from global_lb.routing import admission

if TYPE_CHECKING:
    from farhop.balance.estimate.unacknowledged import UnacknowledgedLoad
    from farhop.balance.machine import Request
    from farhop.balance.outcome import Outcome
    from global_lb.fleet.view import Instance
    from global_lb.routing.pick import Decision
    from topology.law import Law

_UNLAWFUL_THERE = (outcome.UNLAWFUL_HERE, outcome.UNLAWFUL_UNREAD)


class RegionAttempt(msgspec.Struct, eq=False, gc=False):
    """One attempt in flight."""

    region: str
    instance: Instance
    load: UnacknowledgedLoad  # counts its load until the region acknowledges it
    work_bytes: float  # the prefill work that it was counted with
    sent_at: float  # monotonic seconds
    started: bool = False
    began_at: float = 0.0  # when the first byte of a streamed answer came; 0: not yet
    tokens_per_s: float = 0.0  # the stream's expected speed; 0: not begun


class RequestState(msgspec.Struct, eq=False, gc=False):
    """The state of one request under way. Points in time are monotonic seconds."""

    request: Request
    lawful: frozenset[str]  # by `law`, knowing what its model is based on, and by its hop token, if it has one
    law: Law  # that of its arrival
    attempt: RegionAttempt | None = None  # the attempt under way; None: none
    attempts: int = 0  # how many were made
    transport_retries: int = 0
    budgeted: bool = False  # a retry of it was taken from the retry budget
    last_resort: bool = False  # no promise is made any more
    # It may have ended the processes at which it broke off, and waits until it is known whether they live.
    quarantined: bool = False
    decision: Decision | None = None  # the last choice of a region; None: none yet
    refusals: dict[str, Outcome] = {}  # why regions refused it or failed, by region
    waits_ms: dict[str, float] = {}  # how long it would wait in regions that refused it, as they report
    held_until: float | None = None  # when it stops waiting for a region; None: it never waited
    waited_s: float = 0.0  # how long it waited in queues of regions that released it
    due: float = 0.0  # when its timer fires
    resumes: int = 0  # how often its stream broke and had to continue elsewhere
    broke: frozenset[str] = frozenset()  # the regions where it broke
    waited_for: dict[str, float] = {}  # the lost regions that it waits or waited for, and until when

    def law_refused(self, lawful: frozenset[str]) -> bool:
        """Whether every lawful region refused because its own copy of the law forbids the request."""
        return all(self.refusals.get(region) in _UNLAWFUL_THERE for region in lawful)

    def all_say(self, reason: Outcome) -> bool:
        """Whether all regions that were asked, if any, refused it for this reason."""
        return bool(self.refusals) and all(one is reason for one in self.refusals.values())

    def summary(self) -> str:
        """What happened to the request in each region, as a text for the client."""
        return admission.refused_by(self.refusals, self.decision.absent if self.decision is not None else {})
