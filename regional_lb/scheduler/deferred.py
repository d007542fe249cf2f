"""Which requests are deferred: they wait by choice for a full replica that will soon serve them better than any with
room (delay scheduling, Zaharia et al. 2010).

They will get its next room, so a further request that would wait for it must wait for all of them. Without this a queue
forms before the best replica while others have nothing to prefill, as each request expects to wait only for what is
being prefilled there. And they do not queue before other requests: those may take the room that they declined. How many
of them have the same prefix cached there is known, too: a second replica that holds it would serve them all sooner.
Never decides.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple


class Deferral(NamedTuple):
    """What a deferred request waits for, its work there in tokens, and the last node of its prefix that is cached
    there, 0 without one. `most_s`: after so long in the queue it waits no more."""

    variant: str
    replica: str
    work_tokens: float
    node: int = 0
    most_s: float = inf


class Deferred:
    """The deferred requests. `tokens`: by replica, their work there; `by_variant`: their number; `alike`: by replica
    and node, the number of those with this prefix. All keep entries that no request waits for any more until none waits
    at all.
    """

    __slots__ = ("alike", "by_request", "by_variant", "tokens")

    def __init__(self) -> None:
        self.by_request: dict[str, Deferral] = {}
        self.by_variant: dict[str, int] = {}
        self.tokens: dict[str, float] = {}
        self.alike: dict[tuple[str, int], int] = {}

    def add(self, request_id: str, deferral: Deferral) -> None:
        """Record a request that is not deferred yet."""
        self.by_request[request_id] = deferral
        self.by_variant[deferral.variant] = self.by_variant.get(deferral.variant, 0) + 1
        self.tokens[deferral.replica] = self.tokens.get(deferral.replica, 0.0) + deferral.work_tokens
        self._count(deferral, 1)

    def remove(self, request_id: str) -> None:
        """The request is no longer deferred; nothing happens if it was not."""
        deferral = self.by_request.pop(request_id, None)
        if deferral is None:
            return
        if not self.by_request:  # the usual case, and no rest of rounding is left
            self.by_variant.clear()
            self.tokens.clear()
            self.alike.clear()
            return
        self.by_variant[deferral.variant] -= 1
        self.tokens[deferral.replica] = max(0.0, self.tokens[deferral.replica] - deferral.work_tokens)
        self._count(deferral, -1)

    def _count(self, deferral: Deferral, more: int) -> None:
        if deferral.node:
            of = deferral.replica, deferral.node
            self.alike[of] = self.alike.get(of, 0) + more


NO_DEFERRED = Deferred()
