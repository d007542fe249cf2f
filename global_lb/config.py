"""The global balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from farhop.balance.machine import Address
from farhop.identity import names
from farhop.identity.hop import HopSigner
from farhop.shell.config import ConnectTls, Entry, Limits, Part, Process, Seconds, Session, is_loopback

ROUTES_MAX = 4096
# Each policy, and the options it takes: global_lb.policy reads them.
POLICIES: dict[str, tuple[str, ...]] = {
    "predictive": (),
    "nearest": (),
    "waterfall": ("fill_at",),
    "weighted": ("weights",),
    "failover": ("regions",),
    "consistent-hash": ("prefix_bytes",),
    "least-load": (),
}
_OPTIONS = {option for options in POLICIES.values() for option in options}


class Watch(Part):
    """How regions are watched. Seconds."""

    ping_s: Seconds = 1.0
    ping_timeout_s: Seconds = 0.5
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


Name = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]
RegionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class RouteConfig(Part):
    """Whose requests (`tenant`, `model`; without either: all), by which policy, and what modifies it.

    Regions are named as in the topology; what each field means is said in docs/policies.md.
    """

    tenant: Name | Literal[""] = ""
    model: Name | Literal[""] = ""
    policy: str = "predictive"
    weights: dict[RegionName, Annotated[float, Field(ge=0, le=1e6)]] = Field(default_factory=dict, max_length=1024)
    regions: Annotated[tuple[RegionName, ...], Field(max_length=1024)] = ()
    fill_at: Annotated[float, Field(gt=0, le=10)] = 0.8
    prefix_bytes: Annotated[int, Field(ge=256, le=4 * 1024 * 1024)] = 1024
    bias_ms: dict[RegionName, Annotated[float, Field(ge=-60_000, le=60_000)]] = Field(
        default_factory=dict, max_length=1024
    )
    foreign_quota: Annotated[float, Field(ge=0, le=1)] = 1.0
    affinity_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    canary: dict[RegionName, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict, max_length=64)
    canary_by: Literal["session", "tenant"] = "session"
    egress_usd_per_hour: Annotated[float, Field(ge=0, le=1e9)] | None = None
    usd_weight_ms: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    answer: Literal["proxy", "redirect"] = "proxy"
    redirect_bytes: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    advise: bool = True

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("policy", "predictive")
        if not isinstance(name, str) or name not in POLICIES:
            raise ValueError(f"no policy {str(name)[:64]!r}; known are {', '.join(POLICIES)}")
        for option in given:
            if option in _OPTIONS and option not in POLICIES[name]:
                takes = ", ".join(POLICIES[name]) or "none"
                raise ValueError(f"{option} is no option of policy {name}; its options: {takes}")
        return given

    @model_validator(mode="after")
    def _sound(self) -> RouteConfig:
        if self.policy == "failover" and not self.regions:
            raise ValueError("regions: give them in order, the active one first")
        if len(set(self.regions)) < len(self.regions):
            raise ValueError("regions: one stands twice; name each once")
        if self.policy == "weighted" and self.weights and not any(self.weights.values()):
            raise ValueError("weights: none is above 0; give some region a share, or leave them out")
        if sum(self.canary.values()) > 1.0 + 1e-9:
            raise ValueError(f"canary: the shares come to {sum(self.canary.values()):g}; at most 1")
        if self.redirect_bytes and self.answer != "redirect":
            raise ValueError("redirect_bytes: goes with `answer: redirect`; say both or neither")
        return self

    def named(self) -> set[str]:
        """The regions it names."""
        return {*self.weights, *self.regions, *self.bias_ms, *self.canary}


class TierTls(ConnectTls):
    """TLS to the regions' tier and control ports. Nothing that a region reports can turn it off.

    Their certificates must bear the region's name in the trust domain (farhop.identity.names), or `server_name`, where
    `{region}` stands for the region's: that of the host they advertise proves nothing, as they say themselves what it
    is. `plaintext_regions` do not speak TLS yet.
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


class OuterLimits(Limits):
    """As a region's (farhop.shell.config.Limits), but where its own limits must have had their say before ours.

    It may hold a request for `queue.wait_s` (30 s) and wait for `first_byte_s` (120 s) three times over, the first try
    and two more: 450 s. A whole answer and a pause get the region's limit and time for its word to come here.
    """

    first_byte_s: Seconds = 480.0
    whole_answer_s: Seconds = 630.0
    between_bytes_s: Seconds = 75.0


class GlobalConfig(Process):
    """One global balancer. `trie_bytes` is the prompt text mirrored per region, not memory.

    `proxies` gives, by region, the HTTP proxy (CONNECT) through which its balancers are reached; others directly.
    Without `tier_tls` regions are reached on loopback, where `region_hosts` (host names, `*.name`, networks) says that
    they are, or, with `tier_insecure`, wherever a report says.
    Of the `routes` the narrowest that matches a request decides, whole; without any the policy is predictive.
    """

    limits: OuterLimits = OuterLimits()
    listen: Entry
    watch: Watch = Watch()
    spill: Spill = Spill()
    proxies: dict[str, Proxy] = Field(default_factory=dict)
    tier_tls: TierTls | None = None
    tier_insecure: bool = False
    region_hosts: dict[RegionName, Annotated[tuple[HostPattern, ...], Field(min_length=1, max_length=64)]] = Field(
        default_factory=dict, max_length=1024
    )
    trie_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 256 * 1024 * 1024
    routes: Annotated[list[RouteConfig], Field(max_length=ROUTES_MAX)] = Field(default_factory=list)
    session: Session = Session()

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
        return names.host(self.trust_domain, "regional", region)

    def allows(self, region: str, host: str) -> bool:
        """Whether a balancer of that region may be where a report of it says.

        Where `region_hosts` says where they are, there; else anywhere if its certificate must say that it is one.
        """
        places = self.region_hosts.get(region)
        if places is not None:
            return any(_matches(host, place) for place in places)
        return self.certified_name(region) is not None or self.tier_insecure or is_loopback(host)

    def mutual(self, region: str) -> bool:
        """Whether a region's balancers and we prove to each other by TLS who we are."""
        tls = self.tier_tls
        return tls is not None and tls.cert_file is not None and region not in tls.plaintext_regions

    @model_validator(mode="after")
    def _signs(self) -> GlobalConfig:
        HopSigner(self.hop.secrets(), self.hop.active, self.region)
        return self

    @property
    def balancer(self) -> str:
        """The name under which regions count what this balancer sends: unlike `instance`, unique in the fleet."""
        return f"{self.region}/{self.instance}"
