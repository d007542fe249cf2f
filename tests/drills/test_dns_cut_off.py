"""`farhop dns` as a process, with a real etcd that stops and returns: its answers meanwhile, and their source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import dns.asyncquery
import dns.edns
import dns.message
import pytest
import yaml
from regions import Region, a_report

from farhop.store.contract import report_key
from farhop.store.documents.overrides import EntryDrainOverride
from farhop.store.documents.overrides import encode as encode_override
from farhop.store.documents.report import RegionReport, encode
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.child import Child
from farhop_lab.world.etcd import EmbeddedEtcd
from farhop_lab.world.ports import free_ports
from tests.conftest import NO_CERTIFICATES
from topology.load import document, shipped

NAMES = ("virginia", "frankfurt", "tokyo")
HOSTS = {name: f"127.77.1.{n}" for n, name in enumerate(NAMES, 1)}
PATIENCE_S = 60.0
EVERY_S = 0.1


class Entries:
    """What entries answer to probes, each at an address of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._servers: dict[str, asyncio.Server] = {}

    async def up(self, *names: str) -> None:
        for name in names:
            self._servers[name] = await asyncio.start_server(self._answer, HOSTS[name], self.port)

    async def down(self, *names: str) -> None:
        """These, or without a name all of them."""
        for name in names or tuple(self._servers):
            self._servers.pop(name).close()

    @staticmethod
    async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()


class Server:
    """The process, asked."""

    def __init__(self, child: Child, port: int, admin: int) -> None:
        self.child, self.port, self.admin = child, port, admin

    async def answers(self, name: str = "api", client: str = "198.18.3.0") -> list[str]:
        """The entries in the answer for a client's network, best first; [] for a SERVFAIL."""
        query = dns.message.make_query(f"{name}.entry.example", "A", use_edns=0, options=[dns.edns.ECSOption(client)])
        found = await dns.asyncquery.udp(query, "127.0.0.1", timeout=PATIENCE_S, port=self.port)
        by_host = {host: entry for entry, host in HOSTS.items()}
        return [by_host[rdata.address] for rrset in found.answer for rdata in rrset]

    async def status(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.admin}/status") as answer:
            body: dict[str, Any] = await answer.json()
            return body

    async def entry(self, name: str) -> dict[str, Any]:
        return next(one for one in (await self.status())["entries"] if one["entry"] == name)

    async def until(self, true: Callable[[], Any], what: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await true():
                assert self.child.ended is None, what
                await asyncio.sleep(0.02)

    async def until_first(self, entry: str) -> None:
        async def so() -> bool:
            return (await self.answers())[:1] == [entry]

        await self.until(so, f"{entry} first")

    async def until_last(self, entry: str) -> None:
        async def so() -> bool:
            return (await self.answers())[-1:] == [entry]

        await self.until(so, f"{entry} last")

    async def until_entry(self, name: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        async def so() -> bool:
            return holds(await self.entry(name))

        await self.until(so, name)


def config(folder: Path, etcd: str, port: int, admin: int, entry_port: int) -> Path:
    world = document(shipped("three-regions").read_text())
    world["entries"] = [{"name": n, "region": n, "ipv4": [HOSTS[n]], "port": entry_port} for n in NAMES]
    world["tenants"].append(
        {"name": "eu-entry", "residency": {"processing": {"allow": ["eu"]}, "entry": {"allow": ["eu"]}}}
    )
    (folder / "world.yaml").write_text(yaml.safe_dump(world))
    names = [{"name": f"{name}.entry.example", "tenant": tenant, "families": ["ipv4"]}
             for name, tenant in (("api", ""), ("eu", "eu-entry"))]  # fmt: skip
    path = folder / "dns.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "region": "frankfurt",
                "instance": "dns-1",
                "admin": {"port": admin},
                "topology": str(folder / "world.yaml"),
                "etcd": {"endpoints": [etcd]},
                "listen": {"port": port},
                "zones": [
                    {
                        "zone": "entry.example",
                        "servers": ["ns1.entry.example"],
                        "addresses": {"ns1.entry.example": ["127.0.0.1"]},
                        "names": names,
                    }
                ],
                "probe": {"scheme": "http", "every_s": EVERY_S},
                "networks": {"lists": [{"cidrs": ["198.18.3.0/24"], "near": "tokyo"}]},
                "ramp_s": 0,
                "frozen_s": 1.0,
                "rates": {"per_s": 0},
            }
        )
    )
    return path


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    made = Region()
    await made.start()
    yield made
    await made.stop()


