"""The guard against black holes: a replica that fails at once frees its slots at once, looks idle, and attracts all the
work.

A request that fails early keeps counting at its replica, with its slot and KV cache, for as long as serving it would
have taken: to every policy and to `room` alike a replica that fails fast looks no emptier than one that serves.
(Prequal guards against the same by counting errors into its signals: Wydrowski et al., NSDI 2024.)

Invariants: at most as many count at a replica as it has slots, each until a time that was fixed when it failed; if a
model has no other replica nothing is held, since there is no other to draw work away from. Never decides.
"""

from __future__ import annotations

from collections import deque

HELD_S_MAX = 60.0


class BlackHoleGuard:
    """Slots and KV tokens of failed requests that are still held, by replica."""

    __slots__ = ("_held", "_tokens")

    def __init__(self) -> None:
        self._held: dict[str, deque[tuple[float, int]]] = {}  # until when, KV tokens
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def failed(self, name: str, kv_tokens: int, until: float, now: float, slots: int) -> None:
        """A request that failed at `now` would have been there until `until`."""
        until = min(until, now + HELD_S_MAX)
        held = self._held.get(name)
        if until <= now or (held is not None and len(held) >= slots):
            return
        if held is None:
            held = self._held[name] = deque()
        held.append((until, kv_tokens))
        self._tokens[name] = self._tokens.get(name, 0) + kv_tokens

    def expire(self, now: float) -> None:
        """Release requests that would be over by now. They were added in about the order in which they end; an older
        one may delay the release of a shorter one a little."""
        for name, held in tuple(self._held.items()):
            while held and held[0][0] <= now:
                self._tokens[name] -= held.popleft()[1]
            if not held:
                self.forget(name)

    def forget(self, name: str) -> None:
        """Release all that is held at a replica."""
        self._held.pop(name, None)
        self._tokens.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """The replicas where something is held."""
        return tuple(self._held)

    def load(self, name: str) -> tuple[int, int]:
        """How many requests are held at a replica, and their KV tokens."""
        held = self._held.get(name)
        return (len(held), self._tokens[name]) if held is not None else (0, 0)
