"""What must hold of a trie's columns after every call, whatever it was given."""

from __future__ import annotations

from collections import Counter

from farhop.balance.prefix.chain import BLOCK_BYTES
from farhop.balance.prefix.forest import NO_LOCATION
from farhop.balance.prefix.mirror import Mirror, Mirrors
from farhop.balance.prefix.trie import PrefixTrie


def rows_in_order(store: Mirrors, mirror: Mirror) -> list[int]:
    """The rows of the nodes it holds, the least recently used first; both directions of the list must agree."""
    forest, rows = store.forest, []
    place, before = forest.newer[mirror.ends], mirror.ends
    while place != mirror.ends:
        assert forest.older[place] == before
        rows.append(place if forest.depth[place] else forest.parent[place])
        assert forest.place(rows[-1], mirror.slot) == place
        place, before = forest.newer[place], place
    assert forest.older[mirror.ends] == before
    return rows


def held_by(trie: PrefixTrie, name: str) -> list[int]:
    """The nodes a location holds, the least recently used first."""
    return [trie.store.forest.key[row] for row in rows_in_order(trie.store, trie.mirrors[name])]


def assert_sound(trie: PrefixTrie) -> None:
    store = trie.store
    forest, holders = store.forest, store.holders
    masks: Counter[int] = Counter()
    for mirror in [*trie.mirrors.values(), *trie.to_sweep]:
        rows = rows_in_order(store, mirror)
        assert len(rows) == len(set(rows)) == mirror.nodes
        assert mirror.used_bytes == sum(BLOCK_BYTES[forest.depth[row] - 1] for row in rows)
        assert mirror.used_bytes <= mirror.limit_bytes or mirror.slot not in trie.names
        place = {row: n for n, row in enumerate(rows)}
        assert all(place[forest.parent[row]] > n for row, n in place.items() if forest.parent[row])
        for row in rows:
            masks[row] += mirror.bit
    rows_of_nodes = {node: row for shard in forest.shards for node, row in shard.items()}
    assert {row: holders.masks[forest.set_id[row]] for row in rows_of_nodes.values()} == masks
    assert all(forest.key[row] == node for node, row in rows_of_nodes.items())
    assert store.entries == sum(mask.bit_count() for mask in masks.values())
    primary = sum(forest.slot[row] != NO_LOCATION for row in rows_of_nodes.values())
    assert sum(map(len, forest.extra)) == store.entries - primary
    assert_linked(trie, set(rows_of_nodes.values()))
    counts = Counter(forest.set_id[row] for row in rows_of_nodes.values()) + Counter({0: 1})
    counts.update(mirror.own_id for mirror in [*trie.mirrors.values(), *trie.to_sweep])
    assert {n: count for n, count in enumerate(holders.counts) if count} == counts
    free, row = set(), forest.free
    while row:
        assert row not in free
        assert (forest.child[row], forest.before[row], forest.after[row]) == (0, 0, 0)
        free.add(row)
        row = forest.newer[row]
    used = len(masks) + sum(map(len, forest.extra)) + len(trie.mirrors) + len(trie.to_sweep) + 1
    assert len(free) + used == len(forest.key)


def assert_linked(trie: PrefixTrie, rows: set[int]) -> None:
    """Every node hangs once below its parent, one level up."""
    forest = trie.store.forest
    seen: set[int] = set()
    for above in [0, *rows]:
        child, before = forest.child[above], 0
        while child:
            assert forest.parent[child] == above
            assert forest.before[child] == before
            assert forest.depth[child] == forest.depth[above] + 1
            assert child not in seen
            seen.add(child)
            child, before = forest.after[child], child
    assert seen == rows
