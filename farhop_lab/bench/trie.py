"""What the prefix trie costs, in memory, CPU time and pauses. Never a test.

CPU time of this thread, the median of the repeats: on shared machines wall time misleads. Memory is the growth of
resident memory over a fill of a fresh process, the nodes' own integers included, divided by pairs of node and location.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from farhop_wire import region_pb2

from farhop.balance.prefix.chain import bytes_at
from farhop.balance.prefix.journal import Journal
from farhop.balance.prefix.trie import PrefixTrie
from farhop.service.process.tasks import in_turns
from farhop_lab.bench import usage
from global_lb.links.prefix_streams import Prefixes, PrefixStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

REPEATS = 3
NODES, NODES_QUICK = 2_000_000, 100_000
LOCATIONS = 60
SNAPSHOT_NODES = 200_000
DEPTH = 44  # of a 32 KiB prompt
STEM = 12  # nodes of it that belong to one of the system prompts
STEMS = 50
MESSAGE_NODES = 2000
MATCHES = 2000
RATE_PER_S = 50_000


class Row(msgspec.Struct, frozen=True):
    """One measurement: median, minimum and maximum of the repeats, in `unit`, and its bound."""

    what: str
    unit: str
    median: float
    least: float
    most: float
    limit: float | None = None


def measure(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """All rows. Each repeat has a process of its own, one after the other, so that memory is that of one fill."""
    nodes = NODES_QUICK if quick else NODES
    taken: list[dict[str, float]] = []
    context = multiprocessing.get_context("spawn")
    for turn in range(REPEATS):
        progress(f"repeat {turn + 1} of {REPEATS}, {nodes:,} nodes")
        with context.Pool(1) as pool:
            taken.append(pool.apply(repeat, (nodes, turn)))
    return [_row(what, unit, [one[what] for one in taken], limit) for what, unit, limit in ROWS]


ROWS: tuple[tuple[str, str, float | None], ...] = (
    ("memory per node and location", "B", 200.0),
    ("memory of the whole", "MB", 500.0),
    ("insert, new nodes", "µs per node", 2.0),
    ("insert, a path that is held (44 nodes)", "µs", None),
    ("insert, the longest", "ms", 5.0),
    ("match of 32 KB, cold", "µs", 30.0),
    ("match of 32 KB, warm", "µs", 10.0),
    ("insert that evicts as much", "µs per node", None),
    ("full collection", "ms", 5.0),
    ("clear a location", "ms", 5.0),
    ("stream applied: share of a core at 50,000 nodes/s", "%", 20.0),
    ("stream applied: longest turn", "ms", 5.0),
    ("snapshot of 200,000 applied: longest turn", "ms", 5.0),
    ("snapshot of 200,000 made: longest turn", "ms", 5.0),
)


def _row(what: str, unit: str, samples: list[float], limit: float | None) -> Row:
    return Row(what, unit, statistics.median(samples), min(samples), max(samples), limit)


def repeat(nodes: int, seed: int) -> dict[str, float]:
    """Every measurement once, by the rows' names."""
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(LOCATIONS)]
    gc.collect()
    gc.freeze()  # as the shipped processes do
    found, trie, paths = _filled(names, nodes, rng)
    found |= _matched(trie, paths, rng)
    found |= _evicting(trie, names, rng)
    fullest = max(names, key=trie.count)
    found["clear a location"] = _took(partial(trie.clear, fullest)) * 1e3
    del trie, paths
    found |= asyncio.run(_streamed(max(nodes // 4, MESSAGE_NODES), rng))
    found |= _snapshots(min(nodes, SNAPSHOT_NODES), rng)
    return found


def _took(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _chains(nodes: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Paths with shared beginnings, with about that many nodes in all."""
    stems = [tuple(rng.getrandbits(64) | 1 for _ in range(STEM)) for _ in range(STEMS)]
    for _ in range(nodes // (DEPTH - STEM)):
        yield rng.choice(stems) + tuple(rng.getrandbits(64) | 1 for _ in range(DEPTH - STEM))


def _filled(names: list[str], nodes: int, rng: random.Random) -> tuple[dict[str, float], PrefixTrie, list[list[int]]]:
    """A trie of that many nodes, each path at one location; and some of its paths."""
    me = (os.getpid(),)
    before = usage.rss_bytes(me)
    trie = PrefixTrie()
    room = 2 * nodes // len(names) * 4096 + bytes_at(DEPTH)
    for name in names:
        trie.add(name, room)
    spent = longest = 0.0
    kept: list[int] = []
    for count, chain in enumerate(_chains(nodes, rng)):
        name = rng.choice(names)
        began = time.thread_time()
        trie.insert(name, chain)
        took = time.thread_time() - began
        spent += took
        longest = max(longest, took)
        if count % max(1, nodes // DEPTH // MATCHES) == 0:
            kept.append(chain[-1])
    grown = usage.rss_bytes(me) - before
    paths = [trie.path(node) for node in kept]
    holder = max(names, key=lambda name: trie.match_one(name, paths[0]))
    touch_s = _took(lambda: _insert(trie, holder, paths[:1] * MATCHES))
    rows = {
        "memory per node and location": grown / trie.entries,
        "memory of the whole": grown / 1e6,
        "insert, new nodes": spent / trie.entries * 1e6,
        "insert, a path that is held (44 nodes)": touch_s / MATCHES * 1e6,
        "insert, the longest": longest * 1e3,
        "full collection": _took(gc.collect) * 1e3,
    }
    return rows, trie, paths


def _insert(trie: PrefixTrie, name: str, chains: Sequence[Sequence[int]]) -> None:
    for chain in chains:
        trie.insert(name, chain)


def _matched(trie: PrefixTrie, paths: list[list[int]], rng: random.Random) -> dict[str, float]:
    """Cold: a path that was not used lately, its last quarter unknown. Warm: the same one again."""
    tail = [rng.getrandbits(64) | 1 for _ in range(DEPTH // 4)]
    asked = [tuple(path[: DEPTH - len(tail)] + tail) for path in paths]
    rng.shuffle(asked)
    cold = _took(lambda: [trie.match(chain) for chain in asked]) / len(asked)
    one = asked[0]
    warm = _took(lambda: [trie.match(one) for _ in range(MATCHES)]) / MATCHES
    return {"match of 32 KB, cold": cold * 1e6, "match of 32 KB, warm": warm * 1e6}


def _evicting(trie: PrefixTrie, names: list[str], rng: random.Random) -> dict[str, float]:
    """At one location that is full, every new path evicts an old one."""
    name = max(names, key=trie.count)
    trie.set_capacity(name, trie.bytes_held(name))
    chains = list(_chains(MATCHES * (DEPTH - STEM) // 4, rng))
    spent = _took(lambda: _insert(trie, name, chains))
    return {"insert that evicts as much": spent / (len(chains) * (DEPTH - STEM)) * 1e6}


# -- streams, as the global tier takes them: bytes in, the shipped reader, the trie behind it


async def _streamed(nodes: int, rng: random.Random) -> dict[str, float]:
    """A snapshot of one region of many, then deltas, half of which remove what the previous one added."""
    trie = PrefixTrie()
    for i in range(LOCATIONS):
        trie.add(f"r{i}", 1 << 40)
    refused: list[str] = []
    prefixes = Prefixes(trie, refused.append)
    stream = prefixes.begin(("r0", "a"))
    _, snapshot_ms = await _apply(stream, _slices(list(_chains(min(nodes, SNAPSHOT_NODES), rng))))
    spent_s, turn_ms = await _apply(stream, list(_deltas(nodes, rng)))
    if refused:
        raise RuntimeError(f"the reader refused what the bench made: {set(refused)}")
    return {
        "stream applied: share of a core at 50,000 nodes/s": spent_s / nodes * RATE_PER_S * 100,
        "stream applied: longest turn": turn_ms,
        "snapshot of 200,000 applied: longest turn": snapshot_ms,
    }


async def _apply(stream: PrefixStream, messages: Iterable[bytes]) -> tuple[float, float]:
    """CPU seconds in all, and the longest time in ms that the loop was blocked."""
    longest = 0.0
    done = False

    async def watch() -> None:
        nonlocal longest
        before = time.thread_time()
        while not done:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now

    watcher = asyncio.create_task(watch())
    began = time.thread_time()
    for message in messages:
        await asyncio.sleep(0)  # each comes by itself
        await in_turns(stream.take(region_pb2.PrefixDelta.FromString(message)))
    spent = time.thread_time() - began
    done = True
    await watcher
    return spent, longest * 1e3


def _slices(paths: list[tuple[int, ...]]) -> list[bytes]:
    per_slice = MESSAGE_NODES // DEPTH
    cuts = [paths[i : i + per_slice] for i in range(0, len(paths), per_slice)]
    return [
        region_pb2.PrefixDelta(
            instance="a",
            incarnation=1,
            seq=1,
            slice=region_pb2.PrefixSlice(
                snapshot_id=1,
                slice=number,
                last=number == len(cuts) - 1,
                paths=[region_pb2.PrefixPath(nodes=path) for path in cut],
            ),
        ).SerializeToString()
        for number, cut in enumerate(cuts)
    ]


def _deltas(nodes: int, rng: random.Random) -> Iterator[bytes]:
    """Messages of MESSAGE_NODES: new ends below a known path, and as many removed, leaf by leaf."""
    new = DEPTH - STEM
    stem = tuple(rng.getrandbits(64) | 1 for _ in range(STEM))
    seq, before = 1, list[tuple[int, ...]]()
    for _ in range(max(1, nodes // MESSAGE_NODES)):
        ends = [tuple(rng.getrandbits(64) | 1 for _ in range(new)) for _ in range(MESSAGE_NODES // new // 2)]
        changes = [region_pb2.PrefixChange(stored=region_pb2.PrefixPath(parent=0, nodes=stem))] if seq == 1 else []
        changes += [
            region_pb2.PrefixChange(stored=region_pb2.PrefixPath(parent=stem[-1], nodes=nodes)) for nodes in ends
        ]
        changes += [region_pb2.PrefixChange(evicted=region_pb2.PrefixEvicted(nodes=nodes[::-1])) for nodes in before]
        yield region_pb2.PrefixDelta(
            instance="a", incarnation=1, after=seq, seq=seq + 1, changes=changes
        ).SerializeToString()
        seq, before = seq + 1, ends


def _snapshots(nodes: int, rng: random.Random) -> dict[str, float]:
    """A snapshot as a region makes it: the longest step from one slice to the next."""
    trie = PrefixTrie()
    trie.add("r0", 1 << 40)
    journal = Journal(trie)
    for chain in _chains(nodes, rng):
        journal.insert("r0", chain, None)
    longest = 0.0
    slices = journal.snapshot("r0", MESSAGE_NODES)
    while True:
        began = time.thread_time()
        over = next(slices, None) is None
        longest = max(longest, time.thread_time() - began)
        if over:
            return {"snapshot of 200,000 made: longest turn": longest * 1e3}
