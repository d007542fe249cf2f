"""What the regions say they hold: applied, counted by instance, taken back, refused; and end to end over gRPC."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Iterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from farhop_wire import region_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import HOP_KEY, Engine, chat, global_config, regional_config, send, serving, tenant, topology, until

from farhop.balance.prefix.trie import PrefixTrie
from farhop.service.process.tasks import in_turns
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from global_lb.app.main import GlobalBalancer
from global_lb.links import prefix_streams as room
from global_lb.links.prefix_streams import Prefixes, PrefixGapError, PrefixStream
from regional_lb.app.main import RegionalBalancer
from tests.conftest import soonest

TOKYO = "tokyo"


class Told:
    """The room over a trie of one region."""

    def __init__(self) -> None:
        self.trie = PrefixTrie()
        self.trie.add(TOKYO, 1 << 20)
        self.refused: list[str] = []
        self.prefixes = Prefixes(self.trie, self.refused.append)

    def stream(self, instance: str = "a") -> PrefixStream:
        return self.prefixes.begin((TOKYO, instance))

    @property
    def held(self) -> set[int]:
        return {node for node in self.trie.all_nodes() if self.trie.holds(TOKYO, node)}


def path(parent: int, *nodes: int) -> pb.PrefixPath:
    return pb.PrefixPath(parent=parent, nodes=nodes)


def stored(parent: int, *nodes: int) -> pb.PrefixChange:
    return pb.PrefixChange(stored=path(parent, *nodes))


def evicted(*nodes: int) -> pb.PrefixChange:
    return pb.PrefixChange(evicted=pb.PrefixEvicted(nodes=nodes))


CLEARED = pb.PrefixChange(cleared=pb.PrefixCleared())


def delta(after: int, *changes: pb.PrefixChange, seq: int = 0, instance: str = "a", incarnation: int = 1) -> Any:
    return pb.PrefixDelta(
        instance=instance, incarnation=incarnation, seq=seq or after + 1, after=after, changes=changes
    )


def slice_(
    number: int, *paths: pb.PrefixPath, last: bool = False, seq: int = 1, instance: str = "a", incarnation: int = 1
) -> pb.PrefixDelta:
    what = pb.PrefixSlice(snapshot_id=1, slice=number, last=last, paths=paths)
    return pb.PrefixDelta(instance=instance, incarnation=incarnation, seq=seq, slice=what)


async def whole(value: Told, *paths: pb.PrefixPath, instance: str = "a") -> PrefixStream:
    stream = value.stream(instance)
    await in_turns(stream.take(slice_(0, *paths, last=True, instance=instance)))
    return stream


async def test_a_snapshot_and_changes() -> None:
    found = Told()
    assert found.prefixes.state(TOKYO) == "never"
    stream = found.stream()
    await in_turns(stream.take(slice_(0, path(0, 1, 2))))
    assert found.prefixes.state(TOKYO) == "never"
    await in_turns(stream.take(slice_(1, path(2, 3), last=True)))
    assert (found.held, found.prefixes.state(TOKYO)) == ({1, 2, 3}, "connected")
    await in_turns(stream.take(delta(1, stored(3, 4), evicted(4, 3), stored(2, 5))))
    assert found.held == {1, 2, 5}
    assert found.trie.match((1, 2, 5)) == {TOKYO: 3}
    await in_turns(stream.take(delta(2, CLEARED, stored(0, 9))))
    assert found.held == {9}
    assert found.refused == []


async def test_a_node_leaves_with_the_last_instance_that_holds_it() -> None:
    found = Told()
    a = await whole(found, path(0, 1, 2))
    b = await whole(found, path(0, 1, 2, 3), instance="b")
    await in_turns(a.take(delta(1, evicted(2, 1))))
    assert found.held == {1, 2, 3}
    await in_turns(b.take(delta(1, evicted(3, 2), instance="b")))
    assert found.held == {1}
    await in_turns(b.take(delta(2, CLEARED, instance="b")))
    assert found.held == set()


async def test_a_new_snapshot_takes_over_when_it_is_whole() -> None:
    found = Told()
    (await whole(found, path(0, 1, 2))).ended(10.0)
    stream = found.stream()
    await in_turns(stream.take(slice_(0, path(0, 1), incarnation=2)))
    assert (found.held, found.prefixes.state(TOKYO)) == ({1, 2}, "behind")
    await in_turns(stream.take(slice_(1, path(0, 7), last=True, incarnation=2)))
    assert (found.held, found.prefixes.state(TOKYO)) == ({1, 7}, "connected")


async def test_the_part_of_a_broken_snapshot_stays_and_the_next_starts_again() -> None:
    found = Told()
    (await whole(found, path(0, 1, 2))).ended(10.0)
    stream = found.stream()
    await in_turns(stream.take(slice_(0, path(0, 1, 5), seq=9)))
    stream.ended(11.0)
    again = found.stream()
    assert (found.held, again.known_seq, again.known_incarnation) == ({1, 2, 5}, 0, 0)
    await in_turns(again.take(slice_(0, path(0, 1), last=True, seq=9)))
    assert found.held == {1}


async def test_however_many_snapshots_break_nothing_they_brought_is_forgotten_until_one_is_whole() -> None:
    found = Told()
    for n in range(1, 30):
        stream = found.stream()
        await in_turns(stream.take(slice_(0, path(0, n), seq=9)))
        stream.ended(float(n))
    assert found.held == set(range(1, 30))
    assert len(stream.instance.stale) <= room.STALE_MAX
    await in_turns(found.prefixes.tidy(30.0))
    assert found.held == set(range(1, 30))
    await whole(found, path(0, 40))
    assert found.held == {40}


async def test_however_many_snapshots_break_what_is_kept_of_them_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(room, "INSTANCE_NODES_MAX", 100)
    found = Told()
    for n in range(40):
        stream = found.stream()
        await in_turns(stream.take(slice_(0, path(0, *range(1 + 60 * n, 61 + 60 * n)), seq=9)))
        stream.ended(float(n))
    assert sum(map(len, stream.instance.stale)) <= room.STALE_MAX * 100
    await whole(found, path(0, 9999))
    assert found.held == {9999}


async def test_prefixes_of_a_broken_snapshot_are_forgotten_with_their_instance() -> None:
    found = Told()
    for n in range(1, 4):
        stream = found.stream()
        await in_turns(stream.take(slice_(0, path(0, n), seq=9)))
        stream.ended(0.0)
    await in_turns(found.prefixes.tidy(1.0 + room.FORGET_S))
    assert found.held == set()


@pytest.mark.parametrize("what", ["evicted", "cleared", "renewed"])
async def test_no_message_holds_the_loop_for_long(what: str) -> None:
    found = Told()
    found.trie.set_capacity(TOKYO, 1 << 30)
    nodes = [path(0, *range(n + 1, n + 51)) for n in range(0, 5000, 50)]
    stream = await whole(found, *nodes)
    messages = {
        "evicted": delta(1, evicted(*range(5000, 0, -1))),
        "cleared": delta(1, CLEARED),
        "renewed": slice_(0, path(0, 9000), last=True),
    }
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    await in_turns(stream.take(messages[what]))
    beside.cancel()
    assert found.held == ({9000} if what == "renewed" else set())
    assert turns >= 5000 // (2 * room.TURN_NODES)


@pytest.mark.parametrize(
    "message",
    [
        delta(2, stored(0, 5)),
        delta(0, stored(0, 5)),
        delta(1, stored(0, 5), incarnation=2),
        slice_(1, path(0, 5), last=True),
    ],
)
async def test_a_delta_that_does_not_follow_is_a_gap(message: pb.PrefixDelta) -> None:
    found = Told()
    stream = await whole(found, path(0, 1))
    with pytest.raises(PrefixGapError):
        await in_turns(stream.take(message))
    assert (found.held, found.refused) == ({1}, ["prefixes_gap"])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (delta(1, stored(0, *range(1, 1062))), "prefixes_malformed"),
        (delta(1, stored(0)), "prefixes_malformed"),
        (delta(1, stored(1, 2, 1)), "prefixes_malformed"),
        (delta(1, stored(0, 2, 0)), "prefixes_malformed"),
        (delta(1, stored(0, 2, 3, 2)), "prefixes_duplicate"),
        (delta(1, evicted(*range(room.MESSAGE_NODES_MAX + 1))), "prefixes_too_many"),
        (delta(1, *[CLEARED] * (room.MESSAGE_NODES_MAX + 1)), "prefixes_too_many"),
        (slice_(0, *[path(0, *range(n * 1000 + 1, n * 1000 + 1001)) for n in range(17)]), "prefixes_too_many"),
        (delta(1, stored(0, 2), instance="b"), "prefixes_misplaced"),
        (delta(1, stored(0, 2), incarnation=0), "prefixes_misplaced"),
    ],
)
@pytest.mark.parametrize("was_read", [False, True])
async def test_a_malformed_message_is_refused_whole_and_counted(
    message: pb.PrefixDelta, why: str, was_read: bool
) -> None:
    found = Told()
    stream = await whole(found, path(0, 1))
    with pytest.raises(PrefixGapError):
        await in_turns(stream.take(message, room.read(message) if was_read else None))
    assert (found.held, found.refused) == ({1}, [why])


@pytest.mark.parametrize("change", [True, False])
def test_a_prefix_message_with_too_many_paths_is_refused_without_copying_it(change: bool) -> None:
    """4 MiB of empty paths held the loop for 2.2 s."""
    empty = pb.PrefixDelta(incarnation=1, seq=1)
    for _ in range(200_000):
        (empty.changes if change else empty.slice.paths).add()
    tracemalloc.start()
    try:
        assert room.read(empty) == "prefixes_too_many"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


async def test_a_path_without_its_parent_is_left_out() -> None:
    found = Told()
    stream = await whole(found, path(0, 1))
    await in_turns(stream.take(delta(1, stored(8, 9), stored(1, 2))))
    assert (found.held, found.refused) == ({1, 2}, ["prefixes_unknown_parent"])


async def test_the_prefixes_of_an_instance_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "INSTANCE_NODES_MAX", 3)
    found = Told()
    stream = await whole(found, path(0, 1, 2))
    await in_turns(stream.take(delta(1, stored(2, 3, 4))))
    assert (found.held, found.refused) == ({1, 2}, ["prefixes_too_many"])


async def test_nodes_dropped_for_lack_of_room_are_not_counted_as_refused() -> None:
    found = Told()
    found.trie.set_capacity(TOKYO, 600)
    stream = await whole(found, path(0, 1, 2, 3, 4))
    await in_turns(stream.take(delta(1, stored(4, 5))))
    assert (found.held, found.refused) == ({1, 2}, [])


async def test_superseded_stream_is_ignored() -> None:
    found = Told()
    old = await whole(found, *[path(0, n) for n in range(1, 10)])
    big = asyncio.create_task(in_turns(old.take(delta(1, *[stored(0, n) for n in range(10, 10_000)]))))
    await asyncio.sleep(0)
    new = found.stream()
    with pytest.raises(PrefixGapError):
        await big
    old.ended(5.0)
    await in_turns(new.take(slice_(0, path(0, 1), last=True)))
    assert (found.held, found.prefixes.state(TOKYO)) == ({1}, "connected")


async def test_prefixes_of_a_lost_stream_are_kept_for_a_while_and_then_forgotten() -> None:
    found = Told()
    a, b = await whole(found, path(0, 1, 2)), await whole(found, path(0, 1), instance="b")
    assert found.prefixes.behind_s(TOKYO, 99.0) is None
    a.ended(100.0)
    assert (found.prefixes.state(TOKYO), found.prefixes.behind_s(TOKYO, 102.5)) == ("behind", 2.5)
    a.ended(101.0)
    assert found.prefixes.behind_s(TOKYO, 102.5) == 2.5
    await in_turns(found.prefixes.tidy(100.0 + room.FORGET_S))
    assert found.held == {1, 2}
    await in_turns(found.prefixes.tidy(100.1 + room.FORGET_S))
    assert (found.held, found.prefixes.state(TOKYO)) == ({1}, "connected")
    b.ended(300.0)
    await in_turns(found.prefixes.tidy(400.0))
    assert (found.held, found.prefixes.state(TOKYO)) == (set(), "never")
    assert found.prefixes.behind_s(TOKYO, 401.0) is None


async def test_the_longest_silence_counts_and_ends_when_it_speaks_again() -> None:
    found = Told()
    for name, at in (("a", 100.0), ("b", 90.0)):
        (await whole(found, path(0, 1), instance=name)).ended(at)
    assert found.prefixes.behind_s(TOKYO, 100.0) == 10.0
    await whole(found, path(0, 1), instance="b")
    assert (found.prefixes.state(TOKYO), found.prefixes.behind_s(TOKYO, 101.0)) == ("behind", 1.0)
    never = found.stream("c")
    never.ended(50.0)
    assert found.prefixes.behind_s(TOKYO, 101.0) == 1.0  # it has told nothing that could be old


async def test_what_is_being_sent_again_is_not_forgotten_meanwhile() -> None:
    found = Told()
    (await whole(found, path(0, 1, 2))).ended(100.0)
    stream = found.stream()
    await in_turns(stream.take(slice_(0, path(0, 1))))
    await in_turns(found.prefixes.tidy(500.0))
    assert found.held == {1, 2}
    await in_turns(stream.take(slice_(1, path(1, 3), last=True)))
    assert found.held == {1, 3}


async def test_a_stream_whose_instance_was_forgotten_starts_again() -> None:
    found = Told()
    (await whole(found, path(0, 1, 2))).ended(100.0)
    late = found.stream()
    await in_turns(found.prefixes.tidy(500.0))
    with pytest.raises(PrefixGapError):
        await in_turns(late.take(delta(1, stored(2, 3))))
    assert found.held == set()


def send_there(value: Told, *chain: int) -> None:
    value.trie.insert(TOKYO, chain)
    value.prefixes.sent(TOKYO, chain)


async def test_without_a_prefix_stream_sent_prefixes_count_as_cached() -> None:
    found = Told()
    send_there(found, 1, 2)
    for now in range(4):
        await in_turns(found.prefixes.tidy(float(now)))
    assert found.held == {1, 2}
    await whole(found, path(0, 5))
    assert found.held == {5}  # now it is known better


async def test_prefixes_of_sent_requests_are_forgotten_unless_the_region_confirms_them() -> None:
    found = Told()
    stream = await whole(found, path(0, 1))
    await in_turns(found.prefixes.tidy(0.0))
    send_there(found, 1, 2, 3)
    send_there(found, 1, 4)
    await in_turns(stream.take(delta(1, stored(1, 2))))
    await in_turns(found.prefixes.tidy(5.0))
    assert found.held == {1, 2, 3, 4}
    send_there(found, 1, 4, 5)  # sent again: its time begins anew
    await in_turns(found.prefixes.tidy(10.0))
    assert found.held == {1, 2, 4, 5}
    await in_turns(stream.take(delta(2, stored(1, 4, 5))))
    await in_turns(found.prefixes.tidy(15.0))
    assert found.held == {1, 2, 4, 5}


async def test_a_prefix_sent_repeatedly_is_noted_once_in_a_period() -> None:
    found = Told()
    await whole(found, path(0, 1))
    await in_turns(found.prefixes.tidy(0.0))
    for _ in range(3):
        send_there(found, 1, 2, 3)
        send_there(found, 1, 2)  # which the longer one speaks for
    assert len(found.prefixes.regions[TOKYO].young) == 1
    await in_turns(found.prefixes.tidy(5.0))
    send_there(found, 1, 2)
    await in_turns(found.prefixes.tidy(10.0))
    assert 2 in found.held  # that was sent in the period after, too
    await in_turns(found.prefixes.tidy(15.0))
    assert found.held == {1}


async def test_silence_of_a_broken_stream_takes_nothing_back() -> None:
    found = Told()
    stream = await whole(found, path(0, 1))
    await in_turns(found.prefixes.tidy(0.0))
    send_there(found, 1, 2)
    stream.ended(1.0)
    for now in range(2, 8):
        await in_turns(found.prefixes.tidy(float(now)))
    assert found.held == {1, 2}


LABELS = st.lists(st.integers(1, 3), min_size=1, max_size=4)
# A node is its path spelled out: 213 is the child 3 of 21.
PATHS = LABELS.map(lambda labels: [int("".join(map(str, labels[: i + 1]))) for i in range(len(labels))])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["store", "evict", "clear", "renew"]), PATHS)))
def test_a_region_holds_the_union_of_its_instances(steps: list[tuple[str, str, list[int]]]) -> None:
    async def run() -> None:
        found = Told()
        model: dict[str, set[int]] = {"a": set(), "b": set()}
        seq = {"a": 1, "b": 1}
        streams = {name: await whole(found, instance=name) for name in "ab"}
        for name, what, nodes in steps:
            mine = model[name]
            if what == "renew":
                streams[name] = found.stream(name)
                every = [path(node // 10, node) for node in sorted(mine)]
                await in_turns(streams[name].take(slice_(0, *every, last=True, seq=seq[name], instance=name)))
                continue
            if what == "store":
                change = stored(0, *nodes)
                mine |= set(nodes)
            elif what == "evict":
                gone = sorted((n for n in mine if str(n).startswith(str(nodes[-1]))), reverse=True)
                change = evicted(*gone)
                mine -= set(gone)
            else:
                change = CLEARED
                mine.clear()
            await in_turns(streams[name].take(delta(seq[name], change, instance=name)))
            seq[name] += 1
            assert found.held == model["a"] | model["b"]
        assert found.refused == []

    asyncio.run(run())


# -- end to end


@pytest.fixture(autouse=True)
def _hop_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    return


def _region(balancer: GlobalBalancer, name: str = "virginia") -> dict[str, Any]:
    return next(r for r in balancer.tier_admin.status()["regions"] if r["region"] == name)


def _known(balancer: GlobalBalancer, name: str = "virginia") -> int:
    return balancer.flow.regions.trie.count(name) if name in balancer.flow.regions.trie else 0


async def test_a_prompt_served_via_one_global_balancer_is_known_to_others_within_a_second() -> None:
    world, cluster, engine = (
        topology(tenant("us-only", residency={"processing": {"allow": ["us"]}})),
        MemoryCluster(),
        Engine(),
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine.running())
        below = RegionalBalancer(regional_config(engine), world, Random(1), MemoryStore(Random(2), cluster))
        quick = {"ping_s": 0.05, "ping_timeout_s": 1.0}
        above = [
            GlobalBalancer(
                global_config(where, instance=name, watch=quick), world, Random(n), MemoryStore(Random(n + 9), cluster)
            )
            for n, (where, name) in enumerate([("virginia", "g1"), ("virginia", "g2"), ("tokyo", "g1")])
        ]
        lines = []
        for one in (below, *above):
            lines.append(await one.open())
            stack.push_async_callback(one.close)
        await until(lambda: all(serving(one) for one in above))
        await until(lambda: all(_region(one)["prefix_stream"] == "connected" for one in above))
        port = int(lines[1].split("127.0.0.1:")[1].split(",")[0])
        clock = asyncio.get_running_loop().time
        numbers = itertools.count()

        async def known_after_s(who: str, knows: tuple[int, ...]) -> float:
            before = [_known(one) for one in above]
            body = {
                "model": "llama-3.1-8b",
                "messages": [{"role": "user", "content": f"{next(numbers)} a whale " * 400}],
                "max_tokens": 4,
            }
            began = clock()
            answer = await send(port, chat(f"sk-farhop-{who}", body))
            assert answer.status == 200
            expected = below.flow.replicas.trie.nodes
            await until(lambda: all(_known(above[i]) >= expected for i in knows))
            took_s = clock() - began
            if 2 not in knows:
                assert _known(above[2]) == before[2]
            return took_s

        await soonest(lambda: known_after_s("anywhere", (0, 1, 2)), 1.0)
        await soonest(lambda: known_after_s("us-only", (0, 1)), 1.0)
        status = _region(above[1])
        assert status["prefix_nodes"] > 10
        assert {"predicted_hit_tokens", "actual_hit_tokens"} <= set(status)
        assert status["prefix_behind_s"] is None


async def test_under_a_law_that_forbids_hints_every_stream_starts_again() -> None:
    found = Told()
    stream = found.stream()
    await in_turns(stream.take(slice_(0, path(0, 1, 2), last=True)))
    send_there(found, 7, 8)
    found.trie.clear(TOKYO)  # which the machine does
    found.prefixes.begin_anew()
    assert found.prefixes.state(TOKYO) == "behind"
    assert not len(found.prefixes.regions[TOKYO].instances["a"].nodes)
    with pytest.raises(PrefixGapError):
        await in_turns(stream.take(delta(1, stored(2, 3))))
    anew = found.stream()
    assert (anew.known_incarnation, anew.known_seq) == (0, 0)
    await in_turns(anew.take(slice_(0, path(0, 4), last=True)))
    assert found.held == {4}
    await in_turns(found.prefixes.tidy(100.0))
    assert found.held == {4}
    assert found.prefixes.discarded == []


async def test_under_a_law_that_only_widens_it_is_kept_and_requested_again() -> None:
    found = Told()
    stream = await whole(found, path(0, 1, 2))
    found.prefixes.adopt(5)
    assert found.held == {1, 2}
    with pytest.raises(PrefixGapError):  # by which law it is told nobody knows
        await in_turns(stream.take(delta(1, stored(2, 3))))
    stream.ended(1.0)
    again = found.stream()
    assert (found.prefixes.law_epoch, again.known_seq) == (5, 1)
    await in_turns(again.take(delta(1, stored(2, 3))))
    assert found.held == {1, 2, 3}
    found.prefixes.begin_anew()
    found.prefixes.adopt(6)
    assert found.prefixes.law_epoch == 6
    assert found.stream().known_seq == 0


async def test_nothing_is_taken_any_more_that_was_asked_under_another_map() -> None:
    found = Told()
    found.prefixes.adopt(5, 77)
    stream = await whole(found, path(0, 1, 2))
    found.prefixes.adopt(5, 77)
    await in_turns(stream.take(delta(1, stored(2, 3))))
    found.prefixes.adopt(5, 78)
    with pytest.raises(PrefixGapError):
        await in_turns(stream.take(delta(2, stored(3, 4))))
    assert found.held == {1, 2, 3}


async def test_a_snapshot_being_received_is_not_visible() -> None:
    found = Told()
    paths = [path(0, *range(1000 * n + 1, 1000 * n + 100)) for n in range(40)]
    telling = asyncio.create_task(in_turns(found.stream().take(slice_(0, *paths, last=True))))
    await asyncio.sleep(0)
    assert found.held
    found.trie.clear(TOKYO)
    found.prefixes.begin_anew()
    with pytest.raises(PrefixGapError):
        await telling
    assert found.held == set()