def busy(seq: int, free: int, address: str) -> RegionReport:
    report = a_report(seq=seq, control_address=address)
    (model,) = report.models
    return a_report(seq=seq, control_address=address, models=(type(model)(**{**fields(model), "slots_free": free}),))


def fields(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__struct_fields__}


async def without_etcd(server: Server, entries: Entries, region: Region) -> None:
    """Entries' statuses are followed, and so are their regions' loads."""
    await entries.down("tokyo")
    await server.until_first("frankfurt")
    assert "tokyo" not in await server.answers(), "known to be down while lawful ones are not"
    await entries.up("tokyo")
    await server.until_first("tokyo")
    await region.say(busy(2, 0, region.address))
    await server.until_entry("tokyo", lambda one: one["share"] < 1.0)
    await region.say(busy(3, 8, region.address))
    await server.until_entry("tokyo", lambda one: one["share"] == 1.0)


async def without_anything(server: Server, entries: Entries, region: Region) -> None:
    """The last view holds, and after `frozen_s` only distance and law count."""

    async def lost() -> bool:
        return "out of contact" in (await server.status())["notice"]

    await server.until(lost, "it says that etcd is gone")
    await region.stop()
    await entries.down("frankfurt")
    await server.until_entry("frankfurt", lambda one: one["state"] == "down")
    await entries.down("tokyo", "virginia")
    await server.until_entry("frankfurt", lambda one: one["state"] == "unknown")
    await server.until_first("tokyo")
    assert await server.answers("eu") == ["frankfurt"]
    await entries.up("virginia")
    await server.until_first("virginia")


async def back_again(server: Server, entries: Entries, etcd: EmbeddedEtcd, store: EtcdStore) -> None:
    """What an operator sets in etcd is followed as ever."""
    await entries.up("tokyo", "frankfurt")
    await etcd.start()
    drain = EntryDrainOverride(
        region="tokyo", entry="tokyo", why="kernel", author="ann", at=datetime(2026, 5, 1, tzinfo=UTC), for_s=600.0
    )
    await store.put(drain.key, encode_override(drain))
    await server.until_entry("tokyo", lambda one: one["state"] == "drained")
    await server.until_last("tokyo")  # once probes have found it up: entries that are down are left out
    assert (await server.answers())[0] == "frankfurt"


async def test_without_etcd_it_uses_probes_and_grpc_and_without_both_it_reports_that(
    tmp_path: Path, region: Region
) -> None:
    port, admin, entry_port = free_ports(3)
    entries = Entries(entry_port)
    await entries.up(*NAMES)
    async with EmbeddedEtcd() as etcd:
        store = EtcdStore(EtcdSettings((etcd.endpoint,)), Random(1))
        await store.open()
        await store.put(report_key("tokyo", "r1"), encode(busy(1, 8, region.address)))
        await region.say(busy(1, 8, region.address))
        path = config(tmp_path, etcd.endpoint, port, admin, entry_port)
        child = Child("dns", ["dns", "--config", str(path)], tmp_path / "dns.log", NO_CERTIFICATES)
        await child.start(PATIENCE_S)
        server = Server(child, port, admin)
        try:
            await server.until_first("tokyo")
            assert await server.answers("eu") == ["frankfurt"], "the law's alone"

            async def speaks() -> bool:
                return bool((await server.status())["regions_by_grpc"] == 1)

            await server.until(speaks, "its reports come by gRPC")
            etcd.pause()
            await without_etcd(server, entries, region)
            etcd.resume()
            await etcd.kill()
            await without_anything(server, entries, region)
            await back_again(server, entries, etcd, store)
        finally:
            await store.close()
            await child.stop()
            await entries.down()
