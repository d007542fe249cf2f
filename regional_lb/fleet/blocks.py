"""Which replica holds which blocks of KV cache, as reported by KV events: exact, if the events are complete.

Every engine names blocks in its own way, so blocks are hashed again: a node is the hash of a block's tokens over its
parent's node, seeded by what separates caches (adapter, block size; a salt or an image goes into the block that it
begins in). Invariants: a node that no source holds is gone; what is removed as often as it was stored is gone (vLLM
keeps, and reports, several copies of a block); memory is bounded per source and in all, and the largest source is
forgotten for want of it; a source that may hold blocks which it never reported is not called exact. Never estimates and
never forgets by itself; token ids are not kept.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_64_intdigest

from regional_lb.fleet.kv_events import TOKEN_BYTES, Cleared, Linked, Removed, Stored, canonical_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regional_lb.fleet.kv_events import Hash, KvEvent

BLOCKS_MAX = 8_000_000  # of all sources: some 200 B each
# Blocks of a path that are looked up, some 5 ms. If an engine has pages of one token (SGLang's usual), or says so, a
# prompt has 130,000, which held the loop for 0.3 s with every request that began like it.
LOOKED_AT = 8192
_SLACK = 2  # a source that reports more than twice its cache has lost removals on the way
_SLACK_BLOCKS = 1024
_PARTS = 64
_SWEEP_BLOCKS = 4096  # 1 to 2 ms
_WHOLE = 0.95  # a source that has reported this share of its cache can hold next to nothing else


def _seed(adapter: str, block_tokens: int) -> int:
    return xxh3_64_intdigest(f"{block_tokens}:{adapter}".encode("utf-8", "surrogatepass"))


class Path:
    """A prompt's tokens as nodes, computed only as deep as needed. `ids`: TOKEN_BYTES each."""

    __slots__ = ("_adapter", "_ids", "_nodes", "_salt")

    def __init__(self, ids: bytes, adapter: str = "", cache_salt: str = "") -> None:
        self._ids, self._adapter = ids, adapter
        self._salt = canonical_keys((cache_salt,)) if cache_salt else b""
        self._nodes: dict[int, list[int]] = {}

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self._ids) // TOKEN_BYTES

    def nodes(self, block_tokens: int, depth: int) -> list[int]:
        """Its nodes at that block size, at least `depth` of them (which it must have), shallowest first."""
        nodes = self._nodes.get(block_tokens)
        if nodes is None:
            nodes = self._nodes[block_tokens] = []
        if len(nodes) < depth:
            size, ids = block_tokens * TOKEN_BYTES, self._ids
            node = nodes[-1] if nodes else _seed(self._adapter, block_tokens)
            for at in range(len(nodes) * size, depth * size, size):
                block = ids[at : at + size]
                node = xxh3_64_intdigest(block if at or not self._salt else block + self._salt, node)
                nodes.append(node)
        return nodes


class Known(NamedTuple):
    """What replicas report about their caches for one prompt, in tokens by replica. `exact`: all that they hold of it,
    of those with complete events; `least`: a lower bound, of the others."""

    exact: Mapping[str, float]
    least: Mapping[str, float]


class _Source:
    """One cache: a replica, or a rank of one. `again` and `shared` count copies beyond the first, which are rare."""

    __slots__ = ("again", "bit", "blocks", "complete", "group", "replica", "shared", "size", "up")

    def __init__(self, replica: str, bit: int) -> None:
        self.replica, self.bit = replica, bit
        self.blocks: dict[Hash, int] = {}  # its name for a block -> node
        self.again: dict[Hash, int] = {}  # more copies under the same name
        self.shared: dict[int, int] = {}  # more names for the same node
        self.size = 0  # tokens a block, 0 while it never stored one
        self.group: int | None = None
        self.up = self.complete = False


class _Replica:
    __slots__ = ("kv_tokens", "ranks")

    def __init__(self, ranks: list[_Source]) -> None:
        self.ranks = ranks
        self.kv_tokens: int | None = None  # of all of them, once the engine has reported it


