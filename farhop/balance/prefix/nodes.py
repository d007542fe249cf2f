"""Many nodes with a number each, or a set of nodes (the number is 0), in parts: nothing about it is done all at once.

Never tells an order. Invariants: the collector has nothing to walk (dicts of integers); no call but `alike` takes
longer than one part does: a dict grows by copying itself whole, and a set of a million takes 40 ms to do so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SHARDS = 256


def shards() -> list[dict[int, int]]:
    """Empty parts. A node is in that of its lowest bits."""
    return [{} for _ in range(SHARDS)]


class NodeMap:
    """See the module's head. `most` is no less than its length, and costs nothing to ask."""

    __slots__ = ("most", "shards")

    def __init__(self, nodes: Iterable[int] = ()) -> None:
        self.shards: Sequence[dict[int, int]] = shards()
        self.most = 0
        self.put(nodes)

    @classmethod
    def alike(cls, parts: Sequence[Mapping[int, int]], value: int) -> NodeMap:
        """The nodes of these parts, each with the same number: 25 ms for a million."""
        made = cls()
        made.shards = [dict.fromkeys(part, value) for part in parts]
        len(made)
        return made

    def put(self, nodes: Iterable[int], value: int = 0) -> None:
        """Every one of these has this number now."""
        parts, count = self.shards, 0
        for node in nodes:
            parts[node & 255][node] = value
            count += 1
        self.most += count

    def get(self, node: int) -> int | None:
        """The node's number; None for one that is not in it."""
        return self.shards[node & 255].get(node)

    def pop(self, node: int) -> int | None:
        """The same, and it is in it no more."""
        return self.shards[node & 255].pop(node, None)

    def __contains__(self, node: int) -> bool:
        return node in self.shards[node & 255]

    def __len__(self) -> int:
        self.most = sum(map(len, self.shards))
        return self.most

    def __iter__(self) -> Iterator[int]:
        """In parts: what is put in or popped meanwhile may be told or not."""
        for part in self.shards:
            yield from tuple(part)

    def drain(self) -> Iterator[int]:
        """All of them, part by part; a part is forgotten when it has been told. Nobody else may use it any more."""
        for part in self.shards:
            yield from part
            part.clear()
