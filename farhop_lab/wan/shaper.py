"""One direction of one connection over an emulated link: when each chunk leaves the far end. Pure: no IO, no clock.

Invariants: what is taken out is what was put in, in order, and never early, whatever happens to delay, jitter and
freezes in between; nothing while frozen. The caller bounds memory by `queued_bytes`.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

# Memory of a queued chunk besides its bytes (object headers, tuple, float): many tiny chunks must not evade the bound.
CHUNK_OVERHEAD_BYTES = 128
# The most that is handed out at once, so that a receiver that stops reading is noticed in between.
TAKE_BYTES_MAX = 256 * 1024


class Signal(Enum):
    """What crosses the link besides bytes, in order with them."""

    OPEN = "open"  # the client's connection request (its SYN)
    ANSWER = "answer"  # its result
    END = "end"  # FIN: nothing more comes this way
    RESET = "reset"  # RST: the sender is gone


class LinkSettings:
    """One link's live settings, read for each chunk. Seconds; `bytes_per_s` None: as fast as can be."""

    __slots__ = ("bytes_per_s", "delay_s", "frozen", "jitter_s")

    def __init__(self, delay_s: float, jitter_s: float, bytes_per_s: float | None = None) -> None:
        self.delay_s, self.jitter_s, self.bytes_per_s = delay_s, jitter_s, bytes_per_s
        self.frozen = False


class Direction:
    """One direction of a link, shared by its connections. `free_at`: when the last byte put so far is on the wire."""

    __slots__ = ("delivered_bytes", "free_at")

    def __init__(self) -> None:
        self.free_at = 0.0
        self.delivered_bytes = 0


class Shaper:
    """First in, first out; each item after the delay in force when it was put, give or take a uniform jitter.

    Nothing overtakes: an item due before the one ahead of it waits for that one, so in a dense stream delays tend to
    `delay + jitter`, as in a router's queue. `lost`: the path has forgotten this connection; nothing more comes out.
    """

    __slots__ = ("_direction", "_rng", "_settings", "lost", "queue", "queued_bytes")

    def __init__(self, settings: LinkSettings, direction: Direction, rng: Random) -> None:
        self._settings, self._direction, self._rng = settings, direction, rng
        self.queue: deque[tuple[float, bytes | Signal]] = deque()
        self.queued_bytes = 0
        self.lost = False

    def put(self, item: bytes | Signal, now: float) -> None:
        """Put an item at `now` (monotonic seconds, never going back)."""
        size = len(item) if isinstance(item, bytes) else 0
        due = self._arrival(size, now)
        self.queue.append((due, item))
        self.queued_bytes += size + CHUNK_OVERHEAD_BYTES

    def _arrival(self, size_bytes: int, now: float) -> float:
        settings = self._settings
        start = now
        if settings.bytes_per_s is not None:
            direction = self._direction
            direction.free_at = start = max(now, direction.free_at) + size_bytes / settings.bytes_per_s
        late_s = settings.delay_s
        if settings.jitter_s:
            late_s = max(0.0, late_s + settings.jitter_s * (2.0 * self._rng.random() - 1.0))
        return start + late_s

    @property
    def due(self) -> float | None:
        """When the next item comes out; None if there is none, or nothing can come out."""
        if self._settings.frozen or self.lost or not self.queue:
            return None
        return self.queue[0][0]

    def take(self, until: float) -> bytes | Signal | None:
        """The next signal due by then, or the bytes due by then up to the next signal, joined. None: nothing is due."""
        queue = self.queue
        if not queue or queue[0][0] > until or self._settings.frozen or self.lost:
            return None
        item = queue.popleft()[1]
        self.queued_bytes -= CHUNK_OVERHEAD_BYTES
        if not isinstance(item, bytes):
            return item
        if queue and queue[0][0] <= until:
            item = self._joined(item, until)
        self.queued_bytes -= len(item)
        return item

    def _joined(self, first: bytes, until: float) -> bytes:
        queue = self.queue
        parts, size = [first], len(first)
        while queue and queue[0][0] <= until:
            item = queue[0][1]
            if not isinstance(item, bytes) or size + len(item) > TAKE_BYTES_MAX:
                break
            queue.popleft()
            parts.append(item)
            size += len(item)
        self.queued_bytes -= CHUNK_OVERHEAD_BYTES * (len(parts) - 1)
        return b"".join(parts)

    def thaw(self, now: float) -> None:
        """The freeze has ended: all that was under way is sent again, from now (TCP's retransmission, without its
        backoff).
        """
        queue, self.queue = self.queue, deque()
        for due, item in queue:
            size = len(item) if isinstance(item, bytes) else 0
            # Never earlier than it was due, so that a waiting timer need not be set anew.
            self.queue.append((max(self._arrival(size, now), due), item))

    def clear(self) -> None:
        """Drop all that is under way."""
        self.queue.clear()
        self.queued_bytes = 0
