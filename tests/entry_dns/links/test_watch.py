from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace

from entry_dns.fleet.entry_health import EntryHealthConfig, EntryHealthTracker, State
from entry_dns.fleet.latencies import Learned, LearningConfig
from entry_dns.links import watch
from entry_dns.links.watch import EntryWatcher
from farhop.balance.estimate.network_latencies import Latency
from farhop.store.contract import Change, ChangeKind, KeyValue, latency_key, report_key
from farhop.store.documents.latencies import LatencyReport
from farhop.store.documents.latencies import encode as encode_latencies
from farhop.store.documents.overrides import BiasOverride, DrainOverride, EntryDrainOverride, encode
from farhop.store.documents.report import ModelReport, RegionReport
from farhop.store.documents.report import encode as encode_report
from farhop_lab.memory_store import MemoryStore
from tests.entry_dns.conftest import NAMES, world

SAID = {"why": "kernel", "author": "ann", "at": datetime(2026, 5, 1, tzinfo=UTC), "for_s": 600.0}


class Watched:
    def __init__(self, ramp_s: float = 0.0) -> None:
        self.now, self.refused = 10.0, []
        self.entry_health = EntryHealthTracker(EntryHealthConfig(ramp_s=ramp_s))
        self.entry_health.know({name: name for name in NAMES}, 0.0)
        for name in NAMES:
            self.entry_health.probed(name, True, "", 1.0)
        store = MemoryStore(Random(1))
        self.learned = Learned(LearningConfig())
        self.watcher = EntryWatcher(
            store, "main", world(), self.entry_health, self.refused.append, lambda: self.now, self.learned
        )

    def of(self, name: str):
        return next(one for one in self.entry_health.read(self.now) if one.entry == name)


def put(override, key: str = "") -> Change:
    return Change(ChangeKind.PUT, 1, key or override.key, encode(override))


def test_a_region_s_drain_drains_its_entries_and_ends_with_its_key() -> None:
    one = Watched()
    drain = DrainOverride(region="tokyo", **SAID)
    one.watcher.drains_changed(put(drain))
    assert [health.state for health in one.entry_health.read(one.now)] == [State.UP, State.UP, State.DRAINED]
    assert one.of("tokyo").why == "kernel (by ann)"
    one.watcher.drains_changed(Change(ChangeKind.LOST, why="gone"))
    assert one.of("tokyo").state is State.DRAINED
    one.watcher.drains_changed(Change(ChangeKind.DELETE, 2, drain.key))
    assert one.of("tokyo").state is State.UP


def test_an_entry_is_drained_by_itself_and_for_its_length() -> None:
    one = Watched()
    one.watcher.entry_drains_changed(put(EntryDrainOverride(region="tokyo", entry="tokyo", **SAID)))
    assert one.of("tokyo").state is State.DRAINED
    one.now += 601.0
    assert one.of("tokyo").state is State.UP


def test_an_entry_in_a_drained_region_stays_drained_when_its_own_drain_ends() -> None:
    for ends_first in ("of its own", "of the region"):
        one = Watched()
        own = EntryDrainOverride(region="tokyo", entry="tokyo", **SAID | {"why": "disk"})
        region = DrainOverride(region="tokyo", **SAID | {"for_s": 3600.0, "over_s": 0.0, "keep_share": 0.5})
        if ends_first == "of the region":
            own, region = (
                EntryDrainOverride(region="tokyo", entry="tokyo", **SAID | {"why": "disk", "for_s": 3600.0}),
                DrainOverride(region="tokyo", **SAID | {"keep_share": 0.5, "over_s": 0.0}),
            )
        one.watcher.drains_changed(put(region))
        one.watcher.entry_drains_changed(put(own))
        assert (one.of("tokyo").share, one.of("tokyo").why) == (0.0, "disk (by ann)"), "the one that leaves less"
        one.now += 601.0
        left = one.of("tokyo")
        assert left.state is State.DRAINED
        assert (left.share, left.why) == (
            (0.5, "kernel (by ann)") if ends_first == "of its own" else (0.0, "disk (by ann)")
        )
        one.watcher.entry_drains_changed(Change(ChangeKind.DELETE, 2, own.key))
        one.watcher.drains_changed(Change(ChangeKind.DELETE, 3, region.key))
        assert one.of("tokyo").state is State.UP


def test_another_drain_changes_nothing_of_the_pace_of_one_under_way() -> None:
    one = Watched()
    one.watcher.drains_changed(put(DrainOverride(region="tokyo", over_s=100.0, **SAID)))
    one.watcher.entry_drains_changed(
        put(EntryDrainOverride(region="tokyo", entry="tokyo", over_s=100.0, **SAID | {"why": "disk"}))
    )
    one.now += 75.0
    assert one.of("tokyo").share == 0.25
    one.watcher.drains_changed(put(DrainOverride(region="frankfurt", **SAID)))
    assert one.of("tokyo").share == 0.25


def test_a_drain_that_is_over_and_still_listed_does_not_begin_its_return_anew() -> None:
    one = Watched(ramp_s=100.0)
    one.watcher.entry_drains_changed(put(EntryDrainOverride(region="tokyo", entry="tokyo", **SAID)))
    one.now += 601.0
    assert one.of("tokyo").share < 0.5
    one.now += 100.0
    assert one.of("tokyo").share == 1.0
    one.watcher.drains_changed(put(DrainOverride(region="frankfurt", **SAID)))
    assert (one.of("tokyo").state, one.of("tokyo").share) == (State.UP, 1.0)


