"""The demo's parts (l) and (m): DNS leads clients to the best lawful entry, and away from one that is drained.

Streams on a drained entry continue. Questions go to the real `farhop dns`, as a resolver would ask them.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING

import dns.asyncquery
import dns.edns
import dns.exception
import dns.message

from farhop.store.documents.overrides import EntryDrainOverride, encode
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.world import ZONE, client_network

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.demo.checker import Checker
    from farhop_lab.world.world import World

PATIENCE_S = 10.0
STREAMS = 6
TOKENS = 240
_ASK_S = 2.0


async def entries(world: World, name: str, client: str) -> list[str]:
    """The entries in the answer for a client network, best first; [] without an answer."""
    network, _, length = client.partition("/")
    query = dns.message.make_query(
        f"{name}.{ZONE}", "A", use_edns=0, options=[dns.edns.ECSOption(network, int(length))]
    )
    try:
        response = await dns.asyncquery.udp(query, "127.0.0.1", timeout=_ASK_S, port=world.dns_port)
    except (dns.exception.DNSException, OSError):
        return []
    by_host = {run.entry_host: run.name for run in world.regions.values()}
    return [by_host[rdata.address] for rrset in response.answer for rdata in rrset]


async def near(world: World, region: str, without: str = "") -> list[str]:
    """The answer to a network near a region; `without`: once it no longer contains that entry. [] without a DNS
    server.
    """
    if world.dns is None:
        return []
    network = client_network(list(world.regions).index(region))
    return await _until(world, network, lambda answer: bool(answer) and without not in answer)


async def led_by_dns(checker: Checker) -> None:
    """(l) DNS sends a Tokyo network to Tokyo, and an EU-only name to Frankfurt only."""
    world, names = checker.world, checker.names
    if world.dns is None:
        checker.progress("     (l) left out: this machine has no further loopback addresses for entries")
        return
    tokyo = client_network(names.index("tokyo"))
    answer = await _until_first(world, tokyo, "tokyo")
    checker.check("l", "DNS: api, asked for a network near tokyo", "tokyo first, 3 entries", ", ".join(answer),
                  answer[:1] == ["tokyo"] and len(answer) == len(names))  # fmt: skip
    eu = [await entries(world, "eu", client_network(at)) for at in range(len(names))]
    seen = "; ".join(sorted({", ".join(one) or "none" for one in eu}))
    checker.check("l", "DNS: an EU-only name, from every network", "frankfurt", seen, seen == "frankfurt")
    # The client connects to the answer's addresses: an entry of them serves it.
    region = world.regions[answer[0]] if answer else world.regions["virginia"]
    result = await checker.ask(region.name, "japan-only", "Who is nearest?")
    checker.check("l", "a client that goes where DNS led it is served", "tokyo",
                  result.headers.get("x-farhop-region", str(result.status)),
                  result.headers.get("x-farhop-region") == "tokyo")  # fmt: skip


async def entry_drained(checker: Checker) -> None:
    """(m) An entry drained: answers change, its streams continue."""
    world = checker.world
    if world.dns is None or world.etcd is None:
        checker.progress("     (m) left out: there is no DNS server, or this etcd is not ours to write to")
        return
    network = client_network(checker.names.index("tokyo"))
    await _until_first(world, network, "tokyo")
    begun: list[None] = []
    streams = [
        asyncio.create_task(checker.stream("tokyo", "anywhere", f"Go on. {i}", max_tokens=TOKENS, begun=begun))
        for i in range(STREAMS)
    ]
    while len(begun) < STREAMS and not all(stream.done() for stream in streams):
        await asyncio.sleep(0.005)
    store = EtcdStore(EtcdSettings((world.etcd.endpoint,)), Random(1))
    await store.open()
    drain = EntryDrainOverride(
        region="tokyo", entry="tokyo", why="kernel", author="demo", at=datetime.now(UTC), for_s=600.0
    )
    try:
        under_way, began = sum(not stream.done() for stream in streams), time.monotonic()
        await store.put(drain.key, encode(drain))
        answer = await _until_last(world, network, "tokyo")
        took_s = time.monotonic() - began
        checker.check("m", "tokyo's entry drained: DNS answers a network near it", "others first",
                      f"{', '.join(answer)}, after {took_s:.1f} s", bool(answer) and answer[0] != "tokyo")  # fmt: skip
        results = await asyncio.gather(*streams)
        whole = sum(result.ok for _, result in results)
        checker.check("m", f"streams on it meanwhile ({under_way} under way then)", f"{STREAMS} whole",
                      f"{whole} whole", whole == STREAMS)  # fmt: skip
        again = await checker.ask("tokyo", "anywhere", "Still there?")
        checker.check("m", "who goes there still (an older answer) is served", "200", str(again.status), again.ok)
    finally:
        await store.delete(drain.key)
        await store.close()
    back = await _until_first(world, network, "tokyo")
    checker.check("m", "the drain over: DNS leads there again", "tokyo first", ", ".join(back), back[:1] == ["tokyo"])


async def _until_first(world: World, network: str, entry: str) -> list[str]:
    return await _until(world, network, lambda answer: answer[:1] == [entry])


async def _until_last(world: World, network: str, entry: str) -> list[str]:
    return await _until(world, network, lambda answer: answer[:1] not in ([], [entry]))


async def _until(world: World, network: str, true: Callable[[list[str]], bool]) -> list[str]:
    """The first answer for which it is true, or the last one before the time is over."""
    end = time.monotonic() + PATIENCE_S
    while True:
        answer = await entries(world, "api", network)
        if true(answer) or time.monotonic() > end:
            return answer
        await asyncio.sleep(0.05)
