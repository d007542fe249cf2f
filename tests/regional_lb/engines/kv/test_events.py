"""KV events on real sockets: what an engine says is what is known of it, however it fails or lies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import pytest
from inprocess import until

from farhop.balance.machine import Event
from farhop_lab.engine.kv_publisher import KvPublisher
from farhop_lab.world.ports import free_ports
from regional_lb.engines.config import ReplicaConfig
from regional_lb.engines.kv import events as kv_events
from regional_lb.engines.kv.events import KvListener
from regional_lb.engines.kv.link import MESSAGE_BYTES_MAX
from regional_lb.fleet.blocks import BlockIndex, Path
from regional_lb.fleet.view import BlocksChanged

HOST = "127.0.0.1"
SIZE = 2


def stored(*names: int, parent: int | None = None) -> dict[str, Any]:
    """Blocks whose tokens are their names."""
    tokens = [name for name in names for _ in range(SIZE)]
    return {
        "type": "BlockStored", "block_hashes": list(names), "parent_block_hash": parent, "token_ids": tokens,
        "block_size": SIZE,
    }  # fmt: skip


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([time.time(), list(events), 0])


def prompt(*names: int) -> Path:
    return Path(b"".join(name.to_bytes(4, "little") * SIZE for name in names) + bytes(4))


class Recorded:
    """What the fleet would know."""

    def __init__(self, ranks: int = 1) -> None:
        self.blocks = BlockIndex()
        self.blocks.add("one", ranks)
        self.refused: list[str] = []
        self.events = 0
        self.most = 0
        self.listener: KvListener

    def react(self, event: Event) -> None:
        assert isinstance(event, BlocksChanged)
        self.events += 1
        self.most = max(self.most, sum(len(getattr(change, "hashes", ())) for change in event.changes))
        for change in event.changes:
            self.blocks.apply(event.target, event.rank, change)

    def exact(self, *names: int) -> float | None:
        return self.blocks.known(prompt(*names)).exact.get("one")

    def least(self, *names: int) -> float:
        return self.blocks.known(prompt(*names)).least.get("one", 0.0)


SAID = 6_000


@pytest.mark.parametrize(
    "payload",
    [None, b"", batch(), batch(*[None] * 20), batch(*[["Unknown"]] * 20)],
    ids=["none", "empty", "no events", "no maps", "unknown"],  # a batch carries the time: workers would disagree
)
async def test_large_batch_of_events_does_not_block_other_tasks(
    monkeypatch: pytest.MonkeyPatch, payload: bytes | None
) -> None:
    """What cannot be read, or changes nothing, takes time, too."""
    said = turns = 0

    class Talker:
        async def receive(self) -> list[bytes]:
            nonlocal said
            if said >= SAID:
                await asyncio.Event().wait()
            said += 1
            return [b"nonsense"] if payload is None else [said.to_bytes(8, "big"), payload]

        def close(self) -> None:
            pass

    async def opened(*_: object) -> Talker:
        return Talker()

    monkeypatch.setattr(kv_events, "open_link", opened)
    async with listening(*free_ports(1)):
        while said < SAID and turns < 1_000_000:
            turns += 1
            await asyncio.sleep(0)
    assert said == SAID
    assert turns >= SAID // 400


async def test_events_of_one_batch_that_change_nothing_take_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 of them in a turn took 11 ms."""
    read, most, last, turns = 0, 0, 0, 0
    loop = asyncio.get_running_loop()

    def refused(_reason: str) -> None:
        nonlocal read
        read += 1

    def tick() -> None:
        nonlocal most, last, turns
        most, last, turns = max(most, read - last), read, turns + 1
        if read < 20_000:
            loop.call_soon(tick)

    said = [[(0).to_bytes(8, "big"), batch(*[["Unknown"]] * 20_000)]]

    class Talker:
        async def receive(self) -> list[bytes]:
            if not said:
                await asyncio.Event().wait()
            return said.pop()

        def close(self) -> None:
            pass

    async def opened(*_: object) -> Talker:
        return Talker()

    monkeypatch.setattr(kv_events, "open_link", opened)
    config = ReplicaConfig(url="http://127.0.0.1:1", models=["m"], name="one", kv_events=f"tcp://{HOST}:1")
    listener = KvListener(lambda _event: None, refused, time.monotonic)
    loop.call_soon(tick)
    listener.listen([config])
    while read < 20_000:
        await asyncio.sleep(0)
    await listener.close()
    assert most <= kv_events.BLOCKS_A_TURN // kv_events.EVENT_BLOCKS


