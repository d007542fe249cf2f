from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farhop.store.documents.report import RegionReport
from farhop_lab.sim.balancer import BalancerProcess
from farhop_lab.sim.sites import Reporting, Watching, flat, station
from farhop_lab.sim.world import World
from global_lb.links.link import HURRY
from global_lb.routing.flow import GlobalFlow


def apart(rtt_ms: float = 100.0, **options: Any) -> World:
    """A global balancer in an empty region, and one region with engines far from it."""
    return World(5, flat(["here", "there"], rtt_ms), {"there": station(8, 2.0)}, balancers={"here": 1}, **options)


def only(world: World) -> BalancerProcess:
    return world.balancers["here"][0]


def flow_of(world: World) -> GlobalFlow:
    flow = only(world).flow
    assert isinstance(flow, GlobalFlow)
    return flow


def state(world: World) -> str:
    return str(flow_of(world).regions.liveness["there"].read(only(world).relay.clock()).state)


def test_an_older_report_never_undoes_a_newer_one() -> None:
    world = apart()
    world.run(3.0)
    links = only(world).links
    newest, heard_at = links.reports["there"]
    view = flow_of(world).regions.view
    links.on_report(msgspec.structs.replace(newest, seq=newest.seq - 1, draining=True))
    links.on_report(newest)
    assert links.reports["there"] == (newest, heard_at)
    assert flow_of(world).regions.view is view
    links.on_report(msgspec.structs.replace(newest, incarnation=newest.incarnation + 1, seq=0, draining=True))
    assert flow_of(world).regions.view is not view


def test_the_round_trip_time_follows_the_pings() -> None:
    world = apart(watching=Watching(ping_jitter=0.0))
    world.at(5.0, world.wire.set_rtt, "here", "there", 300.0)
    world.run(4.0)
    assert flow_of(world).regions.view.regions["there"].rtt_ms == pytest.approx(100.0)
    world.run(60.0)
    assert flow_of(world).regions.view.regions["there"].rtt_ms == pytest.approx(300.0)


def test_reports_that_are_lost_leave_a_region_suspect_not_down() -> None:
    world = apart()
    world.at(5.0, world.lose_reports, "there", 1.0)
    world.at(20.0, world.lose_reports, "there", 0.0)
    world.run(19.0)
    assert state(world) == "suspect"
    world.run(22.0)
    assert state(world) == "up"


def test_reports_may_be_old_when_they_set_out() -> None:
    world = apart(reporting=Reporting(every_s=1.0, delay_s=3.0))
    seen: list[tuple[float, RegionReport]] = []
    listen = only(world).links.on_report
    only(world).links.on_report = lambda r: (seen.append((world.now, r)), listen(r))[1]  # type: ignore[method-assign]
    world.run(5.5)
    assert [round(at, 6) for at, _ in seen] == [3.05, 4.05, 5.05]
    clock_ms = world.regions["there"].relay.clock() * 1e3
    assert seen[0][1].clock_ms == pytest.approx(clock_ms - 5500.0)


def test_channel_breaks_after_two_lost_pings_and_not_after_one() -> None:
    world = apart(watching=Watching(ping_jitter=0.0))
    world.run(5.0)
    links, there = only(world).links, world.regions["there"]
    there.alive = False  # no answer comes, yet nothing else is affected
    while links.lost["there"] == 0:
        world.run(world.now + 0.01)
    assert links.channel_up["there"], "one may be lost by chance"
    world.run(world.now + 0.5)
    assert not links.channel_up["there"], "it was asked again soon"


def test_a_broken_channel_is_tried_four_times_a_second() -> None:
    world = apart(watching=Watching(ping_jitter=0.0))
    world.run(5.0)
    links, there = only(world).links, world.regions["there"]
    there.alive = False
    while links.channel_up["there"]:
        world.run(world.now + 0.01)
    before = links.lost["there"]
    world.run(world.now + 3.0)
    assert links.lost["there"] - before >= 3.0 / (HURRY * 1.2 + 0.1) - 1.0  # the pause at the longest, and the wire
    there.alive = True
    world.run(world.now + HURRY * 1.2 + 0.1)
    assert links.channel_up["there"]


def test_the_clock_offset_is_that_of_the_ping_not_of_an_old_report() -> None:
    world = apart(reporting=Reporting(every_s=1.0, delay_s=3.0), watching=Watching(ping_jitter=0.0))
    world.run(10.0)
    offset_ms = (world.regions["there"].relay.clock() - only(world).relay.clock()) * 1e3
    (instance,) = flow_of(world).regions.view.regions["there"].instances
    assert instance.clock_offset_ms == pytest.approx(offset_ms, abs=0.01)
