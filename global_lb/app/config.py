"""The global balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from farhop.config import ConfigError, Seconds
from farhop.identity.hop_token import HopSigner
from farhop.service.config import Entry, Limits, Session
from global_lb.fleet.regions import Spill
from global_lb.links.config import LinksConfig
from global_lb.routing.policy import ROUTES_MAX, RouteConfig, RouteScope, routes_of

if TYPE_CHECKING:
    from topology.model import Topology


class OuterLimits(Limits):
    """As a region's (farhop.service.config.Limits), but where its own limits must have had their say before ours.

    It may hold a request for `queue.wait_s` (30 s) and wait for `first_byte_s` (120 s) three times over, the first try
    and two more: 450 s. A whole answer and a pause get the region's limit and time for its answer to come here.
    """

    first_byte_s: Seconds = 480.0
    whole_answer_s: Seconds = 630.0
    between_bytes_s: Seconds = 75.0


class GlobalConfig(LinksConfig):
    """One global balancer. `trie_bytes` is the prompt text mirrored per region, not memory.

    Of the `routes` the narrowest that matches a request decides, whole; without any the policy is predictive.
    """

    limits: OuterLimits = OuterLimits()
    listen: Entry
    spill: Spill = Spill()
    trie_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 256 * 1024 * 1024
    routes: Annotated[list[RouteConfig], Field(max_length=ROUTES_MAX)] = Field(default_factory=list)
    session: Session = Session()

    def routes_in(self, topology: Topology) -> dict[RouteScope, RouteConfig]:
        """The routes by their scope. Raises ConfigError where they do not go with this map."""
        try:
            return routes_of(self.routes, topology.regions)
        except ValueError as error:
            raise ConfigError("configuration", [str(error)]) from None

    def signer_in(self, topology: Topology) -> HopSigner:
        """Who signs hop tokens. Raises ConfigError where a region of this map could not be sent to."""
        signer = HopSigner(self.hop.secrets(), self.hop.active, self.region)
        if lacking := [name for name in sorted(topology.regions) if not signer.reaches(name)]:
            remedy = f"derive it anew with: farhop certs hop-key --from {self.region}"
            raise ConfigError("hop.keys", [f"the active key does not reach {', '.join(lacking[:8])}; {remedy}"])
        return signer

    @model_validator(mode="after")
    def _signs(self) -> GlobalConfig:
        HopSigner(self.hop.secrets(), self.hop.active, self.region)
        return self
