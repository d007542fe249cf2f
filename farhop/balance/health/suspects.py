"""Which request bodies may have killed the processes that handled them: a query of death must not go to another
process.

A process counts against a body if the body was under way there when it broke off, and nothing was heard of the process
afterwards, by any path, for SILENCE_S. If it is heard of again meanwhile, only its link was cut, and no body is blamed.
Invariants: bounded; nothing is held longer than HOLD_S; only the same body of the same tenant is affected, and not once
it was answered. Never sees a body, only its hash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from farhop.balance import outcome

HOLD_S = 60.0
# How an attempt ends that was under way at a process: not one without a connection, nor one that was answered.
BROKE_OFF = (
    outcome.DIED_BEFORE_START, outcome.DIED_MID_STREAM, outcome.FIRST_BYTE_TIMEOUT, outcome.STALLED,
    outcome.ENGINE_BROKEN,
)  # fmt: skip
SILENCE_S = 3.0  # three reports missed, as for a region's liveness
PROCESSES = 2  # one may be chance
BODIES_MAX = 4096

Body: TypeAlias = tuple[str, int]  # tenant, hash of the body
Process: TypeAlias = tuple[str, ...]
LastSeen: TypeAlias = Callable[
    [Process], float
]  # when it was last heard of, by any path; -inf if it is not known any more


class Quarantine(msgspec.Struct, frozen=True):
    """The body must not be sent before `until`; if not `sure`, only until it is known whether the processes are
    alive."""

    until: float
    sure: bool


class Suspects:
    """Failures counted against request bodies, by their hash. Times are monotonic seconds."""

    __slots__ = ("against",)

    def __init__(self) -> None:
        self.against: dict[Body, dict[Process, tuple[float, bool]]] = {}  # since when, and whether that is sure

    def __len__(self) -> int:
        return len(self.against)

    def broke_off(self, body: Body, process: Process, last_seen_at: float, now: float) -> None:
        """An attempt with this body ended without an answer at a process last heard of at `last_seen_at`."""
        held = self.against.pop(body, {})
        held[process] = (now, now - last_seen_at >= SILENCE_S)
        self.against[body] = held  # the last: the first is the one quiet for longest
        if len(self.against) > BODIES_MAX:
            del self.against[next(iter(self.against))]

    def answered(self, body: Body) -> None:
        """A process took it, and lives: whatever ended the others, it was not this."""
        self.against.pop(body, None)

    def quarantine(self, body: Body, last_seen: LastSeen, now: float) -> Quarantine | None:
        """Whether the body may be sent to another process: None, or until when not."""
        held = self.against.get(body)
        if held is None:
            return None
        for process, (since, sure) in list(held.items()):
            if now >= since + HOLD_S or (not sure and last_seen(process) > since):
                del held[process]
            elif not sure and now >= since + SILENCE_S:
                held[process] = (since, True)
        if not held:
            del self.against[body]
        if len(held) < PROCESSES:
            return None
        sure_until = sorted((since + HOLD_S for since, sure in held.values() if sure), reverse=True)
        if len(sure_until) >= PROCESSES:
            return Quarantine(sure_until[PROCESSES - 1], sure=True)
        return Quarantine(min(since + SILENCE_S for since, sure in held.values() if not sure), sure=False)
