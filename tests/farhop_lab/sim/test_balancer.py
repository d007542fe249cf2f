from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from farhop.balance import outcome
from farhop.balance.health.inquiry import STALL_FLOOR_S
from farhop_lab.engine.core.text import write_all
from farhop_lab.sim.balancer import BalancerProcess
from farhop_lab.sim.measures import RequestRecord
from farhop_lab.sim.sites import MODEL, Watching, flat, gpus, station
from farhop_lab.sim.wire import STREAMED_BYTES
from farhop_lab.sim.world import World
from regional_lb.mesh.report import LEASE_S
from topology.model import Rule


def apart(rtt_ms: float = 100.0, **options: Any) -> World:
    """A global balancer in an empty region, and one region with engines far from it."""
    return World(
        5, flat(["here", "there"], rtt_ms), {"there": station(8, 2.0, first_s=0.1)}, balancers={"here": 1}, **options
    )


def only(world: World) -> BalancerProcess:
    return world.balancers["here"][0]


def state(world: World, region: str = "there") -> str:
    flow = only(world).flow
    return str(flow.regions.liveness[region].read(only(world).relay.clock()).state)  # type: ignore[attr-defined]


def test_a_far_answer_takes_a_round_trip_more() -> None:
    world = apart(300.0)
    world.at(5.0, world.arrive, "here", "t")
    measures = world.run(10.0)
    (record,) = measures.records
    assert record.outcome == "served"
    assert (record.entry, record.region, record.attempts) == ("here", "there", 1)
    assert record.ttft_ms == pytest.approx(300.0 + 1.0 + 100.0)  # wire, inside the region, engine
    assert record.ended_at == pytest.approx(5.0 + 0.3 + 0.001 + 2.0)
    assert world.wire.carried == {("here", "there"): 1224, ("there", "here"): 100 * STREAMED_BYTES}


def test_a_region_counts_bytes_by_sender_and_acknowledges_them() -> None:
    world = apart()
    world.at(5.0, world.arrive, "here", "t", 2048)
    world.run(9.0)
    flow = only(world).flow
    assert world.regions["there"].flow.accepted_bytes == {"here/g0": 2048.0}
    instance = flow.regions.view.regions["there"].instances[0]  # type: ignore[attr-defined]
    assert instance.accepted == 2048.0
    assert MODEL in instance.models


def test_clocks_of_two_processes_are_never_compared() -> None:
    """They differ by hours here, and a deadline holds all the same on either side of the wire."""
    world = apart()
    clocks = [only(world).relay.clock(), world.regions["there"].relay.clock()]
    assert abs(clocks[0] - clocks[1]) > 60.0
    world.at(5.0, lambda: world.arrive("here", "t", deadline_s=1.0))
    (record,) = world.run(10.0).records
    assert record.outcome == "deadline_exceeded"
    assert record.ended_at == pytest.approx(6.0, abs=0.01)


def test_a_dead_region_refuses_connections_and_is_noticed() -> None:
    world = apart()
    world.at(5.0, world.kill, "there")
    world.run(6.5)
    assert state(world) == "suspect", "its channel broke; its last report is still young"
    world.arrive("here", "t")
    measures = world.run(9.0)
    assert measures.outcomes == {"no_region_serving": 1}
    assert state(world) == "down"
    world.at(10.0, world.revive, "there")
    world.run(30.0)
    assert state(world) == "up"


def test_a_stream_that_dies_with_its_region_breaks_half_a_round_trip_later() -> None:
    world = apart()
    world.at(5.0, world.arrive, "here", "t")
    world.at(6.0, world.kill, "there")
    (record,) = world.run(10.0).records
    assert record.outcome == "upstream_died_mid_stream"
    assert record.ended_at == pytest.approx(6.05)


@pytest.mark.parametrize("bound", [False, True], ids=["free", "bound"])
def test_stream_of_a_dead_region_continues_in_another_lawful_one(bound: bool) -> None:
    """To the letter what an unbroken one says."""
    tenants = {"t": Rule(("there",) if bound else ("world",))}
    wires = {("here", "there"): 20.0, ("here", "yonder"): 90.0, ("there", "yonder"): 90.0}
    sites = dict.fromkeys(("there", "yonder"), gpus("a100", 1, token_ids=True))
    world = World(5, flat(["here", "there", "yonder"], wires, tenants), sites, balancers={"here": 1})
    seen: list[tuple[str, str, int, int | None, bytes]] = []

    def done(record: RequestRecord, value: bytes) -> None:
        seen.append((record.outcome, record.region, record.answer_tokens, record.prompt_tokens, value))

    world.at(5.0, lambda: world.arrive(
        "here", "t", text=b"tell me", answer_tokens=400, max_tokens=400, on_done=done
    ))  # fmt: skip
    world.at(8.0, world.kill, "there")
    world.run(60.0)
    assert world.measures.violations == 0, world.journal.first_violations
    ((outcome_, region, tokens, prompt_tokens, value),) = seen
    if bound:
        assert outcome_ == "no_region_serving"  # its own did not come back
    else:
        assert (outcome_, region, tokens, prompt_tokens) == ("served", "yonder", 400, 2)
        assert value == write_all(b"tell me", 0, 200.0, 400)


