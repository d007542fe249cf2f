from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random

import grpc
import pytest
from farhop_wire import region_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import until
from regions import WORLD, Clock, Recorded, a_report, config, put, watching
from reporting import reporter
from worlds import regional, replica

from farhop.balance.machine import Address
from farhop.store.contract import Change, ChangeKind, KeyValue, report_key
from farhop.store.documents.report import encode, to_wire
from farhop.store.hubs import Hubs
from farhop_lab.memory_store import MemoryStore
from global_lb.links import watch
from global_lb.links.watch import RegionWatcher
from regional_lb.mesh import report

# -- by etcd


async def test_a_report_becomes_an_instance_of_the_view() -> None:
    clock = Clock(100.0)
    async with watching(clock=clock) as (_, store, found):
        accepted = {"virginia/g1": 11.0, "g1": 99.0, "tokyo/g1": 22.0}
        await put(store, a_report(tier_address="[fd00::1]:80", accepted_bytes=accepted, draining=True))
        await until(lambda: found.names() == ["r1"])
        region = found.view.regions["tokyo"]
        (one,) = region.instances
        assert region.rtt_ms == 166.0
        assert (one.tier, one.draining, one.incarnation, one.received_at) == (Address("fd00::1", 80), True, 1, 100.0)
        assert one.clock_offset_ms == 5000.0 - 100_000.0
        assert one.accepted == 11.0  # the region that it acknowledges to us, not the one of the same name elsewhere
        assert one.models["m"].wait_ms == 7.0
        assert found.reported == ["tokyo"]


async def test_reports_written_before_the_start_are_read() -> None:
    store = MemoryStore(Random(1))
    await store.open()
    await put(store, a_report())
    await put(store, a_report("frankfurt"))
    async with watching(store) as (_, _, found):
        await until(lambda: set(found.view.regions) == {"tokyo", "frankfurt"})


async def test_each_instance_has_its_own_clock() -> None:
    clock = Clock(10.0)
    async with watching(clock=clock) as (_, store, found):
        await put(store, a_report(instance="a", clock_ms=1_000.0))
        await until(lambda: found.names() == ["a"])
        clock.at = 10.25
        await put(store, a_report(instance="b", clock_ms=900_000.0))
        await until(lambda: found.names() == ["a", "b"])
        a, b = found.view.regions["tokyo"].instances
        assert (a.clock_offset_ms, b.clock_offset_ms) == (1_000.0 - 10_000.0, 900_000.0 - 10_250.0)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (report_key("tokyo", "r1"), b"", "malformed"),
        (report_key("tokyo", "r1"), b"{}", "malformed"),
        (report_key("tokyo", "r1"), b"\xff", "malformed"),
        (report_key("tokyo", "r1"), encode(a_report()).replace(b'"wait_ms":7.0', b'"wait_ms":-7.0'), "malformed"),
        (report_key("tokyo", "r1"), encode(a_report()).replace(b'"slots_free":8', b'"slots_free":9'), "malformed"),
        (report_key("tokyo", "r2"), encode(a_report()), "misplaced"),
        (report_key("frankfurt", "r1"), encode(a_report()), "misplaced"),
        ("/farhop/v1/region/tokyo/other/r1", encode(a_report()), "misplaced"),
        ("/farhop/v1/region/", encode(a_report()), "misplaced"),
        (report_key("atlantis", "r1"), encode(a_report("atlantis")), "unknown_region"),
    ],
)
async def test_refused_reports_are_dropped_and_counted(key: str, value: bytes, why: str) -> None:
    async with watching() as (_, store, found):
        await store.put(key, value)
        await until(lambda: found.refused == [why])
        await put(store, a_report("frankfurt"))
        await until(lambda: set(found.view.regions) == {"frankfurt"})
        assert found.refused == [why]


async def test_there_is_a_bound_on_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INSTANCES_MAX", 2)
    async with watching() as (_, store, found):
        for name in "abc":
            await put(store, a_report(instance=name))
        await until(lambda: found.refused == ["too_many_instances"])
        await put(store, a_report(instance="b", seq=2, draining=True))
        await until(lambda: [i.draining for i in found.view.regions["tokyo"].instances] == [False, True])


