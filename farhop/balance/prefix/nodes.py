"""A large map from node to integer, or a set of nodes (the integer is 0), in shards so that no call takes long.

Unordered. Invariants: the garbage collector has nothing to visit (dicts of integers); no call but `alike` takes longer
than one shard takes: a dict grows by copying itself as a whole, which takes 40 ms for a set of a million.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SHARDS = 256


def shards() -> list[dict[int, int]]:
    """SHARDS empty dicts. A node belongs to the shard of its lowest 8 bits."""
    return [{} for _ in range(SHARDS)]


class NodeMap:
    """See the module's docstring. `most`: an upper bound of the length, which costs nothing to read."""

    __slots__ = ("most", "shards")

    def __init__(self, nodes: Iterable[int] = ()) -> None:
        self.shards: Sequence[dict[int, int]] = shards()
        self.most = 0
        self.put(nodes)

    @classmethod
    def alike(cls, parts: Sequence[Mapping[int, int]], value: int) -> NodeMap:
        """The nodes of these shards, all with the same value: 25 ms for a million."""
        made = cls()
        made.shards = [dict.fromkeys(part, value) for part in parts]
        len(made)
        return made

    def put(self, nodes: Iterable[int], value: int = 0) -> None:
        """Set the value of each of these nodes."""
        parts, count = self.shards, 0
        for node in nodes:
            parts[node & 255][node] = value
            count += 1
        self.most += count

    def get(self, node: int) -> int | None:
        """The node's value; None if it is not in the map."""
        return self.shards[node & 255].get(node)

    def pop(self, node: int) -> int | None:
        """Remove the node and return its value; None if it is not in the map."""
        return self.shards[node & 255].pop(node, None)

    def __contains__(self, node: int) -> bool:
        return node in self.shards[node & 255]

    def __len__(self) -> int:
        self.most = sum(map(len, self.shards))
        return self.most

    def __iter__(self) -> Iterator[int]:
        """All nodes, shard by shard; a node added or removed during the iteration may or may not be yielded."""
        for part in self.shards:
            yield from tuple(part)

    def drain(self) -> Iterator[int]:
        """All nodes, shard by shard; each shard is emptied after it was yielded. The map must not be used any more."""
        for part in self.shards:
            yield from part
            part.clear()
