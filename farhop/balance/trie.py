"""Which location (replica or region) holds which node of the prefix trie, each mirrored as the bounded cache it is.

Invariants: a location that holds a node holds its ancestors, so holding is monotone in depth; the bytes of a mirror
never exceed its capacity less what running sequences pin; a node that nobody holds is gone. Never holds text, never
decides. Nodes come from farhop.balance.chain: a node is the hash of its whole path, so its parent is unique.

Why an LRU of nodes evicts leaves first: a path is touched from leaf to root, hence every ancestor is younger than its
descendants (a later touch of the ancestor only makes it younger still), hence the oldest node of a mirror has no child
in it. An OrderedDict keeps that order at O(1) per touch.

What the garbage collector sees is one OrderedDict per location and one dict of the nodes that branch; the rest is dicts
of integers, which it does not track. Frozen (gc.freeze()) once there has been some traffic, those cost no pause either.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from farhop.balance.chain import BLOCK_BYTES, DEPTH_MAX, depth_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOCATIONS_MAX = 4096
_GROUPS_MAX = 1024


class Listener(Protocol):
    """Who is told which nodes came to be held and which nobody holds any more, in order (farhop.balance.journal)."""

    def stored(self, parent: int, nodes: Sequence[int]) -> None:
        """These, each the parent of the next, are held now; some may have been before. `parent` 0: of a root."""

    def evicted(self, node: int) -> None:
        """Nobody holds it any more. Told of a node before its parent."""

    def cleared(self) -> None:
        """Nobody holds anything any more; no node is told apart."""


class _Mirror:
    """One location's cache as imagined here: its nodes, least recently used first, with the bytes of each."""

    __slots__ = ("bit", "capacity_bytes", "lru", "pinned_bytes", "used_bytes")

    def __init__(self, bit: int, capacity_bytes: int) -> None:
        self.bit = bit
        self.capacity_bytes = capacity_bytes
        self.pinned_bytes = 0
        self.used_bytes = 0
        self.lru: OrderedDict[int, int] = OrderedDict()

    @property
    def limit_bytes(self) -> int:
        return max(self.capacity_bytes - self.pinned_bytes, 0)


class _Branches:
    """Parent and children of every node below the first. Most nodes have one child: only those with more own a dict."""

    __slots__ = ("_many", "_only", "_parent")

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._only: dict[int, int] = {}
        self._many: dict[int, dict[int, None]] = {}

    def link(self, parent: int, child: int) -> None:
        self._parent[child] = parent
        if parent in self._many:
            self._many[parent][child] = None
        elif self._only.setdefault(parent, child) != child:
            self._many[parent] = {self._only.pop(parent): None, child: None}

    def unlink(self, child: int) -> None:
        parent = self._parent.pop(child, None)
        if parent is None:
            return  # of depth 1: there is nothing above it
        if self._only.pop(parent, None) is not None:
            return
        many = self._many[parent]
        del many[child]
        if len(many) == 1:
            self._only[parent] = next(iter(many))
            del self._many[parent]

    def parent(self, child: int) -> int:
        return self._parent.get(child, 0)

    def goes_on(self, node: int) -> bool:
        return node in self._only or node in self._many

    def children(self, parent: int) -> Iterator[int]:
        if parent in self._only:
            yield self._only[parent]
        else:
            yield from self._many.get(parent, ())

    def __len__(self) -> int:
        return len(self._parent)


