"""Discovers replicas behind a DNS name: SRV records (host and port), or A and AAAA records on one port.

Invariants: a name that does not exist, or has no such record, is an answer: there are no replicas; a server that fails,
is late or refuses gives no answer, and neither does half an answer (A without AAAA). The name is asked again when its
TTL expires, within a floor and a ceiling. Only the targets of the lowest priority count: the others are for when the
name's owner removes those. Load is spread by measurement, not by weight, but weight 0 beside others means no new work.
Never caches.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver
import dns.ttl

from farhop.balance.backoff import Backoff
from regional_lb.engines.config import nameserver
from regional_lb.engines.discovery.source import EndpointError, Failed, Found, at

if TYPE_CHECKING:
    from random import Random

    from dns.message import QueryMessage
    from dns.rdtypes.IN.SRV import SRV

    from regional_lb.engines.config import DnsSource, ReplicaConfig
    from regional_lb.engines.discovery.source import OnUpdate

_UDP_BYTES = 1232  # EDNS: what passes everywhere unfragmented; what is longer comes by TCP


class DnsNames:
    """See the module's docstring."""

    def __init__(self, config: DnsSource, rng: Random) -> None:
        self._config, self.label, self._rng = config, config.label, rng
        self._resolver: dns.asyncresolver.Resolver | None = None

    async def follow(self, on_update: OnUpdate) -> None:
        """See Source."""
        config = self._config
        backoff = Backoff(self._rng, min(0.5, config.ttl_floor_s), config.ttl_ceiling_s)
        while True:
            try:
                found, ttl_s = await self._ask()
            except dns.exception.DNSException as error:
                self._resolver = None  # the system's servers may be others by now
                on_update(Failed(self.label, f"{type(error).__name__}: {error}; check the name and its servers"))
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            on_update(found)
            await asyncio.sleep(min(max(ttl_s, config.ttl_floor_s), config.ttl_ceiling_s))

    async def _ask(self) -> tuple[Found, float]:
        """Resolve the name: the replicas, and for how many seconds the answer is valid. Raises DNSException."""
        config = self._config
        if config.record == "srv":
            records, ttl_s = await self._records("SRV")
            return self._found(_targets(records)), ttl_s
        hosts: set[str] = set()
        least_s = config.ttl_ceiling_s
        for kind in ("A", "AAAA"):
            records, ttl_s = await self._records(kind)
            hosts |= {record.address for record in records}
            least_s = min(least_s, ttl_s)
        return self._found([(host, config.port or 0, False) for host in sorted(hosts)]), least_s

    async def _records(self, kind: str) -> tuple[list[Any], float]:
        """The records of one kind, none where the name has none, and their TTL. Raises DNSException."""
        resolver = self._resolver = self._resolver or self._made()
        try:
            answer = await resolver.resolve(self._config.host, kind, raise_on_no_answer=False, search=False)
        except dns.resolver.NXDOMAIN as error:
            return [], min(_negative_ttl_s(message) for message in error.kwargs["responses"].values())
        if answer.rrset is None:
            return [], _negative_ttl_s(answer.response)
        return list(answer.rrset), answer.chaining_result.minimum_ttl

    def _made(self) -> dns.asyncresolver.Resolver:
        """Asks afresh every time. Raises DNSException where the system names no server."""
        named = [nameserver(text) for text in self._config.nameservers]
        resolver = dns.asyncresolver.Resolver(configure=not named)
        if named:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in named]
        resolver.lifetime = self._config.timeout_s
        resolver.timeout = self._config.timeout_s / 2  # of one server: there may be another
        resolver.use_edns(0, 0, _UDP_BYTES)
        return resolver

    def _found(self, targets: list[tuple[str, int, bool]]) -> Found:
        replicas: list[ReplicaConfig] = []
        problems: list[str] = []
        for host, port, draining in targets:
            source = f"{self._config.host}: {host}:{port}"
            try:
                replicas.append(at(self._config.replica, host, port, "", source, draining=draining))
            except EndpointError as error:
                problems.append(str(error))
        return Found(self.label, tuple(replicas), tuple(problems))


def _targets(records: list[SRV]) -> list[tuple[str, int, bool]]:
    """Host, port, and whether it gets no new work, of each target with the best priority."""
    # RFC 2782: "." as the target means that the service is decidedly not available there.
    there = [record for record in records if record.target != dns.name.root]
    first = [record for record in there if record.priority == min(one.priority for one in there)]
    weighed = any(record.weight for record in first)
    return sorted(
        (record.target.to_text(omit_final_dot=True), record.port, weighed and not record.weight) for record in first
    )


def _negative_ttl_s(message: QueryMessage) -> float:
    """How long it holds that there is nothing: the zone's SOA says it (RFC 2308); without one, no time at all."""
    ttl_s = message.resolve_chaining().minimum_ttl
    return 0.0 if ttl_s >= dns.ttl.MAX_TTL else float(ttl_s)
