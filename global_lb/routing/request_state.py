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

_UNLAWFUL_THERE = (outcome.UNLAWFUL_HERE, outcome.UNLAWFUL_UNREAD)


class Attempt(msgspec.Struct, eq=False, gc=False):
    """One attempt under way: where, since when (`sent_at`), and what it was counted with in `load`. Of an answer that
    comes piece by piece `began_at`, and at how many tokens a second it was thought to come; 0 before."""

    region: str
    instance: Instance
    load: UnacknowledgedLoad
    work_bytes: float
    sent_at: float
    started: bool = False
    began_at: float = 0.0
    tokens_per_s: float = 0.0


class RequestState(msgspec.Struct, eq=False, gc=False):
    """One request in the machine's hands. `lawful` is by the law it came under (and its token's, if it has one).

    `attempt` is the one under way, `attempts` how many there were. `last_resort`: no promise is made any more;
    `quarantined`: it waits until it is known whether the processes live at which it broke off; `due` is what its timer
    is set for; `held_until` is when its patience ends, once it began. `waits_ms` is how long it would wait in regions
    that refused it, as they said; `waited_s` what it waited in queues of regions that let it go; `resumes`: how often
    its stream broke and was to go on elsewhere, and `broke`: where.
    """

    request: Request
    lawful: frozenset[str]
    attempt: Attempt | None = None
    attempts: int = 0
    transport_retries: int = 0
    budgeted: bool = False
    last_resort: bool = False
    quarantined: bool = False
    decision: Decision | None = None
    refusals: dict[str, Outcome] = {}
    waits_ms: dict[str, float] = {}
    held_until: float | None = None
    waited_s: float = 0.0
    due: float = 0.0
    resumes: int = 0
    broke: frozenset[str] = frozenset()

    def law_refused(self, lawful: frozenset[str]) -> bool:
        """Whether every lawful region refused because its own copy of the law forbids the request."""
        return all(self.refusals.get(region) in _UNLAWFUL_THERE for region in lawful)

    def all_say(self, reason: Outcome) -> bool:
        """Whether all who were asked, if any was, refused it for this."""
        return bool(self.refusals) and all(one is reason for one in self.refusals.values())

    def summary(self) -> str:
        """What happened to the request in each region, as text for the client."""
        return admission.refused_by(self.refusals, self.decision.absent if self.decision is not None else {})
