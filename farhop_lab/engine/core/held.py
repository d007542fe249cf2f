"""KV blocks held for another engine: those of a finished prefill until they are fetched, and fetched ones, adopted.

As in vLLM's NIXL connector, without memory to move. Pure. Invariants: held blocks stay referenced, so that they are not
evicted, until they are fetched or dropped, exactly once; adopted blocks become merely cached, a whole chain from its
start. Bounded by the cache itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop_lab.engine.core.kv import BlockTable

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

    from farhop_lab.engine.core.kv import PagedCache
    from farhop_lab.engine.core.sequence import Sequence

KV_BYTES_PER_TOKEN = 131_072  # Llama-3.1-8B in bf16, see profiles
GBPS = 200.0  # one port of InfiniBand HDR
HOLD_S = 30.0


class TransferLink(msgspec.Struct, frozen=True):
    """Between prefill and decode: how fast KV travels, and how many seconds it is held for a peer that does not
    come.
    """

    ms_per_token: float = KV_BYTES_PER_TOKEN * 8 / (GBPS * 1e6)
    hold_s: float = HOLD_S


class Held:
    """What one engine holds for others, by the sequence that computed it."""

    def __init__(self, kv: PagedCache) -> None:
        self._kv = kv
        self._tables: dict[str, BlockTable] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def keep(self, sequence: Sequence, block_tokens: int) -> None:
        """Hold the full blocks of a finished sequence's prompt. Its own table is still to be released."""
        table = self._tables[sequence.id] = BlockTable()
        self._kv.share(table, sequence.block_names(sequence.prompt_tokens // block_tokens))

    def blocks(self, name: str) -> int:
        """How many blocks are held of this sequence."""
        table = self._tables.get(name)
        return table.blocks if table is not None else 0

    def drop(self, name: str) -> int | None:
        """It was fetched, or its time is over. Returns how many blocks were held, None if it is unknown (or no longer
        known).
        """
        table = self._tables.pop(name, None)
        if table is None:
            return None
        blocks = table.blocks
        self._kv.release(table)
        return blocks


def adopt(kv: PagedCache, chain: Sequence_[int]) -> int:
    """Take fetched blocks into the cache as if computed here: as many as fit, evicting the oldest cached ones. Returns
    how many of `chain` are cached now.
    """
    table, depth = BlockTable(), kv.match(chain)
    kv.share(table, chain[:depth])
    more = min(len(chain) - depth, kv.available)
    kv.grow(table, more)
    kv.fill(table, chain[depth : depth + more])
    kv.release(table)
    return depth + more
