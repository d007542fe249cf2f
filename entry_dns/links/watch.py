"""Follows documents in etcd that concern entries: drains, biases, regions' load, measured latencies.

Invariants: a document that is invalid, names an unknown place or is under another's key changes nothing and is counted;
a drain ends with its key or after its own length by this process's clock; losing etcd changes nothing. Never decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from farhop.store.contract import (
    ENTRY_DRAIN_PREFIX,
    LATENCY_PREFIX,
    OVERRIDE_PREFIX,
    REGION_INSTANCES_MAX,
    REGION_PREFIX,
    STEER_PREFIX,
    parse_instance_key,
    parse_report_key,
)
from farhop.store.documents import latencies, overrides
from farhop.store.documents import report as reports
from farhop.store.documents.overrides import BiasOverride
from farhop.store.follow import Documents, Refused, follow
from farhop.store.hubs import stores_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from entry_dns.fleet.entry_health import EntryHealthTracker
    from entry_dns.fleet.latencies import Learned
    from farhop.store.contract import Change, Store
    from farhop.store.documents.latencies import LatencyReport
    from farhop.store.documents.overrides import DrainOverride, EntryDrainOverride
    from farhop.store.documents.report import RegionReport
    from topology.model import Topology


LOAD_AGE_S = 15.0  # a report is too old after this time: entry_dns.fleet.entry_health.EntryHealthConfig.load_age_s
INSTANCES_MAX = 1024


class Links(Protocol):
    """Follows balancers by another path, once their addresses are known: regions.RegionLinks."""

    def named(self, report: RegionReport) -> None:
        """A report names its sender's address."""

    def gone(self, region: str, instance: str) -> None:
        """A balancer's report was taken away."""


class _NoLinks:
    def named(self, report: RegionReport) -> None:
        """Ignored."""

    def gone(self, region: str, instance: str) -> None:
        """Ignored."""


@dataclass(frozen=True, slots=True)
class _Load:
    at: tuple[int, int]  # incarnation and seq
    received_at: float
    free: int
    total: int


