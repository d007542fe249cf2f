"""The global balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field

from farhop.balance.health.pilot_light import PilotConfig
from farhop.config import ConfigError, Part, Seconds, rule
from farhop.identity.hop_keys import HopError
from farhop.identity.hop_token import HopSigner
from farhop.service.config.process import ClientListen, Limits, ResumeConfig, SessionConfig
from global_lb.app.drills import DrillsConfig
from global_lb.fleet.regions import Spill
from global_lb.links.config import LinksConfig
from global_lb.links.latencies import ClientLatencies
from global_lb.routing.policy import ROUTES_MAX, RouteConfig, RouteScope, routes_of
from global_lb.routing.policy.route import RegionName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.model import Topology


IpAddress = Annotated[str, AfterValidator(lambda text: str(ip_address(text)))]


class OuterLimits(Limits):
    """As a region's (farhop.service.config.process.Limits), but longer where its own limits must apply before these.

    A region may hold a request for `queue.wait_s` (30 s) and wait for `first_byte_s` (120 s) three times, the first try
    and two more: 450 s. A whole answer and a pause get the region's limit and time for its answer to come here.
    """

    first_byte_s: Seconds = 480.0
    whole_answer_s: Seconds = 630.0
    between_bytes_s: Seconds = 75.0


class PilotLightConfig(Part):
    """A region kept small and without traffic until others cannot carry the load. `sleep_after_s`: for how long they
    must be able to again before it sleeps."""

    sleep_after_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0


class Unicast(Part):
    """How clients reach just this process, and which of its addresses others announce, too (anycast).

    `url` is http(s)://host[:port], of this process and no other: a redirect brings a token that only it knows.
    """

    url: Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\-\[\]:]+$", max_length=512)]
    anycast: Annotated[list[IpAddress], Field(min_length=1, max_length=64)]


class GlobalConfig(LinksConfig):
    """One global balancer. `trie_bytes` is the prompt text mirrored per region, not memory. `pilot_light`: regions of
    that mode; give every global balancer the same.

    Of the `routes` the narrowest that matches a request decides, whole; without any the policy is predictive.
    `client_latencies`: how far clients' networks are is measured and published for `farhop dns`; left out, it is not.
    `drills`: run those that are on the schedule, by whichever balancer holds the lock; left out, this one runs none.
    `answers_bytes`: the most memory for answers that routes reuse (`keep_answers_s`, `coalesce`).
    """

    elsewhere: ClassVar = {
        **LinksConfig.elsewhere,
        **dict.fromkeys(("tier", "control", "replicas", "discovery"), "a regional balancer's (farhop regional)"),
    }

    limits: OuterLimits = OuterLimits()
    listen: ClientListen
    spill: Spill = Spill()
    pilot_light: dict[RegionName, PilotLightConfig] = Field(default_factory=dict, max_length=1024)
    trie_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 256 * 1024 * 1024
    routes: Annotated[list[RouteConfig], Field(max_length=ROUTES_MAX)] = Field(default_factory=list)
    session: SessionConfig = SessionConfig()
    resume: ResumeConfig = ResumeConfig()
    unicast: Unicast | None = None
    client_latencies: ClientLatencies | None = None
    drills: DrillsConfig | None = None
    answers_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 64 * 1024 * 1024

    def routes_in(self, topology: Topology) -> dict[RouteScope, RouteConfig]:
        """The routes by their scope. Raises ConfigError if they do not fit this map."""
        try:
            return routes_of(self.routes, topology.regions)
        except ValueError as error:
            raise ConfigError("configuration", [str(error)]) from None

    def pilots_in(self, topology: Topology) -> dict[str, PilotConfig]:
        """The pilot-light regions. Raises ConfigError if they do not fit this map."""
        if unknown := sorted(self.pilot_light.keys() - topology.regions.keys()):
            known = ", ".join(sorted(topology.regions)[:8])
            raise ConfigError("pilot_light", [f"no region {unknown[0]!r} in the topology; known are {known}"])
        if topology.regions.keys() <= self.pilot_light.keys():
            raise ConfigError("pilot_light", ["every region is one; leave out those that are to serve all the time"])
        return {name: PilotConfig(sleep_after_s=one.sleep_after_s) for name, one in self.pilot_light.items()}

    def signer_in(self, topology: Topology) -> HopSigner:
        """The signer of hop tokens. Raises ConfigError if a region of this map would have no key."""
        signer = HopSigner(self.hop.secrets(), self.hop.active, self.region)
        if lacking := [name for name in sorted(topology.regions) if not signer.reaches(name)]:
            remedy = f"derive it again with: farhop certs hop-key --from {self.region}"
            raise ConfigError("hop.keys", [f"the active key does not reach {', '.join(lacking[:8])}; {remedy}"])
        return signer

    @rule
    def _known(self) -> None:
        self.identity.check_entry("listen", self.listen)

    @rule
    def _signs(self) -> Iterator[str]:
        try:
            HopSigner(self.hop.secrets(), self.hop.active, self.region)
        except HopError as error:
            yield f"hop: {error}"

    @rule
    def _reached(self) -> Iterator[str]:
        unicast = self.unicast
        if unicast is None and any(one.unicast_tokens is not None for one in self.routes):
            yield "unicast: is not given, and a route has unicast_tokens; say how this process is reached"
        if unicast is not None and self.listen.tls is not None and not unicast.url.startswith("https:"):
            yield "unicast.url: is http, and clients come by TLS; give the https URL"
        if unicast is not None and self.listen.reuse_port:
            yield "unicast: with listen.reuse_port it would lead to any of several processes; leave one out"