def test_a_stream_whose_only_region_loses_its_balancer_goes_on_there_where_its_prompt_is_cached() -> None:
    """A new balancer finds on its disk what was sent some seconds before."""
    seen: list[tuple[str, int, bytes]] = []

    def done(record: RequestRecord, value: bytes) -> None:
        seen.append((record.outcome, record.cached_tokens, value))

    for dies in (False, True):
        sites = {"there": gpus("a100", 4, token_ids=True)}
        world = World(5, flat(["here", "there"], 20.0), sites, balancers={"here": 1})
        text = b"tell me of the sea " * 400
        world.at(5.0, partial(world.arrive, "here", "t", text=text, answer_tokens=900, max_tokens=900, on_done=done))
        if dies:
            world.at(14.0, world.kill_regional, "there")
            world.at(15.0, world.revive, "there")
        world.run(60.0)
        assert world.measures.violations == 0, world.journal.first_violations
    (whole, cached_tokens, value), (broken, cached_again_tokens, as_long) = seen
    assert (whole, cached_tokens) == (broken, 0) == ("served", 0)
    assert as_long == value
    assert cached_again_tokens > 1_800  # of 1,900, and what had come of the answer


def test_a_frozen_link_is_given_up_in_time_and_heals_without_a_command_too_much() -> None:
    world = apart(watching=Watching(first_byte_s=4.0, between_bytes_s=3.0))
    world.at(5.0, world.arrive, "here", "t")
    world.at(5.5, world.freeze, "here", "there")
    world.at(5.6, lambda: world.arrive("here", "t", deadline_s=30.0))
    measures = world.run(8.55)
    first, *others = measures.records
    assert (first.outcome, first.ended_at) == (outcome.STALLED.reason, pytest.approx(8.5))
    assert not others, "its first byte may still come"
    world.run(10.0)
    assert measures.records[1].outcome in ("no_region_serving", "first_byte_timeout")
    world.at(12.0, world.heal, "here", "there")
    world.run(40.0)
    assert world.regions["there"].relay.under_way == 0, "what was given up is cancelled there once the link is back"
    assert (measures.arrived, measures.concluded, measures.violations) == (2, 2, 0)


def test_a_request_swallowed_by_the_only_region_is_asked_again_when_that_is_back() -> None:
    """Cut off, but not for so long that it counts as down: the connection stays dead, nobody closes it, and there is no
    other region to go to."""
    world = apart(watching=Watching(ping_jitter=0.0))
    for at in (5.9, 5.99):  # one has arrived there, and its answer is lost; the other never arrives
        world.at(at, world.arrive, "here", "t")
    world.at(6.0, world.blackhole, "here", "there")
    world.at(8.5, world.heal, "here", "there")
    records = world.run(100.0).records
    assert [record.outcome for record in records] == ["served", "served"]
    assert all(8.5 < record.ended_at < 14.0 for record in records)
    assert all((record.region, record.attempts) == ("there", 2) for record in records)


def test_a_stream_on_a_dead_connection_ends_and_a_slow_one_does_not() -> None:
    """After a heal the dead one is ended once TCP could not bring it any more; the other stood in a frozen link."""
    world = World(5, flat(["here", "there"], 100.0), {"there": station(8, 30.0, first_s=0.1)}, balancers={"here": 1})
    world.at(5.0, world.arrive, "here", "t")
    world.at(7.0, world.blackhole, "here", "there")
    world.at(11.0, world.heal, "here", "there")
    world.at(13.0, world.arrive, "here", "t")
    world.at(15.0, world.freeze, "here", "there")
    world.at(19.0, world.heal, "here", "there")
    dead, slow = sorted(world.run(100.0).records, key=lambda record: record.arrived_at)
    assert (dead.outcome, slow.outcome) == ("upstream_stalled", "served")
    assert 13.0 < dead.ended_at < 18.0
    assert world.journal.violations == 0


def test_a_stream_behind_a_link_that_stays_broken_ends_by_its_own_pauses() -> None:
    world = World(5, flat(["here", "there"], 100.0), {"there": station(8, 90.0, first_s=0.1)}, balancers={"here": 1})
    world.at(5.0, world.arrive, "here", "t")
    world.at(7.0, world.freeze, "here", "there")
    (record,) = world.run(100.0).records
    assert record.outcome == "upstream_stalled"
    assert record.ended_at == pytest.approx(7.0 + STALL_FLOOR_S, abs=1.0)


