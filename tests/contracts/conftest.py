"""Worlds to try a store in: two connections to one set of keys, one of which can be cut."""

import asyncio
import contextlib
from random import Random

import aetcd
import pytest
import pytest_asyncio

from farhop.store.disk_cache import DiskCachedStore
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop.store.hubs import Hubs
from farhop.store.state import StateDir
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from farhop_lab.world.etcd import EmbeddedEtcd

TIMEOUT_S = 1.2


class Wire:
    """A TCP relay to one port that can be cut (connections end, new ones too), frozen (nothing moves) or strand what
    there is: connections stand frozen for good, as behind a firewall that forgot them, and only new ones flow."""

    def __init__(self, etcd: EmbeddedEtcd) -> None:
        self._target = int(etcd.endpoint.split(":")[1])
        self._flowing = asyncio.Event()
        self._whole = True
        self._tasks: set[asyncio.Task] = set()
        self.accepted = 0

    async def __aenter__(self):
        self._flowing.set()
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        await self._drop()
        await self._server.wait_closed()

    async def cut(self):
        self._whole = False
        await self._drop()

    def freeze(self):
        self._flowing.clear()

    def strand(self):
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def heal(self):
        self._whole = True
        self._flowing.set()

    async def _drop(self):
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        self.accepted += 1
        writers = [writer]
        try:
            if self._whole:
                back, out = await asyncio.open_connection("127.0.0.1", self._target)
                writers.append(out)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, out, self._flowing))
                    group.create_task(self._pump(back, writer, self._flowing))
        except* (OSError, EOFError):
            pass  # one side hung up, or does not exist: the other side must see just that
        except* asyncio.CancelledError:
            pass  # the wire is cut, and the test that cut it waits for this to end
        finally:
            self._tasks.discard(task)
            for each in writers:
                each.transport.abort()

    async def _pump(self, reader, writer, flowing):
        while chunk := await reader.read(65536):
            await flowing.wait()
            writer.write(chunk)
            await writer.drain()
        raise EOFError


class MemoryWorld:
    """Two stores on one cluster."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.near = MemoryStore(Random(1), self.cluster)
        self.far = MemoryStore(Random(2), self.cluster)

    async def cut(self):
        self.near.outage()

    async def heal(self):
        self.near.restore()

    async def restart(self, *, wipe=False):
        self.near.outage()
        self.far.outage()
        if wipe:
            self.cluster.wipe()
        self.near.restore()
        self.far.restore()

    async def compact(self):
        self.cluster.compact()


class HubsWorld:
    """Two stores, each on the same two clusters that know nothing of each other."""

    def __init__(self) -> None:
        self.worlds = {"atlantic": MemoryWorld(), "pacific": MemoryWorld()}
        self.near = Hubs({name: world.near for name, world in self.worlds.items()}, Random(3))
        self.far = Hubs({name: world.far for name, world in self.worlds.items()}, Random(4))

    async def cut(self):
        for world in self.worlds.values():
            await world.cut()

    async def heal(self):
        for world in self.worlds.values():
            await world.heal()

    async def restart(self, *, wipe=False):
        stores = [store for world in self.worlds.values() for store in (world.near, world.far)]
        for store in stores:
            store.outage()
        await asyncio.sleep(0.05)  # all of them are away at the same time, not one after the other
        for world in self.worlds.values():
            if wipe:
                world.cluster.wipe()
        for store in stores:
            store.restore()

    async def compact(self):
        for world in self.worlds.values():
            await world.compact()


class KeptWorld(MemoryWorld):
    """As in memory, with what is watched on disk beside it."""

    def __init__(self, folder) -> None:
        super().__init__()
        self.inner_near, self.inner_far = self.near, self.far
        self.near = DiskCachedStore(self.near, "hub", StateDir(folder, "f", "near"), Random(5), lambda _: None)
        self.far = DiskCachedStore(self.far, "hub", StateDir(folder, "f", "far"), Random(6), lambda _: None)

    async def cut(self):
        self.inner_near.outage()

    async def heal(self):
        self.inner_near.restore()

    async def restart(self, *, wipe=False):
        self.inner_near.outage()
        self.inner_far.outage()
        if wipe:
            self.cluster.wipe()
        self.inner_near.restore()
        self.inner_far.restore()


class EtcdWorld:
    """Two stores on one etcd, `near` over a wire."""

    def __init__(self, etcd: EmbeddedEtcd, wire: Wire) -> None:
        self.etcd = etcd
        self.wire = wire
        self.near = EtcdStore(EtcdSettings((wire.endpoint,), timeout_s=TIMEOUT_S), Random(1))
        self.far = EtcdStore(EtcdSettings((etcd.endpoint,), timeout_s=TIMEOUT_S), Random(2))

    async def cut(self):
        await self.wire.cut()

    async def heal(self):
        self.wire.heal()

    async def restart(self, *, wipe=False):
        await self.etcd.restart(wipe=wipe)

    async def compact(self):
        host, port = self.etcd.endpoint.split(":")
        async with aetcd.Client(host, int(port)) as client:
            revision = (await client.get_prefix(b"/", keys_only=True)).header.revision
            await client.compact(revision, physical=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def etcd():
    async with EmbeddedEtcd() as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module", params=["memory", "hubs", "disk_cached", "etcd"])
async def world(request, etcd, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "memory":
            made = MemoryWorld()
        elif request.param == "hubs":
            made = HubsWorld()
        elif request.param == "disk_cached":
            made = KeptWorld(tmp_path)
        else:
            wire = await stack.enter_async_context(Wire(etcd))
            made = EtcdWorld(etcd, wire)
        for store in (made.near, made.far):
            await store.open()
            stack.push_async_callback(store.close)
        yield made


@pytest.fixture
def wire_to():
    """Makes a Wire to an etcd."""
    return Wire
