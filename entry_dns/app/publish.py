"""`farhop dns publish`: the same view as the server's, kept in another server's zone by dynamic updates.

Entries are watched by the same code (`DnsServer` without its listeners). Invariant: a record is written again only when
it changes or when the last write failed; a failed write is logged, and tried again.
"""

from __future__ import annotations

import asyncio
import sys
from ipaddress import ip_address
from random import Random
from typing import TYPE_CHECKING, Any

import dns.name
import dns.rdatatype

from entry_dns.answers.publishing import Wanted, changes, records_of
from entry_dns.answers.responder import wire
from entry_dns.app.config import DnsConfig
from entry_dns.app.main import DnsServer
from entry_dns.links.updates import Publish, UpdateError, Updates
from farhop.config import ConfigError, load
from farhop.service.assembly import stores
from farhop.service.process.lifecycle import run as run_process
from farhop.store.contract import StoreError
from farhop.telemetry import logs
from topology.problems import TopologyError

if TYPE_CHECKING:
    from pathlib import Path

    from entry_dns.answers.prepare import Table
    from entry_dns.answers.snapshot import Head, Records
    from farhop.store.contract import Store

NEGATIVE, FAULT = 1, 2


class Publisher:
    """Keeps a zone. `wrote` is its content as far as we know; `unsure` are the records of failed writes, which the
    server may have taken all the same.
    """

    def __init__(self, updates: Updates, log: Any) -> None:
        self._updates, self._log = updates, log
        self.wrote: dict[tuple[bytes, int], Records | None] = {}
        self.unsure: set[tuple[bytes, int]] = set()
        self.trouble = ""

    async def __call__(self, head: Head, tables: list[Table]) -> bool:
        """Write what differs; returns whether the zone is as wanted."""
        wanted = records_of(head, tables)
        due = changes(self.wrote, wanted) | {key: wanted.get(key) for key in self.unsure}
        if not due:
            return True
        try:
            await self._updates.write(due)
        except UpdateError as error:
            if str(error) != self.trouble:
                self._log.error("publish", problem=str(error))
            self.trouble = str(error)
            self.unsure.update(due)
            return False
        self.wrote, self.trouble = dict(wanted), ""
        self.unsure.clear()
        return True


def shown(wanted: Wanted) -> list[str]:
    """Records as lines of a zone file."""
    lines = []
    for (name, kind), records in sorted(wanted.items()):
        owner, type_ = dns.name.from_wire(name, 0)[0], dns.rdatatype.to_text(dns.rdatatype.RdataType(kind))
        if records is None:
            lines.append(f"; {owner} has no {type_}: no entry is lawful for all who may ask")
            continue
        lines += [f"{owner} {records.ttl} IN {type_} {ip_address(rdata)}" for rdata in records.rdatas]
    return lines


def run(path: Path, *, once: bool, dry_run: bool) -> int:
    """Publish until stopped, or once; the exit code."""
    try:
        config = load(DnsConfig, path)
        logs.configure("dns", config.region, config.instance, config.log_level)
        publisher = Publisher(Updates(_inside(config)), logs.get("dns"))
        if not once and not dry_run:
            run_process("dns publish", lambda: _server(config, publisher))
            return 0
        return asyncio.run(write_once(config, publisher, dry_run=dry_run))
    except (ConfigError, TopologyError, StoreError) as error:
        print(f"dns publish: {error}", file=sys.stderr)
        return FAULT


def _inside(config: DnsConfig) -> Publish:
    """The configured zone. ConfigError if there is none, or for a name that the zone cannot hold."""
    if config.publish is None:
        raise ConfigError("publish", ["is not given; name the server, zone and TSIG key"])
    zone = wire(config.publish.zone)
    for at, one in enumerate(config.zones):
        for name in one.names:
            if not wire(name.name).endswith(zone):
                problem = f"{name.name} is outside of publish.zone {config.publish.zone}; leave it out of this file"
                raise ConfigError(f"zones[{at}]", [problem])
    return config.publish


def _server(config: DnsConfig, publisher: Publisher) -> DnsServer:
    return DnsServer(config, stores.topology_of(config), Random(), publish=publisher)


async def write_once(config: DnsConfig, publisher: Publisher, store: Store | None = None, *, dry_run: bool) -> int:
    """Show the records, and publish them unless it is a dry run; the exit code. Not on the configured admin port: a
    server may be running by the same file."""
    wanted: Wanted = {}
    config = config.model_copy(update={"admin": config.admin.model_copy(update={"host": "127.0.0.1", "port": 0})})

    async def look(head: Head, tables: list[Table]) -> bool:
        wanted.update(records_of(head, tables))
        return dry_run or await publisher(head, tables)

    server = DnsServer(config, stores.topology_of(config), Random(), store, publish=look)
    server.waits = False
    try:
        await server.open()
    finally:
        await server.close()
    print("\n".join(shown(wanted)))
    if publisher.trouble:
        print(f"dns publish: {publisher.trouble}", file=sys.stderr)
        return NEGATIVE
    return 0
