"""A prefix trie: which location (replica or region) caches which prefix, with a bounded mirror of each one's cache.

Invariants: a location that holds a node holds its ancestors, so holding is monotone in depth; the bytes of a mirror
never exceed its capacity less what running sequences pin, except that no call evicts more than TURN_NODES nodes to make
room (the next call for that location continues); a node that no location holds is removed; except for `evict` without a
limit, no call's time grows with the number of nodes held. Never holds text, never decides. Nodes come from
farhop.balance.prefix.chain: a node is the hash of its whole path, so its parent is unique; if chains were made to
collide, nodes that contradict this are left out.

Memory: at most 200 B per node and location, its integer included (`farhop bench trie`,
docs/measurements/performance.md); in addition a mask of one bit per location for each distinct set of holders, which
the nodes of a path mostly share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from farhop.balance.prefix.mirror import TURN_NODES, Mirror, Mirrors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from farhop.balance.prefix.mirror import TrieObserver

LOCATIONS_MAX = 16_384
_SWEEP_NODES = 256  # of cleared locations, with every insert
_CLEARED_MAX = 64
_GROUPS_MAX = 1024
_GROUP_NAMES_MAX = 64


class PrefixTrie:
    """A map from node to the set of locations that hold it, and a bounded mirror per location.

    Every call that names a location raises KeyError if it was never added, or was dropped. After `clear`, no query
    says that the location holds anything; its nodes, if there are many and no other location holds them, are freed
    gradually by `sweep`.
    """

    __slots__ = (
        "_groups",
        "_hidden",
        "_slots",
        "_slots_free",
        "mirrors",
        "names",
        "store",
        "to_sweep",
        "tombstones",
        "version",
    )  # fmt: skip

    def __init__(self) -> None:
        self.store = Mirrors()
        self.mirrors: dict[str, Mirror] = {}
        self.names: dict[int, str] = {}  # slot -> location
        self._groups: dict[int, tuple[str, ...]] = {}  # mask -> locations, what _group() has worked out
        self._slots = 0
        self._slots_free: list[int] = []  # of dropped locations: reused, so that masks stay as short as can be
        self.to_sweep: list[Mirror] = []  # what is still to be swept
        self._hidden = 0  # the mask of `to_sweep`
        self.tombstones: list[dict[int, int]] = []  # dicts of a former store, freed one at a time
        self.version = 0  # of the slots: incremented whenever a location gets or loses one

    @property
    def observer(self) -> TrieObserver | None:
        """The observer of changes that affect all locations together; costs nothing while it is None."""
        return self.store.observer

    @observer.setter
    def observer(self, observer: TrieObserver | None) -> None:
        self.store.observer = observer

    # --- locations -------------------------------------------------------------------------------------------------

    def add(self, location: str, capacity_bytes: int) -> None:
        """Begin an empty mirror. ValueError if it exists, the capacity is negative, or there are LOCATIONS_MAX."""
        if location in self.mirrors:
            raise ValueError(f"location {location!r} exists already: use set_capacity() or drop() it first")
        if len(self.mirrors) >= LOCATIONS_MAX:
            raise ValueError(f"{LOCATIONS_MAX} locations are mirrored already: drop() one before adding {location!r}")
        _check_bytes("capacity_bytes", capacity_bytes)
        self._begin(location, capacity_bytes, 0)

    def _begin(self, location: str, capacity_bytes: int, pinned_bytes: int) -> None:
        if self._slots_free:
            slot = self._slots_free.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        mirror = self.mirrors[location] = Mirror(slot, capacity_bytes, pinned_bytes)
        self.store.stand(mirror)
        self.names[slot] = location
        self.version += 1

    def drop(self, location: str) -> None:
        """Forget the location and all it held."""
        self.clear(location)
        mirror = self.mirrors.pop(location)
        self._forget_name(mirror)
        self._end(mirror)

    def _forget_name(self, mirror: Mirror) -> None:
        del self.names[mirror.slot]
        self._groups.clear()
        self.version += 1

    def _end(self, mirror: Mirror) -> None:
        self.store.end(mirror)
        self._slots_free.append(mirror.slot)

    def clear(self, location: str) -> None:
        """The location's cache is empty (restart, all blocks cleared). The pinned bytes set by `hold` stay."""
        mirror = self.mirrors[location]
        if not mirror.nodes:
            return
        if mirror.nodes == self.store.entries:
            self._reset()  # no other location holds anything: one notification instead of one per node
            if self.store.observer is not None:
                self.store.observer.cleared()
        elif mirror.nodes <= TURN_NODES:
            self.store.shrink(mirror, mirror.nodes)
        else:
            if len(self.to_sweep) >= _CLEARED_MAX:
                self.sweep(self.to_sweep[-1].nodes)  # many caches cleared, no insert between: a slow call
            self._forget_name(mirror)
            self.to_sweep.append(mirror)
            self._hidden |= mirror.bit
            self._begin(location, mirror.capacity_bytes, mirror.pinned_bytes)
            if self.store.observer is not None:
                self.store.observer.hidden()

    def _reset(self) -> None:
        self.tombstones += self.store.forest.shards
        self.tombstones += self.store.forest.extra
        self.store = Mirrors(self.store.observer)
        for mirror in self.mirrors.values():
            self.store.stand(mirror)

    @property
    def sweeping(self) -> bool:
        """Whether something is left for `sweep` to do."""
        return bool(self.to_sweep or self.tombstones)

    def sweep(self, nodes_max: int = TURN_NODES) -> None:
        """Free up to about `nodes_max` nodes of cleared locations. Every insert does a little of this."""
        if self.tombstones:
            self.tombstones.pop()
        while self.to_sweep and nodes_max > 0:
            mirror = self.to_sweep[-1]
            part = min(mirror.nodes, nodes_max)
            nodes_max -= part
            self.store.shrink(mirror, part)
            if not mirror.nodes:
                self.to_sweep.pop()
                self._hidden ^= mirror.bit
                self._end(mirror)

    def set_capacity(self, location: str, capacity_bytes: int) -> None:
        """Set the cache's size; what no longer fits is evicted."""
        _check_bytes("capacity_bytes", capacity_bytes)
        mirror = self.mirrors[location]
        mirror.resize(capacity_bytes, mirror.pinned_bytes)
        self.store.evict(mirror)

    def hold(self, location: str, pinned_bytes: int) -> None:
        """Set how much of the cache running sequences pin (the total, not a change); the rest is the mirror's.

        What no longer fits is evicted, and does not return when fewer bytes are pinned later.
        """
        _check_bytes("pinned_bytes", pinned_bytes)
        mirror = self.mirrors[location]
        mirror.resize(mirror.capacity_bytes, pinned_bytes)
        self.store.evict(mirror)

    def __contains__(self, location: object) -> bool:
        return location in self.mirrors

    @property
    def locations(self) -> tuple[str, ...]:
        """The locations mirrored."""
        return tuple(self.mirrors)

    def slots(self, locations: Sequence[str]) -> NDArray[np.intp]:
        """The slot of each, by which `holders` names them, as long as `version` stays."""
        mirrors = self.mirrors
        return np.array([mirrors[location].slot for location in locations], dtype=np.intp)

    @property
    def slots_known(self) -> int:
        """Above every slot."""
        return self._slots

    # --- paths -----------------------------------------------------------------------------------------------------

    def insert(self, location: str, chain: Sequence[int]) -> None:
        """The location has just used this path: add the nodes it lacks, touch the others, evict the oldest.

        Of a path that exceeds the whole mirror only the beginning is added, so that it evicts no more than it can use.
        """
        mirror = self.mirrors[location]
        if self.to_sweep or self.tombstones:
            self.sweep(_SWEEP_NODES + len(chain))
        self.store.insert(mirror, 0, chain)

    def extend(self, location: str, parent: int, nodes: Sequence[int]) -> bool:
        """As `insert`, for `nodes` that continue the path to `parent` (0: they begin at the root).

        Returns False, and changes nothing, if the location does not hold `parent`.
        """
        if not parent:
            self.insert(location, nodes)
            return True
        mirror = self.mirrors[location]
        row = self.store.place(mirror, parent)
        if not row:
            return False
        if self.to_sweep or self.tombstones:
            self.sweep(_SWEEP_NODES + len(nodes))
        self.store.insert(mirror, row, nodes)
        return True

    def evict(self, location: str, node: int, nodes_max: int | None = None) -> int:
        """The location no longer holds this node and its descendants. Returns how many were removed.

        At most `nodes_max` are removed, leaves first; if it returns that number, some may be left.
        """
        mirror = self.mirrors[location]
        row = self.store.place(mirror, node)
        return self.store.prune(mirror, row, mirror.nodes if nodes_max is None else nodes_max) if row else 0

    def holds(self, location: str, node: int) -> bool:
        """Whether the location holds this node."""
        return self.store.place(self.mirrors[location], node) > 0

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to `node`; [] if no location holds it."""
        forest, path = self.store.forest, list[int]()
        row = forest.find(node)
        while row:
            path.append(forest.key[row])
            row = forest.parent[row]
        path.reverse()
        return path

    def parent(self, node: int) -> int:
        """The parent of the node; 0 for a root and for a node that no location holds."""
        forest = self.store.forest
        return forest.key[forest.parent[forest.find(node)]]

    def match(self, chain: Sequence[int]) -> dict[str, int]:
        """How deep each location holds this path: {location: nodes held}, without the locations that hold none."""
        found: dict[str, int] = {}
        for depth, mask in self.holders(chain):
            group = self._groups.get(mask) or self._group(mask)
            if len(group) == 1:
                found[group[0]] = depth
            else:
                found.update(dict.fromkeys(group, depth))
        return found

    def holders(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """How deep each location holds this path: pairs of (nodes held, mask of slots), each slot in at most one mask.

        A binary search over depth for all locations at once: holding is monotone, so at any depth the set of holders
        splits into those to search deeper and those to search above. So it costs no more than a search for each
        location, and mostly less. `slots_of` lists the slots of a mask.
        """
        found: list[tuple[int, int]] = []
        if not chain:
            return found
        shards, set_id, masks = self.store.forest.shards, self.store.forest.set_id, self.store.holders.masks
        node = chain[0]
        mask = masks[set_id[shards[node & 255].get(node, 0)]]
        if self._hidden:
            mask &= ~self._hidden
        ranges = [(1, len(chain), mask)] if mask else []
        while ranges:
            low, high, mask = ranges.pop()
            while low < high:
                middle = (low + high + 1) >> 1
                node = chain[middle - 1]
                deeper = masks[set_id[shards[node & 255].get(node, 0)]] & mask
                if not deeper:
                    high = middle - 1
                    continue
                if deeper != mask:
                    ranges.append((low, middle - 1, mask ^ deeper))
                    mask = deeper
                low = middle
            found.append((low, mask))
        return found

    def match_one(self, location: str, chain: Sequence[int]) -> int:
        """How many nodes of this path the location holds."""
        mirror, place = self.mirrors[location], self.store.place
        low, high = 0, len(chain)
        if chain and place(mirror, chain[-1]):
            return high
        while low < high:
            middle = (low + high + 1) >> 1
            if place(mirror, chain[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def confine(self, location: str, chain: Sequence[int], depth: int) -> int:
        """Apply an engine's report: before this request it held exactly the first `depth` nodes of this path.

        Now it holds the whole path. Descendants of the later nodes, except the path itself, are removed from the
        mirror. Returns how many nodes of the path the mirror holds; the caller inserts the others. Raises ValueError if
        `depth` is not within 0 and len(chain).
        """
        if not 0 <= depth <= len(chain):
            raise ValueError(f"depth must lie within 0 and the chain's {len(chain)} nodes, not {depth!r}")
        held = self.match_one(location, chain)
        if held > depth:
            self.store.confine(self.mirrors[location], self.store.forest.find(chain[held - 1]), held - depth)
        return held

    # --- size ------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> int:
        """Distinct nodes kept."""
        return len(self.store.forest)

    @property
    def entries(self) -> int:
        """Pairs of node and location kept; memory grows with these."""
        return self.store.entries

    @property
    def shards(self) -> Sequence[Mapping[int, int]]:
        """All nodes kept, as the shards of a NodeMap. Do not keep a reference: they change."""
        return self.store.forest.shards

    def all_nodes(self) -> Iterator[int]:
        """All nodes kept, unordered; a node held throughout the iteration is yielded exactly once."""
        for shard in self.store.forest.shards:
            yield from tuple(shard)

    def count(self, location: str) -> int:
        """How many nodes the location holds."""
        return self.mirrors[location].nodes

    def has_children(self, node: int) -> bool:
        """Whether any location holds a child of this node."""
        forest = self.store.forest
        row = forest.find(node)
        return row > 0 and forest.child[row] > 0

    def is_held(self, node: int) -> bool:
        """Whether any location holds the node (or did, and it is not swept yet)."""
        return self.store.forest.find(node) > 0

    def bytes_held(self, location: str) -> int:
        """Prompt bytes covered by what the location is believed to hold."""
        return self.mirrors[location].used_bytes

    def filled(self, location: str) -> float:
        """The share of the location's capacity in use; at 1, an insert evicts something."""
        mirror = self.mirrors[location]
        return mirror.used_bytes / mirror.capacity_bytes if mirror.capacity_bytes else 1.0

    # --- within ----------------------------------------------------------------------------------------------------

    def _group(self, mask: int) -> tuple[str, ...]:
        """The locations of a mask; small groups are cached, since hot prefixes ask for the same few."""
        group = tuple(self.names[slot] for slot in slots_of(mask))
        if len(group) <= _GROUP_NAMES_MAX:
            if len(self._groups) >= _GROUPS_MAX:
                self._groups.clear()
            self._groups[mask] = group
        return group


def slots_of(mask: int) -> list[int]:
    """The slots of a mask, ascending."""
    return spread(mask, mask.bit_length()).nonzero()[0].tolist()


def spread(mask: int, n_slots: int) -> NDArray[np.bool_]:
    """The mask as an array: whether each of the first `n_slots` is in it; none of the others is."""
    octets = np.frombuffer(mask.to_bytes((n_slots + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(octets, count=n_slots, bitorder="little").view(np.bool_)


def _check_bytes(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, not {value!r}")
