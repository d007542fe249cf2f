"""Follows regional balancers' reports over gRPC: the path that works when etcd does not.

Invariants: a balancer is contacted only at the addresses that the configuration allows for its region, and
authenticated as global balancers do it; reports are ordered by incarnation and seq, whichever path they came by; an
invalid report, or one under another's name, changes nothing and is counted; a balancer's last known address is kept
while etcd is silent. Never judges a report.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
from farhop_wire import region_pb2, region_pb2_grpc

from farhop.service.assembly.region_channel import address_of, channel
from farhop.service.process.tasks import Tasks
from farhop.store.contract import REGION_INSTANCES_MAX
from farhop.store.documents.document import DocumentError
from farhop.store.documents.report import from_wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.service.config.certificates import Certificates
    from farhop.service.config.region_connections import RegionConnections
    from farhop.store.documents.report import RegionReport

LINKS_MAX = 256  # the most streams that a balancer serves; an entry needs no more of a region than its sum
AGAIN_S = 1.0  # between two attempts at a stream
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class RegionLinks:
    """One stream of reports for each balancer. `reported` is called with each report, `refused` with the reason of each
    rejected one.
    """

    def __init__(
        self,
        config: RegionConnections,
        certificates: Certificates | None,
        reported: Callable[[RegionReport], None],
        refused: Callable[[str], None],
        jitter: Callable[[], float],
    ) -> None:
        self._config, self._certificates, self._reported = config, certificates, reported
        self._refused, self._jitter = refused, jitter
        self.links: dict[tuple[str, str], tuple[str, asyncio.Task[None]]] = {}
        self._connected: set[tuple[str, str]] = set()
        self._unlisted: set[tuple[str, str]] = set()  # taken from etcd while they speak: until their streams end
        self._tasks = Tasks()
        if certificates is not None:
            certificates.changed = self._relink

    @property
    def speaking(self) -> int:
        """The number of balancers with an open stream that has delivered a report."""
        return len(self._connected)

    def named(self, report: RegionReport) -> None:
        """A report gives its sender's address: follow it there."""
        name, address = (report.region, report.instance), report.control_address
        known = self.links.get(name)
        self._unlisted.discard(name)
        if known is not None and known[0] == address:
            return
        if known is not None:
            known[1].cancel()
            del self.links[name]
        if not self._config.allows(report.region, address_of(address).host):
            self._refused("address_not_allowed")
        elif len(self.links) < LINKS_MAX and sum(one == report.region for one, _ in self.links) < REGION_INSTANCES_MAX:
            self.links[name] = (address, self._tasks.start(self._follow(name, address), f"read reports of {address}"))

    def gone(self, region: str, instance: str) -> None:
        """A balancer's key in etcd is gone. An open stream is followed until it ends."""
        name = (region, instance)
        if name in self._connected:
            self._unlisted.add(name)
        elif name in self.links:
            self.links.pop(name)[1].cancel()

    async def close(self) -> None:
        """Stop following all balancers."""
        await self._tasks.close()

    def _relink(self) -> None:
        # A gRPC channel keeps the certificates it was opened with.
        for name, (address, task) in tuple(self.links.items()):
            task.cancel()
            self.links[name] = (address, self._tasks.start(self._follow(name, address), f"read reports of {address}"))

    async def _follow(self, name: tuple[str, str], address: str) -> None:
        request = region_pb2.ReportsRequest(balancer=f"{self._config.balancer}/dns", region=self._config.region)
        async with channel(self._config, name[0], address, self._certificates, AGAIN_S) as way:
            stub = region_pb2_grpc.RegionStub(way)
            while True:
                try:
                    async for message in stub.Reports(request):
                        self._take(message, name)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in _GONE:
                        self._refused(f"reports_{error.code().name.lower()}")
                finally:
                    self._connected.discard(name)
                if name in self._unlisted:
                    self._unlisted.discard(name)
                    self.links.pop(name, None)
                    return
                await asyncio.sleep(AGAIN_S * self._jitter())

    def _take(self, message: region_pb2.Report, name: tuple[str, str]) -> None:
        try:
            report = from_wire(message)
        except DocumentError:
            self._refused("report_malformed")
            return
        if (report.region, report.instance) != name:
            self._refused("report_misplaced")
            return
        self._connected.add(name)
        self._reported(report)
