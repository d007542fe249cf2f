"""A pilot-light region: few replicas and no traffic while all is well; woken when others cannot carry the load.

asleep -> waking (needed) -> awake (all that is wanted is there) -> asleep (not needed for `sleep_after_s`). While it
wakes it is admitted the share of its wanted replicas that is there. Invariants: asleep it is admitted nothing; the
share lies in 0..1; a needed region is never asleep; `sleep_after_s` lie between the last need and sleep. Reading
changes nothing.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class PilotState(StrEnum):
    """The state of a pilot-light region."""

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"


class PilotConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a pilot light, in seconds."""

    sleep_after_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.sleep_after_s >= 0.0:
            raise ValueError(f"sleep_after_s must be 0 or more, not {self.sleep_after_s!r}")


class PilotLight:
    """The state machine of one pilot-light region. `why`: why it was last woken."""

    __slots__ = ("_config", "_needed_at", "state", "why")

    def __init__(self, config: PilotConfig) -> None:
        self._config = config
        self._needed_at = 0.0
        self.state, self.why = PilotState.ASLEEP, ""

    def configure(self, config: PilotConfig) -> None:
        """Use this configuration from the next call of `look` on."""
        self._config = config

    def look(self, needed: str, warm_share: float, now: float) -> bool:
        """Update the state, and return whether it changed. `needed`: why other regions cannot carry the load, "" if
        they can; `warm_share`: the share of the wanted replicas that are ready.
        """
        before = self.state
        if needed:
            self._needed_at, self.why = now, needed
            if before is PilotState.ASLEEP:
                self.state = PilotState.WAKING
        elif before is not PilotState.ASLEEP and now - self._needed_at >= self._config.sleep_after_s:
            self.state = PilotState.ASLEEP
        if self.state is PilotState.WAKING and warm_share >= 1.0 and before is PilotState.WAKING:
            self.state = PilotState.AWAKE
        return self.state is not before

    def admitted_share(self, warm_share: float) -> float:
        """The share (0..1) of requests for this region that it may be sent."""
        if self.state is PilotState.ASLEEP:
            return 0.0
        return 1.0 if self.state is PilotState.AWAKE else max(0.0, min(1.0, warm_share))
