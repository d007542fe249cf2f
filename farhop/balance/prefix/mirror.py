"""The mirror of each location's cache: which nodes it holds, in order of use, within its bytes.

For farhop.balance.prefix.trie alone, which gives locations their names. Invariants: a location that holds a node holds
its ancestors; the least recently used node is evicted first, and a node never before its descendants; a node that no
location holds is removed, and the observer notified. Never holds text.

Why an LRU of nodes evicts leaves first: a path is touched from leaf to root, so every ancestor is more recent than its
descendants (a later touch of the ancestor only makes it more recent still), so the oldest node of a mirror has no child
in it. The LRU order is a doubly linked list through the rows of a Forest: nodes that were touched together are adjacent
in it, and are moved as one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from farhop.balance.prefix.chain import BLOCK_BYTES, bytes_at, depth_at
from farhop.balance.prefix.forest import NO_LOCATION, Forest, Holders

if TYPE_CHECKING:
    from collections.abc import Sequence

TURN_NODES = 2000  # evicted in one call at most: about 2 ms


class TrieObserver(Protocol):
    """The observer of which nodes became held, and which are no longer held by any location, in order
    (farhop.balance.prefix.journal).
    """

    def stored(self, parent: int, nodes: Sequence[int]) -> None:
        """Some location now holds these nodes, each the parent of the next; some may have been held before.

        `parent`: the parent of the first node; 0 if that is a root.
        """

    def evicted(self, node: int) -> None:
        """No location holds the node any more. A node is reported before its parent."""

    def cleared(self) -> None:
        """No location holds anything any more; nodes are not reported one by one."""

    def hidden(self) -> None:
        """A location was cleared: those of its nodes that no other location holds are evicted part by part
        (PrefixTrie.sweep)."""


class Mirror:
    """One location's mirrored cache. `ends` is the sentinel row of its LRU list, between the newest and the oldest."""

    __slots__ = (
        "bit", "capacity_bytes", "depth_max", "ends", "limit_bytes", "nodes", "own_id", "pinned_bytes", "slot",
        "used_bytes",
    )  # fmt: skip

    def __init__(self, slot: int, capacity_bytes: int, pinned_bytes: int = 0) -> None:
        self.slot, self.bit = slot, 1 << slot
        self.used_bytes = self.nodes = 0
        self.ends = self.own_id = 0
        self.resize(capacity_bytes, pinned_bytes)

    def resize(self, capacity_bytes: int, pinned_bytes: int) -> None:
        """Set the cache's size. `limit_bytes` is what is left for the mirror; a path of `depth_max` nodes fits into
        it.
        """
        self.capacity_bytes, self.pinned_bytes = capacity_bytes, pinned_bytes
        self.limit_bytes = max(capacity_bytes - pinned_bytes, 0)
        self.depth_max = depth_at(self.limit_bytes)


