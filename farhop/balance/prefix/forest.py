"""Storage of a prefix trie's nodes as columns of numbers: each node's parent, children, siblings and holders.

For farhop.balance.prefix.trie alone, whose loops read and write the columns directly. Invariants: row 0 is the parent
of all roots and is never freed; a row in use is a node (depth 1 and up), a further holder of a node (depth 0, `parent`
is the node's row) or the sentinel of one mirror's LRU list; a row that is not a node has no child and no siblings, and
neither has a new node until it is linked, so those columns need not be reset. Never decides, never holds text.

Why columns: with an object per node, the garbage collector would visit each of them, and each would cost memory. Here a
node takes 44 B of arrays, one entry of a dict from integer to integer, and those integers. Why a dict: probing a hash
table in Python costs 0.5 us, a dict's lookup 0.05 us. Why shards: a dict grows by copying itself as a whole, which
takes 40 ms with a million nodes.
"""

from __future__ import annotations

from array import array

from farhop.balance.prefix.nodes import shards

NO_LOCATION = 0xFFFF  # the slot of no location
_GROW_ROWS = 2048


class Forest:
    """See the module's docstring. `free` is the first free row; free rows are linked by `newer`."""

    __slots__ = (
        "after", "before", "child", "depth", "extra", "free", "key", "newer", "older", "parent", "set_id", "shards",
        "slot",
    )  # fmt: skip

    def __init__(self) -> None:
        self.shards = shards()  # node -> row
        self.extra = shards()  # row << 16 | slot -> the row of a further holder; sharded by row
        self.key = array("Q")
        self.parent = array("I")
        self.child = array("I")  # the first one; they are chained by `before` and `after`
        self.before, self.after = array("I"), array("I")
        self.older, self.newer = array("I"), array("I")  # the LRU list of the mirror that the row belongs to
        self.set_id = array("I")  # who holds the node (Holders)
        self.slot = array("H")  # the location whose LRU entry this row is; NO_LOCATION: none
        self.depth = array("H")
        self.grow()
        self.free = self.newer[0]
        self.slot[0] = NO_LOCATION

    def grow(self) -> int:
        """Add rows when there is no free one; returns the first. Nothing is copied: arrays this large are remapped by
        page."""
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
        """Take a free row; its columns hold stale values."""
        row = self.free or self.grow()
        self.free = self.newer[row]
        return row

    def give(self, row: int) -> None:
        """Free the row."""
        self.newer[row] = self.free
        self.free = row

    def find(self, node: int) -> int:
        """The node's row; 0 if no location holds the node."""
        return self.shards[node & 255].get(node, 0)

    def link(self, row: int, above: int) -> None:
        """Make the node in `row` a child of the node in `above`."""
        sibling = self.child[above]
        self.parent[row] = above
        if sibling:
            self.before[sibling], self.after[row] = row, sibling
        self.child[above] = row

    def remove(self, row: int) -> None:
        """Remove a node that has no children, and free its row."""
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
        """The row of the location's LRU entry for the node in `row`; 0 if the location does not hold the node."""
        return row if self.slot[row] == slot else self.extra[row & 255].get(row << 16 | slot, 0)

    def __len__(self) -> int:
        return sum(map(len, self.shards))


class Holders:
    """Interned sets of locations, reference-counted by nodes. A set is a mask with a bit for each slot; id 0 is empty.

    Nodes of one path are mostly held by the same locations, so there are far fewer sets than nodes.
    """

    __slots__ = ("_free", "_ids", "counts", "masks")

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        self.counts: list[int] = [1]
        self._ids: dict[int, int] = {0: 0}
        self._free: list[int] = []

    def id(self, mask: int) -> int:
        """The id of the set with this mask; a new set starts with a count of 0."""
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

    def release(self, set_id: int) -> None:
        """A node no longer refers to this set; an unused set is freed."""
        self.counts[set_id] -= 1
        if not self.counts[set_id]:
            del self._ids[self.masks[set_id]]
            self.masks[set_id] = 0
            self._free.append(set_id)
