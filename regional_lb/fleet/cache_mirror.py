"""The estimated content of each replica's KV cache: a mirror of what it was sent and answered, and its KV events.

Invariants: a mirror is no larger than its cache; KV events take precedence over the mirror; tokens from a tokenizer
that proved wrong are not used (regional_lb.fleet.tokenizer_guard). Never chooses; keeps nothing of replicas that left.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from farhop.balance.prefix.chain import ENDS
from farhop.balance.prefix.journal import Journal
from farhop.balance.prefix.partial_blocks import PartialBlocks
from farhop.balance.prefix.trie import PrefixTrie, spread
from regional_lb.fleet.blocks import BlockIndex
from regional_lb.fleet.kv_events import Cleared
from regional_lb.fleet.tokenizer_guard import TokenizerGuard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from farhop.balance.estimate.estimates import Estimates
    from regional_lb.fleet.table import Hits, Rows, Subset
    from regional_lb.fleet.view import BlocksChanged, Replica

_BLOCK_TOKENS = 16  # an engine counts whole blocks
_MIRROR_SLACK_BYTES = 64 * 1024  # an answer's first byte may be faster than the event that its prompt is stored
_PLACES_KEPT_MAX, _PLACES_MAX = 1024, 64


class CacheMirror:
    """See the module's docstring."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates
        self.trie = PrefixTrie()
        self.journal = Journal(self.trie)
        self.blocks = BlockIndex()
        self.guard = TokenizerGuard()
        self.partial_blocks = PartialBlocks()

    # -- the replicas that there are

    def adopt(self, replica: Replica, before: Replica | None) -> None:
        """A replica of the view, as it is and as it was; None if it is new."""
        name, capacity_bytes = replica.name, _capacity_bytes(replica, self._estimates)
        if before is None:
            self.trie.add(name, capacity_bytes)
            self._listen(replica)
            return
        self.trie.set_capacity(name, capacity_bytes)
        if (before.address, before.version) != (replica.address, replica.version):
            self.trie.clear(name)  # another process under the same name
        if (before.address, before.kv_ranks) != (replica.address, replica.kv_ranks):
            self._listen(replica)

    def drop(self, name: str) -> None:
        """The replica was removed."""
        self.trie.drop(name)
        self.blocks.drop(name)

    def _listen(self, replica: Replica) -> None:
        self.blocks.drop(replica.name)
        if replica.kv_ranks:
            self.blocks.add(replica.name, replica.kv_ranks)

    def fit(self, replica: Replica) -> None:
        """Bound the mirror by the cache's size, and by what is in it where that is known."""
        held = self.blocks.held_tokens(replica.name)
        capacity_bytes = _capacity_bytes(replica, self._estimates)
        if held is not None and held < replica.kv_tokens:
            capacity_bytes = int(capacity_bytes * held / replica.kv_tokens) + _MIRROR_SLACK_BYTES
        self.trie.set_capacity(replica.name, capacity_bytes)

    # -- what it holds

    def hits(self, chain: tuple[int, ...], some: Subset) -> Hits:
        """How many bytes of this prompt each of these replicas holds; those that hold nothing are left out."""
        trie = self.trie
        found = trie.holders(chain)
        if not found:
            return ()
        if some.version != trie.version:
            some.place_slots(trie.slots(some.names), trie.slots_known, trie.version)
        by_slot = some.by_slot
        hits: list[tuple[float, int | Rows | NDArray[np.bool_]]] = []
        behind = self.partial_blocks.by_node
        for depth, mask in found:
            held = ENDS[depth] + behind.get(chain[depth - 1], 0.0)
            if mask & (mask - 1):
                places = some.places_by_mask.get(mask)
                hits.append((held, _places_of(some, mask, trie.slots_known) if places is None else places))
            else:
                place = by_slot.item(mask.bit_length() - 1)
                if place >= 0:
                    hits.append((held, place))
        return hits

    # -- what was reported

    def changed(self, event: BlocksChanged) -> None:
        """A replica reported changes of its cache. Its mirror is bounded by them at the next sample."""
        for change in event.changes:
            self.blocks.apply(event.target, event.rank, change)
            if isinstance(change, Cleared):
                self.trie.clear(event.target)

    def missed(self, name: str, chain: tuple[int, ...], predicted_bytes: float) -> None:
        """The replica did not accept a prompt that was counted as cached: forget what only this prompt added, from its
        end back to what was thought to be there before, or to where another path branches off."""
        depth = bisect_right(ENDS, int(predicted_bytes)) - 1
        if name in self.trie:
            for node in reversed(chain[depth:]):
                if self.trie.has_children(node):
                    return
                self.trie.evict(name, node)

    def overrated(
        self, name: str, chain: tuple[int, ...], bytes_per_token: float, predicted_tokens: float, cached_tokens: int
    ) -> bool:
        """An engine found `cached_tokens` of a prompt cached. If the mirror predicted clearly more, it forgets
        everything below the node where the two diverge, except the prompt itself, which is cached now: an engine evicts
        the oldest first, and a node's descendants are no younger. Returns whether the corrected mirror lacks some of
        the prompt, to be added by `caches`.
        """
        if cached_tokens + _BLOCK_TOKENS >= predicted_tokens:
            return False
        predicted = (
            bisect_right(ENDS, int(predicted_tokens * bytes_per_token)) - 1
        )  # whole blocks, as depth_at has them
        found = bisect_right(ENDS, int((cached_tokens + _BLOCK_TOKENS) * bytes_per_token)) - 1
        if found + 1 >= min(predicted, len(chain)) or name not in self.trie:
            return False
        return self.trie.confine(name, chain, found) < len(chain)


def _places_of(some: Subset, mask: int, n_slots: int) -> Rows | NDArray[np.bool_]:
    """The places of a set of slots. Those of few are kept, since hot prefixes ask for the same."""
    held = spread(mask, n_slots)
    if mask.bit_count() > _PLACES_MAX:
        return some.of_slots(held)
    places = some.by_slot[held.nonzero()[0]]
    if len(some.places_by_mask) >= _PLACES_KEPT_MAX:
        some.places_by_mask.clear()
    places = some.places_by_mask[mask] = places[places >= 0]
    return places


def _capacity_bytes(replica: Replica, estimates: Estimates) -> int:
    """The size of the replica's KV cache, in bytes of prompt."""
    return int(replica.kv_tokens * max(map(estimates.bytes_per_token, replica.models), default=0.0))
