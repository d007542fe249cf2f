"""One global balancer's links to the regions in virtual time: reports, prefixes and pings.

The counterpart of global_lb.links.watch and .link, with their functions and constants: reports come as over gRPC, from
etcd only when the process starts, and only pings are sent on demand. Invariants: an older report never overwrites a
newer one; no clock is compared with another's. Never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from farhop.balance.health.inquiry import ASKED_MAX
from farhop.balance.machine import Address
from farhop_lab.sim.prefix_streams import PrefixSubscription
from global_lb.fleet.distances import Distances, moved
from global_lb.fleet.view import ChannelChanged, Region, RegionKnown, RegionReported, instance_of
from global_lb.links.link import AGAIN, HURRY, PINGS_LOST, SilentAttempt, apply_quiet_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from farhop.balance.machine import Event
    from farhop.store.documents.report import RegionReport
    from farhop_lab.sim.context import SimContext
    from farhop_lab.sim.region import RegionProcess
    from global_lb.fleet.view import Instance
    from global_lb.links.prefix_streams import Prefixes


class SentAttempt(SilentAttempt, Protocol):
    """An attempt under way at a region; it depends on the state of the channel."""

    @property
    def quiet(self) -> bool:
        """Whether it has been silent for so long that the region is to be asked about it."""

    def path_broke(self) -> None:
        """The channel to its region broke."""


_Inquiry: TypeAlias = "tuple[Sequence[SentAttempt], Sequence[int], float, float]"
"""The attempts asked about, the region's answer, the time of asking, the round trip in seconds."""


class RegionLinks:
    """See the module's head. `react` takes events; `clock` is the balancer's; `prefixes` None: no prefix streams.
    `hops` returns the attempts under way at a region.
    """

    def __init__(
        self,
        context: SimContext,
        here: str,
        balancer: str,
        regions: Mapping[str, RegionProcess],
        react: Callable[[Event], None],
        clock: Callable[[], float],
        rng: Random,
        prefixes: Prefixes | None = None,
        hops: Callable[[str], Sequence[SentAttempt]] = lambda _region: (),
    ) -> None:
        self._hops = hops
        self._context, self._here, self._balancer, self._regions = context, here, balancer, regions
        self._react, self._clock, self._rng = react, clock, rng
        self.distances = Distances(context.topology, here)
        self.reports: dict[str, tuple[RegionReport, float]] = {}
        self._prefixes, self.subscriptions = prefixes, dict[str, PrefixSubscription]()
        self._instances: dict[str, Instance] = {}  # by region: computed once per report
        self._given_ms: dict[str, float] = {}  # by region, the round-trip time that the machine was told
        self.channel_up: dict[str, bool] = {}
        self.lost: dict[str, int] = {}
        self._over = False

    def close(self) -> None:
        """The process is gone: nothing arrives any more."""
        self._over = True
        for subscription in self.subscriptions.values():
            subscription.close()

    # -- reports

    def on_report(self, report: RegionReport) -> None:
        """Take a report if it is newer than the present one, and swap the view."""
        if self._over:
            return
        region, now = report.region, self._clock()
        known = self.reports.get(region)
        if known is not None and (known[0].incarnation, known[0].seq) >= (report.incarnation, report.seq):
            return
        self.reports[region] = (report, now)
        offset_ms = self.distances.offset_ms((region, report.instance), report.incarnation)
        self._instances[region] = instance_of(report, Address(region, 1), now, offset_ms, self._balancer)
        if known is None:
            self.lost[region] = PINGS_LOST
            self._ping(region)
            if self._prefixes is not None:
                self.subscriptions[region] = PrefixSubscription(
                    self._context, self._here, self._balancer, self._regions[region], self._prefixes, self._clock
                )
        renewed = known is None or known[0].incarnation < report.incarnation
        self._react(RegionReported(region, renewed, self._region(region)))

    def _region(self, name: str) -> Region:
        rtt_ms = self._given_ms[name] = self.distances.rtt_ms(name, self._clock())
        return Region(name, rtt_ms, (self._instances[name],))

    # -- pings

    def _ping(self, region: str) -> None:
        """The result is computed now, and arrives a round trip or a timeout later."""
        if self._over:
            return
        context, watching, there = self._context, self._context.watching, self._regions[region]
        sent_at = self._clock()
        if context.wire.frozen_since(self._here, region) is not None:
            context.timeline.after(watching.ping_timeout_s, self._no_pong, region)
            return
        rtt_s = context.wire.rtt_ms(self._here, region) / 1e3 * (1.0 + watching.ping_jitter * self._rng.random())
        if there.alive:
            # The region's clock when the ping arrives.
            clock_ms = (there.relay.clock() + rtt_s / 2.0) * 1e3
            asked = [hop for hop in self._hops(region) if hop.quiet][:ASKED_MAX]
            quiet_ms = there.reporter.quiet_ms(self._balancer, [hop.id for hop in asked])
            inquiry = (asked, quiet_ms, context.timeline.now, rtt_s)
            context.timeline.after(rtt_s, self._pong, region, there.incarnation, clock_ms, sent_at, inquiry)
        else:
            context.timeline.after(rtt_s, self._no_pong, region)

    def _pong(self, region: str, incarnation: int, clock_ms: float, sent_at: float, inquiry: _Inquiry) -> None:
        if self.lost[region] == 0:
            name = (region, self.reports[region][0].instance)
            if not self.distances.pinged(name, incarnation, clock_ms, sent_at, self._clock()):
                self._context.journal.violated(f"{self._balancer}: an absurd ping of {region}")
            given_ms = self._given_ms[region]
            if moved(given_ms, self.distances.rtt_ms(region, self._clock())):
                self._react(RegionKnown(region, self._region(region)))
        self.lost[region] = 0
        self._channel(region, True)
        apply_quiet_ms(*inquiry)
        self._again(region)

    def _no_pong(self, region: str) -> None:
        self.lost[region] += 1
        if self.lost[region] >= PINGS_LOST:
            self._channel(region, False)
        self._again(region)

    def _again(self, region: str) -> None:
        lost = self.lost[region]
        soon = HURRY if lost or self.distances.moving(region) else 1.0
        if 0 < lost < PINGS_LOST:
            soon = AGAIN
        jitter = 0.8 + 0.4 * self._rng.random()
        self._context.timeline.after(self._context.watching.ping_s * jitter * soon, self._ping, region)

    @property
    def caught_up(self) -> bool:
        """As in global_lb.links.watch: whether everything has arrived that connected regions have sent by now."""
        ups = [self.channel_up.get(region) for region in self.reports]
        return (
            bool(ups)
            and None not in ups
            and all(
                self._prefixes is None or self._prefixes.state(region) == "connected"
                for region, up in self.channel_up.items()
                if up
            )
        )

    def path_is_broken(self, region: str) -> bool:
        """Whether its channel was up and is broken now."""
        return self.channel_up.get(region) is False

    def _channel(self, region: str, up: bool) -> None:
        if self.channel_up.get(region) != up and not self._over:
            self.channel_up[region] = up
            for hop in () if up else self._hops(region):
                hop.path_broke()
            self._react(ChannelChanged(region, up, self._region(region)))