class Mirrors:
    """All mirrors over one forest. `entries` counts pairs of node and location; `observer` is notified when the union
    of all mirrors changes.
    """

    __slots__ = ("entries", "forest", "holders", "observer")

    def __init__(self, observer: TrieObserver | None = None) -> None:
        self.forest, self.holders = Forest(), Holders()
        self.entries = 0
        self.observer = observer

    def stand(self, mirror: Mirror) -> None:
        """Start the mirror with an empty LRU list. The set of this location alone is kept as long as the location."""
        mirror.used_bytes = mirror.nodes = 0
        mirror.ends = ends = self.forest.take()
        self.forest.older[ends] = self.forest.newer[ends] = ends
        self.forest.depth[ends] = self.forest.set_id[ends] = 0
        mirror.own_id = self.holders.id(mirror.bit)
        self.holders.counts[mirror.own_id] += 1

    def end(self, mirror: Mirror) -> None:
        """Remove a location that holds nothing."""
        self.forest.give(mirror.ends)
        self.holders.release(mirror.own_id)

    def place(self, mirror: Mirror, node: int) -> int:
        """The row of the node if this mirror holds it, else 0."""
        row = self.forest.find(node)
        return row if row and self.forest.place(row, mirror.slot) else 0

    def shrink(self, mirror: Mirror, nodes: int) -> None:
        """Evict this many nodes, the least recently used first. The mirror must hold at least as many."""
        for _ in range(nodes):
            self._remove(mirror, self.forest.newer[mirror.ends])

    def insert(self, mirror: Mirror, above: int, nodes: Sequence[int]) -> None:
        """Add and touch `nodes`, which continue the path that ends at the row `above`, and touch all their
        ancestors.
        """
        forest = self.forest
        base = forest.depth[above]
        fits = min(len(nodes), mirror.depth_max - base)
        if fits > 0:
            last = nodes[fits - 1]
            known, row = fits, forest.shards[last & 255].get(last, 0)  # Forest.find: mostly all of them are known
            if not row:
                known, row = self._known(nodes, fits - 1)
            if row and forest.depth[row] == base + known:
                above = row
            else:  # no location holds any, or a collision has put it elsewhere: see farhop.balance.prefix.trie
                known = 0
            new = self._append(mirror, above, base + known, nodes, known, fits) if known < fits else 0
            added = self._touch(mirror, above)
            mirror.nodes += new + added
            self.entries += new + added
            if new and self.observer is not None:
                self.observer.stored(forest.key[above], nodes[known : known + new])
        if mirror.used_bytes > mirror.limit_bytes:
            self.evict(mirror)

    def _known(self, nodes: Sequence[int], most: int) -> tuple[int, int]:
        """How many of the first `most` nodes any location holds, and the row of the last of them (0 if none)."""
        find, low, high, row = self.forest.find, 0, most, 0
        while low < high:
            middle = (low + high + 1) >> 1
            at = find(nodes[middle - 1])
            if at:
                low, row = middle, at
            else:
                high = middle - 1
        return low, row

    def _append(self, mirror: Mirror, above: int, depth: int, nodes: Sequence[int], start: int, end: int) -> int:
        """Add nodes[start:end] below the row `above`, which has `depth`, as the mirror's newest; returns how many."""
        forest, slot, own_id = self.forest, mirror.slot, mirror.own_id
        shards, newer, older, parent, child = forest.shards, forest.newer, forest.older, forest.parent, forest.child
        key, depths, slots, set_id = forest.key, forest.depth, forest.slot, forest.set_id
        top = row = 0
        began, ends = depth, mirror.ends
        for i in range(start, end):
            node, fresh = nodes[i], forest.free or forest.grow()
            if shards[node & 255].setdefault(node, fresh) != fresh:
                break  # a collision: the node exists below another parent
            forest.free = newer[fresh]
            depth += 1
            key[fresh], depths[fresh], slots[fresh], set_id[fresh] = node, depth, slot, own_id
            if top:
                parent[fresh] = newer[fresh] = row
                child[row] = older[row] = fresh
            else:
                top = fresh
                forest.link(fresh, above)
            row = fresh
        if not top:
            return 0
        newest = older[ends]
        newer[newest], older[row] = row, newest
        newer[top], older[ends] = ends, top
        self.holders.counts[own_id] += depth - began
        mirror.used_bytes += bytes_at(depth) - bytes_at(began)
        return depth - began

    def _touch(self, mirror: Mirror, row: int) -> int:
        """Make a node and then all its ancestors the newest; returns how many the mirror did not hold before."""
        forest, slot, ends = self.forest, mirror.slot, mirror.ends
        newer, older, parent, depth = forest.newer, forest.older, forest.parent, forest.depth
        slots, extra = forest.slot, forest.extra
        added = 0
        old_id = new_id = -1
        while row:
            first = last = row if slots[row] == slot else extra[row & 255].get(row << 16 | slot, 0)  # Forest.place
            if first:
                row = parent[row]
                while row:  # as far up as the nodes are adjacent in the list already
                    place = newer[last]
                    if place != row and (depth[place] or parent[place] != row or place == ends):
                        break
                    last, row = place, parent[row]
                above, below = newer[last], older[first]
                if above == ends:
                    continue
                newer[below], older[above] = above, below
            else:
                if forest.set_id[row] != old_id:
                    old_id = forest.set_id[row]
                    new_id = self.holders.id(self.holders.masks[old_id] | mirror.bit)
                first = last = self._place(row, slot)
                forest.set_id[row] = new_id
                self.holders.counts[new_id] += 1
                self.holders.release(old_id)
                mirror.used_bytes += BLOCK_BYTES[depth[row] - 1]
                added += 1
                row = parent[row]
            newest = older[ends]
            newer[newest], older[first] = first, newest
            newer[last], older[ends] = ends, last
        return added

    def _place(self, row: int, slot: int) -> int:
        """The row of a new LRU entry for a node, in one more mirror."""
        forest = self.forest
        if forest.slot[row] == NO_LOCATION:
            forest.slot[row] = slot
            return row
        place = forest.extra[row & 255][row << 16 | slot] = forest.take()
        forest.parent[place], forest.depth[place] = row, 0
        return place

    def _remove(self, mirror: Mirror, place: int) -> None:
        """Remove one node, given by its LRU entry, from a mirror that holds none of its descendants."""
        forest, holders = self.forest, self.holders
        older, newer = forest.older[place], forest.newer[place]
        forest.newer[older], forest.older[newer] = newer, older
        if forest.depth[place]:
            row = place
            forest.slot[row] = NO_LOCATION
        else:
            row = forest.parent[place]
            del forest.extra[row & 255][row << 16 | mirror.slot]
            forest.give(place)
        mirror.used_bytes -= BLOCK_BYTES[forest.depth[row] - 1]
        mirror.nodes -= 1
        self.entries -= 1
        set_id = forest.set_id[row]
        if set_id == mirror.own_id:
            holders.counts[set_id] -= 1
            node = forest.key[row]
            forest.remove(row)
            if self.observer is not None:
                self.observer.evicted(node)
        else:
            fewer = forest.set_id[row] = holders.id(holders.masks[set_id] ^ mirror.bit)
            holders.counts[fewer] += 1
            holders.release(set_id)

    def evict(self, mirror: Mirror) -> None:
        """Evict what exceeds the mirror's bytes, the least recently used first; at most TURN_NODES nodes."""
        excess, turns, ends = mirror.used_bytes - mirror.limit_bytes, TURN_NODES, mirror.ends
        newer, depth = self.forest.newer, self.forest.depth
        while excess > 0 and turns:
            place = newer[ends]
            if self.forest.set_id[place] == mirror.own_id and depth[place]:
                count = self._evict_own(mirror, place, excess, turns)
            else:
                self._remove(mirror, place)
                count = 1
            excess, turns = mirror.used_bytes - mirror.limit_bytes, turns - count

    def _evict_own(self, mirror: Mirror, place: int, excess: int, most: int) -> int:
        """Evict the oldest nodes as long as no other location holds them, as `_remove` would, at a third of its
        cost.
        """
        forest, own_id, ends, observer = self.forest, mirror.own_id, mirror.ends, self.observer
        shards, key, newer, depth, set_id = forest.shards, forest.key, forest.newer, forest.depth, forest.set_id
        child, before, after, parent = forest.child, forest.before, forest.after, forest.parent
        count = freed = 0
        while freed < excess and count < most and set_id[place] == own_id and depth[place]:
            row, place = place, newer[place]
            freed += BLOCK_BYTES[depth[row] - 1]
            count += 1
            one, other = before[row], after[row]
            if one:
                after[one], before[row] = other, 0
            else:
                child[parent[row]] = other
            if other:
                before[other], after[row] = one, 0
            node = key[row]
            del shards[node & 255][node]
            newer[row], forest.free = forest.free, row
            if observer is not None:
                observer.evicted(node)
        newer[ends], forest.older[place] = place, ends
        mirror.used_bytes -= freed
        mirror.nodes -= count
        self.entries -= count
        self.holders.counts[own_id] -= count
        return count

    def prune(self, mirror: Mirror, top: int, most: int) -> int:
        """Remove the node in `top` and its descendants from one mirror, leaves first; returns how many.

        At most `most` of them: then `top` itself may be left.
        """
        forest, slot, count = self.forest, mirror.slot, 0
        row, child = top, forest.child[top]
        while count < most:
            while child and not forest.place(child, slot):
                child = forest.after[child]
            if child:
                row, child = child, forest.child[child]
                continue
            above, beside = forest.parent[row], forest.after[row]  # read before the row may be given away
            self._remove(mirror, forest.place(row, slot))
            count += 1
            if row == top:
                break
            row, child = above, beside
        return count

    def confine(self, mirror: Mirror, row: int, levels: int) -> None:
        """Remove the descendants of the last `levels` nodes of the path to `row` from one mirror, except the path."""
        forest, slot, kept = self.forest, mirror.slot, 0
        for _ in range(levels):
            child = forest.child[row]
            while child:
                beside = forest.after[child]  # read before the child may be given away
                if child != kept and forest.place(child, slot):
                    self.prune(mirror, child, mirror.nodes)
                child = beside
            kept, row = row, forest.parent[row]
