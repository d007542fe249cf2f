"""How far prompts still agree after the last whole block that they share, learned from what engines found cached.

A chain knows a prefix to its last whole block: of a system prompt of 1,500 tokens it knows 1,280, and every prompt
behind it would count for 224 tokens more than its engine computes, and take as much more room. Where prompts part is
the same each time; an engine that finds more of a prompt cached than its whole blocks tells where that is.

Invariants: between nothing and less than the block that follows; bounded in number, the longest unconfirmed goes first.
Never says who holds anything: what it says holds wherever the node itself is held.
"""

from __future__ import annotations

from bisect import bisect_right

from farhop.balance.prefix.chain import BLOCK_BYTES, DEPTH_MAX, ENDS

NODES_MAX = 4096
ENGINE_BLOCK_BYTES = 64  # engines count whole blocks of 16 tokens, and compute the last one of a prompt anew
_LEARN = 0.25  # what each answer weighs


class PartialBlocks:
    """See the module's head. `by_node`: by the last node that is shared, the bytes known to follow, to be read only."""

    __slots__ = ("by_node",)

    def __init__(self) -> None:
        self.by_node: dict[int, float] = {}

    def bytes_behind(self, chain: tuple[int, ...], depth: int) -> float:
        """Bytes of a prompt that are cached where its first `depth` nodes are: those nodes', and what is known to
        follow."""
        return ENDS[depth] + self.by_node.get(chain[depth - 1], 0.0) if depth and self.by_node else ENDS[depth]

    def learn(self, chain: tuple[int, ...], prompt_bytes: float, believed_bytes: float, found_bytes: float) -> None:
        """An engine that was believed to hold so many bytes of a prompt found so many of them cached. One that found
        less than the whole blocks tells nothing, and where the prompt itself ends others may agree for longer."""
        depth = min(bisect_right(ENDS, believed_bytes + 0.5) - 1, len(chain))
        if not depth or depth >= DEPTH_MAX:
            return
        most = BLOCK_BYTES[depth] - 1.0
        more = min(found_bytes - ENDS[depth], most)
        if more < 0.0:
            return
        node, ended = chain[depth - 1], found_bytes + ENGINE_BLOCK_BYTES >= prompt_bytes
        known = self.by_node.pop(node, None)
        if known is not None:
            more = known if ended and more < known else known + _LEARN * (more - known)
        self.by_node[node] = more
        if len(self.by_node) > NODES_MAX:
            del self.by_node[next(iter(self.by_node))]

    def __len__(self) -> int:
        return len(self.by_node)