async def test_a_region_with_ever_more_instances_takes_no_places_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "REGION_INSTANCES_MAX", 2)
    monkeypatch.setattr(watch, "INSTANCES_MAX", 3)
    store = MemoryStore(Random(1))
    await store.open()
    for name in "abcd":
        await put(store, a_report("frankfurt", instance=name))
    async with watching(store) as (_, _, found):  # it starts where Frankfurt's reports come first
        await put(store, a_report())
        await until(lambda: set(found.view.regions) == {"tokyo", "frankfurt"})
        assert found.refused == ["too_many_instances"] * 2
        assert len(found.view.regions["frankfurt"].instances) == 2


async def test_a_deleted_key_is_not_a_death() -> None:
    async with watching() as (_, store, found):
        await put(store, a_report())
        await until(lambda: found.names() == ["r1"])
        await store.delete(report_key("tokyo", "r1"))
        await put(store, a_report("frankfurt"))
        await until(lambda: "frankfurt" in found.view.regions)
        assert found.names() == ["r1"]


async def test_an_instance_without_key_or_connection_leaves_the_view() -> None:
    clock = Clock()
    async with watching(clock=clock) as (watcher, store, found):
        await put(store, a_report(instance="a"))
        await put(store, a_report(instance="b"))
        await until(lambda: found.names() == ["a", "b"])
        await store.delete(report_key("tokyo", "a"))
        await until(lambda: ("tokyo", "a") not in watcher.listed)
        clock.at += watch.FORGET_S
        watcher.forget()
        assert found.names() == ["a", "b"]  # not yet
        clock.at += 0.1
        watcher.forget()
        assert found.names() == ["b"]  # its key is there still
        await store.delete(report_key("tokyo", "b"))
        await until(lambda: not watcher.listed)
        watcher.forget()
        assert found.view.regions == {}
        assert watcher.links == {}


async def test_an_outage_of_the_store_keeps_the_view_and_its_trouble_is_shown() -> None:
    clock = Clock()
    async with watching(clock=clock) as (watcher, store, found):
        await put(store, a_report())
        await until(lambda: found.names() == ["r1"])
        store.outage()
        await until(lambda: watcher.store_trouble is not None)
        clock.at += 10 * watch.FORGET_S
        watcher.forget()
        assert found.names() == ["r1"]
        store.restore()
        await put(store, a_report(seq=2))
        await until(lambda: watcher.store_trouble is None)


async def test_a_silent_instance_does_not_draw_requests_while_another_speaks() -> None:
    """Its report is old and its channel broken: two signals. A region's last instance stays; its liveness judges."""
    clock = Clock()
    async with watching(clock=clock) as (watcher, store, found):
        await put(store, a_report(instance="a"))
        await put(store, a_report(instance="b"))
        await until(lambda: found.names() == ["a", "b"] and ("tokyo", False) in found.channels)
        clock.at += 1.0
        await put(store, a_report(instance="b", seq=2))
        await until(lambda: found.names() == ["b"])
        clock.at += 100.0
        watcher.forget()  # as it does every few seconds
        assert found.names() == ["a", "b"]


