"""How a request is answered: its answer is relayed, or its client is sent to the region itself.

No report acknowledges a redirected request to this balancer, since the client brings it to the region. So it counts as
sent here for REDIRECTED_S, until the region's next reports show it, whether the client went there or not. Invariants:
no client is sent to a region that the law does not allow to read the body first, nor to one that cannot lend of its
tenant's limits, nor from TLS to plain HTTP; each redirect counts for a while, and at most REDIRECTED_MAX do. Never
signs and never opens anything.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from farhop.balance import machine, outcome
from global_lb.routing import admission

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.balance.estimate.unacknowledged import UnacknowledgedLoad
    from farhop.balance.machine import Redirect, Request
    from global_lb.fleet.regions import Regions
    from global_lb.fleet.view import Instance
    from global_lb.routing.pick import Decision
    from global_lb.routing.policy import RouteConfig
    from topology.law import Law

REDIRECTED_S = 2.0  # a round trip of the client's, and the second within which every region reports
REDIRECTED_MAX = 65_536
_CHARGES = 3  # a region that reads hop tokens of this version charges redirected clients


class Redirects:
    """See the module's docstring. `homes`: for each tenant with limits, the region that lends them; set by what follows
    the limits.
    """

    __slots__ = ("_https_only", "_redirected", "homes")

    def __init__(self, *, https_only: bool) -> None:
        self._https_only = https_only
        self.homes: Mapping[str, str] = {}
        self._redirected: deque[tuple[float, str, UnacknowledgedLoad, float]] = deque()  # until when, where, bytes

    def to_own_name(self, request: Request, route: RouteConfig, url: str) -> Redirect | None:
        """Redirect the client of a long stream to the entry's own name, where a change of BGP routes cannot break the
        stream."""
        least = route.unicast_tokens
        if not url or least is None or not (request.by_anycast and request.stream):
            return None
        if request.max_tokens is not None and request.max_tokens < least:
            return None
        return machine.Redirect(request.id, url, outcome.REDIRECTED, own=True)

    def redirects(self, request: Request, decision: Decision, instance: Instance, law: Law) -> bool:
        """Whether the client is to ask the instance itself. Never by a name that regions do not know."""
        config = decision.route.config
        if config.answer != "redirect" or request.body_bytes < config.redirect_bytes or request.alias:
            return False
        return self.open_to(request.tenant, instance, law)

    def open_to(self, tenant: str, instance: Instance, law: Law) -> bool:
        """Whether a client of this tenant may come to the instance by a token."""
        url = instance.client_url
        if not url or (self._https_only and not url.startswith("https:")):
            return False
        home = self.homes.get(tenant)
        if home is not None and (home != instance.region or instance.hop_version < _CHARGES):
            return False  # it charges such clients from what its own region lends, or (older builds) not at all
        return admission.may_read(tenant, instance.region, law)

    def redirect(
        self,
        request: Request,
        decision: Decision,
        instance: Instance,
        lawful: frozenset[str],
        regions: Regions,
        now: float,
    ) -> Redirect:
        """The command to redirect. The load that it sends to the region counts there for a while."""
        chosen = decision.chosen
        assert chosen is not None
        self.expire(regions, now)
        if len(self._redirected) < REDIRECTED_MAX:
            load = regions.load_of(instance)
            load.sent(request.prompt_bytes)
            self._redirected.append((now + REDIRECTED_S, instance.region, load, request.prompt_bytes))
        forward = machine.Forward(request.id, 1, chosen.region, instance.tier, chosen.bare_ttft_ms, lawful, decision)
        return machine.Redirect(request.id, instance.client_url, outcome.REDIRECTED, forward)

    def expire(self, regions: Regions, now: float) -> None:
        """Stop counting redirects whose time is over."""
        redirected = self._redirected
        while redirected and redirected[0][0] <= now:
            _, region, load, n_bytes = redirected.popleft()
            load.came_back(n_bytes)
            regions.load_changed(region)
