"""The configuration of reports to global balancers and of the exchange between a region's balancers. Never dials."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator, model_validator

from farhop.config import FromOutside, Part, Secret, is_absent, rule
from farhop.service.config.endpoints import ConnectTls, Listen
from farhop.service.config.process import Process
from farhop.store import envelope
from farhop.store.contract import report_key
from farhop.store.documents.document import DocumentError
from farhop.store.documents.report import check_address

if TYPE_CHECKING:
    from collections.abc import Iterator

PEERS_MAX = 64
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class PeersTls(ConnectTls):
    """TLS to the peers' control ports. `server_name` is the name their certificates must bear instead of the region's
    in the trust domain."""

    ca_file: str
    server_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,253}$")] | None = None


class PeersConfig(Part):
    """`addresses` are control ports, host:port, of peers that etcd may not list; the balancer's own is harmless."""

    addresses: Annotated[tuple[str, ...], Field(max_length=PEERS_MAX)] = ()
    tls: PeersTls | None = None

    @field_validator("addresses")
    @classmethod
    def _reachable(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            try:
                check_address("addresses", address)
            except DocumentError as error:
                raise ValueError(error.message) from None
        return addresses


class ReportKey(Part):
    """The key that seals our reports in etcd: its name under `signing.keys`, and its private half (Ed25519, PEM)."""

    name: str
    private: Secret

    @model_validator(mode="after")
    def _sound(self) -> ReportKey:
        if not is_absent(self.private):
            self.signer()
        return self

    def signer(self) -> envelope.Signer:
        """The signer, as farhop.store takes it. Raises ValueError."""
        return envelope.Signer(self.name, self.private.get_secret_value().encode())


class MeshConfig(Process):
    """What this balancer reports to others, and where it listens for them. `advertise` is the host by which they reach
    it.

    Reports go to the region's hub and to `remote_hub`: one by name, the `nearest` by round-trip time, or `none`.
    `prefix_nodes_per_s` bounds what each global balancer is sent about the caches: 8 B a node.
    """

    control: Listen
    advertise: Annotated[str, FromOutside] = "127.0.0.1"
    peers: PeersConfig = PeersConfig()
    remote_hub: Annotated[str, Field(min_length=1, max_length=128)] = "nearest"
    report_key: ReportKey | None = None
    prefix_nodes_per_s: Annotated[int, Field(ge=1000, le=10_000_000)] = 50_000

    @field_validator("advertise")
    @classmethod
    def _host(cls, host: str) -> str:
        if _HOST.fullmatch(host):
            return host
        try:
            return f"[{IPv6Address(host[1:-1] if host.startswith('[') and host.endswith(']') else host)}]"
        except ValueError:
            raise ValueError("must be a host name or an address, without a port") from None

    @property
    def report_signer(self) -> envelope.Signer | None:
        """The signer of this balancer's reports in etcd; None: they are not signed."""
        return None if self.report_key is None else self.report_key.signer()

    @rule
    def _counts(self) -> Iterator[str]:
        """What we sign must count here, too: all balancers of a fleet know the same keys."""
        absent = [key.public for key in self.signing.keys.values() if is_absent(key.public)]
        if absent or (self.report_key is not None and is_absent(self.report_key.private)):
            return  # unknown here
        place, document, signer = report_key(self.region, self.instance), b"{}", self.report_signer
        try:
            self.signing.made().open(place, document if signer is None else signer.seal(place, document))
        except envelope.EnvelopeError as error:
            yield (
                f"report_key: our own reports would not count: {error}; give the private half of a key under "
                f"signing.keys that may sign report/{self.region}"
            )

    @rule
    def _encrypted_peers(self) -> Iterator[str]:
        if self.peers.tls is not None and self.control.tls is None:
            yield "peers.tls: control.tls is not given, and peers use the same protocol; give both or neither"