@asynccontextmanager
async def listening(port: int, replay: int | None = None, ranks: int = 1) -> AsyncIterator[Recorded]:
    config = ReplicaConfig(
        url="http://127.0.0.1:1", models=["m"], name="one", kv_events=f"tcp://{HOST}:{port}", kv_ranks=ranks,
        kv_replay=f"tcp://{HOST}:{replay}" if replay else "",
    )  # fmt: skip
    found = Recorded(ranks)
    listener = found.listener = KvListener(found.react, found.refused.append, time.monotonic)
    listener.listen([config])
    try:
        yield found
    finally:
        await listener.close()
        await listener.close()
        assert not _following()


@contextmanager
def engine(port: int, replay: int | None = None, topic: bytes = b"") -> Iterator[KvPublisher]:
    publisher = KvPublisher(HOST, port, replay, "map", topic)
    try:
        yield publisher
    finally:
        publisher.close()


async def linked(value: Recorded) -> None:
    """From here on what is published arrives."""
    await until(lambda: value.events > 0)


@pytest.fixture
def ports() -> tuple[int, int]:
    first, second = free_ports(2)
    return first, second


async def test_published_kv_events_are_known_as_exact_hits(ports) -> None:
    with engine(*ports, topic=b"kv@one") as found:
        async with listening(*ports) as result:
            await until(lambda: result.blocks.exact == 1)  # it has never reported anything: it holds nothing
            assert result.exact(1, 2) == 0.0
            found.publish(batch(stored(1, 2), stored(3, parent=2)))
            await until(lambda: result.exact(1, 2, 3) == 6.0)
            found.publish(batch({"type": "BlockRemoved", "block_hashes": [3]}))
            await until(lambda: result.exact(1, 2, 3) == 4.0)
            found.publish(batch(["AllBlocksCleared"]))
            await until(lambda: result.exact(1, 2, 3) == 0.0)
            assert result.refused == []


async def test_a_late_subscriber_asks_for_a_replay(ports) -> None:
    with engine(*ports) as found:
        for name in range(1, 50):
            found.publish(batch(stored(name, parent=name - 1 or None)))
        async with listening(*ports) as result:
            await until(lambda: result.exact(*range(1, 50)) == 98.0)
            assert result.refused == []


async def test_without_a_replay_what_was_before_is_not_known(ports) -> None:
    with engine(ports[0]) as found:
        found.publish(batch(stored(1)))
        async with listening(ports[0]) as result:
            await linked(result)
            await until(lambda: result.least(2) == 2.0 or found.publish(batch(stored(2))))
            assert (result.exact(1), result.least(1)) == (None, 0.0)
            assert result.refused == ["kv_gap"]
            found.publish(batch(["AllBlocksCleared"]))
            await until(lambda: result.exact(2) == 0.0)


async def test_a_gap_is_filled_by_a_replay(ports) -> None:
    with engine(*ports) as found:
        async with listening(*ports) as result:
            await until(lambda: result.blocks.exact == 1)
            found.seq += 3
            found.kept.extend((seq, batch(stored(seq + 1))) for seq in range(3))  # sent, and lost on the way
            found.publish(batch(stored(4)))
            await until(lambda: result.exact(4) == 2.0)
            assert [result.exact(name) for name in (1, 2, 3)] == [2.0, 2.0, 2.0]
            assert result.refused == []


