"""The nodes of a prefix trie as columns of numbers: where a node is, what is above and below it, who holds it.

For farhop.balance.prefix.trie alone, whose loops read and write the columns directly. Invariants: row 0 is what all
roots hang
from and is never given away; a row in use is a node (depth 1 and up), a further holder of a node (depth 0, `parent` is
the node's row) or the ends of one mirror's order; one that is not a node has no child and no siblings, nor has a new
node until it is linked, so that they need not be written. Never decides, never holds text.

Why columns: an object or a container per node is something that the garbage collector walks and memory pays for. Here a
node is 44 B of arrays, one entry of a dict from integer to integer, and those integers. Why the dict: to probe a hash
table in Python costs 0.5 us, a dict's lookup 0.05. Why in parts: a dict grows by copying itself whole, and
copying one of a million nodes takes 40 ms.
"""

from __future__ import annotations

from array import array

from farhop.balance.prefix.nodes import shards

NOBODY = 0xFFFF  # the slot of no location
_GROW_ROWS = 2048


class Forest:
    """See the module's head. `free` is the first of the rows not in use, chained by `newer`."""

    __slots__ = (
        "after", "before", "child", "depth", "extra", "free", "key", "newer", "older", "parent", "set_id", "shards",
        "slot",
    )  # fmt: skip

    def __init__(self) -> None:
        self.shards = shards()  # node -> row
        self.extra = shards()  # by row; row << 16 | slot -> the row of a further holder
        self.key = array("Q")
        self.parent = array("I")
        self.child = array("I")  # the first one; they are chained by `before` and `after`
        self.before, self.after = array("I"), array("I")
        self.older, self.newer = array("I"), array("I")  # in the order of use of the mirror that the row belongs to
        self.set_id = array("I")  # who holds the node (Holders)
        self.slot = array("H")  # the location whose place in its order this row is; NOBODY: of none
        self.depth = array("H")
        self.grow()
        self.free = self.newer[0]
        self.slot[0] = NOBODY

    def grow(self) -> int:
        """More rows, where all are in use; the first. It is not a copy: arrays this large are moved by the page."""
        first = len(self.key)
        for column in (
            self.key, self.parent, self.child, self.before, self.after, self.older, self.newer, self.set_id,
            self.slot, self.depth,
        ):  # fmt: skip
            column.frombytes(bytes(_GROW_ROWS * column.itemsize))
        last = first + _GROW_ROWS
        self.newer[first : last - 1] = array("I", range(first + 1, last))
        self.free = first
        return first

    def take(self) -> int:
        """A row that is not in use; what stands in it is stale."""
        row = self.free or self.grow()
        self.free = self.newer[row]
        return row

    def give(self, row: int) -> None:
        """The row is not in use any more."""
        self.newer[row] = self.free
        self.free = row

    def find(self, node: int) -> int:
        """The node's row; 0 for none."""
        return self.shards[node & 255].get(node, 0)

    def link(self, row: int, above: int) -> None:
        """Hang a node below another."""
        sibling = self.child[above]
        self.parent[row] = above
        if sibling:
            self.before[sibling], self.after[row] = row, sibling
        self.child[above] = row

    def remove(self, row: int) -> None:
        """Take a node without children away."""
        before, after = self.before[row], self.after[row]
        if before:
            self.after[before], self.before[row] = after, 0
        else:
            self.child[self.parent[row]] = after
        if after:
            self.before[after], self.after[row] = before, 0
        node = self.key[row]
        del self.shards[node & 255][node]
        self.give(row)

    def place(self, row: int, slot: int) -> int:
        """The row that is this location's place for this node; 0 if it does not hold it."""
        return row if self.slot[row] == slot else self.extra[row & 255].get(row << 16 | slot, 0)

    def __len__(self) -> int:
        return sum(map(len, self.shards))


class Holders:
    """Sets of locations, each kept once: bit `slot` of a mask. Id 0 is the empty one. Counted by nodes.

    Nodes of one path are mostly held by the same locations, so there are far fewer sets than nodes.
    """

    __slots__ = ("_free", "_ids", "counts", "masks")

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        self.counts: list[int] = [1]
        self._ids: dict[int, int] = {0: 0}
        self._free: list[int] = []

    def id(self, mask: int) -> int:
        """The set's id; of a new one nothing is counted yet."""
        known = self._ids.get(mask)
        if known is None:
            if self._free:
                known = self._free.pop()
                self.masks[known] = mask
            else:
                known = len(self.masks)
                self.masks.append(mask)
                self.counts.append(0)
            self._ids[mask] = known
        return known

    def let_go(self, set_id: int, count: int = 1) -> None:
        """So many nodes have this set no more."""
        self.counts[set_id] -= count
        if not self.counts[set_id]:
            del self._ids[self.masks[set_id]]
            self.masks[set_id] = 0
            self._free.append(set_id)
