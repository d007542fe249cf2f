"""The regional machine's state for one request under way. Never decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from farhop.balance.machine import Carrier, Request
    from regional_lb.scheduler.pick import Pick, Scored
    from regional_lb.scheduler.policy import Need
    from regional_lb.scheduler.split import Assigned
    from topology.law import Law


class RequestState(msgspec.Struct, eq=False, gc=False):
    """The state of one request under way. Points in time are monotonic seconds."""

    request: Request
    need: Need
    variant: str  # the variant that it waits for: its model, or the version `assigned` (view.variant_of)
    law: Law  # that of its arrival here
    foreign: bool = False  # it comes from another region
    attempts: int = 0
    transport_retries: int = 0
    budgeted: bool = False  # a retry of it was taken from the retry budget
    started: bool = False  # the current attempt's answer has begun

    # The current attempt.
    replica: str = ""  # "": no attempt is under way
    prefiller: str = ""  # the replica that computes the prompt for `replica` now; "": none
    whole: bool = False  # no other replica is to compute its prompt any more
    tried: tuple[str, ...] = ()  # the replicas that are not to be asked again
    due: float = 0.0  # when its timer fires
    held_at: float | None = None  # when it was first put in the queue; None: never
    # How much of its prompt the best replica had cached when it was last tried and none had room.
    cached_tokens: float = 0.0
    forwarded_at: float = 0.0
    prefilled_at: float = 0.0  # when the first token came or, for an answer in one piece, was expected
    # When it was sent or, of a stream, when its first token came, and its replica's Columns.in_flight_s then: from both
    # follows the mean load beside it.
    load_since: tuple[float, float] = (0.0, 0.0)
    expected_ms: float = 0.0  # the expected time from sending the request to the beginning of the answer
    pick: Pick | None = None  # the last choice of a replica; None: none yet
    assigned: Assigned | None = None  # the version that a split gave it; None: no split
    resumes: int = 0  # how often its stream broke and had to continue elsewhere
    carrier: Carrier | None = None  # by what its stream continues; None: there is nothing to continue
    late: bool = False  # it waited too long in a standing queue and stepped back behind younger requests
    paired: bool = False  # in the last attempt, another replica computes or computed the prompt

    @property
    def chosen(self) -> Scored | None:
        """What the last attempt was expected to meet."""
        return self.pick.chosen if self.pick is not None else None