async def test_an_unfilled_gap_is_counted_and_the_known_blocks_are_forgotten(ports, monkeypatch) -> None:
    monkeypatch.setattr(kv_events, "SILENCE_S", 0.1)
    with engine(ports[0]) as found:  # nothing listens at the replay port
        async with listening(*ports) as result:
            await until(lambda: result.refused == ["kv_replay"])
            await until(lambda: result.exact(1) == 2.0 or _as_its_first(found, batch(stored(1))))
            found.seq += 1
            found.publish(batch(stored(2)))
            await until(lambda: result.least(2) == 2.0)
            assert (result.exact(1), result.least(1)) == (None, 0.0)
            assert result.refused == ["kv_replay", "kv_replay", "kv_gap"]


def _as_its_first(value: KvPublisher, payload: bytes) -> None:
    """Where nothing is said again: who subscribed may have come after what was said before."""
    value.seq = 0
    value.publish(payload)


@pytest.mark.parametrize("replays", [True, False])
async def test_an_engine_that_restarts_holds_nothing_before_its_first_event(ports, replays: bool) -> None:
    port, replay = ports[0], ports[1] if replays else None
    async with listening(port, replay) as result:
        with engine(port, replay) as found:
            await linked(result)
            await until(lambda: _again(found, result, 1))
        await until(lambda: result.exact(1) is None)  # cut: it may be gone
        assert result.least(1) == 0.0
        before = result.events
        with engine(port, replay) as found:
            await until(lambda: result.events > before)
            await until(lambda: result.blocks.exact == 1 or not replays)
            assert (result.exact(1), result.least(1)) == (0.0 if replays else None, 0.0)
            await until(lambda: _again(found, result, 2))
            assert result.exact(1) == 0.0


def _again(value: KvPublisher, given: Recorded, name: int) -> bool:
    """Says a word until it is heard: a link stands before the publisher knows that somebody subscribed."""
    if given.exact(name) != 2.0:
        value.publish(batch(["AllBlocksCleared"], stored(name)))
    return given.exact(name) == 2.0


async def test_a_cut_that_is_no_restart_loses_nothing(ports) -> None:
    through = free_ports(1)[0]
    with engine(*ports) as found:
        async with listening(through, ports[1]) as result:
            for name in (1, 2):
                async with _wire(through, ports[0]):
                    await until(lambda: result.blocks.exact == 1)
                    assert result.exact(name - 1) in (0.0, 2.0)
                    found.publish(batch(stored(name)))
                    await until(lambda name=name: result.exact(name) == 2.0)
                await until(lambda: result.exact(1) is None)
                found.publish(batch(stored(10 + name)))
            async with _wire(through, ports[0]):
                await until(lambda: result.exact(12) == 2.0)
                assert [result.exact(name) for name in (1, 2, 11)] == [2.0, 2.0, 2.0]
            assert set(result.refused) == {"kv_cut"}