# -- whichever path, whatever order

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "link"]),
        st.sampled_from(["tokyo", "frankfurt", "atlantis"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 3),  # incarnation
        st.integers(1, 5),  # seq
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(STEPS)
def test_the_newest_report_wins_on_any_path_and_in_any_order(
    steps: list[tuple[str, str, str, int, int]],
) -> None:
    async def run() -> None:
        found = Recorded()
        clock = Clock()
        store = MemoryStore(Random(1))
        watcher = RegionWatcher(
            config(ping_s=60.0), WORLD, store,
            react=found.react, refused=found.refused.append, clock=clock, rng=Random(2),
        )  # fmt: skip
        newest: dict[tuple[str, str], tuple[int, int]] = {}
        received: dict[tuple[str, str], float] = {}
        for path, region, instance, incarnation, seq in steps:
            clock.at += 0.001
            name, report = (region, instance), a_report(region, instance, incarnation=incarnation, seq=seq)
            if region != "atlantis" and (incarnation, seq) > newest.get(name, (0, 0)):
                newest[name], received[name] = (incarnation, seq), clock.at
            if path == "store":
                key = report_key(region, instance)
                watcher.hubs[0].changed(Change(ChangeKind.PUT, 1, key, encode(report)))
            else:
                watcher.on_link_report(to_wire(report), name)
        known = {(i.region, i.name): i for r in found.view.regions.values() for i in r.instances}
        assert {name: one.incarnation for name, one in known.items()} == {n: v[0] for n, v in newest.items()}
        assert {name: one.received_at for name, one in known.items()} == received
        assert found.refused.count("unknown_region") == sum(step[1] == "atlantis" for step in steps)
        assert set(found.refused) <= {"unknown_region", "past_incarnation"}
        assert len(found.reported) == found.views
        await watcher.close()

    asyncio.run(run())


async def test_an_incarnation_from_the_future_gives_way_to_the_one_that_goes_on() -> None:
    """A clock an hour ahead, set right before the process started anew: its reports would be old for an hour."""
    clock = Clock()
    async with watching(clock=clock, report_age_s=3.0) as (watcher, _, found):
        watcher.on_report(a_report(incarnation=3_600_001, seq=900))
        for seq in (1, 2, 3):
            clock.at += 1.0
            assert watcher.on_report(a_report(incarnation=1, seq=seq)) == "past_incarnation"
        assert found.view.regions["tokyo"].instances[0].incarnation == 3_600_001
        clock.at += 1.0
        assert watcher.on_report(a_report(incarnation=1, seq=3)) == "past_incarnation"  # a key that is only present
        assert watcher.on_report(a_report(incarnation=1, seq=4)) is None
        assert found.view.regions["tokyo"].instances[0].incarnation == 1
        assert found.refused == ["past_incarnation"] * 4
        # It counts from now on, and an incarnation that reports itself as newer is so again.
        assert watcher.on_report(a_report(incarnation=1, seq=5)) is None
        assert watcher.on_report(a_report(incarnation=2, seq=1)) is None
        assert found.view.regions["tokyo"].instances[0].incarnation == 2


async def test_a_report_that_its_instance_never_wrote_does_not_hide_it_for_ever() -> None:
    """Who writes an unsigned store put a number there that was never reached: the region was suspect until it began
    anew."""
    clock = Clock()
    async with watching(clock=clock, report_age_s=3.0) as (watcher, _, found):

        def received_at() -> float:
            return found.view.regions["tokyo"].instances[0].received_at

        watcher.on_report(a_report(seq=7))
        watcher.on_report(a_report(seq=10**12))
        forged_at, seq, accepted = clock.at, 7, []
        for _ in range(12):
            clock.at, seq = clock.at + 1.0, seq + 1
            for _path in ("link", "store"):
                assert watcher.on_report(a_report(seq=seq)) is None
            accepted.append(received_at() == clock.at)
        assert accepted == [False] * 7 + [True] * 5  # 3 s of silence, and 3 s during which it still counts
        assert forged_at < received_at()
        assert found.refused == []


async def test_old_reports_from_a_hub_do_not_keep_an_instance_alive() -> None:
    clock = Clock()
    async with watching(clock=clock, report_age_s=3.0) as (watcher, _, found):
        watcher.on_report(a_report(seq=100))
        last = clock.at
        clock.at += 10.0
        for seq in range(50, 100):
            watcher.on_report(a_report(seq=seq))
        for _ in range(9):  # and a key that is only present
            clock.at += 1.0
            watcher.on_report(a_report(seq=99))
        assert found.view.regions["tokyo"].instances[0].received_at == last


async def test_reports_of_a_past_incarnation_are_refused_while_the_later_one_reports() -> None:
    clock = Clock()
    async with watching(clock=clock, report_age_s=3.0) as (watcher, _, found):
        for second in range(10):
            clock.at += 1.0
            assert watcher.on_report(a_report(incarnation=2, seq=second + 1)) is None
            assert watcher.on_report(a_report(incarnation=1, seq=second + 1)) == "past_incarnation"
        assert found.view.regions["tokyo"].instances[0].incarnation == 2


async def test_the_watcher_has_caught_up_once_every_hub_has_answered_or_is_out_of_contact() -> None:
    """Who lets clients in knows the regions of all hubs: a prompt may be too long for those of the first."""
    a, b = MemoryStore(Random(1)), MemoryStore(Random(2))
    store = Hubs({"a": a, "b": b}, Random(3))
    async with watching(store) as (watcher, _, _found):  # type: ignore[arg-type]
        first, second = watcher.hubs
        first.changed(
            Change(ChangeKind.SNAPSHOT, 1, entries=(KeyValue(report_key("tokyo", "r1"), encode(a_report()), 1),))
        )
        (name,) = watcher.links
        watcher.on_channel(name, up=False)
        assert not watcher.caught_up()
        second.changed(Change(ChangeKind.LOST, why="refused"))
        assert watcher.caught_up()


async def test_hubs_are_merged_and_each_is_shown() -> None:
    """The newest report counts by whichever hub it came; one hub gone, wiped or late changes nothing."""
    clock = Clock()
    a, b = MemoryStore(Random(1)), MemoryStore(Random(2))
    store = Hubs({"a": a, "b": b}, Random(3))
    async with watching(store, clock=clock) as (watcher, _, found):  # type: ignore[arg-type]
        await a.put(report_key("tokyo", "r1"), encode(a_report(seq=3, draining=True)))
        await b.put(report_key("tokyo", "r1"), encode(a_report(seq=2)))
        await until(lambda: all(hub.listed for hub in watcher.hubs))
        assert found.view.regions["tokyo"].instances[0].draining  # the newer one reported that
        assert watcher.store_trouble is None
        a.outage()
        await until(lambda: watcher.store_trouble is not None)
        assert (watcher.store_trouble or "").startswith("hub a: ")
        await b.put(report_key("tokyo", "r1"), encode(a_report(seq=4)))
        await b.put(report_key("tokyo", "r9"), b"nonsense")
        await until(lambda: found.refused == ["malformed"])
        assert not found.view.regions["tokyo"].instances[0].draining
        seen = {one["hub"]: one for one in (hub.status() for hub in watcher.hubs)}
        assert (seen["a"]["in_contact"], seen["a"]["outages"], seen["a"]["refused"]) == (False, 1, {})
        assert (seen["b"]["in_contact"], seen["b"]["refused"], seen["b"]["balancers"]) == (True, {"malformed": 1}, 2)
        a.cluster.wipe()
        a.restore()
        await until(lambda: watcher.store_trouble is None)
        assert found.names() == ["r1"]
        clock.at += 2 * watch.FORGET_S
        watcher.forget()
        assert found.names() == ["r1"]  # b still lists it


async def test_a_report_for_another_instance_is_refused() -> None:
    async with watching() as (watcher, _, found):
        watcher.on_link_report(to_wire(a_report(instance="r2")), ("tokyo", "r1"))
        absurd = to_wire(a_report())
        absurd.models[0].wait_ms = float("nan")
        watcher.on_link_report(absurd, ("tokyo", "r1"))
        assert found.refused == ["misplaced", "malformed"]
        assert found.view.regions == {}


async def test_reasons_of_a_region_without_prefix_stream_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "STREAMS_MAX", 0)
    async with AsyncExitStack() as stack:
        below = grpc.aio.server()
        stack.push_async_callback(below.stop, None)
        region_pb2_grpc.add_RegionServicer_to_server(reporter(regional(replica("a"))), below)
        port = below.add_insecure_port("127.0.0.1:0")
        await below.start()
        _, store, text = await stack.enter_async_context(watching())
        await put(store, a_report(control_address=f"127.0.0.1:{port}"))
        await until(lambda: ("tokyo", True) in text.channels and len(set(text.refused)) == 2)
        assert set(text.refused) == {"reports_resource_exhausted", "prefixes_resource_exhausted"}
        await below.stop(None)
        await until(lambda: text.channels[-1] == ("tokyo", False))
        assert len(set(text.refused)) == 2  # the ping reported that no process is there