def test_an_entry_that_a_new_map_puts_into_a_drained_region_is_drained() -> None:
    one = Watched()
    one.watcher.drains_changed(put(DrainOverride(region="tokyo", **SAID)))
    topology = world()
    more = {**topology.entries, "tokyo-2": replace(topology.entries["tokyo"], name="tokyo-2")}
    one.entry_health.know({name: entry.region for name, entry in more.items()}, one.now)
    one.entry_health.probed("tokyo-2", True, "", one.now)
    one.watcher.remap(replace(topology, entries=more))
    assert one.of("tokyo-2").state is State.DRAINED


def test_a_bias_is_taken() -> None:
    one = Watched()
    one.watcher.steers_changed(put(BiasOverride(region="tokyo", ms=40.0, **SAID)))
    assert one.of("tokyo").bias_ms == 40.0


def test_refused_documents_change_nothing_and_are_counted_by_reason() -> None:
    one = Watched()
    drain = DrainOverride(region="tokyo", **SAID)
    one.watcher.drains_changed(Change(ChangeKind.PUT, 1, drain.key, b"{"))
    one.watcher.drains_changed(put(drain, drain.key.replace("tokyo", "frankfurt")))
    one.watcher.drains_changed(put(DrainOverride(region="osaka", **SAID)))
    one.watcher.entry_drains_changed(put(EntryDrainOverride(region="tokyo", entry="frankfurt", **SAID)))
    one.watcher.read(report_key("tokyo", "lb"), b"{}", from_disk=False)
    assert one.refused == [
        "override_malformed", "override_misplaced", "override_of_unknown_region", "override_of_unknown_entry",
        "report_malformed",
    ]  # fmt: skip
    assert {health.state for health in one.entry_health.read(one.now)} == {State.UP}


def test_latencies_measured_by_entries_are_used_until_their_key_is_deleted() -> None:
    one = Watched()
    key = latency_key("tokyo", "g1")
    found = LatencyReport(region="tokyo", instance="g1", networks={"8.8.8.0/24": Latency(5.0, 8)})

    def step(kind: ChangeKind, key: str = "", value: bytes = b"") -> None:
        one.watcher.latencies_changed(Change(kind, 1, key, value))

    step(ChangeKind.PUT, key, encode_latencies(found))
    assert one.learned.read(one.now)
    step(ChangeKind.LOST)
    step(ChangeKind.PUT, latency_key("osaka", "g1"), encode_latencies(found))
    step(ChangeKind.PUT, key, b"{")
    assert one.learned.read(one.now)
    assert one.refused == ["latencies_misplaced", "latencies_malformed"]
    step(ChangeKind.DELETE, key)
    assert not one.learned.read(one.now)


def load(seq: int, free: int, instance: str = "r1", region: str = "tokyo") -> RegionReport:
    model = ModelReport(
        model="m", replicas_ready=1, replicas_total=1, slots_total=8, slots_free=free, kv_tokens_total=100,
        kv_tokens_free=100, wait_ms=7.0, prefill_ms_per_token=0.1, tpot_ms=20.0, bytes_per_token=4.0,
    )  # fmt: skip
    return RegionReport(
        region=region, instance=instance, incarnation=1, seq=seq, clock_ms=1.0, tier_address="127.0.0.1:1",
        control_address="127.0.0.1:2", models=(model,),
    )  # fmt: skip


def test_the_newest_report_counts_whichever_path_it_came_by() -> None:
    one = Watched()
    take = one.watcher.on_reports("main")
    one.watcher.reported(load(5, 0))
    assert one.of("tokyo").share < 1.0
    late = load(4, 8)
    take(Change(ChangeKind.PUT, 1, report_key("tokyo", "r1"), encode_report(late)))
    assert one.of("tokyo").share < 1.0, "late by etcd"
    one.watcher.reported(load(6, 8))
    assert one.of("tokyo").share == 1.0
    one.watcher.reported(load(1, 0, "r2"))
    assert one.of("tokyo").share == 1.0, "half of both"
    one.now += 16.0
    one.watcher.reported(load(2, 0, "r2"))
    assert one.of("tokyo").share < 1.0, "who is silent counts no more"


def test_a_region_with_ever_more_instances_takes_no_places_of_others(monkeypatch) -> None:
    monkeypatch.setattr(watch, "REGION_INSTANCES_MAX", 2)
    monkeypatch.setattr(watch, "INSTANCES_MAX", 3)
    one = Watched()
    for name in "abcd":
        one.watcher.reported(load(1, 8, name, "frankfurt"))
    assert one.refused == ["too_many_instances"] * 2
    one.watcher.reported(load(1, 0))
    assert one.of("tokyo").share < 1.0


def test_reports_kept_on_disk_give_addresses_but_no_health() -> None:
    one, named = Watched(), []
    one.watcher.links = SimpleNamespace(named=lambda report: named.append(report.control_address), gone=lambda *_: None)
    entry = KeyValue(report_key("tokyo", "r1"), encode_report(load(1, 0)), 1)
    one.watcher.on_reports("main")(Change(ChangeKind.SNAPSHOT, 1, entries=(entry,), from_disk=True))
    assert named == ["127.0.0.1:2"]
    assert one.of("tokyo").share == 1.0
