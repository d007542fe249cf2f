"""How many bytes prompts share after the last whole block that they share, learned from what engines found cached.

A chain covers a prefix only up to its last whole block: of a shared system prompt of 1,500 tokens it covers 1,280, so
every prompt that begins with it would be estimated at 224 tokens more than its engine computes, and take as much more
room. The point where such prompts diverge is the same each time, and an engine reveals it when it finds more of a
prompt cached than its whole blocks.

Invariants: the estimate is at least 0 and less than the next block; the number of nodes is bounded, and the one that
was confirmed longest ago is dropped first. Never says which location holds what: an estimate applies wherever its node
is held.
"""

from __future__ import annotations

from bisect import bisect_right

from farhop.balance.prefix.chain import BLOCK_BYTES, DEPTH_MAX, ENDS

NODES_MAX = 4096
ENGINE_BLOCK_BYTES = 64  # engines count whole blocks of 16 tokens, and compute the last one of a prompt anew
_LEARN = 0.25  # the weight of a new observation in the moving average


class PartialBlocks:
    """See the module's docstring. `by_node`: by the last shared node, the bytes known to follow it; read-only to
    callers.
    """

    __slots__ = ("by_node",)

    def __init__(self) -> None:
        self.by_node: dict[int, float] = {}

    def bytes_behind(self, chain: tuple[int, ...], depth: int) -> float:
        """Bytes of a prompt that are cached where its first `depth` nodes are held: those blocks, and the bytes known
        to follow them.
        """
        return ENDS[depth] + self.by_node.get(chain[depth - 1], 0.0) if depth and self.by_node else ENDS[depth]

    def learn(self, chain: tuple[int, ...], prompt_bytes: float, predicted_bytes: float, found_bytes: float) -> None:
        """Learn from an engine that was believed to hold `predicted_bytes` of a prompt and found `found_bytes` cached.

        If it found less than the whole blocks, nothing is learned. If the prompt itself ended there, other prompts may
        agree for longer: then the estimate does not fall.
        """
        depth = min(bisect_right(ENDS, predicted_bytes + 0.5) - 1, len(chain))
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
