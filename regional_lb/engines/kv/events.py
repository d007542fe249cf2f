"""Receives engines' KV-cache events over ZMQ, and passes them to the machine (`BlocksChanged`).

There is one link per cache (a replica, or one of its ranks), and for a short time a second one for a replay.
Invariants: an unreadable event is counted by reason and the others are used; at most BLOCKS_A_TURN blocks, or as much
other work, are done before the event loop runs other tasks, whatever an engine sends; a cut link is reported once all
its events are applied, so that no decision uses the state of an engine that may be gone. Never decides, and never sends
an engine anything but a request for a replay.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from farhop.service.process.tasks import Tasks
from regional_lb.engines.kv.link import LinkError, open_link
from regional_lb.engines.kv.stream import SEQ_MAX, Follower
from regional_lb.engines.kv.wire import BatchError, read_batch
from regional_lb.fleet.kv_events import Linked, Lost, Removed, Stored
from regional_lb.fleet.view import BlocksChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farhop.balance.machine import Event
    from regional_lb.engines.config import ReplicaConfig
    from regional_lb.engines.kv.stream import Out
    from regional_lb.fleet.kv_events import KvEvent

BLOCKS_A_TURN = 2048  # 1 to 2 ms
MESSAGE_BLOCKS = 32  # receiving and checking a message takes as long as this many
EVENT_BLOCKS = 8  # the same of an event, whatever it changes
SILENCE_S = 2.0  # of a replay
REPLAY_S = 30.0  # a whole one
REPLAY_EVERY_S = 1.0  # an engine whose numbers always jump is not asked for ever
ROUNDS_MAX = 64  # a router drops what its queue cannot hold: the rest is requested from there
_RELINK_S, _RELINK_MAX_S = 0.1, 2.0
_END = (-1).to_bytes(8, "big", signed=True)


class KvListener:
    """Follows the KV events of all replicas that have them. `refused` counts rejected ones by reason."""

    def __init__(
        self, react: Callable[[Event], None], refused: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._react, self._refused, self._clock = react, refused, clock
        self.followed: dict[str, tuple[ReplicaConfig, dict[_Stream, asyncio.Task[None]]]] = {}  # by name
        self._tasks = Tasks()

    def listen(self, replicas: Iterable[ReplicaConfig]) -> None:
        """Follow exactly these replicas from now on. Costs nothing if none of them has KV events."""
        wanted = {replica.label: replica for replica in replicas if replica.kv_events}
        for name in [name for name, (known, _) in self.followed.items() if wanted.get(name) != known]:
            for task in self.followed.pop(name)[1].values():
                task.cancel()
        for name, replica in wanted.items():
            if name not in self.followed:
                self.followed[name] = replica, self._follow(replica)

    def _follow(self, replica: ReplicaConfig) -> dict[_Stream, asyncio.Task[None]]:
        streams = [
            _Stream(replica.label, rank, events, replay, self._react, self._refused, self._clock)
            for rank, (events, replay) in enumerate(replica.kv_sources)
        ]
        return {one: self._tasks.start(one.follow(), f"KV events of {one.replica}") for one in streams}

    @property
    def streams(self) -> list[_Stream]:
        """The streams that are followed now."""
        return [stream for _, streams in self.followed.values() for stream in streams]

    async def close(self) -> None:
        """Stop following. Idempotent."""
        await self._tasks.close()


class _Stream:
    """Follows the events of one cache."""

    def __init__(
        self,
        replica: str,
        rank: int,
        events: str,
        replay: str,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.replica, self._rank, self._events, self._replay_at = replica, rank, events, replay
        self._react, self._refused, self._clock = react, refused, clock
        self.follower = Follower()
        self._replayed_at = -REPLAY_EVERY_S
        self._done_blocks = 0  # since others had the loop

    async def follow(self) -> None:
        """Follow until cancelled. A link that was cut is opened again."""
        pause_s = _RELINK_S
        while True:
            applied = self.follower.applied
            await self._listen()
            pause_s = _RELINK_S if self.follower.applied != applied else min(2 * pause_s, _RELINK_MAX_S)
            await asyncio.sleep(pause_s)

    async def _listen(self) -> None:
        """Open the link and receive batches until it is cut."""
        try:
            link = await open_link(self._events, b"SUB")
        except (OSError, TimeoutError):
            return
        except LinkError:
            self._refused("kv_cut")
            return
        try:
            await self._linked()
            while True:
                await self._came(await link.receive())
        except LinkError:
            self._refused("kv_cut")
            self._report([Linked(up=False)])
        finally:
            link.close()

    async def _linked(self) -> None:
        if not (self._replay_at and await self._replay()):
            self._report(self.follower.lost())
        self._report([Linked(up=True)])

    async def _came(self, frames: list[bytes]) -> None:
        await self._took(MESSAGE_BLOCKS)
        read = _numbered(frames)
        if read is None:
            self._refused("kv_frames")
            return
        seq, payload = read
        out, missing = self.follower.on_batch(seq, payload)
        await self._do(out)
        if not missing:
            return
        now = self._clock()
        if self._replay_at and now - self._replayed_at >= REPLAY_EVERY_S:
            self._replayed_at = now
            await self._replay()
        await self._do(self.follower.give_up(seq, payload))

    async def _replay(self) -> bool:
        """Ask the engine to repeat the batches that were missed. False if it does not answer."""
        try:
            async with asyncio.timeout(REPLAY_S):
                for _ in range(ROUNDS_MAX):
                    if not await self._round():
                        return True
        except (LinkError, OSError, TimeoutError):
            pass  # a replay cut short is counted below, and what is missing counts as lost
        self._refused("kv_replay")
        return False

    async def _round(self) -> bool:
        """Ask once for a replay and apply it; returns whether to ask again. Raises LinkError, OSError, TimeoutError."""
        link = await open_link(self._replay_at, b"DEALER")
        try:
            link.send((b"", self.follower.ask().to_bytes(8, "big")))
            while True:
                async with asyncio.timeout(SILENCE_S):
                    frames = await link.receive()
                await self._took(MESSAGE_BLOCKS)
                if len(frames) >= 2 and frames[-2] == _END:
                    await self._do(self.follower.replay_ended())
                    return False
                read = _numbered(frames)
                if read is None:
                    self._refused("kv_frames")
                    continue
                out, again = self.follower.replayed(*read)
                await self._do(out)
                if again:
                    return True
        finally:
            link.close()

    # -- applying

    async def _do(self, out: list[Out]) -> None:
        for one in out:
            if isinstance(one, bytes):
                await self._apply(one)
            else:
                if isinstance(one, Lost):
                    self._refused("kv_gap")
                self._report([one])

    async def _apply(self, payload: bytes) -> None:
        try:
            changes = read_batch(payload, self._dropped)
        except BatchError as error:
            self._dropped(error.reason)
            self._report([Lost()])
            return
        turn: list[KvEvent] = []
        for of_event in changes:
            blocks = EVENT_BLOCKS
            for change in of_event:
                turn.append(change)
                blocks += len(change.hashes) if isinstance(change, Stored | Removed) else 0
                if self._done_blocks + blocks >= BLOCKS_A_TURN:
                    self._report(turn)
                    turn = []
                    await self._took(blocks)
                    blocks = 0
            await self._took(blocks)
        if turn:
            self._report(turn)

    async def _took(self, blocks: int) -> None:
        """Account for work equal to applying this many blocks, and yield to the event loop now and then."""
        self._done_blocks += blocks
        if self._done_blocks >= BLOCKS_A_TURN:
            self._done_blocks = 0
            await asyncio.sleep(0)

    def _report(self, changes: list[KvEvent]) -> None:
        self._react(BlocksChanged(self.replica, self._rank, changes))

    def _dropped(self, reason: str) -> None:
        self._refused(f"kv_{reason}")


def _numbered(frames: list[bytes]) -> tuple[int, bytes] | None:
    """A message's number and payload: its last two frames. A topic and a delimiter may precede them."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    seq = int.from_bytes(frames[-2], "big")
    return (seq, frames[-1]) if seq <= SEQ_MAX else None