@asynccontextmanager
async def _wire(port: int, to: int) -> AsyncIterator[None]:
    """A TCP path that breaks at the end of the block."""
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, to)
        writers.extend((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    server = await asyncio.start_server(accepted, HOST, port)
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


async def test_hostile_kv_events_are_counted_and_the_others_still_read(ports) -> None:
    with engine(*ports) as found:
        async with listening(*ports) as result:
            await until(lambda: result.blocks.exact == 1)
            for frames in ([b"one"], [b"", b"short", b"x"], [b"", b"\xff" * 8, b"x"], [b""] * 9):
                found.pub.send_multipart(frames)
            found.publish(batch(stored(1), {"type": "BlockStored", "block_hashes": 5}, {"type": "New"}, stored(2)))
            await until(lambda: result.least(2) == result.least(1) == 2.0)
            found.publish(b"\x93\x01")
            found.publish(bytes(2 * 1024 * 1024))
            found.publish(batch(stored(3)))
            await until(lambda: result.least(3) == 2.0)
            assert result.refused == [*["kv_frames"] * 4, "kv_event", "kv_kind", "kv_batch", "kv_size"]
            found.pub.send_multipart([b"", found.seq.to_bytes(8, "big"), bytes(MESSAGE_BYTES_MAX + 1)])
            await until(lambda: result.refused[-1] == "kv_cut")
            await until(lambda: result.least(3) == 2.0)  # linked again


async def test_events_of_every_rank_are_received() -> None:
    """A subscription may arrive after the first word: who hears a later one asks for those before."""
    first = next(ports[0] for ports in iter(lambda: free_ports(4), []) if ports[3] == ports[0] + 3)
    with engine(first, first + 2) as zero, engine(first + 1, first + 3) as one:
        async with listening(first, first + 2, ranks=2) as found:
            await until(lambda: found.blocks.exact == 1)  # neither has reported anything
            zero.publish(batch(stored(1, 2)))
            one.publish(batch(stored(1)))

            def known() -> bool:
                for text in (zero, one):
                    text.publish(batch())
                return found.exact(1, 2) == 3.0  # on average

            await until(known)


async def test_much_at_once_is_applied_bit_by_bit(ports, monkeypatch) -> None:
    with engine(*ports) as found:
        for n in range(40):
            found.publish(batch(stored(*range(1000 * n + 1, 1000 * n + 1001))))
        async with listening(*ports) as result:
            await until(lambda: result.exact(39_001) == 2.0)
            assert len(result.blocks) == 40_000
            assert result.most <= kv_events.BLOCKS_A_TURN
            assert result.refused == []


async def test_an_engine_whose_numbers_always_jump_is_not_asked_without_end(ports) -> None:
    rounds: list[float] = []
    with engine(*ports) as found:
        async with listening(*ports) as result:
            await until(lambda: result.blocks.exact == 1)
            _count(found, rounds.append)
            for n in range(20):
                found.kept.clear()
                found.seq += 5
                found.publish(batch(stored(n)))
                await until(lambda n=n: result.least(n) == 2.0)
            assert result.refused == ["kv_gap"] * 20
            assert len(rounds) <= 2


def _following() -> list[str]:
    """The names of the tasks by which a listener follows."""
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("KV events of ")]


def _count(value: KvPublisher, tell: Callable[[float], None]) -> None:
    router = value._router
    assert router is not None
    asked = value._asked

    def counted() -> None:
        if router.poll(0):
            tell(time.monotonic())
        asked()

    value._asked = counted  # type: ignore[method-assign]
    asyncio.get_running_loop().add_reader(value._descriptor(router), counted)


async def test_without_kv_events_configured_no_socket_is_opened() -> None:
    listener = KvListener(pytest.fail, pytest.fail, time.monotonic)
    listener.listen([ReplicaConfig(url="http://h:1", models=["m"])])
    assert not _following()
    await listener.close()


async def test_kv_events_of_new_replicas_are_followed_and_those_of_removed_ones_are_not() -> None:
    port, other = free_ports(2)
    with engine(port), engine(other):
        async with listening(port) as result:
            await until(lambda: result.events)  # linked
            listener = result.listener
            known, streams = listener.followed["one"]
            (first,) = streams.values()
            listener.listen([known])
            assert listener.followed["one"][1] is streams  # nothing new
            found = result.events
            listener.listen([moved(known, other)])
            await until(lambda: result.events > found)
            assert first.done()
            (second,) = listener.followed["one"][1].values()
            listener.listen([])
            await until(second.done)
            assert not _following()


def moved(known: ReplicaConfig, port: int) -> ReplicaConfig:
    return ReplicaConfig.model_validate({**known.model_dump(), "kv_events": f"tcp://{HOST}:{port}"})