class EntryWatcher:
    """Feeds `entry_health`, and `learned` if there is one; passes balancers' addresses to `links`.

    `refused` counts rejected documents, by reason; `topology` may be replaced (`remap`).
    """

    def __init__(
        self,
        store: Store,
        hub: str,
        topology: Topology,
        entry_health: EntryHealthTracker,
        refused: Callable[[str], None],
        clock: Callable[[], float],
        learned: Learned | None = None,
        links: Links | None = None,
    ) -> None:
        self._learned = learned
        self._latencies: Documents[LatencyReport] = Documents(self._latency, refused, "latencies")
        self._store, self._hubs, self.topology = store, stores_of(store, hub), topology
        self._entry_health, self._clock = entry_health, clock
        self._regions: Documents[tuple[DrainOverride, float]] = Documents(self._region_drain, refused, "override")
        self._entries: Documents[tuple[EntryDrainOverride, float]] = Documents(self._entry_drain, refused, "override")
        self._steers: Documents[tuple[Any, float]] = Documents(self._steer, refused, "steer")
        self._loads: dict[tuple[str, str], _Load] = {}
        self.links: Links = links if links is not None else _NoLinks()
        self._refused = refused
        self.lost: dict[str, str] = {}  # by hub, why it is out of contact
        self._drained: set[tuple[str, str]] = set()  # entry, and the key of its drain

    def follow(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """The coroutines to run, with their names, besides those of `follow_drains`."""
        works = [("watch the biases", follow(self._store, STEER_PREFIX, self.steers_changed))]
        if self._learned is not None:
            works.append(("watch the latencies", follow(self._store, LATENCY_PREFIX, self.latencies_changed)))
        for name, one in self._hubs.items():
            works.append((f"watch the reports in hub {name}", follow(one, REGION_PREFIX, self.on_reports(name))))
        return works

    def follow_drains(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """The same for drains. Begun anew when a map has more regions or entries: what was refused for an unknown one
        may be valid now."""
        return [
            ("watch the drains", follow(self._store, OVERRIDE_PREFIX, self.drains_changed)),
            ("watch the drains of entries", follow(self._store, ENTRY_DRAIN_PREFIX, self.entry_drains_changed)),
        ]

    def remap(self, topology: Topology) -> None:
        """Go by this map from now on; the entries of a drained region may be others."""
        self.topology = topology
        self._drain()

    def drains_changed(self, change: Change) -> None:
        """Take a step of the watch of regions' drains."""
        if self._regions.take(change):
            self._drain()

    def entry_drains_changed(self, change: Change) -> None:
        """Take a step of the watch of entries' drains."""
        if self._entries.take(change):
            self._drain()

    def _drain(self) -> None:
        now, drained = self._clock(), set()
        for drain, until in self._regions.values():
            names = {name for name, one in self.topology.entries.items() if one.region == drain.region}
            drained |= {(name, drain.key) for name in names}
            why = f"{drain.why} (by {drain.author})"
            self._entry_health.drained(names, drain.over_s, until, why, now, drain.keep_share, drain.key)
        for entry, until in self._entries.values():
            drained.add((entry.entry, entry.key))
            why = f"{entry.why} (by {entry.author})"
            self._entry_health.drained([entry.entry], entry.over_s, until, why, now, by=entry.key)
        for name, key in self._drained - drained:
            self._entry_health.undrained([name], now, key)
        self._drained = drained

    def steers_changed(self, change: Change) -> None:
        """Take a step of the watch of biases."""
        if self._steers.take(change):
            biases = {
                one.region: (one.ms, until) for one, until in self._steers.values() if isinstance(one, BiasOverride)
            }
            self._entry_health.biased(biases)

    def latencies_changed(self, change: Change) -> None:
        """Take a step of the watch of what entries measured."""
        assert self._learned is not None
        self._learned.contact(change.kind != "lost", self._clock())
        for key, report in self._latencies.take(change).items():
            name = parse_instance_key(LATENCY_PREFIX, key)
            if report is not None:
                self._learned.reported(report)
            elif name is not None:
                self._learned.gone(*name)

    def on_reports(self, hub: str) -> Callable[[Change], None]:
        listed: set[str] = set()

        def take(change: Change) -> None:
            if change.kind == "lost":
                self.lost[hub] = change.why
                return
            self.lost.pop(hub, None)
            ended = change.ended(listed)
            listed.difference_update(ended)
            for key in ended:
                name = parse_report_key(key)
                if name is not None:
                    self.links.gone(*name)
            for entry in change.written:
                listed.add(entry.key)
                self.read(entry.key, entry.value, from_disk=change.from_disk)

        return take

    def read(self, key: str, value: bytes, *, from_disk: bool) -> None:
        name = parse_report_key(key)
        if name is None:
            return
        try:
            report = reports.decode(value)
        except ValueError:
            self._refused("report_malformed")
            return
        if (report.region, report.instance) != name or report.region not in self.topology.regions:
            self._refused("report_misplaced")
            return
        self.links.named(report)  # its address, also from a report older than this process
        if not from_disk:
            self.reported(report)

    def reported(self, report: RegionReport) -> None:
        """Take a report that is newer than the sender's last one, whichever path it came by."""
        name, at = (report.region, report.instance), (report.incarnation, report.seq)
        known, now = self._loads.get(name), self._clock()
        if known is not None and at <= known.at and now - known.received_at <= LOAD_AGE_S:
            return
        if known is None:
            siblings = sum(region == report.region for region, _ in self._loads)
            if len(self._loads) >= INSTANCES_MAX or siblings >= REGION_INSTANCES_MAX:
                self._refused("too_many_instances")
                return
        total = sum(one.slots_total for one in report.models)
        free = sum(one.slots_free for one in report.models)
        self._loads[name] = _Load(at, now, free, total)
        of_region = [
            load
            for (region, _), load in self._loads.items()
            if region == report.region and now - load.received_at <= LOAD_AGE_S
        ]
        slots = sum(load.total for load in of_region)
        used = 1.0 - sum(load.free for load in of_region) / slots if slots else 0.0
        self._entry_health.loaded(report.region, min(1.0, max(0.0, used)), now)
        for old in [one for one, load in self._loads.items() if now - load.received_at > 4.0 * LOAD_AGE_S]:
            del self._loads[old]

    # -- documents

    def _region_drain(self, key: str, value: bytes) -> tuple[DrainOverride, float]:
        drain = overrides.decode_drain(value)
        if drain.region not in self.topology.regions:
            raise Refused("override_of_unknown_region")
        if drain.key != key:
            raise Refused("override_misplaced")
        return drain, self._clock() + drain.for_s

    def _entry_drain(self, key: str, value: bytes) -> tuple[EntryDrainOverride, float]:
        drain = overrides.decode_entry_drain(value)
        entry = self.topology.entries.get(drain.entry)
        if entry is None or entry.region != drain.region:
            raise Refused("override_of_unknown_entry")
        if drain.key != key:
            raise Refused("override_misplaced")
        return drain, self._clock() + drain.for_s

    def _latency(self, key: str, value: bytes) -> LatencyReport:
        report = latencies.decode(value)
        named = parse_instance_key(LATENCY_PREFIX, key)
        if (report.region, report.instance) != named or report.region not in self.topology.regions:
            raise Refused("latencies_misplaced")
        return report

    def _steer(self, key: str, value: bytes) -> tuple[Any, float]:
        override = overrides.decode_routing(value)
        if override.key != key:
            raise Refused("steer_misplaced")
        return override, self._clock() + override.for_s
