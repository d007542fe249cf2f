"""Prompt bytes that each global balancer sent here; the region's reports acknowledge them.

Every request that arrived counts, whatever became of it: its sender counts everything that reached this balancer
(farhop.balance.estimate.unacknowledged). Bounded, as the senders' names come from outside. A sum never falls while its
sender is known, so that a lost report loses nothing.
"""

from __future__ import annotations

ISSUERS_MAX = 4096  # a report names as many (farhop.store.documents.report.ACCEPTED_LIMIT)
ISSUERS_CHARS_MAX = 64 * 1024  # of all their names: one that was taken over may invent some, and a report must fit etcd


class AcceptedBytes(dict[str, float]):
    """Bytes by global balancer, who sent last at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._issuers_chars = 0

    def add(self, issuer: str, prompt_bytes: int) -> None:
        """Add bytes from a sender. If there are too many, the sender silent for the longest is forgotten: it has
        nothing on its way."""
        if issuer not in self:
            self._issuers_chars += len(issuer)
        self[issuer] = self.pop(issuer, 0.0) + prompt_bytes
        while len(self) > ISSUERS_MAX or self._issuers_chars > ISSUERS_CHARS_MAX:
            oldest = next(iter(self))
            self._issuers_chars -= len(oldest)
            del self[oldest]
