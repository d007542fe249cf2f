"""The whole chain, to be run in a network namespace of its own: client, unbound, `farhop dns`, entries, regions.

Prints one line of JSON: what the client met when the region died that it was led to. Run by test_dns_chain.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import dns.asyncquery
import dns.exception
import dns.message

from farhop.store.contract import LATENCY_PREFIX
from farhop.store.documents.latencies import decode
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.demo.entry import entries
from farhop_lab.world.client import answer
from farhop_lab.world.world import DNS_TTL_S, ZONE, World, WorldSettings

RESOLVER = "127.0.0.54"
CLIENT = "8.8.8.8"  # in this namespace: an address in no private network
PATIENCE_S = 60.0
_UNBOUND = """server:
  interface: {resolver}
  access-control: 127.0.0.0/8 allow
  module-config: "subnetcache iterator"
  send-client-subnet: 127.0.0.1
  client-subnet-always-forward: yes
  do-ip6: no
  rrset-roundrobin: no
  do-not-query-localhost: no
  username: ""
  chroot: ""
  directory: "{folder}"
  pidfile: ""
  use-syslog: no
stub-zone:
  name: "{zone}"
  stub-addr: 127.0.0.1@{port}
"""


class Client:
    """Resolves by the resolver, each time anew; what is kept is kept there."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.by_host = {run.entry_host: run for run in world.regions.values()}

    async def resolve(self) -> tuple[list[str], int]:
        """Entries, best first, and for how many seconds the answer holds still."""
        query = dns.message.make_query(f"api.{ZONE}", "A")
        try:
            found = await dns.asyncquery.udp(query, RESOLVER, timeout=5.0)
        except (dns.exception.DNSException, OSError):
            return [], 0
        hosts = [rdata.address for rrset in found.answer for rdata in rrset]
        return [self.by_host[host].name for host in hosts], min((rrset.ttl for rrset in found.answer), default=0)

    async def until(self, first: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while (await self.resolve())[0][:1] != [first]:
            assert time.monotonic() < end, f"never led to {first}"
            await asyncio.sleep(0.05)

    async def ask(self, *names: str) -> Any:
        body = {"model": self.world.settings.model, "messages": [{"role": "user", "content": "Hello."}],
                "max_tokens": 4, "stream": False}  # fmt: skip
        listed = [self.world.regions[name].entry for name in names]
        return await answer(listed, "sk-farhop-anywhere", body, connect_s=1.0)


async def measured(world: World) -> dict[str, Any]:
    """Clients of a network that no list holds connect to Frankfurt's entry, from an address of the public internet that
    this namespace has: what DNS answered that network before, and once it has learned how near it is."""
    at = f"{CLIENT.rpartition('.')[0]}.0/24"
    # For an unknown network every entry costs the same: the answer is the first of the map, once all of them are up.
    before = await _until(world, at, "virginia")
    frankfurt, body = world.regions["frankfurt"], {"model": world.settings.model, "prompt": "Hello.", "max_tokens": 1}
    for tenant in ("eu-only", "anywhere"):
        for _ in range(6):  # a connection each
            connector = aiohttp.TCPConnector(local_addr=(CLIENT, 0), force_close=True)
            async with aiohttp.ClientSession(connector=connector) as session:
                headers = {"authorization": f"Bearer sk-farhop-{tenant}"}
                async with session.post(f"{frankfurt.entry}/v1/completions", json=body, headers=headers) as answered:
                    assert answered.status == 200, await answered.text()
        if tenant == "eu-only":
            await asyncio.sleep(1.0)  # five times the time within which it would be notified
            assert world.etcd is not None
            store = EtcdStore(EtcdSettings((world.etcd.endpoint,)), Random(1))
            await store.open()
            hidden = [decode(one.value).networks for one in await store.list(LATENCY_PREFIX)]
            await store.close()
    after = await _until(world, at, "frankfurt")
    url = f"http://127.0.0.1:{world.dns_admin_port}/latencies"
    async with aiohttp.ClientSession() as session, session.get(url) as answered:
        findings = (await answered.json())["networks"]
    return {"before": before, "after": after, "hidden": hidden, "findings": findings}


async def _until(world: World, network: str, first: str) -> list[str]:
    """The answer to a network, once it leads there first."""
    end = time.monotonic() + PATIENCE_S
    while (found := await entries(world, "api", network))[:1] != [first]:
        assert time.monotonic() < end, f"never led to {first}: {found}"
        await asyncio.sleep(0.05)
    return found


async def chain(folder: Path) -> dict[str, Any]:
    settings = WorldSettings(
        replicas=1,
        dns=True,
        global_config={"client_latencies": {"samples_min": 2, "every_s": 0.2}},
        dns_config={"latencies": {"every_s": 0.2}},
    )
    async with World(settings, folder) as world:
        (folder / "unbound.conf").write_text(
            _UNBOUND.format(resolver=RESOLVER, folder=folder, zone=ZONE, port=world.dns_port)
        )
        quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        unbound = await asyncio.create_subprocess_exec(sys.argv[1], "-d", "-c", str(folder / "unbound.conf"), **quiet)
        try:
            client = Client(world)
            learned = await measured(world)
            await client.until("tokyo")
            first = await client.ask("tokyo")
            listed, ttl = await client.resolve()
            tokyo = world.regions["tokyo"]
            children = [*tokyo.engines, tokyo.regional, tokyo.global_]
            await asyncio.gather(*(child.kill() for child in children if child is not None))
            died_at = time.monotonic()
            retried = await client.ask(*listed)
            retried_s = time.monotonic() - died_at
            # And a client that knows only the first address, and asks its resolver again.
            tries = 0
            while True:
                tries += 1
                names, _ = await client.resolve()
                result = await client.ask(names[0]) if names else None
                if result is not None and result.ok:
                    break
                assert time.monotonic() < died_at + PATIENCE_S, "never served again"
                await asyncio.sleep(0.02)
            return {
                **learned,
                "first": first.headers.get("x-farhop-region"),
                "listed": listed,
                "ttl": ttl,
                "ttl_most": DNS_TTL_S,
                "retried": retried.status,
                "retried_by": next(run.name for run in world.regions.values() if run.entry == retried.entry),
                "retried_s": retried_s,
                "next_by": names[0],
                "next_s": time.monotonic() - died_at,
                "tries": tries,
            }
        finally:
            unbound.terminate()
            await unbound.wait()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="farhop-chain-") as folder:
        print(json.dumps(asyncio.run(chain(Path(folder)))))


if __name__ == "__main__":
    main()
