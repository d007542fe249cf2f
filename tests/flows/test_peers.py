"""Several balancers of one region, on real sockets and a real etcd: what one knows, the others know."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest
import yaml
from inprocess import MODEL, common, global_config, topology, until
from peering import SLOTS, Region, config, region

from farhop_lab.memory_store import MemoryStore
from farhop_lab.world.certs import Authority
from farhop_lab.world.child import Child
from farhop_lab.world.etcd import EmbeddedEtcd
from global_lb.app.main import GlobalBalancer
from regional_lb.mesh import peers
from tests.conftest import NO_CERTIFICATES, unhindered

# Long beside the error that a busy machine causes in speeds: the replica with the cache is then the better one by far.
LONG = "the same long beginning of a conversation " * 240

# More requests come than are served, and this machine may take seconds for its load.
PATIENT = {"queue": {"wait_s": 300.0, "ttft_objective_s": 600.0}}


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    with asyncio.Runner() as runner:
        embedded = EmbeddedEtcd()
        runner.run(embedded.start())
        try:
            yield embedded.endpoint
        finally:
            runner.run(embedded.stop())


async def test_the_second_turn_through_another_instance_finds_the_first_ones_replica(etcd: str) -> None:
    async with region(etcd) as west:
        await west.start("r1")
        await west.start("r2")
        await west.acquainted()
        for n in range(6):
            text = f"{n} {LONG}"
            first = await west.ask("r1", text)
            here, there = (west.balancers[name].flow for name in ("r1", "r2"))
            await until(lambda here=here, there=there: there.replicas.trie.nodes == here.replicas.trie.nodes)
            await until(
                lambda there=there: not there.replicas.whole.backlog_tokens.any()
            )  # it heard that it is done, too
            assert await west.ask("r2", text + "and what was said since") == first
        # One that was restarted, and one that was never there before.
        await west.stop("r1")
        for instance in ("r1", "r3"):
            cold = await west.start(instance)
            assert cold.flow.replicas.trie.nodes == west.balancers["r2"].flow.replicas.trie.nodes > 0
            assert await west.ask(instance, text + "and more") == first


async def test_peers_speak_mutual_tls_as_the_control_port_does(etcd: str, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    names = ("virginia.regional.farhop.internal", "spiffe://farhop.internal/farhop/regional/virginia")
    server = authority.issue("server", ("127.0.0.1", *names))
    files = {"cert_file": server.cert_file, "key_file": server.key_file}
    listen = {"port": 0, "tls": {**files, "client_ca_file": authority.ca_file}}
    async with region(etcd, n_engines=2) as west:
        more = {"tier": listen, "control": listen, "peers": {"tls": {"ca_file": authority.ca_file, **files}}}
        await west.start("r1", **more)
        await west.start("r2", **more)
        await west.acquainted()
        other = stranger.issue("other")
        intruder = {"ca_file": authority.ca_file, "cert_file": other.cert_file, "key_file": other.key_file}
        await west.start("r3", **{**more, "peers": {"tls": intruder}})
        await until(lambda: len(west.balancers["r1"].mesh.peers.status()) == 2)  # it is seen to report
        assert west.balancers["r3"].mesh.peers.up == 0
        assert west.balancers["r1"].tier_admin.status()["peers"][0]["connected"]


async def _overload(west: Region, requests: int, *, known: bool) -> tuple[float, dict[str, int]]:
    """More than the engines take, through r1 first, which fills them, and then through r2, too.

    From then on, until so many are served: the share that waited inside an engine, and how many came through each.
    `known`: r2 hears of what r1 has.
    """
    served = dict.fromkeys(west.balancers, 0)
    over = asyncio.Event()

    async def client(instance: str, number: int) -> None:
        while not over.is_set():
            await west.ask(instance, f"{instance} {number} {served[instance]}")
            served[instance] += 1

    async with asyncio.TaskGroup() as group:
        for name, balancer in west.balancers.items():
            for number in range(24):
                group.create_task(client(name, number))
            seen = west.balancers["r2" if known else "r1"].flow.replicas
            if name == "r1":
                await until(lambda: float(seen.whole.in_flight.sum()) == SLOTS * len(west.engines))  # noqa: B023
                await until(lambda: len(balancer.flow.queue))  # noqa: B023
                served["r1"] = 0
        for engine in west.engines:
            engine.waited = engine.served = 0
        await until(lambda: sum(e.served for e in west.engines) >= requests)
        share = sum(e.waited for e in west.engines) / sum(e.served for e in west.engines)
        over.set()
    return share, served


async def test_slots_are_not_booked_twice_and_freed_ones_go_to_both(etcd: str) -> None:
    async with region(etcd, n_engines=2, service_s=0.3) as west:
        await west.start("r1", **PATIENT)
        await west.start("r2", **PATIENT)
        await west.acquainted()
        shared, served = await _overload(west, 96, known=True)
        most = max(e.waiting_most for e in west.engines)
    async with region(etcd, n_engines=2, service_s=0.3) as west:
        await west.start("r1", MemoryStore(Random(1)), **PATIENT)
        await west.start("r2", MemoryStore(Random(2)), **PATIENT)  # they do not know each other
        alone, _ = await _overload(west, 40, known=False)
    print("share that waited in an engine:", shared, "and without peers", alone, "served", served, "at once", most)
    assert most <= SLOTS
    assert shared < 0.2 * alone
    assert alone > 0.5
    assert min(served.values()) > 0.6 * max(served.values())  # though r1 was there first, and frees them all


async def test_each_replica_is_reported_once_through_join_and_leave(etcd: str) -> None:
    made = global_config(etcd={"endpoints": [etcd]})
    above = GlobalBalancer(made, topology(), Random(9))
    async with region(etcd, n_engines=7) as west, AsyncExitStack() as stack:
        stack.push_async_callback(above.close)
        await above.open()
        for n in range(1, 4):
            await west.start(f"r{n}")
            await west.acquainted()
            await until(lambda n=n: sum(west.reported().values()) == 7 and len(west.reported()) == n)
        await until(lambda: _slots_seen(above) == [7 * SLOTS] * 3)  # whichever instance is asked
        assert all(west.reported().values())
        before = west.reported()
        await _stored(west, 7)
        await west.stop("r2")
        await until(lambda: sum(west.reported().values()) == 7)
        after = west.reported()
        assert all(after[name] >= before[name] for name in after)
        await _stored(west, 7)
        await until(lambda: {7 * SLOTS} == set(_slots_seen(above)))


def _slots_seen(above: GlobalBalancer) -> list[int]:
    """What a global balancer thinks is free, by the instance it would ask."""
    each = above.flow.regions.instances
    return [each.capacity(instance, MODEL).slots_free for instance in each.able("virginia", MODEL)]


async def _stored(west: Region, n: int) -> None:
    async with asyncio.timeout(60.0):
        while sum((await west.stored()).values()) != n:
            await asyncio.sleep(0.02)


async def test_replicas_of_a_killed_or_frozen_balancer_are_taken_over(etcd: str, tmp_path: Path) -> None:
    async with region(etcd, n_engines=7) as west:
        here = await west.start("r1")
        made = config(west.engines, "r9", etcd={"endpoints": [etcd]})
        document = made.model_dump(mode="json", exclude_defaults=True)
        document |= common("virginia", "r9")
        path = tmp_path / "r9.yaml"
        path.write_text(yaml.safe_dump(document))
        child = Child("r9", ["regional", "--config", str(path)], tmp_path / "r9.log", NO_CERTIFICATES)
        await child.start()
        try:
            await until(lambda: 0 < west.reported()["r1"] < 7)  # a process starts
            mine = west.reported()["r1"]
            child.signal(signal.SIGSTOP)
            await until(lambda: west.reported()["r1"] == 7)  # it no longer talks to any process
            await until(lambda: here.mesh.peers.up == 0)
            child.signal(signal.SIGCONT)
            await until(lambda: west.reported()["r1"] == mine)
            child.signal(signal.SIGKILL)
            took_s = unhindered()
            await until(lambda: west.reported()["r1"] == 7)
            assert took_s() < 0.9 * peers.GONE_S  # sooner: nothing listens there any more
            status = here.tier_admin.status()
            assert [(p["instance"], p["connected"], p["takes_part"]) for p in status["peers"]] == [("r9", False, False)]
            assert all(replica["owned"] for replica in status["replicas"])
        finally:
            await child.kill()
