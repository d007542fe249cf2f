"""Watches the regions: their reports in every hub, and a gRPC link to each balancer that reported.

An event concerns one region alone: a report costs the same however many regions there are.

Reports are merged by (region, instance, incarnation, seq), never by a clock, whichever path they came by. Invariants: a
report that is invalid, of an unknown region or under another's key is dropped and counted; a key's presence is not
liveness and its deletion is not death; when hubs are gone the last view stays and the links carry on; an incarnation is
replaced by an earlier one only if it is silent and the earlier one continues (a clock set back between two starts), and
a report by those of a lower number only if these continue for long (its instance never wrote the higher one). Never
decides.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import grpc
import msgspec
from farhop_wire import region_pb2

from farhop.balance.estimate.estimates import ENTRIES_MAX
from farhop.balance.machine import Address
from farhop.balance.prefix.trie import PrefixTrie
from farhop.service.assembly.region_channel import address_of
from farhop.service.config.endpoints import host_of, is_loopback
from farhop.service.process.tasks import Tasks, in_turns
from farhop.store.contract import REGION_INSTANCES_MAX, report_key
from farhop.store.documents.document import DocumentError
from farhop.store.documents.report import TEXT_LIMIT, from_wire
from farhop.store.hubs import stores_of
from global_lb.fleet.distances import Distances, moved
from global_lb.fleet.view import (
    ChannelChanged,
    Instance,
    OutputsReported,
    Region,
    RegionKnown,
    RegionReported,
    instance_of,
)  # fmt: skip
from global_lb.links.drains import Drains
from global_lb.links.hubs import Hub
from global_lb.links.link import GONE, BalancerLink, SilentAttempt
from global_lb.links.prefix_streams import CONFIRM_S, Prefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from farhop.balance.machine import Event
    from farhop.service.config.certificates import Certificates
    from farhop.service.law.lawbook import LawBook
    from farhop.store.contract import Store
    from farhop.store.documents.report import RegionReport
    from global_lb.links.config import LinksConfig
    from topology.model import Topology

FORGET_S = 60.0  # an instance silent for this long, and gone from every hub, is forgotten
INSTANCES_MAX = 1024


class Upstreams(Protocol):
    """The sender of requests to the balancers: the relay."""

    def channel(self, address: Address, up: bool) -> None:
        """The gRPC channel to the balancer with this tier listener broke, or works again."""
        ...

    def quiet(self, address: Address) -> Sequence[SilentAttempt]:
        """The silent attempts at this address."""
        ...

    def in_use(self, address: Address, within_s: float) -> bool:
        """Whether requests are in progress there, or were within the last `within_s` seconds."""
        ...


class RegionWatcher:
    """Keeps the view. `react` takes events; `refused` counts refused reports, by reason.

    `certificates` are for the links to regions that speak TLS; `trouble` is called with where that fails, and why;
    `upstreams`, to which balancer a channel broke or works again, and what is said of attempts there.
    """

    def __init__(
        self,
        config: LinksConfig,
        topology: Topology,
        store: Store,
        *,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        rng: Random,
        prefixes: Prefixes | None = None,
        certificates: Certificates | None = None,
        trouble: Callable[[Address, str], None] = lambda _address, _why: None,
        upstreams: Upstreams | None = None,
        laws: LawBook | None = None,
    ) -> None:
        self.upstreams, self.laws = upstreams, laws
        self.certificates, self._trouble = certificates, trouble
        if certificates is not None:
            certificates.changed = self._relink
        self.config, self._topology, self._store = config, topology, store
        self.prefixes = prefixes if prefixes is not None else Prefixes(PrefixTrie(), refused)
        self._react, self._refused, self._clock, self._rng = react, refused, clock, rng
        self._reports: dict[tuple[str, str], tuple[RegionReport, float]] = {}
        self._instances: dict[str, dict[str, Instance]] = {}  # by region and name: made once of each report
        self._tiers: dict[tuple[str, str], Address] = {}
        self._balancer = config.balancer
        self._known_ms: dict[str, float] = {}  # by region, the round-trip time that the machine knows
        self.links: dict[tuple[str, str], BalancerLink] = {}  # to each balancer of each region, by both names
        self._up: dict[tuple[str, str], bool] = {}
        # Of reports older than the one known: the greatest (incarnation, seq), and since when such reports come.
        self._late: dict[tuple[str, str], tuple[tuple[int, int], float]] = {}
        self._tasks = Tasks()
        self.retired = Tasks()
        # By instance, where redirected clients find it as it said itself, proven by its certificate.
        self._client_urls: dict[tuple[str, str], str] = {}
        self._signed = config.signing.made().asks(report_key(config.region, config.instance))
        self._closed = False
        self._following: list[asyncio.Task[None]] = []
        self.distances = Distances(topology, config.region)
        self.drains = Drains(store, topology.regions, react, refused, clock)
        hubs = stores_of(store, topology.regions[config.region].hub)
        self.hubs = tuple(
            Hub(name, one, self.on_report, refused, clock, self.on_report_from_disk) for name, one in hubs.items()
        )

    @property
    def store_trouble(self) -> str | None:
        """Which hubs are out of contact, and why; None if all are in contact."""
        lost = [(hub.name, hub.trouble) for hub in self.hubs if hub.trouble is not None]
        if len(self.hubs) == 1:
            return lost[0][1] if lost else None
        return "; ".join(f"hub {name}: {why}" for name, why in lost) or None

    @property
    def listed(self) -> set[tuple[str, str]]:
        return set().union(*(hub.listed for hub in self.hubs))

    async def open(self) -> None:
        """Begin to watch."""
        self._follow()
        self._tasks.start(self._tidy(), "forget what is gone")
        self._tasks.start(self._tidy_prefixes(), "forget prefixes that are gone")

    async def close(self) -> None:
        """Stop watching."""
        self._closed = True
        await self._tasks.close()
        for link in self.links.values():
            self._retire(link)
        await self.retired.join()

    def _retire(self, link: BalancerLink) -> None:
        """Close a link without waiting for it."""
        self.retired.start(link.close(), f"close the link to {link.address}")

    # -- what is gone

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(FORGET_S / 10.0)
            self.forget()

    async def _tidy_prefixes(self) -> None:
        while True:
            await asyncio.sleep(CONFIRM_S)
            await in_turns(self.prefixes.tidy(self._clock()))

    def forget(self) -> None:
        """Drop instances that are gone from every hub and silent; a link that still speaks keeps one alive."""
        now, listed = self._clock(), self.listed
        gone = [
            name
            for name, (_, received_at) in self._reports.items()
            if name not in listed and now - received_at > FORGET_S
        ]
        for name in gone:
            self._drop(name)
        # Time alone makes instances silent, too: of one of several it shows with the others' reports, of all here.
        several = {region for region, instances in self._instances.items() if len(instances) > 1}
        for region in several.union(region for region, _ in gone):
            self._react(RegionKnown(region, self._region(region)))

    def _drop(self, name: tuple[str, str]) -> None:
        """Forget an instance."""
        region, instance = name
        del self._reports[name]
        self._unwatched(self._instances[region].pop(instance))
        self._late.pop(name, None)
        self._client_urls.pop(name, None)
        if self.laws is not None:
            self.laws.left("/".join(name))
        self.distances.forget(name)
        self._retire(self.links.pop(name))
        if self._up.pop(name, False):
            self._channel_of(region)

    # -- another map

    def reconfigure(self, config: LinksConfig, topology: Topology) -> None:
        """Use this map and these connections to its regions from now on. What was known of a region that is gone, or of
        a balancer at an address no longer allowed, is forgotten; if regions are new, the hubs' documents are read
        again."""
        before, self._topology = self._topology, topology
        rerouted = _reachability(self.config) != _reachability(config)
        self.config = config
        gone = before.regions.keys() - topology.regions.keys()
        left = {
            name
            for name, (report, _) in self._reports.items()
            if name[0] in gone or not self._addresses_allowed(report)
        }
        for name in left:
            self._drop(name)
        self.distances.remap(topology)
        self.drains.regions = topology.regions
        self._tiers.clear()
        if rerouted:
            self._relink()  # the addresses in its reports have the new way with the next of them
        for region in {*gone, *(name[0] for name in left)}:
            self._react(RegionKnown(region, self._region(region)))
        for region in gone:
            self._instances.pop(region, None)
            self._known_ms.pop(region, None)
        if topology.regions.keys() - before.regions.keys():
            self._follow()

    def _follow(self) -> None:
        """Follow the hubs from the beginning: reports that were rejected for their region may be valid now."""
        for task in self._following:
            task.cancel()
        self._following = [self._tasks.start(hub.follow(), f"watch the reports in hub {hub.name}") for hub in self.hubs]
        self._following.append(self._tasks.start(self.drains.follow(), "watch the drains"))

    # -- by either path

    def on_report(self, report: RegionReport) -> str | None:
        """Take a report if it is newer than the known one, and swap the view. Returns why it is rejected; None if it is
        not."""
        if self._closed:
            return None  # a link may still speak while it is being closed
        if report.region not in self._topology.regions:
            return self._refuse("unknown_region")
        name = (report.region, report.instance)
        known = self._reports.get(name)
        if not (known is not None and _as_before(known[0], report)) and not self._addresses_allowed(report):
            return self._refuse("address_not_allowed")
        if known is None and not self._has_room(report.region):
            return self._refuse("too_many_instances")
        now = self._clock()
        if known is not None and (known[0].incarnation, known[0].seq) >= (report.incarnation, report.seq):
            if known[0].incarnation != report.incarnation:
                if not self._past_incarnation_continues(name, report, known[1], now):
                    return self._refuse("past_incarnation")
            elif now - known[1] <= self.config.watch.report_age_s or not self._lower_seq_continues(name, report, now):
                return None  # the other path was faster, or it is late
        self._late.pop(name, None)
        self._reports[name] = (report, now)
        instances, instance = self._instances.setdefault(report.region, {}), self._instance(report, now)
        before = instances.get(report.instance)
        if before is not None and before.tier is not instance.tier:
            self._unwatched(before)
        instances[report.instance] = instance
        self._link(name, report)
        if self.laws is not None:
            self.laws.named("/".join(name), report.law_epoch)
        renewed = known is None or known[0].incarnation != report.incarnation
        self._react(RegionReported(report.region, renewed, self._region(report.region)))
        return None

    def on_report_from_disk(self, report: RegionReport) -> str | None:
        """A report that was kept on disk, from before we were: where its sender may be found, and no sign of life."""
        name = (report.region, report.instance)
        if report.region not in self._topology.regions:
            return self._refuse("unknown_region")
        if not self._addresses_allowed(report):
            return self._refuse("address_not_allowed")  # what may be dialled is decided now, not when it was kept
        if self._closed or name in self._reports or not self._has_room(report.region):
            return None
        at = self._clock() - self.config.watch.report_age_s
        self._reports[name] = (report, at)
        self._instances.setdefault(report.region, {})[report.instance] = self._instance(report, at)
        self._link(name, report)
        self._react(RegionKnown(report.region, self._region(report.region)))
        return None

    def _has_room(self, region: str) -> bool:
        """Whether another instance of the region may be known. No region takes up the places of others."""
        return len(self._reports) < INSTANCES_MAX and len(self._instances.get(region, ())) < REGION_INSTANCES_MAX

    def _past_incarnation_continues(
        self, name: tuple[str, str], report: RegionReport, received_at: float, now: float
    ) -> bool:
        """Whether a past incarnation is the one that lives: it counts on, while the later one has long been silent."""
        at, (before, _) = (report.incarnation, report.seq), self._late.get(name, ((0, 0), now))
        self._note_late(name, report, now)
        silent = now - received_at > self.config.watch.report_age_s
        return silent and before[0] == at[0] and at[1] > before[1]

    def _lower_seq_continues(self, name: tuple[str, str], report: RegionReport, now: float) -> bool:
        """Whether an instance keeps counting below its known sequence number, which was seen only once. (A hub that was
        cut off and delivers the past shows lower numbers, too, but all at once.)"""
        before, since = self._late.get(name, ((0, 0), now))
        self._note_late(name, report, now)
        goes_on = before[0] == report.incarnation and report.seq > before[1]
        return goes_on and now - since > self.config.watch.report_age_s

    def _note_late(self, name: tuple[str, str], report: RegionReport, now: float) -> None:
        before, since = self._late.get(name, ((0, 0), now))
        at = (report.incarnation, report.seq)
        self._late[name] = max(before, at), since if before[0] == at[0] else now

    def _addresses_allowed(self, report: RegionReport) -> bool:
        """Whether its addresses are allowed for its region: otherwise anybody who can write a report could direct
        prompts to a host of their own.
        """
        hosts = [address_of(one).host for one in (report.tier_address, report.control_address)]
        if report.client_url and report.region in self.config.region_hosts:
            hosts.append(urlsplit(report.client_url).hostname or "")
        return all(self.config.allows(report.region, host) for host in hosts)

    def _refuse(self, reason: str) -> str:
        self._refused(reason)
        return reason

    def _region(self, region: str) -> Region | None:
        """The region as it is known now; None if nothing is."""
        instances = tuple(self._instances.get(region, {}).values())
        if len(instances) > 1:
            # A silent one is left out where another speaks; a region's last one is the liveness's to judge.
            now = self._clock()
            instances = tuple(i for i in instances if not self._silent((region, i.name), now)) or instances
        if not instances:
            return None
        rtt_ms = self._known_ms[region] = self.distances.rtt_ms(region, self._clock())
        return Region(region, rtt_ms, instances)

    def _silent(self, name: tuple[str, str], now: float) -> bool:
        """Two signals against one instance: it does not report, and its channel is broken."""
        return now - self._reports[name][1] > self.config.watch.report_age_s and not self._up.get(name, False)

    def _instance(self, report: RegionReport, received_at: float) -> Instance:
        offset_ms = self.distances.offset_ms((report.region, report.instance), report.incarnation)
        if report.client_url and not self._may_be_sent_clients(report):
            report = msgspec.structs.replace(report, client_url="")
        tier = self._tier(report.region, report.tier_address)
        return instance_of(report, tier, received_at, offset_ms, self._balancer)

    def _may_be_sent_clients(self, report: RegionReport) -> bool:
        """Whether clients may be redirected where a report says. They would bring their prompts, and no certificate of
        the region's has to be there: so it is believed if the report is signed, if `region_hosts` allows the place, or
        if the region itself said it.
        """
        config = self.config
        if self._signed or config.tier_insecure or report.region in config.region_hosts:
            return True
        known = self._client_urls.get((report.region, report.instance))
        return known == report.client_url or is_loopback(host_of(report.client_url))

    def _tier(self, region: str, address: str) -> Address:
        """Where a tier listener is reached: the same object for the same text, 20 times a second."""
        known = self._tiers.get((region, address))
        if known is None:
            at = address_of(address)
            known = Address(at.host, at.port, self.config.proxy(region), self.config.certified_name(region))
            if len(self._tiers) >= INSTANCES_MAX:
                self._tiers.clear()
            self._tiers[region, address] = known
        return known

    # -- by gRPC

    def _link(self, name: tuple[str, str], report: RegionReport) -> None:
        known = self.links.get(name)
        if known is not None and known.address == report.control_address:
            return
        if known is not None:
            self._retire(known)
        self.links[name] = BalancerLink(self, name, report.control_address, self.config)

    def _relink(self) -> None:
        # A gRPC channel keeps the certificates it was opened with.
        for name, link in tuple(self.links.items()):
            self._retire(link)
            self.links[name] = BalancerLink(self, name, link.address, self.config)

    def on_tls_failure(self, address: str, why: str) -> None:
        """TLS with a regional balancer failed."""
        self._trouble(address_of(address), why)

    def on_ping(self, name: tuple[str, str], reply: region_pb2.PingReply, sent_at: float) -> None:
        """A ping over a standing connection came back."""
        if name[0] not in self._topology.regions:
            return  # the map lost it meanwhile
        if not self.distances.pinged(name, reply.incarnation, reply.clock_ms, sent_at, self._clock()):
            self._refused("absurd_ping")
            return
        region = name[0]
        known_ms = self._known_ms.get(region)
        if known_ms is not None and moved(known_ms, self.distances.rtt_ms(region, self._clock())):
            self._react(RegionKnown(region, self._region(region)))  # its reports may not come, or not soon

    def on_channel(self, name: tuple[str, str], up: bool) -> None:
        """An instance's channel broke, or works again."""
        if name not in self._reports or self._up.get(name) == up:
            return
        self._up[name] = up
        if self.upstreams is not None:
            self.upstreams.channel(self._instances[name[0]][name[1]].tier, up)
        self._channel_of(name[0])

    def _unwatched(self, instance: Instance) -> None:
        """Nothing watches the channel to the instance any more: its state counts as unknown."""
        if self.upstreams is not None:
            self.upstreams.channel(instance.tier, True)

    def quiet(self, name: tuple[str, str]) -> Sequence[SilentAttempt]:
        """See LinkEvents."""
        known = self._instances.get(name[0], {}).get(name[1])
        return self.upstreams.quiet(known.tier) if self.upstreams is not None and known is not None else ()

    def in_use(self, name: tuple[str, str], within_s: float) -> bool:
        """See LinkEvents; true if unknown."""
        known = self._instances.get(name[0], {}).get(name[1])
        return self.upstreams is None or known is None or self.upstreams.in_use(known.tier, within_s)

    def on_use(self, address: Address) -> None:
        """A request goes to this balancer, after a while without any."""
        for region, instances in self._instances.items():
            for instance in instances.values():
                if instance.tier == address and (link := self.links.get((region, instance.name))) is not None:
                    link.used()

    def _channel_of(self, region: str) -> None:
        """A region's channel is up while that of any of its instances is."""
        up = any(self._up.get((region, instance), False) for instance in self._instances[region])
        self._react(ChannelChanged(region, up, self._region(region)))

    def on_link_report(self, message: region_pb2.Report, name: tuple[str, str]) -> None:
        """A report over gRPC, judged as one from etcd is."""
        try:
            report = from_wire(message)
        except DocumentError:
            self._refused("malformed")
            return
        if (report.region, report.instance) != name:
            self._refused("misplaced")
            return
        if self.config.certified_name(report.region) is not None:
            self._client_urls[name] = report.client_url
        self.on_report(report)
        if message.outputs:
            self._report_outputs(message)

    def _report_outputs(self, message: region_pb2.Report) -> None:
        """Pass on the answer lengths that a region reports when a stream begins. The receiver checks the figures."""
        outputs = [(one.tenant, one.model, one.tokens) for one in message.outputs[:ENTRIES_MAX]]
        if any(max(len(tenant), len(model)) > TEXT_LIMIT for tenant, model, _ in outputs):
            self._refused("malformed")
        else:
            self._react(OutputsReported(tuple(outputs)))

    def caught_up(self) -> bool:
        """Whether everything that connected balancers have sent by now (caches and positions) has arrived. A balancer
        whose liveness is not yet known is waited for, too, and a hub that has not answered yet."""
        if not all(hub.is_read for hub in self.hubs):
            return False
        for region, instance in self._reports:
            up = self._up.get((region, instance))
            if up is None or (up and self.prefixes.state(region) != "connected"):
                return False
        return bool(self._reports)

    def on_stream_failed(self, what: str, code: grpc.StatusCode) -> None:
        """A link's stream ended in an error. Pings detect that the other end is gone; any other reason is counted."""
        if code not in GONE:
            self._refused(f"{what}_{code.name.lower()}")

    def now(self) -> float:
        """The time of this process's monotonic clock, in seconds."""
        return self._clock()

    def jitter(self) -> float:
        """0.8 to 1.2, so that many balancers do not ask one region in step."""
        return 0.8 + 0.4 * self._rng.random()


def _reachability(config: LinksConfig) -> tuple[object, ...]:
    """The part of a configuration that says how regions are reached, and may change at run time."""
    return config.proxies, config.region_hosts


def _as_before(known: RegionReport, report: RegionReport) -> bool:
    """Whether it names the addresses that an earlier one did, which was let in."""
    return (report.tier_address, report.control_address, report.client_url) == (
        known.tier_address,
        known.control_address,
        known.client_url,
    )
