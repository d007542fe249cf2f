"""How a request is answered: its answer is relayed, or its client is sent to the region itself (docs/answering.md).

What was redirected no report acknowledges to us, as the client brings it: until the region's next reports show it, it
counts here as sent (PLEDGED_S), and then no more, whether the client went there or not.
Invariants: nobody is sent where the law would not let the body be read first, nor from TLS to less; every pledge ends,
and there are at most PLEDGES_MAX. Never signs and never opens anything.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from farhop.balance import machine, outcome
from global_lb import admission

if TYPE_CHECKING:
    from farhop.balance.machine import Redirect, Request
    from farhop.balance.reckoning import Reckoning
    from global_lb.fleet import Regions
    from global_lb.pick import Decision
    from global_lb.view import Instance
    from topology.law import Law

PLEDGED_S = 2.0  # a round trip of the client's, and the second within which every region reports
PLEDGES_MAX = 65_536


class Answering:
    """See the module's head."""

    __slots__ = ("_https_only", "_pledges")

    def __init__(self, *, https_only: bool) -> None:
        self._https_only = https_only
        self._pledges: deque[tuple[float, str, Reckoning, float]] = deque()  # until when, where, bytes

    def redirects(self, request: Request, decision: Decision, instance: Instance, law: Law) -> bool:
        """Whether the client is to ask the instance itself."""
        route = decision.rule.route
        if route.answer != "redirect" or request.body_bytes < route.redirect_bytes:
            return False
        return self.open_to(request.tenant, instance, law)

    def open_to(self, tenant: str, instance: Instance, law: Law) -> bool:
        """Whether a client of this tenant may come to the instance by a token."""
        url = instance.client_url
        if not url or (self._https_only and not url.startswith("https:")):
            return False
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
        """The command; what it sends there is pledged."""
        chosen = decision.chosen
        assert chosen is not None
        self.settle(regions, now)
        if len(self._pledges) < PLEDGES_MAX:
            reckoning = regions.reckoning_of(instance)
            reckoning.sent(request.prompt_bytes)
            self._pledges.append((now + PLEDGED_S, instance.region, reckoning, request.prompt_bytes))
        forward = machine.Forward(request.id, 1, chosen.region, instance.tier, chosen.ttft_ms, lawful, decision)
        return machine.Redirect(request.id, instance.client_url, outcome.REDIRECTED, forward)

    def settle(self, regions: Regions, now: float) -> None:
        """Pledges that are over count no more."""
        pledges = self._pledges
        while pledges and pledges[0][0] <= now:
            _, region, reckoning, n_bytes = pledges.popleft()
            reckoning.came_back(n_bytes)
            regions.settled(region)
