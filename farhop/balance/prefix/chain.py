"""The prefix chain of a prompt: one hash (node) for each whole block of the prompt.

Each hash also covers all blocks before its own, so a node identifies a whole path from the beginning of the prompt.
Invariants: block boundaries depend on position alone, and only whole blocks become nodes, so equal prefixes give equal
chains up to the last whole block; equal input gives an equal chain in every process and version, since both tiers
compute it and it is never sent; chains of different scopes have no node in common, however their blocks are chosen.
Never keeps the text. Not a cryptographic hash: xxh3 collisions can be made on purpose, which can only mislead an
estimate of what is cached, and only within a scope.
"""

from bisect import bisect_right
from itertools import accumulate, pairwise
from struct import Struct

import msgspec
from xxhash import xxh3_64_intdigest

# (block bytes, up to this many bytes of prompt): small blocks where short chats differ, large ones in a long prompt.
_LAYOUT = ((256, 4 * 1024), (1024, 32 * 1024), (4096, 4 * 1024 * 1024))


def _block_sizes() -> tuple[int, ...]:
    sizes: list[int] = []
    start = 0
    for block_bytes, end in _LAYOUT:
        sizes += [block_bytes] * ((end - start) // block_bytes)
        start = end
    return tuple(sizes)


BLOCK_BYTES = _block_sizes()
"""Bytes of the block that each depth adds; BLOCK_BYTES[0] is that of depth 1."""
DEPTH_MAX = len(BLOCK_BYTES)
"""The most nodes in a chain (1060): prompts that differ only after 4 MiB have the same chain."""

ENDS = (0, *accumulate(BLOCK_BYTES))
"""Bytes covered by the first so many nodes, 0 to DEPTH_MAX."""
_FINE = bisect_right(ENDS, _LAYOUT[1][1]) - 1  # 44 nodes to 32 KiB
# Cutting 44 small blocks one by one costs as much as hashing them (5 of 11 us); one call of struct cuts them in 3.
_CUT_FINE = tuple(Struct("".join(f"{n}s" for n in BLOCK_BYTES[:depth])).unpack_from for depth in range(_FINE + 1))
# A node's upper 24 bits are its scope's, the lower 40 the hash: a block of printable text with a given hash is found in
# seconds, and by the hash alone a tenant could so learn that another's prompt is cached, block by block.
_HASH = (1 << 40) - 1
_SCOPE = (1 << 64) - 1 - _HASH
_COARSE = tuple(slice(start, end) for start, end in pairwise(ENDS[_FINE:]))


def seed_of(model: str, adapter: str, cache_salt: str, scope: str) -> int:
    """The 64-bit seed of a chain. Only chains of equal seeds can share nodes, and by no means those of other scopes. An
    argument is "" if it does not apply.

    Each argument is hashed with its length, so that no two different quadruples give the same text.
    """
    text = f"{len(model)}:{model}{len(adapter)}:{adapter}{len(cache_salt)}:{cache_salt}{len(scope)}:{scope}"
    # A word read from JSON may hold lone surrogates; hashing it must not fail.
    seed, own = (xxh3_64_intdigest(one.encode("utf-8", "surrogatepass")) for one in (text, scope))
    return seed & _HASH | own & _SCOPE


def chain(data: bytes, seed: int) -> tuple[int, ...]:
    """The nodes of the canonical prompt `data`, shallowest first: h[i] = xxh3_64(block[i], seed=h[i-1]), h[-1] = seed,
    each with the scope of the seed in its upper bits.

    At most DEPTH_MAX nodes of 64 bits; () for less than one block (256 B).
    """
    depth = bisect_right(ENDS, len(data)) - 1
    node, scope = seed, seed & _SCOPE
    nodes = [node := xxh3_64_intdigest(block, node) & _HASH | scope for block in _CUT_FINE[min(depth, _FINE)](data)]
    if depth > _FINE:
        view = memoryview(data)
        nodes += [node := xxh3_64_intdigest(view[block], node) & _HASH | scope for block in _COARSE[: depth - _FINE]]
    return tuple(nodes)


class Tail(msgspec.Struct, frozen=True, gc=False):
    """The state needed to extend a chain: its nodes, the seed of the next node, and the bytes after the last whole
    block.
    """

    nodes: tuple[int, ...]
    seed: int
    remainder: bytes


def tail(data: bytes, nodes: tuple[int, ...], seed: int, more: bytes = b"") -> Tail:
    """The tail of a text whose chain is known: `nodes` is `chain(data, seed)`. `more`: bytes known to follow the text.

    Keeps `more` and less than a block of the text.
    """
    remainder = data[ENDS[len(nodes)] :] if len(nodes) < DEPTH_MAX else b""
    return Tail(nodes, nodes[-1] if nodes else seed, remainder + more)


def extend_chain(tail: Tail, more: bytes) -> tuple[int, ...]:
    """The chain of the tail's text followed by `more`, as `chain` would give it for the whole text."""
    nodes, node, data = tail.nodes, tail.seed, tail.remainder + more
    start = ENDS[len(nodes)]
    cuts = ENDS[len(nodes) : bisect_right(ENDS, start + len(data))]
    if len(cuts) < 2:
        return nodes
    scope = node & _SCOPE
    return nodes + tuple(
        [node := xxh3_64_intdigest(data[a - start : b - start], node) & _HASH | scope for a, b in pairwise(cuts)]
    )


def bytes_at(depth: int) -> int:
    """Bytes covered by the first `depth` nodes. ValueError outside 0..DEPTH_MAX."""
    if not 0 <= depth <= DEPTH_MAX:
        raise ValueError(f"depth must lie within 0 and {DEPTH_MAX}, not {depth!r}")
    return ENDS[depth]


def depth_at(n_bytes: int) -> int:
    """The number of whole blocks in the first `n_bytes` of a prompt: the greatest depth with bytes_at(depth) <=
    n_bytes.
    """
    return max(bisect_right(ENDS, n_bytes) - 1, 0)


_MARK_EVERY = 4  # every fourth large block is a mark; all small ones (up to 32 KiB) are


def marks(nodes: tuple[int, ...]) -> tuple[int, ...]:
    """A sample of a chain's nodes. Comparing two samples shows roughly how far two prompts agree, at a third of the
    cost of comparing all nodes.
    """
    return nodes if len(nodes) <= _FINE else nodes[:_FINE] + nodes[_FINE + _MARK_EVERY - 1 :: _MARK_EVERY]


def marked_depth(count: int) -> int:
    """The depth in the chain of its `count`-th mark; 0 for none."""
    return count if count <= _FINE else _FINE + _MARK_EVERY * (count - _FINE)
