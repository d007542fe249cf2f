"""A DNS server, whole, with a worker of its own, while its files change under it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import dns.dnssec
import dns.message
import dns.name
import dns.query
import dns.rcode
import dns.rdata
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec

from entry_dns.answers.responder import wire
from entry_dns.answers.signing import ZoneKey, delegation, key_tag
from entry_dns.app import main
from entry_dns.app.config import DnsConfig
from entry_dns.app.main import DnsServer
from farhop.config import ConfigError, load
from farhop.service.assembly import stores
from farhop.store.documents.overrides import EntryDrainOverride, encode
from farhop_lab.memory_store import MemoryStore
from tests.entry_dns.answers.test_signing import pem
from topology.load import shipped

DEADLINE_S = 40.0
ZONE = "entry.example"


class Files:
    """The map, the configuration and two keys of the zone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys: dict[str, ZoneKey] = {}
        for name in ("old", "new"):
            key = pem(ec.generate_private_key(ec.SECP256R1()))
            (folder / f"{name}.pem").write_bytes(key)
            self.keys[name] = ZoneKey(key)
        self.map()
        self.write(old="active")

    def map(self, *names: str) -> None:
        document = yaml.safe_load(shipped("three-regions").read_text())
        document["entries"] = [
            {"name": name, "region": name, "ipv4": [f"192.0.2.{n}"]}
            for n, name in enumerate(names or ("virginia", "tokyo"), 1)
        ]
        (self.folder / "map.yaml").write_text(yaml.safe_dump(document))

    def write(self, *names: str, **stages: str) -> None:
        listed = [{"file": str(self.folder / f"{name}.pem"), "stage": stage} for name, stage in stages.items()]
        named = [{"name": f"{name}.{ZONE}", "families": ["ipv4"]} for name in ("api", *names)]
        (self.folder / "dns.yaml").write_text(yaml.safe_dump({
            "region": "tokyo", "instance": "dns-1", "admin": {"port": 0}, "topology": str(self.folder / "map.yaml"),
            "listen": {"port": 0}, "probe": {"every_s": 60.0, "timeout_s": 0.1},
            "zones": [{"zone": ZONE, "servers": [f"ns1.{ZONE}"], "addresses": {f"ns1.{ZONE}": ["192.0.2.53"]},
                       "names": named, "dnssec_keys": listed}],
        }))  # fmt: skip


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def test_only_a_server_that_answers_for_a_zone_needs_its_name_servers_addresses(files) -> None:
    """A provider's zone, in which records are kept, has its own."""
    path = files.folder / "dns.yaml"
    document = yaml.safe_load(path.read_text())
    del document["zones"][0]["addresses"]
    path.write_text(yaml.safe_dump(document))
    config = load(DnsConfig, path)
    given = config, stores.topology_of(config), Random(1), MemoryStore(Random(2))
    with pytest.raises(ConfigError, match=rf"zones: ns1\.{ZONE}: is a name server inside of its zone"):
        DnsServer(*given)

    async def publish(_head: object, _tables: object) -> bool:
        return True

    DnsServer(*given, publish=publish)


@pytest.fixture
async def server(files, monkeypatch):
    monkeypatch.setattr(main, "FIRST_LOOK_S", 0.0)  # there is nothing to learn of these entries
    path = files.folder / "dns.yaml"
    config = load(DnsConfig, path)
    made = DnsServer(config, stores.topology_of(config), Random(1), MemoryStore(Random(2)), path=path)
    try:
        await made.open()
        yield made
    finally:
        await made.close()


async def ask(server: DnsServer, name: str, kind: str, *, tcp: bool = False) -> dns.message.Message:
    query = dns.message.make_query(name, kind, want_dnssec=True)
    by = dns.query.tcp if tcp else dns.query.udp
    return await asyncio.to_thread(by, query, "127.0.0.1", timeout=DEADLINE_S, port=server.port)


async def until(server: DnsServer, name: str, kind: str, wanted: set[str], *, tcp: bool = False) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            answer = await ask(server, name, kind, tcp=tcp)
            fields = {rdata.to_text() for one in answer.answer[:1] for rdata in one}
            if fields == wanted:
                return
            await asyncio.sleep(0.1)


