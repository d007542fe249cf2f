"""The regional machine's state for one request under way. Never decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from farhop.balance.machine import Carrier, Request
    from regional_lb.scheduler.pick import Pick, Scored
    from regional_lb.scheduler.policy import Need
    from regional_lb.scheduler.split import Assigned


class RequestState(msgspec.Struct, eq=False, gc=False):
    """One request in the machine's hands. `replica` is "" unless an attempt is under way there.

    `due` is what its timer is set for, `held_at` when it was first held, None if it never was. `prefilled_at` is when
    its first token came, or, where the answer comes in one piece and does not show it, when that was due.
    `expected_ms`: within what time after it was sent its answer should begin. `variant` is what it waits for: its
    model, or the version `assigned`. `prefiller` computes the prompt for `replica` now, "" if nobody does; `whole`:
    nobody is to do so any more. `paired`: another replica computed, or computes, the prompt in the last attempt.
    `declined`: it waits by choice (Pick.declined). `foreign`: it comes from another region. `cached_tokens`: of its
    prompt, where most of it was cached when it was last tried and nobody had room.
    `late`: it has waited too long in a queue that stands, and stepped back; it waits until `late_until` at the most.
    `resumes`: how often its stream broke and was to go on elsewhere; `carrier`: what it then goes on by, None while
    nothing is to go on.
    """

    request: Request
    need: Need
    variant: str
    foreign: bool = False
    attempts: int = 0
    transport_retries: int = 0
    budgeted: bool = False
    started: bool = False
    replica: str = ""
    prefiller: str = ""
    whole: bool = False
    tried: tuple[str, ...] = ()
    due: float = 0.0
    held_at: float | None = None
    declined: bool = False
    cached_tokens: float = 0.0
    forwarded_at: float = 0.0
    prefilled_at: float = 0.0
    expected_ms: float = 0.0
    pick: Pick | None = None
    assigned: Assigned | None = None
    resumes: int = 0
    carrier: Carrier | None = None
    late: bool = False
    late_until: float = 0.0
    paired: bool = False

    @property
    def chosen(self) -> Scored | None:
        """What the last attempt was expected to meet."""
        return self.pick.chosen if self.pick is not None else None