class BlockIndex:
    """See the module's docstring. A replica that was never added, or was dropped, is no news to any call."""

    __slots__ = (
        "_bits",
        "_blocks",
        "_exact",
        "_free",
        "_holders",
        "_max",
        "_replicas",
        "_sizes",
        "_sources",
        "_stale",
        "ignored",
    )

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._max = blocks_max
        self._blocks = 0  # entries of all sources
        # Node -> bits of its sources, never 0; in parts by the node's last bits, since a dict that grows is built anew
        # at once, which of a million entries takes 100 ms.
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in range(_PARTS))
        self._replicas: dict[str, _Replica] = {}
        self._sources: dict[int, _Source] = {}  # by bit
        self._bits = 0  # ever in use
        self._free: list[int] = []
        self._stale: list[tuple[int, dict[Hash, int]]] = []  # forgotten at once, but cleared away in parts
        self._sizes: dict[int, int] = {}  # tokens a block -> bits of the sources with such blocks
        self._exact: dict[str, float] = {}  # sources with complete reports, with 0: a hit that none has
        self.ignored: Counter[str] = Counter()  # by reason, what could not be used

    def add(self, replica: str, ranks: int) -> None:
        """Begin to record a replica with this number of caches. Raises ValueError if it is recorded already."""
        if replica in self._replicas:
            raise ValueError(f"replica {replica!r} is known already: drop() it first")
        sources = []
        for _ in range(ranks):
            source = _Source(replica, self._bit())
            self._sources[source.bit] = source
            sources.append(source)
        self._replicas[replica] = _Replica(sources)

    def drop(self, replica: str) -> None:
        """Forget a replica."""
        known = self._replicas.pop(replica, None)
        for source in known.ranks if known is not None else ():
            self._empty(source)
            del self._sources[source.bit]
            self._free.append(source.bit)
        self._exact.pop(replica, None)

    def resize(self, replica: str, kv_tokens: int) -> None:
        """The engine reported that its caches hold this many tokens in total. Do not call this with an estimate."""
        known = self._replicas.get(replica)
        if known is not None:
            known.kv_tokens = kv_tokens

    def apply(self, replica: str, rank: int, change: KvEvent) -> None:
        """Apply one change of the replica's cache number `rank`."""
        self._sweep()
        known = self._replicas.get(replica)
        if known is None or rank >= len(known.ranks):
            return
        source = known.ranks[rank]
        if isinstance(change, Stored):
            self._stored(source, known, change)
        elif isinstance(change, Removed):
            self._removed(source, change)
        elif isinstance(change, Linked):
            source.up = change.up
        elif isinstance(change, Cleared):
            self._empty(source)
            source.complete = True
        else:
            source.complete = False
            if change.all:
                self._empty(source)
        if not source.complete and known.kv_tokens is not None and isinstance(change, Stored):
            # What it reported leaves no room for unreported blocks.
            source.complete = len(source.blocks) * source.size * len(known.ranks) >= _WHOLE * known.kv_tokens
        if all(one.up and one.complete for one in known.ranks):
            self._exact[replica] = 0.0
        else:
            self._exact.pop(replica, None)

    def known(self, path: Path) -> Known:
        """How much of a path each replica holds; of several caches of a replica, on average: it picks one itself.

        At least one token is always computed, so a prompt's last block never counts as a hit if it ends there. Of a
        longer path than LOOKED_AT blocks, a replica that holds so many holds these at least.
        """
        exact, least, deeper = self._exact.copy(), dict[str, float](), set[str]()
        for size, mask in self._sizes.items():
            unknown = (path.tokens - 1) // size > LOOKED_AT
            for bits, depth in self._depths(path, size, mask):
                while bits:
                    bit = bits & -bits
                    bits ^= bit
                    source = self._sources[bit]
                    name = source.replica
                    tokens = depth * size / len(self._replicas[name].ranks)
                    if name in exact:
                        exact[name] += tokens
                    elif source.up:
                        least[name] = least.get(name, 0.0) + tokens
                    if unknown and depth == LOOKED_AT:
                        deeper.add(name)
        for name in deeper & exact.keys():
            least[name] = exact.pop(name)
        return Known(exact, least)

    def ends_within(self, path: Path) -> bool:
        """Whether no source holds the path to its end, so that no more of a longer path with this beginning can be
        held."""
        for size, mask in self._sizes.items():
            most = min((path.tokens - 1) // size, LOOKED_AT)
            if most <= 0 or any(depth == most for _, depth in self._depths(path, size, mask)):
                return False
        return True

    # -- size

    def __len__(self) -> int:
        """The number of blocks of all sources."""
        return self._blocks

    @property
    def nodes(self) -> int:
        """The number of distinct nodes held by any replica."""
        return sum(map(len, self._holders))

    @property
    def exact(self) -> int:
        """The number of replicas whose events are complete."""
        return len(self._exact)

    def events_state(self, replica: str) -> str | None:
        """How complete its KV events are: `exact`, `partial`, `cut` while none reach us; None if it sends none."""
        known = self._replicas.get(replica)
        if known is None:
            return None
        if replica in self._exact:
            return "exact"
        return "partial" if all(source.up for source in known.ranks) else "cut"

    def reports(self, replica: str) -> bool:
        """Whether its events say anything about its cache: that it holds some blocks, or that it holds no others."""
        known = self._replicas.get(replica)
        return known is not None and (replica in self._exact or any(one.up and one.blocks for one in known.ranks))

    def held_tokens(self, replica: str) -> float | None:
        """Tokens that the replica's caches hold together; None if that is not known exactly."""
        if replica not in self._exact:
            return None
        return float(sum(len(source.blocks) * source.size for source in self._replicas[replica].ranks))

    # -- within

    def _depths(self, path: Path, size: int, mask: int) -> list[tuple[int, int]]:
        """(sources, blocks they hold), none left out that holds any.

        From the root on, not by halves: an engine may let go of a block before those below it, which are of no use to
        it then, and it costs little beside hashing them.
        """
        found: list[tuple[int, int]] = []
        holders, most = self._holders, min((path.tokens - 1) // size, LOOKED_AT)
        nodes, depth = path.nodes(size, 0), 0
        while mask and depth < most:
            if depth == len(nodes):
                path.nodes(size, min(most, depth + 1 + depth // 4))
            node = nodes[depth]
            here = holders[node % _PARTS].get(node, 0) & mask
            if here != mask:
                if depth:
                    found.append((mask ^ here, depth))
                mask = here
            depth += 1
        if mask and most > 0:
            found.append((mask, most))
        return found

    def _stored(self, source: _Source, known: _Replica, change: Stored) -> None:
        if source.size and change.group not in (None, source.group):
            return  # another group of layers caches the same prompt in its own way: only the first counts
        if source.size != change.block_tokens:
            if source.blocks:
                self.ignored["block_size"] += len(change.hashes)
                return
            self._resized(source, change)
        if change.parent is None:
            node = _seed(change.adapter, change.block_tokens)
        else:
            parent = source.blocks.get(change.parent)
            if parent is None:
                self.ignored["parent"] += len(change.hashes)
                return
            node = parent
        limit = self._max
        if known.kv_tokens is not None:
            limit = _SLACK_BLOCKS + _SLACK * known.kv_tokens // change.block_tokens
        size, extras, tokens = change.block_tokens * TOKEN_BYTES, change.extras, change.tokens
        for place, name in enumerate(change.hashes):
            block = tokens[place * size : (place + 1) * size]
            node = xxh3_64_intdigest(block + extras[place] if extras else block, node)
            if name in source.blocks:
                source.again[name] = source.again.get(name, 0) + 1
                node = source.blocks[name]
            elif len(source.blocks) >= limit or (self._blocks >= self._max and not self._makes_room(source)):
                self.ignored["full"] += len(change.hashes) - place
                self._overflowed(source)  # whatever this is, it is not what the engine holds
                return
            else:
                self._hold(source, name, node)

    def _makes_room(self, source: _Source) -> bool:
        """Forget the source with most blocks, so that one that reports without end costs only itself its place. False
        if that is this one."""
        if not self._stale:
            largest = max(self._sources.values(), key=lambda one: len(one.blocks))
            if largest is source:
                return False
            self.ignored["full"] += len(largest.blocks)
            self._overflowed(largest)
            self._exact.pop(largest.replica, None)
        else:
            self._sweep()
        return self._blocks < self._max

    def _overflowed(self, source: _Source) -> None:
        self._empty(source)
        source.complete = False

    def _hold(self, source: _Source, name: Hash, node: int) -> None:
        source.blocks[name] = node
        self._blocks += 1
        holders = self._holders[node % _PARTS]
        mask = holders.get(node, 0)
        if mask & source.bit:
            source.shared[node] = source.shared.get(node, 0) + 1
        else:
            holders[node] = mask | source.bit if mask else source.bit

    def _resized(self, source: _Source, change: Stored) -> None:
        self._unsize(source)
        source.size, source.group = change.block_tokens, change.group
        self._sizes[source.size] = self._sizes.get(source.size, 0) | source.bit

    def _removed(self, source: _Source, change: Removed) -> None:
        if change.group not in (None, source.group):
            return
        for name in change.hashes:
            if name in source.again:
                _less(source.again, name)
                continue
            node = source.blocks.pop(name, None)
            if node is None:
                self.ignored["block"] += source.complete  # else it was stored before we heard
                continue
            self._blocks -= 1
            if node in source.shared:
                _less(source.shared, node)
            else:
                self._remove_holder(node, source.bit)

    def _remove_holder(self, node: int, bit: int) -> None:
        holders = self._holders[node % _PARTS]
        mask = holders[node] ^ bit
        if mask:
            holders[node] = mask
        else:
            del holders[node]

    def _empty(self, source: _Source) -> None:
        """Forget all that a source holds, at once: it gets a new bit, under which it holds nothing; the old bit is
        never looked up."""
        self._unsize(source)
        source.again.clear()
        source.shared.clear()
        if not source.blocks:
            return
        self._stale.append((source.bit, source.blocks))
        del self._sources[source.bit]
        source.bit, source.blocks = self._bit(), {}
        self._sources[source.bit] = source
        self._sweep()

    def _sweep(self) -> None:
        """Free some of the forgotten entries."""
        left = _SWEEP_BLOCKS
        while self._stale and left:
            bit, blocks = self._stale[-1]
            now = min(left, len(blocks))
            for _ in range(now):
                node = blocks.popitem()[1]
                if self._holders[node % _PARTS].get(node, 0) & bit:  # not under another name already
                    self._remove_holder(node, bit)
            left -= now
            self._blocks -= now
            if not blocks:
                self._stale.pop()
                self._free.append(bit)

    def _bit(self) -> int:
        if self._free:
            return self._free.pop()
        self._bits += 1
        return 1 << (self._bits - 1)

    def _unsize(self, source: _Source) -> None:
        if source.size:
            self._sizes[source.size] ^= source.bit
            if not self._sizes[source.size]:
                del self._sizes[source.size]
        source.size, source.group = 0, None


def _less(counts: dict[Any, int], key: Hash) -> None:
    """Decrement a count; drop it at zero."""
    if counts[key] > 1:
        counts[key] -= 1
    else:
        del counts[key]
