"""Limits of real balancers whose root is killed, then all of its region: no tenant gets more, and service continues."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest
from inprocess import HOP, HOP_KEY, MODEL, Engine, chat, send, until
from processes import Process

from farhop.store.contract import limit_root_key
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import Limit, TenantLimits
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.etcd import EmbeddedEtcd

A_MINUTE = 120  # half a request a second is the entry's own, whichever region is reached
LIMITS = TenantLimits(
    tenant="anywhere", home="virginia", limits=(Limit(requests_per_minute=A_MINUTE),), author="ann", why="drill",
    at=datetime(2026, 11, 26, tzinfo=UTC), safe_share=0.25, safe=("frankfurt/g1",),
)  # fmt: skip


class Clients:
    """Ask one entry all the time, two at a time: of the tenant with a limit, and of one without."""

    def __init__(self, port: int) -> None:
        self._port, self._stopped = port, False
        self.since = time.monotonic()
        self.served = self.refused = self.others_served = 0
        self.other = set[int]()
        self._tasks = [asyncio.create_task(self._limited()) for _ in range(2)]
        self._tasks.append(asyncio.create_task(self._unlimited()))

    async def _limited(self) -> None:
        while not self._stopped:
            status = 0
            with contextlib.suppress(OSError):
                status = (await send(self._port, chat())).status
                self.served += status == 200
                self.refused += status == 429
                if status not in (200, 429):
                    self.other.add(status)
            await asyncio.sleep(0.05 if status == 200 else 0.25)

    async def _unlimited(self) -> None:
        while not self._stopped:
            with contextlib.suppress(OSError):
                answer = await send(self._port, chat("sk-farhop-eu-only"))
                self.others_served += answer.status == 200
            await asyncio.sleep(0.25)

    async def more(self, served: int = 0, refused: int = 0, within_s: float = 60.0) -> None:
        """Until so many more were."""
        wanted = self.served + served, self.refused + refused
        await until(lambda: self.served >= wanted[0] and self.refused >= wanted[1], within_s)

    async def outruns(self, per_s: float, by: int = 10, within_s: float = 120.0) -> None:
        """Until so many more were served than a share that fills at this rate would have had in the same time."""
        since, served = time.monotonic(), self.served
        await until(lambda: self.served - served >= by + per_s * (time.monotonic() - since), within_s)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    def may_be_served(self) -> float:
        """What the limit lets through since the first was asked."""
        return A_MINUTE + (time.monotonic() - self.since) * A_MINUTE / 60.0


@pytest.mark.long
async def test_limits_hold_after_the_quota_root_is_killed_and_then_its_whole_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine().running())
        etcd = await stack.enter_async_context(EmbeddedEtcd())
        store = EtcdStore(EtcdSettings((etcd.endpoint,)), Random(1))
        await store.open()
        stack.push_async_callback(store.close)
        common = {"admin": {"port": 0}, "hop": HOP, "etcd": {"endpoints": [etcd.endpoint]}, "limits": {"drain_s": 0.5}}
        replica = {"url": f"http://{engine.address}", "models": [MODEL], "name": "one"}
        regional = {**common, "tier": {"port": 0}, "control": {"port": 0}, "replicas": [replica]}

        async def started(which: str, **config: object) -> Process:
            process = Process(which, tmp_path, config)
            await process.start()
            stack.push_async_callback(process.end, signal.SIGKILL)
            return process

        async def root() -> str:
            found = await store.get(limit_root_key("virginia"))
            return "" if found is None else documents.decode_root(found.value).instance

        async def rooted(*names: str, within_s: float = 60.0) -> None:
            async with asyncio.timeout(within_s):
                while await root() not in names:
                    await asyncio.sleep(0.2)

        await store.put(LIMITS.place, documents.encode(LIMITS))
        roots = {name: await started("regional", **regional, region="virginia", instance=name) for name in ("r1", "r2")}
        await started("regional", **regional, region="frankfurt", instance="f1")
        entry = await started("global", **common, region="frankfurt", instance="g1", listen={"port": 0})
        await rooted("r1", "r2")
        clients = Clients(entry.port)
        await clients.more(served=A_MINUTE // 2)

        first = await root()
        await roots[first].end(signal.SIGKILL)
        await clients.more(refused=1)  # the lent tokens are used up
        await clients.more(served=3)  # its own share keeps coming
        second = "r2" if first == "r1" else "r1"
        await rooted(second)
        await clients.outruns(LIMITS.safe_share * A_MINUTE / 60.0)  # as many as its own share would let through

        await roots[second].end(signal.SIGKILL)
        others = clients.others_served
        await clients.more(refused=1)
        await clients.more(served=3)
        assert clients.others_served > others
        await clients.stop()
        assert clients.served <= clients.may_be_served()
        assert clients.other <= {502, 503, 504}  # requests that were under way in the lost region