class PrefixTrie:
    """A map from node to the set of locations that hold it, and a bounded mirror per location.

    A location that was never added, or was dropped, is a KeyError in every call that names one. `listener` is told what
    changes for all locations together; it costs nothing while it is None.
    """

    __slots__ = ("_bits_free", "_branches", "_groups", "_mirrors", "_names", "_nodes", "listener")

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self._nodes: dict[int, int] = {}  # node -> bitmask of locations, never 0
        self._branches = _Branches()
        self._mirrors: dict[str, _Mirror] = {}
        self._names: dict[int, str] = {}  # bit -> location
        self._groups: dict[int, tuple[str, ...]] = {}  # mask -> locations, what _group() has worked out
        self._bits_free: list[int] = []  # bits of dropped locations: reused, so that masks stay as short as can be

    # --- locations -------------------------------------------------------------------------------------------------

    def add(self, location: str, capacity_bytes: int) -> None:
        """Begin an empty mirror. ValueError if it exists, the capacity is negative, or there are LOCATIONS_MAX."""
        if location in self._mirrors:
            raise ValueError(f"location {location!r} exists already: use set_capacity() or drop() it first")
        if len(self._mirrors) >= LOCATIONS_MAX:
            raise ValueError(f"{LOCATIONS_MAX} locations are mirrored already: drop() one before adding {location!r}")
        _check_bytes("capacity_bytes", capacity_bytes)
        bit = self._bits_free.pop() if self._bits_free else 1 << len(self._mirrors)
        self._names[bit] = location
        self._mirrors[location] = _Mirror(bit, capacity_bytes)

    def drop(self, location: str) -> None:
        """Forget the location and all it held."""
        self.clear(location)
        bit = self._mirrors.pop(location).bit
        del self._names[bit]
        self._groups.clear()
        self._bits_free.append(bit)

    def clear(self, location: str) -> None:
        """The location's cache is empty (restart, all blocks cleared). What running sequences pin stays as told."""
        mirror = self._mirrors[location]
        listener = self.listener
        if listener is not None and mirror.lru and len(mirror.lru) == self.entries:
            self.listener = None  # nobody else holds anything: one word instead of one per node
        for node in mirror.lru:  # oldest first, so a node goes before its ancestors
            self._forget(node, mirror.bit)
        if self.listener is not listener:
            self.listener = listener
            assert listener is not None
            listener.cleared()
        mirror.lru.clear()
        mirror.used_bytes = 0

    def set_capacity(self, location: str, capacity_bytes: int) -> None:
        """The cache is of this size now; what no longer fits is evicted."""
        _check_bytes("capacity_bytes", capacity_bytes)
        mirror = self._mirrors[location]
        mirror.capacity_bytes = capacity_bytes
        self._evict(mirror)

    def hold(self, location: str, pinned_bytes: int) -> None:
        """Running sequences pin `pinned_bytes` of the cache (the whole of it, not a change); the rest is the mirror's.

        What they push out is gone: letting go of the bytes later brings nothing back.
        """
        _check_bytes("pinned_bytes", pinned_bytes)
        mirror = self._mirrors[location]
        mirror.pinned_bytes = pinned_bytes
        self._evict(mirror)

    def __contains__(self, location: object) -> bool:
        return location in self._mirrors

    @property
    def locations(self) -> tuple[str, ...]:
        """The locations mirrored."""
        return tuple(self._mirrors)

    # --- paths -----------------------------------------------------------------------------------------------------

    def insert(self, location: str, chain: Sequence[int]) -> None:
        """The location now caches this path, used just now: add what is missing, touch the rest, evict what is oldest.

        Of a path longer than the whole room only the beginning is added: what can never fit pushes nothing out.
        """
        mirror = self._mirrors[location]
        lru, bit, nodes = mirror.lru, mirror.bit, self._nodes
        touch, link = lru.move_to_end, self._branches.link
        # Leaf to root: see the head of the module. Each node is looked up, although a chain's held ones come first: of
        # chains that somebody made collide, that need not be true, and they may spoil a guess but nothing else.
        depth = first_new = min(len(chain), depth_at(mirror.limit_bytes))
        for i in range(depth - 1, -1, -1):
            node = chain[i]
            if node in lru:
                touch(node)
            else:
                lru[node] = BLOCK_BYTES[i]
                mirror.used_bytes += BLOCK_BYTES[i]
                mask = nodes.get(node)
                if mask is None:
                    nodes[node] = bit  # the one object per location, not a new integer per node
                    first_new = i
                    if i:
                        link(chain[i - 1], node)
                else:
                    nodes[node] = mask | bit
        if first_new < depth and self.listener is not None:
            self.listener.stored(chain[first_new - 1] if first_new else 0, chain[first_new:depth])
        self._evict(mirror)

    def extend(self, location: str, parent: int, nodes: Sequence[int]) -> bool:
        """As `insert`, for a path known by the node it goes on from (0: it begins at the root).

        False, and nothing done, if the location does not hold `parent`.
        """
        if parent and not self.holds(location, parent):
            return False
        self.insert(location, (*self.path(parent), *nodes))
        return True

    def evict(self, location: str, node: int) -> None:
        """The location holds this node no more, nor what descends from it."""
        mirror = self._mirrors[location]
        if node in mirror.lru:
            self._prune(mirror, node)

    def holds(self, location: str, node: int) -> bool:
        """Whether the location holds this node."""
        return node in self._mirrors[location].lru

    def path(self, node: int) -> list[int]:
        """From the root down to `node`, if it is held anywhere; [] for 0. At most DEPTH_MAX of it, from below."""
        path: list[int] = []
        parent = self._branches.parent
        while node and len(path) < DEPTH_MAX:  # lies about ancestors could make a ring
            path.append(node)
            node = parent(node)
        path.reverse()
        return path

    def parent(self, node: int) -> int:
        """The node above; 0 for a root and for what nobody holds."""
        return self._branches.parent(node)

    def match(self, chain: Sequence[int]) -> dict[str, int]:
        """How deep each location holds this path: {location: nodes held}, those that hold none left out.

        A binary search over depth for all locations at once: holding is monotone, so at any depth the set of holders
        splits into those to look for deeper and those to look for above. One split costs no more than one location.
        """
        found: dict[str, int] = {}
        if not chain:
            return found
        get = self._nodes.get
        mask = get(chain[0], 0)
        if not mask:
            return found
        names = self._names
        ranges = [(1, len(chain), mask)]
        while ranges:
            low, high, mask = ranges.pop()
            while low < high:
                middle = (low + high + 1) >> 1
                deeper = get(chain[middle - 1], 0) & mask
                if not deeper:
                    high = middle - 1
                    continue
                if deeper != mask:
                    ranges.append((low, middle - 1, mask ^ deeper))
                    mask = deeper
                low = middle
            if mask in names:
                found[names[mask]] = low
            else:
                found.update(dict.fromkeys(self._group(mask), low))
        return found

    def match_one(self, location: str, chain: Sequence[int]) -> int:
        """How many nodes of this path the location holds."""
        return self._depth(self._mirrors[location].bit, chain)

    def correct(self, location: str, chain: Sequence[int], depth: int) -> None:
        """The engine's own truth: it held the first `depth` nodes of this path and no more.

        What was believed beyond that is dropped with all that descends from it; what was not known is added and, with
        the rest of the path, touched. ValueError if `depth` is not within 0 and len(chain).
        """
        if not 0 <= depth <= len(chain):
            raise ValueError(f"depth must lie within 0 and the chain's {len(chain)} nodes, not {depth!r}")
        mirror = self._mirrors[location]
        held = self._depth(mirror.bit, chain)
        if held > depth:
            self._prune(mirror, chain[depth])
        elif held < depth:
            self.insert(location, chain[:depth])

    # --- size ------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> int:
        """Distinct nodes held anywhere."""
        return len(self._nodes)

    @property
    def entries(self) -> int:
        """Pairs of node and location; memory grows with these."""
        return sum(len(mirror.lru) for mirror in self._mirrors.values())

    def all_nodes(self) -> tuple[int, ...]:
        """All nodes held anywhere, copied, in no order: about 1 ms for 200,000 (a mirror's own order takes 20)."""
        return tuple(self._nodes)

    def count(self, location: str) -> int:
        """How many nodes the location holds."""
        return len(self._mirrors[location].lru)

    def goes_on(self, node: int) -> bool:
        """Whether anybody holds a path that goes on below this node."""
        return self._branches.goes_on(node)

    def is_held(self, node: int) -> bool:
        """Whether anybody holds it."""
        return node in self._nodes

    def bytes_held(self, location: str) -> int:
        """Prompt bytes covered by what the location is believed to hold."""
        return self._mirrors[location].used_bytes

    # --- within ----------------------------------------------------------------------------------------------------

    def _depth(self, bit: int, chain: Sequence[int]) -> int:
        get = self._nodes.get
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) >> 1
            if get(chain[middle - 1], 0) & bit:
                low = middle
            else:
                high = middle - 1
        return low

    def _group(self, mask: int) -> tuple[str, ...]:
        """The locations of a mask. Kept, since hot prefixes ask for the same few: 60 bits take 20 us to spell out."""
        group = self._groups.get(mask)
        if group is None:
            if len(self._groups) >= _GROUPS_MAX:
                self._groups.clear()
            group = self._groups[mask] = tuple(name for bit, name in self._names.items() if bit & mask)
        return group

    def _forget(self, node: int, bit: int) -> None:
        """Take the bit off a node none of whose children has it."""
        mask = self._nodes[node] ^ bit
        if mask:
            self._nodes[node] = mask
        else:
            del self._nodes[node]
            self._branches.unlink(node)
            if self.listener is not None:
                self.listener.evicted(node)

    def _evict(self, mirror: _Mirror) -> None:
        lru, limit_bytes = mirror.lru, mirror.limit_bytes
        while mirror.used_bytes > limit_bytes:
            node, block_bytes = lru.popitem(last=False)
            mirror.used_bytes -= block_bytes
            self._forget(node, mirror.bit)

    def _prune(self, mirror: _Mirror, top: int) -> None:
        """Drop `top` and its descendants from one mirror."""
        lru = mirror.lru
        doomed = [top]
        mirror.used_bytes -= lru.pop(top)
        for node in doomed:  # grows as it goes: parents before their children
            for child in self._branches.children(node):
                block_bytes = lru.pop(child, None)
                if block_bytes is not None:
                    mirror.used_bytes -= block_bytes
                    doomed.append(child)
        for node in reversed(doomed):
            self._forget(node, mirror.bit)


def _check_bytes(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, not {value!r}")
