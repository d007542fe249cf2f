"""The configuration of connections to regions: how they are reached and authenticated. Never opens anything.

Used by all that follow regions: global balancers and DNS servers. A region's report cannot loosen any of it.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from farhop.balance.machine import Address
from farhop.identity import certificate_names
from farhop.service.config.endpoints import ConnectTls, is_loopback
from farhop.service.config.process import Member

RegionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class TierTls(ConnectTls):
    """TLS to the regions' tier and control ports. Nothing that a region reports can turn it off.

    Their certificates must bear the region's name in the trust domain (farhop.identity.certificate_names), or
    `server_name`, where `{region}` is replaced by the region's name. The name of the host they advertise proves
    nothing, as they choose it themselves. `plaintext_regions` do not speak TLS yet.
    """

    ca_file: str
    server_name: Annotated[str, Field(pattern=r"^([A-Za-z0-9_.\-]|\{region\})+$")] | None = None
    plaintext_regions: list[str] = Field(default_factory=list)

    @field_validator("server_name")
    @classmethod
    def _of_one_region(cls, name: str | None) -> str | None:
        if name is not None and "{region}" not in name:
            raise ValueError("must hold {region}: else any region's certificate would do for any other's prompts")
        return name


Proxy = Annotated[str, Field(pattern=r"^http://[A-Za-z0-9.\-]+:[0-9]{1,5}$")]


def _sound_place(place: str) -> str:
    if "/" in place:
        ip_network(place)
    return place.lower()


HostPattern = Annotated[str, Field(pattern=r"^(\*\.)?[A-Za-z0-9:._/-]{1,253}$"), AfterValidator(_sound_place)]


def _matches(host: str, place: str) -> bool:
    """Whether a host is the one named, is below `*.name`, or is an address in the network."""
    host = host.lower()
    if place.startswith("*."):
        return host.endswith(place[1:]) and len(host) > len(place) - 1
    if "/" not in place:
        return host == place
    try:
        return ip_address(host) in ip_network(place)
    except ValueError:
        return False


class RegionConnections(Member):
    """A process that connects to regions' balancers.

    `proxies` gives, by region, the HTTP proxy (CONNECT) through which its balancers are reached; others directly.
    Without `tier_tls` regions are reached on loopback, where `region_hosts` (host names, `*.name`, networks) says that
    they are, or, with `tier_insecure`, wherever a report says.
    """

    proxies: dict[str, Proxy] = Field(default_factory=dict)
    tier_tls: TierTls | None = None
    tier_insecure: bool = False
    region_hosts: dict[RegionName, Annotated[tuple[HostPattern, ...], Field(min_length=1, max_length=64)]] = Field(
        default_factory=dict, max_length=1024
    )

    def proxy(self, region: str) -> Address | None:
        """The proxy on the way to a region, if there is one."""
        url = self.proxies.get(region)
        if url is None:
            return None
        host, _, port = url.removeprefix("http://").rpartition(":")
        return Address(host, int(port))

    def certified_name(self, region: str) -> str | None:
        """The name that the certificates of a region's balancers must bear; None if it speaks plaintext."""
        tls = self.tier_tls
        if tls is None or region in tls.plaintext_regions:
            return None
        if tls.server_name is not None:
            return tls.server_name.replace("{region}", region)
        return certificate_names.host(self.trust_domain, "regional", region)

    def allows(self, region: str, host: str) -> bool:
        """Whether a balancer of that region may be at the address that its report gives.

        Only within `region_hosts`, if these are given; else anywhere, if its certificate must name the region.
        """
        places = self.region_hosts.get(region)
        if places is not None:
            return any(_matches(host, place) for place in places)
        return self.certified_name(region) is not None or self.tier_insecure or is_loopback(host)

    def mutual(self, region: str) -> bool:
        """Whether a region's balancers and we authenticate each other by TLS."""
        tls = self.tier_tls
        return tls is not None and tls.cert_file is not None and region not in tls.plaintext_regions

    @property
    def balancer(self) -> str:
        """The name under which regions count what this balancer sends: unlike `instance`, unique in the fleet."""
        return f"{self.region}/{self.instance}"
