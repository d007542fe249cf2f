"""A balancer's learned state on its own disk: a restart without a peer begins with it.

It contains what a peer would send (`mesh.feed`), is written as often as costs little and at the end, and is read like
a peer's message before clients are served: which replica had which prefixes cached, and what was learned, but nothing
about requests under way. Invariants: an invalid file is counted and changes nothing; hashes that the law keeps out of
this region are not written, and a new law rewrites the file; a state older than AGE_MAX_S is ignored, since engines
have served other prompts by then; losing the file costs time, and nothing else. Never holds text: prefixes are hashes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from farhop_wire import peers_pb2
from google.protobuf.message import DecodeError

from farhop.service.process.tasks import until
from farhop.store.state import StateError
from regional_lb.fleet.shares import PeersChanged
from regional_lb.mesh.messages import PeerUpdateError, event_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farhop.balance.machine import Event
    from farhop.store.state import StateDir
    from regional_lb.mesh.feed import PeerFeed
    from regional_lb.scheduler.flow import RegionalFlow

NAME = "learned"
# Between two writings: as long as keeps their work below WORK_SHARE of a core, so that a balancer that is killed has
# lost little. Tens of thousands of paths take a third of a second, in pieces.
EVERY_S, RARELY_S, WORK_SHARE = 5.0, 60.0, 0.01
AGE_MAX_S = 900.0
AGE_AHEAD_S = 60.0  # by which a disk's clock may be ahead of ours
REPLICAS_S = 1.0  # how long a start waits for the replicas that the file names to be found
_LENGTH_BYTES = 4
_NOBODY: frozenset[str] = frozenset()


class WarmRestart:
    """See the module's docstring. `wall_s` is the wall clock, as the disk's; `cpu_s` the CPU time of this process."""

    def __init__(
        self,
        state_dir: StateDir | None,
        flow: RegionalFlow,
        feed: PeerFeed,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        wall_s: Callable[[], float],
        cpu_s: Callable[[], float],
    ) -> None:
        self._state_dir, self._flow, self._feed = state_dir, flow, feed
        self._react, self._refused, self._wall_s, self._cpu_s = react, refused, wall_s, cpu_s
        self._saved: tuple[object, ...] = ()
        self.pause_s = EVERY_S  # until the next writing

    async def restore(self) -> int:
        """Load the state on disk; returns how many messages were accepted."""
        if self._state_dir is None:
            return 0
        try:
            kept = await asyncio.to_thread(self._state_dir.load, NAME)
        except StateError:
            self._refused("warm_restart_broken")
            return 0
        if kept is None or not -AGE_AHEAD_S <= self._wall_s() - kept.written_at <= AGE_MAX_S:
            return 0
        accepted = 0
        try:
            for number, update in enumerate(_messages(kept.document)):
                if not number:
                    await self._found({load.replica for load in update.loads if load.known}, update.law_fingerprint)
                self._react(event_of(update, self._flow.law, first=number == 0))
                accepted += 1
                await asyncio.sleep(0)  # others may run
        except (PeerUpdateError, DecodeError, ValueError):
            self._refused("warm_restart_malformed")
        # Its sender is gone: the learned figures stay, and it takes part in nothing.
        self._react(PeersChanged(_NOBODY, _NOBODY))
        return accepted

    async def _found(self, names: set[str], law_fingerprint: int) -> None:
        """Wait, for a bounded time, until these replicas are discovered: state of unknown replicas is dropped. And
        until they have reported their models' bases: if these changed, no other region may be told the prefixes.
        """
        flow = self._flow
        await until(
            lambda: names <= flow.replicas.view.replicas.keys() and flow.law.fingerprint == law_fingerprint, REPLICAS_S
        )

    async def keep(self) -> None:
        """Write it down now and then, until cancelled."""
        while self._state_dir is not None:
            await asyncio.sleep(self.pause_s)
            await self.save()

    async def save(self) -> None:
        """Write the state to disk, if it has changed."""
        now = (self._feed.known_cached_seq, self._flow.news, self._flow.law.epoch)
        if self._state_dir is None or now == self._saved:
            return
        pieces: list[bytes] = []
        work_s, began = 0.0, self._cpu_s()
        for update in self._feed.everything():
            written = update.SerializeToString()
            pieces += (len(written).to_bytes(_LENGTH_BYTES, "big"), written)
            work_s += self._cpu_s() - began
            await asyncio.sleep(0)
            began = self._cpu_s()
        self.pause_s = min(max(EVERY_S, work_s / WORK_SHARE), RARELY_S)
        try:
            await asyncio.to_thread(self._state_dir.save, NAME, b"".join(pieces))
            self._saved = now
        except StateError:
            self._refused("warm_restart_unwritten")


def _messages(document: bytes) -> Iterator[peers_pb2.PeerUpdate]:
    """Raises ValueError or DecodeError for what is none."""
    at = 0
    while at < len(document):
        n_bytes = int.from_bytes(document[at : at + _LENGTH_BYTES], "big")
        at += _LENGTH_BYTES
        if at + n_bytes > len(document):
            raise ValueError("it is cut short")
        yield peers_pb2.PeerUpdate.FromString(document[at : at + n_bytes])
        at += n_bytes
