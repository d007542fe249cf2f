"""The connections to the roots of limits: a channel to each region's root, kept while it answers.

Never judges the answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from farhop_wire import region_pb2_grpc

from farhop.service.assembly.region_channel import address_of, channel

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_wire import region_pb2

    from farhop.service.config.certificates import Certificates
    from farhop.store.documents.limits import RootClaim
    from global_lb.links.config import LinksConfig


class Roots:
    """See above. `config` is the one in force."""

    def __init__(self, config: Callable[[], LinksConfig], certificates: Certificates | None) -> None:
        self._config, self._certificates = config, certificates
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}  # by region, and where to

    async def borrow(self, claim: RootClaim, request: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        """Ask a root. AioRpcError if it does not answer; OSError where it may not be asked."""
        config, region, address = self._config(), claim.region, claim.address
        known = self._channels.get(region)
        if known is None or known[0] != address:
            try:
                host = address_of(address).host
            except ValueError:
                raise OSError("the root's address is not host:port") from None
            if not config.allows(region, host):
                raise OSError(f"region_hosts: no balancer of {region} may be at {host}")
            await self._drop(region)
            opened = channel(config, region, address, self._certificates, config.watch.ping_s)
            known = self._channels[region] = address, opened
        try:
            return await region_pb2_grpc.RegionStub(known[1]).Borrow(request)
        except grpc.aio.AioRpcError:
            await self._drop(region)  # the next one is opened with the certificates of then
            raise

    async def _drop(self, region: str) -> None:
        known = self._channels.pop(region, None)
        if known is not None:
            await known[1].close(None)

    async def close(self) -> None:
        """Close all channels."""
        for region in tuple(self._channels):
            await self._drop(region)
