"""Where requests wait when every replica is full: priority bands, weighted fair between tenants, bounded.

Within a band tenants take turns by virtual time (start-time fair queuing, Goyal et al. 1996: a tenant's next request
starts at max(the band's time, its own last finish), and finishes cost / weight later). Invariants: at most
`requests_max` and `tokens_max` wait; a request is in here once or not at all; nobody waits behind a lower band, but one
request older than `starvation_s` goes before any band. Never decides where a request goes.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator


class Waiting(msgspec.Struct, frozen=True, eq=False):
    """One request waiting. `since` in monotonic seconds; `tag` its virtual start in its band."""

    id: str
    tenant: str
    priority: int
    tokens: float
    since: float
    tag: float


class _Band:
    __slots__ = ("finish", "heap", "time")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Waiting]] = []
        self.time = 0.0
        self.finish: dict[str, float] = {}


class WaitingRoom:
    """The queue of one region's balancer instance."""

    __slots__ = ("_bands", "_by_id", "_serial", "_starvation_s", "requests_max", "tokens", "tokens_max")

    def __init__(self, requests_max: int, tokens_max: int, starvation_s: float) -> None:
        self.requests_max, self.tokens_max, self._starvation_s = requests_max, tokens_max, starvation_s
        self._bands: dict[int, _Band] = {}
        self._by_id: dict[str, Waiting] = {}  # in order of arrival
        self._serial = count()
        self.tokens = 0.0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def fits(self, tokens: float) -> bool:
        """Whether one more request of this many tokens may wait. A first one always may."""
        if not self._by_id:
            return self.requests_max > 0
        return len(self._by_id) < self.requests_max and self.tokens + tokens <= self.tokens_max

    def push(self, request_id: str, tenant: str, weight: float, priority: int, tokens: float, now: float) -> None:
        """Let a request wait. ValueError if it does already, or there is no room."""
        if request_id in self._by_id:
            raise ValueError(f"request {request_id!r} waits already")
        if not self.fits(tokens):
            raise ValueError("the queue is full: ask fits() first")
        band = self._bands.setdefault(priority, _Band())
        tag = max(band.time, band.finish.get(tenant, 0.0))
        band.finish[tenant] = tag + max(tokens, 1.0) / weight
        waiting = Waiting(request_id, tenant, priority, tokens, now, tag)
        self._by_id[request_id] = waiting
        self.tokens += tokens
        heappush(band.heap, (tag, next(self._serial), waiting))

    def remove(self, request_id: str, *, served: bool) -> Waiting | None:
        """Take a request out, wherever it stands; `served` moves its band's time on. None if it is not here."""
        waiting = self._by_id.pop(request_id, None)
        if waiting is None:
            return None
        self.tokens -= waiting.tokens
        band = self._bands[waiting.priority]
        if served:
            band.time = max(band.time, waiting.tag)
        self._tidy(waiting.priority, band)
        return waiting

    def _tidy(self, priority: int, band: _Band) -> None:
        """Drop what was removed from the head; when a band empties, forget its history."""
        while band.heap and band.heap[0][2].id not in self._by_id:
            heappop(band.heap)
        if not band.heap:
            del self._bands[priority]
        if not self._by_id:
            self.tokens = 0.0  # sums of floats drift; an empty queue holds nothing

    def first(self, most: int, now: float) -> list[Waiting]:
        """The next `most` requests in the order they are due."""
        due: list[Waiting] = []
        oldest = next(iter(self._by_id.values()), None)
        if oldest is not None and now - oldest.since > self._starvation_s:
            due.append(oldest)
        for waiting in self._in_order(most + 1):
            if len(due) >= most:
                break
            if waiting is not oldest or not due:
                due.append(waiting)
        return due

    def _in_order(self, most: int) -> Iterator[Waiting]:
        for priority in sorted(self._bands, reverse=True):
            heap = self._bands[priority].heap
            # A look at the k least of a heap touches O(k) entries; what was removed is skipped.
            frontier = [(heap[0], 0)] if heap else []
            while frontier and most > 0:
                (_, _, waiting), at = heappop(frontier)
                for child in (2 * at + 1, 2 * at + 2):
                    if child < len(heap):
                        heappush(frontier, (heap[child], child))
                if self._by_id.get(waiting.id) is waiting:
                    most -= 1
                    yield waiting
