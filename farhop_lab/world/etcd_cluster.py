"""An etcd cluster of several members on this machine, whose leader can be moved: one hub as in production.

Invariants as in `farhop_lab.world.etcd`, for each member.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import aetcd.rpc

from farhop_lab.world.etcd import EmbeddedEtcd, EtcdLabError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

CALL_TIMEOUT_S = 3.0
# A single member may elect itself at once. Members on a busy machine must not depose a leader that was late by a
# moment.
_TUNING = ("--heartbeat-interval=100", "--election-timeout=1000")


class EtcdCluster:
    """`size` members, each with its folder below `folder`; a single member is like an embedded etcd."""

    def __init__(self, size: int, folder: Path) -> None:
        tuning = _TUNING if size > 1 else ()
        self.members = [EmbeddedEtcd(folder=folder / f"m{i}", name=f"m{i}", extra=tuning) for i in range(size)]

    @property
    def endpoints(self) -> list[str]:
        """host:port of each member."""
        return [member.endpoint for member in self.members]

    async def start(self) -> None:
        """Start all members, and wait until they serve. EtcdLabError; then none is left running."""
        if len(self.members) > 1:
            joined = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
            for member in self.members:
                member.members = joined
        try:
            async with asyncio.TaskGroup() as group:
                for member in self.members:
                    group.create_task(member.start())
        except BaseExceptionGroup as failed:
            await self.stop()
            raise failed.exceptions[0] from None

    async def stop(self) -> None:
        """Stop all members. Idempotent."""
        # A leader that is stopped would wait seconds for another to take over, which is stopped as well.
        if len(self.members) > 1:
            await asyncio.gather(*(member.end_now() for member in self.members))
        await asyncio.gather(*(member.stop() for member in self.members))

    async def kill(self) -> None:
        """Kill all members as a power cut would; their data stays for `start`."""
        await asyncio.gather(*(member.kill() for member in self.members))

    def pause(self) -> None:
        """Freeze all members."""
        for member in self.members:
            member.pause()

    def resume(self) -> None:
        """End `pause`."""
        for member in self.members:
            member.resume()

    async def restart(self, *, wipe: bool = False) -> None:
        """Stop all members and start them again on the same ports, with the same data or with none."""
        await asyncio.gather(*(member.forget(wipe=wipe) for member in self.members))
        await self.start()

    async def leader(self) -> int:
        """The leader. EtcdLabError if there is none."""
        for index, member in enumerate(self.members):
            status = await _call(member, "Status", aetcd.rpc.StatusRequest())
            if status.leader == status.header.member_id:
                return index
        raise EtcdLabError("no member of the cluster leads: wait until they have elected one")

    async def move_leader(self) -> int:
        """Make another member the leader; returns it. Raises EtcdLabError."""
        at = await self.leader()
        to = (at + 1) % len(self.members)
        status = await _call(self.members[to], "Status", aetcd.rpc.StatusRequest())
        request = aetcd.rpc.MoveLeaderRequest(targetID=status.header.member_id)
        await _call(self.members[at], "MoveLeader", request)
        return to

    async def compact(self) -> int:
        """Compact the history up to now; returns the revision."""
        member = self.members[0]
        status = await _call(member, "Status", aetcd.rpc.StatusRequest())
        revision = int(status.header.revision)
        request = aetcd.rpc.CompactionRequest(revision=revision, physical=True)
        await _call(member, "Compact", request, stub=aetcd.rpc.KVStub)
        return revision

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


async def _call(member: EmbeddedEtcd, method: str, request: Any, stub: Any = aetcd.rpc.MaintenanceStub) -> Any:
    channel = aetcd.rpc.insecure_channel(member.endpoint)
    try:
        return await getattr(stub(channel), method)(request, timeout=CALL_TIMEOUT_S)
    except aetcd.rpc.AioRpcError as error:
        raise EtcdLabError(f"etcd at {member.endpoint}: {method}: {error.details()}") from None
    finally:
        await channel.close()
