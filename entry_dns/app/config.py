"""The configuration file of a DNS server for entries, checked whole. Never opens a connection."""

from __future__ import annotations

from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from entry_dns.answers.responder import wire
from entry_dns.answers.signing import KEYS_MAX, KeyFileError, Role, Stage, ZoneKey, ZoneKeys
from entry_dns.answers.zones import NamePlan, Ttls, ZonePlan
from entry_dns.app.worker import KeyFile
from entry_dns.fleet.entry_health import EntryHealthConfig
from entry_dns.links.config import Latencies, NetworksConfig, Probe
from entry_dns.links.updates import Publish
from farhop.config import ConfigError, Part, Seconds, Secret, rule
from farhop.service.config.region_connections import RegionConnections

if TYPE_CHECKING:
    from collections.abc import Iterator


def _domain(text: str) -> str:
    wire(text)
    return text.rstrip(".").lower()


def _address(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError:
        raise ValueError(f"{text[:64]!r} is no address; give one such as 192.0.2.53 or 2001:db8::53") from None


Address = Annotated[str, Field(max_length=64), AfterValidator(_address)]
Domain = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})$"), AfterValidator(_domain)]
Family = Literal["ipv4", "ipv6"]
_FAMILIES = {"ipv4": 4, "ipv6": 6}


class NameConfig(Part):
    """A name that clients ask for. `tenant`: the tenant whose *entry* scope applies to it; without one it is for all
    clients.

    `families`: the address families it has; leave one out if no entry has any. `alpn`: the protocols in its HTTPS
    record; []: no such record. `txt`: texts of its TXT record.
    """

    name: Domain
    tenant: Annotated[str, Field(max_length=63)] = ""
    families: Annotated[tuple[Family, ...], Field(min_length=1)] = ("ipv4", "ipv6")
    alpn: tuple[Annotated[str, Field(pattern=r"^[a-z0-9./-]{1,32}$")], ...] = ("http/1.1",)
    txt: tuple[Annotated[str, Field(min_length=1, max_length=255)], ...] = ()


class DnssecKey(Part):
    """A key of a zone in its `file` (ECDSA P-256, PEM). `role`: a ksk signs the keys, a zsk the records, a csk both.
    `stage`: a published or retired key is in the DNSKEY set and signs nothing."""

    file: Annotated[str, Field(min_length=1, max_length=4096)]
    role: Role = Role.CSK
    stage: Stage = Stage.ACTIVE


class ZoneConfig(Part):
    """A zone delegated to this server. `servers`: its name servers; `addresses`: of those inside the zone; `contact`:
    the responsible mailbox, with a dot for the @. `dnssec_key_file`: the only key that signs it; or `dnssec_keys`, if
    there are several or one is to be replaced."""

    zone: Domain
    names: Annotated[list[NameConfig], Field(min_length=1, max_length=4096)]
    servers: Annotated[list[Domain], Field(min_length=1, max_length=16)]
    addresses: Annotated[dict[Domain, list[Address]], Field(max_length=16)] = Field(default_factory=dict)
    contact: Domain = "hostmaster.invalid"
    negative_ttl_s: Annotated[int, Field(ge=1, le=3600)] = 30
    dnssec_key_file: str | None = None
    dnssec_keys: Annotated[list[DnssecKey], Field(max_length=KEYS_MAX)] = Field(default_factory=list)

    @rule
    def _one_way(self) -> Iterator[str]:
        if self.dnssec_key_file is not None and self.dnssec_keys:
            yield "dnssec_keys: dnssec_key_file is given, too; list its key among dnssec_keys"

    @rule
    def _own_servers(self) -> Iterator[str]:
        for host in self.addresses:
            if host not in self.servers:
                yield f"addresses: {host} is none of the servers; name it there, too, or leave it out"
            if not wire(host).endswith(wire(self.zone)):
                yield (
                    f"addresses: {host} lies outside of the zone, so its address stands in its own zone; leave it out"
                )

    def plan(self) -> ZonePlan:
        """The zone as `entry_dns.answers.zones` needs it."""
        names = tuple(
            NamePlan(one.name, one.tenant, tuple(_FAMILIES[f] for f in one.families), one.alpn, one.txt)
            for one in self.names
        )
        servers = tuple((host, tuple(self.addresses.get(host, ()))) for host in self.servers)
        return ZonePlan(self.zone, names, servers, self.contact, self.negative_ttl_s)

    def keys(self) -> tuple[KeyFile, ...]:
        """The keys that sign it, none for a zone that is not signed. Raises ConfigError."""
        one = self.dnssec_key_file
        field_path = "dnssec_keys" if one is None else "dnssec_key_file"
        listed = self.dnssec_keys if one is None else [DnssecKey(file=one)]
        found, made = [], []
        for key in listed:
            try:
                pem = Path(key.file).read_bytes()
                made.append(ZoneKey(pem, key.role, key.stage))
            except OSError as error:
                problem = f"{key.file}: {error.strerror}; give a readable file"
                raise ConfigError(f"zone {self.zone}: {field_path}", [problem]) from None
            except KeyFileError as error:
                raise ConfigError(f"zone {self.zone}: {field_path}", [f"{key.file}: {error}"]) from None
            found.append(KeyFile(pem, key.role, key.stage))
        try:
            if made:
                ZoneKeys(made)
        except KeyFileError as error:
            raise ConfigError(f"zone {self.zone}: {field_path}", [str(error)]) from None
        return tuple(found)


