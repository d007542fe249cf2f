"""The other balancers of the region: where they are besides those in etcd, and how to speak to them. Never dials."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from farhop.shell.config import ConnectTls, Part
from farhop.store.report import ReportError, check_address

PEERS_MAX = 64


class PeersTls(ConnectTls):
    """TLS to the peers' control ports. `server_name` is the name their certificates must bear instead of the region's
    in the trust domain."""

    ca_file: str
    server_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,253}$")] | None = None


class Peers(Part):
    """`addresses` are control ports, host:port, of peers that etcd may not tell of; one's own is harmless."""

    addresses: Annotated[tuple[str, ...], Field(max_length=PEERS_MAX)] = ()
    tls: PeersTls | None = None

    @field_validator("addresses")
    @classmethod
    def _reachable(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            try:
                check_address("addresses", address)
            except ReportError as error:
                raise ValueError(error.message) from None
        return addresses
