"""The network in virtual time: half a round trip each way, more with jitter or drift; links may freeze or lose packets.

Invariants: messages on one link arrive in the order they were sent; a frozen link loses nothing and delivers nothing
until it heals, like TCP on a path that drops packets; after a black hole nothing of a connection that was opened before
its healing ever arrives. Never interprets what it carries.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Usage
    from farhop_lab.sim.timeline import Timeline
    from topology.model import Topology

_Parcel = tuple["Callable[..., object]", tuple[Any, ...]]


STREAMED_BYTES = 250
"""Bytes on a wire per token, framed as an event."""


def answer_bytes(usage: Usage | None) -> int:
    """Bytes of an answer, as its sender knows them; 0 if an engine refused."""
    return 0 if usage is None else usage.completion_tokens * STREAMED_BYTES


class Wire:
    """Links between all regions of a topology, at first with its round-trip times. `carried`: bytes by (from, to)."""

    def __init__(self, topology: Topology, timeline: Timeline) -> None:
        self._timeline = timeline
        names = list(topology.regions)
        self._rtt_ms = {(a, b): topology.rtt_ms(a, b) for a in names for b in names}
        self._frozen: dict[tuple[str, str], tuple[float, list[_Parcel]]] = {}
        self._swallowing: set[tuple[str, str]] = set()  # those of the frozen links that are black holes
        self._dead_before: dict[tuple[str, str], float] = {}  # connections opened before this time are dead
        self._dead_since: dict[tuple[str, str], float] = {}
        self._arrives: dict[tuple[str, str], float] = {}
        self.carried: Counter[tuple[str, str]] = Counter()
        self._rng: Random | None = None
        self._jitter = 0.0

    def rtt_ms(self, a: str, b: str) -> float:
        """The present round-trip time. KeyError for a region that the world lacks."""
        return self._rtt_ms[a, b]

    def set_rtt(self, a: str, b: str, rtt_ms: float) -> None:
        """Change the round-trip time, both ways, of what is sent from now on."""
        if not 0.0 <= rtt_ms < inf:
            raise ValueError(f"rtt_ms: {rtt_ms!r} is no round-trip time; give 0 or more milliseconds")
        self._rtt_ms[a, b] = self._rtt_ms[b, a] = rtt_ms

    def disturb(self, rng: Random, jitter: float, drift: float, every_s: float) -> None:
        """From now on each way takes up to `jitter` (a share) longer, and every `every_s` each round-trip time is drawn
        anew within `drift` (a share below 1) of its first value.
        """
        if jitter < 0.0 or not 0.0 <= drift < 1.0 or not every_s > 0.0:
            raise ValueError(
                f"jitter {jitter} must be 0 or more, drift {drift} within 0 and 1, every_s {every_s} above 0"
            )
        self._rng, self._jitter = rng, jitter
        base = {pair: ms for pair, ms in self._rtt_ms.items() if pair[0] < pair[1]}

        def wander() -> None:
            for (a, b), ms in base.items():
                self.set_rtt(a, b, ms * (1.0 + drift * (2.0 * rng.random() - 1.0)))
            self._timeline.after(every_s, wander)

        if drift:
            wander()

    def send(self, a: str, b: str, act: Callable[..., object], *args: Any) -> None:
        """Call `act` when the message arrives in `b`."""
        pair = a, b
        if self._frozen and pair in self._frozen:
            self._frozen[pair][1].append((act, args))
            return
        # After the path became shorter, a message must not overtake an earlier one.
        delay_s = self._rtt_ms[pair] / 2e3
        if self._rng is not None and self._jitter:
            delay_s *= 1.0 + self._jitter * self._rng.random()
        due, before = self._timeline.now + delay_s, self._arrives.get(pair)
        if before is not None and before > due:
            due = before
        self._arrives[pair] = due
        self._timeline.at(due, act, *args)

    def send_on(self, opened_at: float, a: str, b: str, act: Callable[..., object], *args: Any) -> None:
        """As `send`, on a connection opened at that time: nothing arrives on one that a black hole has broken."""
        if not self.breaks(opened_at, a, b):
            self.send(a, b, act, *args)

    def breaks(self, opened_at: float, a: str, b: str) -> bool:
        """Whether a black hole has broken the connections opened at that time."""
        return opened_at < self._dead_before.get((a, b), -inf)

    def carry(self, a: str, b: str, n_bytes: int) -> None:
        """Count this many bytes from `a` to `b`; bytes within a region do not count."""
        if a != b:
            self.carried[a, b] += n_bytes

    def freeze(self, a: str, b: str) -> None:
        """Nothing sent from now on arrives, either way. Idempotent."""
        for pair in ((a, b), (b, a)):
            self._frozen.setdefault(pair, (self._timeline.now, []))

    def blackhole(self, a: str, b: str) -> None:
        """As freeze, but present connections stay dead, and what is sent meanwhile is lost."""
        self.freeze(a, b)
        self._swallowing |= {(a, b), (b, a)}

    def heal(self, a: str, b: str) -> None:
        """The link works again; waiting messages go first. Idempotent."""
        for pair in ((a, b), (b, a)):
            since, waiting = self._frozen.pop(pair, (0.0, []))
            if pair in self._swallowing:
                self._swallowing.discard(pair)
                self._dead_before[pair] = self._timeline.now
                self._dead_since[pair] = since
                continue
            for act, args in waiting:
                self.send(*pair, act, *args)

    @property
    def has_broken(self) -> bool:
        """Whether any link is frozen, or has ever been a black hole."""
        return bool(self._frozen or self._dead_before)

    def swallows(self, a: str, b: str) -> bool:
        """Whether what is sent now from `a` to `b` will never arrive."""
        return (a, b) in self._swallowing

    def silent_since(self, opened_at: float, a: str, b: str) -> float | None:
        """Since when nothing gets from `a` to `b` on a connection opened at that time; None if messages arrive."""
        if self.breaks(opened_at, a, b):
            return self._dead_since[a, b]
        return self.frozen_since(a, b)

    @property
    def now(self) -> float:
        """The timeline's present."""
        return self._timeline.now

    def frozen_since(self, a: str, b: str) -> float | None:
        """Since when nothing gets from `a` to `b`; None if messages arrive."""
        frozen = self._frozen.get((a, b))
        return frozen[0] if frozen is not None else None
