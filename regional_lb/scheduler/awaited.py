"""Which requests wait by choice, and for which full replica: one that will soon serve them better than those with room.

They will get its next room, so a further request that would wait for it must wait for all of them. Without this a queue
forms before the best replica while others have nothing to prefill, as each request expects to wait only for what is
being prefilled there. And they do not queue before other requests: those may take the room that they declined. Never
decides.
"""

from __future__ import annotations

from typing import NamedTuple


class Wait(NamedTuple):
    """One of them: what it waits for, and its work there in tokens."""

    variant: str
    replica: str
    work_tokens: float


class Awaited:
    """The replicas that requests wait for by choice. `tokens`: by replica, their work there; `by_variant`: their
    number. Both keep entries that no request waits for any more until none waits at all.
    """

    __slots__ = ("by_request", "by_variant", "tokens")

    def __init__(self) -> None:
        self.by_request: dict[str, Wait] = {}
        self.by_variant: dict[str, int] = {}
        self.tokens: dict[str, float] = {}

    def wait(self, request_id: str, wait: Wait) -> None:
        """The request, which waits for none yet, waits so."""
        self.by_request[request_id] = wait
        self.by_variant[wait.variant] = self.by_variant.get(wait.variant, 0) + 1
        self.tokens[wait.replica] = self.tokens.get(wait.replica, 0.0) + wait.work_tokens

    def leave(self, request_id: str) -> None:
        """The request no longer waits by choice; nothing happens if it did not."""
        wait = self.by_request.pop(request_id, None)
        if wait is None:
            return
        if not self.by_request:  # the usual case, and no rest of rounding is left
            self.by_variant.clear()
            self.tokens.clear()
            return
        self.by_variant[wait.variant] -= 1
        self.tokens[wait.replica] = max(0.0, self.tokens[wait.replica] - wait.work_tokens)
