"""One request in the global machine's hands: what it may do, what it did, where it is now. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farhop.balance import outcome
from global_lb import admission

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from farhop.balance.outcome import Outcome
    from farhop.balance.reckoning import Reckoning
    from global_lb.pick import Decision
    from global_lb.view import Instance

LOOK_AGAIN_S = 1.0
_UNLAWFUL = (outcome.UNLAWFUL_HERE, outcome.UNLAWFUL_UNREAD)
LOOK_SOON_S = 0.5


@dataclass(slots=True)
class Live:
    """One request in the machine's hands. `lawful` is by the law it came under (and its token's, if it has one).

    `region` and `reckoning` are those of the attempt under way, "" and None without one, `uncached_bytes` what that was
    reckoned with; `instance` was asked last; `last_resort`: no promise is made any more; `doubted`: it waits until it
    is known whether the processes live at which it broke off; `due` is what its timer is set
    for; `held_until` is when its patience ends, once it began. `waits_ms` is how long it would wait in regions that
    refused it, by their own word. `sent_at` is when the attempt under way was sent, `waited_s` what it waited in queues
    of regions that let it go.
    """

    request: Request
    lawful: frozenset[str]
    attempts: int = 0
    transport_retries: int = 0
    budgeted: bool = False
    started: bool = False
    region: str = ""
    reckoning: Reckoning | None = None
    uncached_bytes: float = 0.0
    instance: Instance | None = None
    last_resort: bool = False
    doubted: bool = False
    decision: Decision | None = None
    refusals: dict[str, Outcome] = field(default_factory=dict)
    waits_ms: dict[str, float] = field(default_factory=dict)
    held_until: float | None = None
    sent_at: float = 0.0
    waited_s: float = 0.0
    due: float = 0.0

    def look_again(self, now: float) -> float:
        """When to see whether its region still lives: a request that is swallowed brings no event of its own."""
        return self.request.deadline if self.started else min(self.request.deadline, now + LOOK_AGAIN_S)

    def law_refused(self, lawful: frozenset[str]) -> bool:
        """Whether every lawful region's own copy of the law said no."""
        return all(self.refusals.get(region) in _UNLAWFUL for region in lawful)

    def look_soon(self, now: float) -> bool:
        """Whether to look sooner than it is due, LOOK_SOON_S after its region's channel broke: it may be back then."""
        return not self.started and now + LOOK_SOON_S < self.due

    def told(self) -> str:
        """What became of it, region by region, for the client."""
        return admission.told(self.refusals, self.decision.absent if self.decision is not None else {})