def dnskeys(*keys: ZoneKey) -> set[str]:
    """As dnspython shows them."""
    data = (dns.rdata.from_wire("IN", "DNSKEY", one.dnskey, 0, len(one.dnskey)) for one in keys)
    return {one.to_text() for one in data}


async def delved(server: DnsServer, files: Files, key: str) -> str:
    """What delv says of the name when the parent tells of this key."""
    rdata = delegation(wire(ZONE), files.keys[key].dnskey)
    anchor = files.folder / "anchor"
    tag, digest = int.from_bytes(rdata[:2], "big"), rdata[4:].hex()
    anchor.write_text(f'trust-anchors {{ {ZONE}. static-ds {tag} {rdata[2]} {rdata[3]} "{digest}"; }};\n')
    command = ["delv", "@127.0.0.1", "-p", str(server.port), "-a", str(anchor), f"+root={ZONE}", f"api.{ZONE}", "A"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("delv") is None, reason="delv is not installed")
async def test_a_key_is_replaced_and_the_zone_validates_throughout(files, server) -> None:
    old, new = files.keys["old"], files.keys["new"]
    assert "; fully validated" in await delved(server, files, "old")
    assert "; fully validated" not in await delved(server, files, "new")
    first = server.workers.processes[0]

    files.write(old="active", new="active")  # both sign: either DS will do
    await server.reloader.reload()
    for tcp in (False, True):
        await until(server, ZONE, "DNSKEY", dnskeys(old, new), tcp=tcp)
    for key in ("old", "new"):
        assert "; fully validated" in await delved(server, files, key)

    files.write(old="retired", new="retired")
    await server.reloader.reload()
    assert "no active key signs the keys; make a csk or a ksk active" in server.status()["configuration"]["trouble"][0]
    assert "; fully validated" in await delved(server, files, "old")

    files.write(old="retired", new="active")
    await server.reloader.reload()
    signers = {new.tag}
    async with asyncio.timeout(DEADLINE_S):
        while {one.key_tag for one in (await ask(server, ZONE, "DNSKEY")).answer[-1]} != signers:
            await asyncio.sleep(0.1)
    await until(server, ZONE, "DNSKEY", dnskeys(old, new))
    assert "; fully validated" in await delved(server, files, "new")
    assert server.workers.restarts == 0  # workers were replaced, none crashed
    async with asyncio.timeout(DEADLINE_S):
        assert await first.wait() == 0


async def test_the_topology_and_the_names_are_reloaded_without_a_restart(files, server) -> None:
    process = server.workers.processes[0]
    await until(server, f"api.{ZONE}", "A", {"192.0.2.1", "192.0.2.2"})
    files.map("frankfurt", "virginia", "tokyo")
    files.write("also", old="active")
    await server.reloader.reload()
    await until(server, f"also.{ZONE}", "A", {"192.0.2.1", "192.0.2.2", "192.0.2.3"})
    assert server.workers.processes[0] is process  # with a view only
    assert sum(server.led_so_far().values()) >= 0
    (files.folder / "map.yaml").write_text("nonsense")
    await server.reloader.reload()
    assert server.status()["configuration"]["trouble"]
    assert (await ask(server, f"also.{ZONE}", "A")).rcode() == dns.rcode.NOERROR


async def test_a_drain_from_before_the_map_had_its_entry_holds_from_then_on(files, server) -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    drain = EntryDrainOverride(region="frankfurt", entry="frankfurt", why="disk", author="ann", at=at, for_s=600.0)
    await server.store.put(drain.key, encode(drain))
    await asyncio.sleep(0.1)
    files.map("frankfurt", "virginia", "tokyo")
    await server.reloader.reload()
    async with asyncio.timeout(DEADLINE_S):
        while {one["entry"]: one["state"] for one in server.status()["entries"]}.get("frankfurt") != "drained":
            await asyncio.sleep(0.02)


def test_the_record_for_the_parent_is_as_dnspython_makes_it(files) -> None:
    key = files.keys["old"]
    rdata = dns.rdata.from_wire("IN", "DNSKEY", key.dnskey, 0, len(key.dnskey))
    made = dns.dnssec.make_ds(dns.name.from_text(ZONE), rdata, "SHA256")
    assert delegation(wire(ZONE), key.dnskey) == made.to_digestable()
    assert key_tag(key.dnskey) == made.key_tag
