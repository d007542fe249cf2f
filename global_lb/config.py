"""The global balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from farhop.balance.machine import Address
from farhop.shell.config import ConnectTls, Entry, Part, Process, Seconds


class Watch(Part):
    """How regions are watched. Seconds."""

    ping_s: Seconds = 1.0
    ping_timeout_s: Seconds = 1.0
    report_age_s: Seconds = 3.0


class Spill(Part):
    """When a region is hot (shares of its use, seconds), how fast it is come back to, and what both cost its score."""

    at: Annotated[float, Field(gt=0, le=10)] = 0.90
    return_at: Annotated[float, Field(gt=0, le=10)] = 0.75
    hold_s: Annotated[float, Field(ge=0, le=3600)] = 2.0
    ramp_per_s: Annotated[float, Field(gt=0, le=1000)] = 0.05
    penalty_ms: Annotated[float, Field(ge=0, le=60_000)] = 300.0

    @model_validator(mode="after")
    def _apart(self) -> Spill:
        if self.return_at >= self.at:
            raise ValueError(f"return_at {self.return_at} must be below at {self.at}")
        return self


class TierTls(ConnectTls):
    """TLS to the regions' tier and control ports. Nothing that a region reports can turn it off.

    `server_name` is the name their certificates must bear instead of the host they advertise; `{region}` stands for
    the region's. `plaintext_regions` do not speak TLS yet.
    """

    ca_file: str
    server_name: Annotated[str, Field(pattern=r"^([A-Za-z0-9_.\-]|\{region\})+$")] | None = None
    plaintext_regions: list[str] = Field(default_factory=list)


Proxy = Annotated[str, Field(pattern=r"^http://[A-Za-z0-9.\-]+:[0-9]{1,5}$")]


class GlobalConfig(Process):
    """One global balancer. `trie_bytes` is the prompt text mirrored per region, not memory.

    `proxies` gives, by region, the HTTP proxy (CONNECT) through which its balancers are reached; others directly.
    """

    listen: Entry
    watch: Watch = Watch()
    spill: Spill = Spill()
    proxies: dict[str, Proxy] = Field(default_factory=dict)
    tier_tls: TierTls | None = None
    trie_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 256 * 1024 * 1024

    def proxy(self, region: str) -> Address | None:
        """The proxy on the way to a region, if there is one."""
        url = self.proxies.get(region)
        if url is None:
            return None
        host, _, port = url.removeprefix("http://").rpartition(":")
        return Address(host, int(port))

    def certified_name(self, region: str, host: str) -> str | None:
        """The name that the certificates of a region's balancer at `host` must bear; None if it speaks plaintext."""
        tls = self.tier_tls
        if tls is None or region in tls.plaintext_regions:
            return None
        return tls.server_name.replace("{region}", region) if tls.server_name is not None else host

    @property
    def balancer(self) -> str:
        """The name under which regions count what this balancer sends: unlike `instance`, unique in the fleet."""
        return f"{self.region}/{self.instance}"
