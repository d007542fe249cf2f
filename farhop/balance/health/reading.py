"""One reading of a target's health, and an operator's override of it: the types that all health machines share.

Invariants: what is forced says so, and expires by itself; reading never changes. Never reads a clock: `now` is
monotonic seconds and does not run backwards.
"""

from enum import StrEnum
from math import inf

import msgspec


class State(StrEnum):
    """UP and SUSPECT may take work (SUSPECT less gladly), DOWN may not, DRAINING takes no new work."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"


_WORST_FIRST = (State.DOWN, State.DRAINING, State.SUSPECT, State.UP)


def worst_first(state: object) -> int:
    """A sort key for states as other processes write them; one that is unknown comes last."""
    return _WORST_FIRST.index(state) if isinstance(state, str) and state in _WORST_FIRST else len(_WORST_FIRST)


class Health(msgspec.Struct, frozen=True):
    """One reading. `until`: when it changes if nothing more is heard (monotonic seconds), None if it does not.

    `forced`: an operator's word; `why` is then theirs, else one of this module's fixed phrases. `share`: of new work
    that a DRAINING target may still take, while it is drained at a pace.
    """

    state: State
    why: str
    until: float | None = None
    forced: bool = False
    share: float = 0.0


class ForcedState:
    """An operator's word about one target: a state, why, and until when (None: until lifted)."""

    __slots__ = ("_faded_at", "_keep_share", "_over_s", "health")

    def __init__(self) -> None:
        self.health: Health | None = None
        self._over_s = self._keep_share = 0.0
        self._faded_at = -inf

    def force(
        self,
        state: State,
        why: str,
        until: float | None = None,
        *,
        now: float = -inf,
        over_s: float = 0.0,
        keep_share: float = 0.0,
    ) -> None:
        """Pin `state` until `until` (monotonic seconds). The newest word replaces the one before.

        The share of new work it may still take falls from what it is at `now` as 1 does to 0 in `over_s`, and no
        further than to `keep_share`: a word repeated gives nothing back.
        """
        before = self.read(now)
        share = 1.0 if before is None else before.share
        self.health = Health(state, why, until, forced=True)
        self._over_s, self._keep_share = over_s, keep_share
        self._faded_at = now + share * over_s if over_s > 0.0 else -inf

    def lift(self) -> None:
        """Remove the forced state. Idempotent."""
        self.health = None

    def fading(self, now: float) -> bool:
        """Whether requests are admitted by chance: the share that it leaves of new work is still falling, or is
        constant above 0.
        """
        return self.health is not None and (now < self._faded_at or self._keep_share > 0.0)

    def read(self, now: float) -> Health | None:
        """The forced health, if it is in force at `now`; else None."""
        health = self.health
        if health is None or (health.until is not None and now >= health.until):
            return None
        share = min(1.0, (self._faded_at - now) / self._over_s) if now < self._faded_at else 0.0
        share = max(share, self._keep_share)
        return msgspec.structs.replace(health, share=share) if share else health