def test_a_black_hole_takes_what_was_sent_into_it_and_the_answers_of_before() -> None:
    world = apart(watching=Watching(first_byte_s=60.0, between_bytes_s=9.0))
    world.at(5.0, world.arrive, "here", "t")
    world.at(5.5, world.blackhole, "here", "there")
    world.at(6.0, world.heal, "here", "there")
    measures = world.run(7.5)
    assert world.regions["there"].relay.under_way == 0, "it is answered there"
    assert measures.records == []
    assert only(world).relay.under_way == 1, "and nobody here hears of it"
    world.at(8.0, world.arrive, "here", "t")
    world.run(12.0)
    fields = {record.arrived_at: record.outcome for record in measures.records}
    assert fields[8.0] == "served", "new connections are well"
    assert fields[5.0] == "upstream_stalled", "and the region was asked, and knows nothing of the other one any more"


def test_a_cut_breaks_connections_at_both_ends_and_none_comes_about() -> None:
    world = apart()
    world.at(5.0, world.arrive, "here", "t")
    world.at(6.0, world.cut, "here", "there")
    world.at(6.1, world.arrive, "here", "t")
    measures = world.run(6.2)
    assert world.regions["there"].relay.under_way == 0
    assert measures.records[0].outcome == "upstream_died_mid_stream"
    assert measures.records[0].ended_at == 6.0
    world.run(12.0)
    assert measures.records[1].outcome in ("connect_failed", "no_region_serving")
    assert state(world) == "down"
    world.heal("here", "there")
    world.run(20.0)
    world.arrive("here", "t")
    world.run(30.0)
    assert measures.records[2].outcome == "served"
    assert measures.violations == 0


def test_a_balancer_that_dies_breaks_its_streams_and_returns_with_the_state_in_etcd() -> None:
    world = World(
        5, flat(["here", "there"], 100.0), {"there": station(8, 2.0), "here": station(8, 2.0)}, balancers={"here": 1}
    )
    world.at(5.0, world.arrive, "here", "t")
    world.at(5.5, world.kill_global, "here")
    world.at(5.6, world.arrive, "here", "t")
    world.at(6.0, world.drain, "there")
    before = only(world)
    measures = world.run(7.0)
    assert [record.outcome for record in measures.records] == ["upstream_died_mid_stream", "connect_failed"]
    assert all(region.relay.under_way == 0 for region in world.regions.values())
    world.start_global("here")
    world.start_global("here")
    world.run(12.0)
    after = only(world)
    assert after is not before
    assert after.name == before.name
    assert (state(world), state(world, "here")) == ("draining", "up")
    world.arrive("here", "t")
    world.run(20.0)
    assert measures.records[-1].outcome == "served"
    assert before.relay.under_way == before.flow.under_way - 1 == 0, "the dead one is left as it died"
    assert measures.violations == 0


@pytest.mark.parametrize("is_read", [True, False])
def test_a_new_process_waits_for_every_region_whose_report_is_in_etcd(is_read: bool) -> None:
    """Not only for those whose reports come first: a prompt may be too long for them. Without etcd it knows no more."""
    world = World(5, flat(["here", "near", "far"], 300.0), {"near": station(8, 2.0), "far": station(8, 2.0)})
    world.at(5.0, world.kill_global, "here")
    world.run(5.5)
    world.lose_reports("far", 1.0)
    if not is_read:
        world.stop_etcd()
    world.start_global("here")
    made = only(world)
    while not made.listens:
        assert world.now < 10.0
        world.run(world.now + 0.01)
    assert made.links.channel_up == ({"near": True, "far": True} if is_read else {"near": True})


def test_a_region_that_died_is_in_etcd_for_its_lease() -> None:
    world = apart()
    world.run(5.0)
    world.kill("there")
    for at, listed in ((5.0 + LEASE_S - 0.1, True), (5.0 + LEASE_S, False)):
        world.run(at)
        assert world.regions["there"].is_listed == listed
    world.start_global("here")
    world.kill_global("here")
    world.start_global("here")
    assert only(world).links.reports == {}


def test_a_new_process_accepts_clients_only_after_it_knows_the_regions_or_has_waited() -> None:
    """As the shipped one (global_lb.app.main): a client's connection is refused, and it may go on to another entry."""
    settled: list[float] = []
    for lives in (True, False):
        world = apart()
        world.run(5.0)
        world.kill_global("here")
        if not lives:
            world.kill("there")
            world.run(60.0)
        began = world.now
        world.start_global("here")
        world.arrive("here", "t")
        while not only(world).listens:
            assert world.now < began + 10.0
            world.run(world.now + 0.05)
        settled.append(world.now - began)
        world.arrive("here", "t")
        world.run(world.now + 10.0)
        outcomes = [record.outcome for record in world.measures.records]
        assert outcomes == ["connect_failed", "served" if lives else "no_region_serving"]
    known_s, waited_s = settled
    assert 0.1 < known_s < 2.0  # at least one round trip
    assert waited_s == pytest.approx(Watching().settle_s, abs=0.06)