class DnsListen(Part):
    """The addresses and the port to listen on (UDP and TCP), and the number of worker processes for each address."""

    hosts: Annotated[list[Address], Field(min_length=1, max_length=16)] = Field(default_factory=lambda: ["127.0.0.1"])
    port: Annotated[int, Field(ge=0, le=65535)] = 53
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    tcp_connections_max: Annotated[int, Field(ge=1, le=100_000)] = 1000
    tcp_idle_s: Seconds = 10.0


class Rates(Part):
    """Rate limit of answers to a network (/24, /64) without a valid cookie. `per_s`: answers a second, 0 for no limit.

    Above the limit, every `slip`-th answer is truncated, so that the client retries over TCP; the others are dropped.
    """

    per_s: Annotated[int, Field(ge=0, le=65_535)] = 200
    slip: Annotated[int, Field(ge=0, le=100)] = 2


class Ttl(Part):
    """TTLs of answers, in seconds: `most` while entries are stable, `least` while any drains, returns or is
    uncertain.
    """

    least: Annotated[int, Field(ge=1, le=60)] = 5
    most: Annotated[int, Field(ge=5, le=60)] = 30

    @rule
    def _ordered(self) -> Iterator[str]:
        if self.least > self.most:
            yield "least: is above most; give it less"


class DnsConfig(RegionConnections):
    """A DNS server for entries. `cookie_secrets`: the same on all servers of an anycast address, the first makes
    cookies; without any, each process makes one up. `nsid`: the identifier of this server.
    `region_links`: regions' reports are followed over gRPC, too, wherever a balancer may be by `tier_tls`,
    `region_hosts` and `tier_insecure`; with certificates ours is that of a global balancer of this region.
    `entries_max`: in one answer. `publish`: where `farhop dns publish` keeps the same records."""

    listen: DnsListen = DnsListen()
    zones: Annotated[list[ZoneConfig], Field(min_length=1, max_length=256)]
    probe: Probe = Probe()
    networks: NetworksConfig = NetworksConfig()
    latencies: Latencies = Latencies()
    region_links: bool = True
    ttl: Ttl = Ttl()
    entries_max: Annotated[int, Field(ge=1, le=8)] = 3
    ramp_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    frozen_s: Seconds = 300.0
    shed_at: Annotated[float, Field(gt=0, lt=1)] = 0.9
    rates: Rates = Rates()
    cookie_secrets: Annotated[list[Secret], Field(max_length=4)] = Field(default_factory=list)
    nsid: Annotated[str, Field(pattern=r"^[!-~]{0,64}$")] = ""
    publish: Publish | None = None

    def health_config(self) -> EntryHealthConfig:
        """The settings by which entries' health is judged."""
        probe = self.probe
        return EntryHealthConfig(
            probe.every_s, probe.up_after, probe.down_after, self.ramp_s, self.frozen_s, shed_at=self.shed_at
        )

    def plans(self) -> list[ZonePlan]:
        """The configured zones, as plans."""
        return [zone.plan() for zone in self.zones]

    def ttls(self) -> Ttls:
        """The bounds of the answers' TTLs."""
        return Ttls(self.ttl.least, self.ttl.most)

    def cookies(self) -> list[bytes]:
        """The cookie secrets: 16 bytes each, derived by BLAKE2b from the configured texts."""
        return [blake2b(one.get_secret_value().encode(), digest_size=16).digest() for one in self.cookie_secrets]
