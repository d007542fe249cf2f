"""Measures clients' round trips to this entry by network, and publishes them under a lease, for `farhop dns` to learn
from.

Invariants: a client is measured only for a request that the law allows to be recorded in every region of the map, since
any of them may read the published values; if a new law forbids that for any tenant, all values are forgotten; a client
behind a proxy that identifies itself is not measured; samples per second, networks and bytes are bounded. Never keeps
an address.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from farhop.balance.estimate.network_latencies import NetworkLatencies
from farhop.config import Part, Seconds
from farhop.store.contract import latency_key
from farhop.store.documents.latencies import NETWORKS_LIMIT, LatencyReport, encode
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.relay.http.exchange import Exchange
    from farhop.service.authentication.authenticator import Caller
    from farhop.store.contract import Publication, Store
    from topology.law import Law

LEASE_S = 90.0
SAMPLES_PER_S_MAX = 100  # at some 7 µs each: 0.07 % of a core, however many connections come
_PROXIED = (b"x-forwarded-for", b"forwarded")


class ClientLatencies(Part):
    """Measuring of clients' networks. `samples_min`: connections of a network before it is published; `networks_max`:
    the most networks that are published, those measured most often; `every_s`: how often that is published, if it
    changed.
    """

    samples_min: Annotated[int, Field(ge=2, le=1000)] = 3
    networks_max: Annotated[int, Field(ge=1, le=NETWORKS_LIMIT)] = 2048
    every_s: Seconds = 30.0


class LatencyTable:
    """See the module's docstring. `law` is read anew for each sample."""

    def __init__(
        self, config: ClientLatencies, region: str, instance: str, law: Callable[[], Law], clock: Callable[[], float]
    ) -> None:
        self._config, self._region, self._instance = config, region, instance
        self._law, self._clock = law, clock
        self._recorded_law = law()
        self.table = NetworkLatencies(4 * config.networks_max)
        self._due, self._left = 0.0, SAMPLES_PER_S_MAX
        self._changed = asyncio.Event()

    def arrived(self, exchange: Exchange, caller: Caller, model: str) -> None:
        """See farhop.service.admission.ingress.ArrivalObserver."""
        now = self._clock()
        if now >= self._due:
            self._due, self._left = now + 1.0, SAMPLES_PER_S_MAX
        if not self._left:
            return
        measured = exchange.client_rtt()
        if measured is None:
            return
        self._left -= 1
        known = exchange.head.known
        if any(name in known for name in _PROXIED):
            return  # it is the proxy that is as far as this
        law = self.lawful()
        if law.verdict(caller.tenant, model, Scope.LOGGING, caller.narrow, caller.key).excluded:
            return
        self.table.take(measured[0], measured[1], now)

    def lawful(self) -> Law:
        """The law in force. If it forbids measurements that an earlier law allowed, all measurements are dropped."""
        law = self._law()
        if law is not self._recorded_law:
            regions = frozenset(self._recorded_law.topology.regions)
            if not law.widens(self._recorded_law, Scope.LOGGING, regions) or not law.topology.regions.keys() <= regions:
                self.table.clear()
                self._changed.set()
            self._recorded_law = law
        return law

    def report(self) -> LatencyReport:
        """The current report."""
        self.lawful()
        networks = self.table.read(self._clock(), self._config.networks_max, self._config.samples_min)
        return LatencyReport(region=self._region, instance=self._instance, networks=networks)

    async def publish(self, store: Store) -> None:
        """Publish in the store, until cancelled. The store deletes it as it closes."""
        publication: Publication | None = None
        before = b""
        while True:
            document = encode(self.report())
            if publication is None:
                publication = await store.publish(latency_key(self._region, self._instance), document, LEASE_S)
            elif document != before:
                await publication.update(document)
            before = document
            self._changed.clear()
            try:
                async with asyncio.timeout(self._config.every_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
