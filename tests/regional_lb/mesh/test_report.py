from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import grpc
import msgspec
import pytest
from farhop_wire import region_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import until
from msgspec.structs import replace
from reporting import ADDRESSES, Watched, calling, live, publishing, reporter
from worlds import MODEL, OTHER_MODEL, regional, replica, request, swapped

from farhop.balance.ledger import Reservation
from farhop.balance.machine import RequestArrived, Usage
from farhop.service.assembly.region_channel import REPORT_BYTES_MAX
from farhop.store.contract import ChangeKind, report_key
from farhop.store.documents.document import DocumentError
from farhop.store.documents.report import (
    ACCEPTED_LIMIT,
    BASES_LIMIT,
    MODELS_LIMIT,
    RATE_LIMIT_MS,
    WAIT_LIMIT_MS,
    ModelReport,
    RegionReport,
    decode,
    encode,
    from_wire,
    to_wire,
)
from regional_lb.fleet.shares import PeerLoad, PeerReported, PeersChanged
from regional_lb.fleet.view import ReplicaProbed, ReplicaSampled, Sample
from regional_lb.mesh import report
from regional_lb.mesh.report import moved
from regional_lb.scheduler.accepted_bytes import ISSUERS_MAX
from regional_lb.scheduler.flow import RegionalFlow
from tests.conftest import unhindered

# -- what is said


async def test_report_has_the_state_of_this_instance() -> None:
    flow = regional(replica("a", slots=4), replica("b", slots=4), replica("c", models=frozenset({OTHER_MODEL}), gpu=""))
    flow.handle(ReplicaProbed("b", False), 0.0)
    for _ in range(3):
        flow.handle(ReplicaProbed("b", False), 0.0)
    flow.replicas.ledger.reserve("x", Reservation("a", 100, 400))
    found = reporter(flow, lambda: 1.0).build()
    assert (found.region, found.instance, found.incarnation, found.seq, found.clock_ms) == (
        "london",
        "r1",
        7,
        2,
        1000.0,
    )
    assert (found.tier_address, found.control_address, found.admin_address) == ADDRESSES
    mine, other = sorted(found.models, key=lambda m: m.model != MODEL)
    assert (mine.replicas_ready, mine.replicas_total, mine.usable_share) == (1, 2, 0.5)
    assert (mine.slots_total, mine.slots_free, mine.in_flight) == (4, 3, 1)
    assert (mine.kv_tokens_total, mine.kv_tokens_free) == (10_000, 9_600)
    assert (mine.gpu_types, other.gpu_types) == (("L4",), ())
    assert (other.model, other.replicas_ready) == (OTHER_MODEL, 1)


async def test_a_region_without_a_ready_replica_still_reports() -> None:
    flow = regional(replica("a"), up=False)
    (model,) = decode(encode(reporter(flow).build())).models
    assert (model.replicas_ready, model.slots_total, model.usable_share, model.wait_ms) == (0, 0, 0.0, 0.0)
    assert model.prefill_ms_per_token > 0


async def test_a_speed_below_a_reports_range_is_reported_as_the_slowest() -> None:
    crowd = Sample(0.0, waiting=10**9, running=1, kv_usage=1.0)
    flow = regional(replica("a", tpot_ms=60_000.0, sample=crowd))
    for n in range(200):
        flow.replicas.speeds.ended("a", 9e4, 9e7, 2, 1.0, 0.1 * n)
    flow.handle(ReplicaProbed("a", True), 20.0)
    assert flow.replicas.speeds["a"].tpot_ms > RATE_LIMIT_MS
    (model,) = decode(encode(reporter(flow, lambda: 0.0).build())).models
    assert (model.tpot_ms, model.wait_ms) == (RATE_LIMIT_MS, WAIT_LIMIT_MS)


async def test_the_balancers_that_sent_last_are_acknowledged_when_there_are_too_many() -> None:
    flow = regional(replica("a"), up=False)

    def sends(issuer: str) -> None:
        flow.handle(RequestArrived(request("q", 100, issuer=issuer)), 0.0)

    assert ISSUERS_MAX == ACCEPTED_LIMIT
    for n in range(ACCEPTED_LIMIT):
        sends(f"g{n}")
    sends("g0")  # seen first, but it continues to send
    sends("new")
    document = decode(encode(reporter(flow).build()))
    assert len(document.accepted_bytes) == ACCEPTED_LIMIT
    assert (document.accepted_bytes["g0"], document.accepted_bytes["new"]) == (200.0, 100.0)
    assert "g1" not in document.accepted_bytes


async def test_names_that_a_balancer_invents_leave_room_for_the_report() -> None:
    flow = regional(replica("a"), up=False)
    for n in range(ISSUERS_MAX):
        flow.handle(RequestArrived(request("q", 100, issuer=f"tokyo/{n:0250}")), 0.0)
    flow.handle(RequestArrived(request("q", 100, issuer="virginia/honest")), 0.0)
    document = decode(encode(reporter(flow).build()))
    assert document.accepted_bytes["virginia/honest"] == 100.0
    assert 100 < len(document.accepted_bytes) < ISSUERS_MAX


def named_at_length(models: int, bases: int, letters: int = 250) -> RegionalFlow:
    """Of an engine that says so much that etcd does not take it."""
    names = {f"m{n:0250}": frozenset(f"{n}-{base:0{letters}}" for base in range(bases)) for n in range(models)}
    flow = regional(replica("a", models=frozenset(names), lineage=names))
    assert flow.law.lineage.keys() == names.keys()
    return flow


async def test_an_engine_that_names_more_than_etcd_takes_neither_hides_its_region_nor_keeps_it_from_starting() -> None:
    flow = named_at_length(256, 7)
    value = live(flow)
    with pytest.raises(DocumentError, match="bytes"):
        encode(value.build())
    async with publishing(flow, value) as (_, store):
        assert [one.models for _, one in store.written] == [()]
        (why,) = value.published("hub").values()
        assert why is not None
        assert "only over gRPC" in why
        async with calling(value) as stub:
            call = stub.Reports(region_pb2.ReportsRequest(balancer="g"))
            assert len(from_wire(await call.read()).models) == 256
            call.cancel()
        flow.handle(swapped(replica("a")), asyncio.get_running_loop().time())
        await until(lambda: any(one.models for _, one in store.written))
        assert value.published("hub") == {"hub": None}
        flow.handle(
            swapped(*named_at_length(256, 7).replicas.view.replicas.values()), asyncio.get_running_loop().time()
        )
        await until(lambda: value.published("hub")["hub"] is not None)
    assert store.written[-1][1].draining, "and its end is told"


@pytest.mark.parametrize(
    ("bases", "letters", "unknown"),
    [(BASES_LIMIT, 50, False), (BASES_LIMIT + 1, 50, True), (BASES_LIMIT, 250, True), (7, 250, False)],
)
async def test_a_model_of_more_bases_than_a_report_names_has_none_that_are_known(
    bases: int, letters: int, unknown: bool
) -> None:
    found = reporter(named_at_length(1, bases, letters)).build().models[0]
    assert (len(found.bases), found.base_unknown) == (0 if unknown else bases, unknown)


@pytest.mark.parametrize("bases", [7, 32])
async def test_a_report_with_any_model_names_is_accepted_by_global_balancers(bases: int) -> None:
    """Two engines hid their region: they said 1 MiB."""
    found, path = reporter(named_at_length(MODELS_LIMIT, bases)).build(), "\N{LATIN SMALL LETTER E WITH ACUTE}" * 128
    models = tuple(replace(model, root=path, parent=path) for model in found.models)
    assert to_wire(replace(found, models=models)).ByteSize() < REPORT_BYTES_MAX


SIZES = st.sampled_from([0, 1, 37, 10_000, 10**6])
REPLICAS = st.lists(
    st.tuples(
        st.sampled_from(["up", "down", "never"]),
        st.sampled_from([1, 7, 10**6]),  # slots
        st.sampled_from([1, 10_000, 10**9]),  # kv_tokens
        st.sampled_from([1e-9, 0.1, 60_000.0]),  # prefill_ms_per_token
        st.sampled_from([1e-9, 20.0, 60_000.0]),  # tpot_ms
        st.sampled_from([None, 0, 5, 10**9]),  # waiting in the engine
        st.lists(st.tuples(SIZES, SIZES), max_size=4),  # reservations
        st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12), st.integers(0, 10**6)), max_size=3),  # speeds
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    REPLICAS,
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 10**7)), max_size=12),
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**31)), max_size=3),
    st.floats(0, 1e6),
)
def test_every_report_is_accepted_by_its_readers(
    replicas: list[Any], arrivals: list[tuple[str, int]], learnt: list[tuple[int, int]], now: float
) -> None:
    made = [
        replica(
            f"r{n}", slots=slots, kv_tokens=kv, prefill_ms_per_token=prefill, tpot_ms=tpot,
            sample=None if waiting is None else Sample(now, waiting, waiting, 1.0),
        )
        for n, (_, slots, kv, prefill, tpot, waiting, _, _) in enumerate(replicas)
    ]  # fmt: skip
    flow = regional(*made, up=False, queue_requests_max=5)
    for one, (state, *_, held, speeds) in zip(made, replicas, strict=True):
        if state != "never":
            flow.handle(ReplicaProbed(one.name, state == "up"), now)
        for n, (prefill_tokens, kv_tokens) in enumerate(held):
            flow.replicas.ledger.reserve(f"{one.name}-{n}", Reservation(one.name, prefill_tokens, kv_tokens))
        for elapsed_ms, service_ms, tokens in speeds:
            flow.replicas.speeds.began(one.name, elapsed_ms, tokens, now)
            flow.replicas.speeds.ended(one.name, elapsed_ms, service_ms, tokens, 1.0, now)
    for n, (issuer, size) in enumerate(arrivals):
        flow.handle(RequestArrived(request(f"q{n}", size, issuer=issuer, deadline=now + 1e5)), now)
    for prompt_bytes, tokens in learnt:
        flow.replicas.estimates.learn("anyone", MODEL, prompt_bytes, Usage(tokens, tokens))

    async def reported() -> RegionReport:
        return reporter(flow, lambda: now).build()

    made_report = asyncio.run(reported())
    assert decode(encode(made_report)) == made_report
    assert from_wire(to_wire(made_report)) == made_report


# -- when it counts as moved

CALM = ModelReport(
    model="m", replicas_ready=2, replicas_total=4, slots_total=100, slots_free=100, kv_tokens_total=1000,
    kv_tokens_free=1000, wait_ms=100.0, prefill_ms_per_token=0.1, tpot_ms=20.0, bytes_per_token=4.0, queued_tokens=1000,
)  # fmt: skip


def about(**fields: Any) -> RegionReport:
    own = {k: v for k, v in fields.items() if k in ModelReport.__struct_fields__}
    rest = {k: v for k, v in fields.items() if k not in own}
    return RegionReport(
        region="london", instance="r1", incarnation=1, tier_address="h:1", control_address="h:2",
        **{"seq": 1, "clock_ms": 0.0, "models": (msgspec.structs.replace(CALM, **own),), **rest},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "is_moved"),
    [
        ({}, False),
        ({"seq": 9}, False),
        ({"clock_ms": 9e9}, False),
        ({"wait_ms": 104.9}, False),
        ({"wait_ms": 95.1}, False),
        ({"wait_ms": 95.0}, True),
        ({"wait_ms": 106.0}, True),
        ({"wait_ms": 0.0}, True),
        ({"foreign_wait_ms": 1.0}, True),
        ({"slots_free": 96}, False),
        ({"slots_free": 95}, True),
        ({"kv_tokens_free": 949}, True),
        ({"kv_tokens_free": 951}, False),
        ({"queued_tokens": 0}, True),
        ({"prefill_ms_per_token": 0.094}, True),
        ({"prefill_ms_per_token": 0.096}, False),
        ({"tpot_ms": 21.5}, True),
        ({"bytes_per_token": 3.7}, True),
        ({"replicas_ready": 1}, True),
        ({"replicas_total": 5}, True),
        ({"draining": True}, True),
        ({"accepted_bytes": {"g": 1.0}}, True),
        ({"models": ()}, True),
        ({"model": "n"}, True),
    ],
)
def test_a_change_of_five_percent_or_of_a_flag_is_reported_at_once(fields: dict[str, Any], is_moved: bool) -> None:
    before = about()
    after = about(**fields)
    assert moved(before, after) is is_moved
    assert moved(after, before) is is_moved


def test_a_negligible_change_causes_no_report() -> None:
    assert not moved(about(wait_ms=0.0), about(wait_ms=0.04))
    assert moved(about(wait_ms=0.0), about(wait_ms=0.06))
    assert not moved(about(queued_tokens=0), about(queued_tokens=0))


# -- to the store


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its times a fifth."""
    for name in ("LOOK_S", "STORE_GAP_S", "LONGEST_GAP_S"):
        monkeypatch.setattr(report, name, getattr(report, name) / 5.0)


def test_report_intervals_match_the_contract() -> None:
    assert report.STORE_GAP_S >= 1 / 4  # at most four a second
    assert report.LONGEST_GAP_S <= 1.0
    assert report.LOOK_S <= 0.1 / 2  # a change is seen within 100 ms, with time left to send it


async def test_without_changes_a_report_is_written_once_per_longest_gap(faster: None) -> None:
    """By a clock that goes on with its looks alone, so that it does not matter how long they take this machine."""
    looks = 0
    found = reporter(regional(replica("a")), lambda: looks * report.LOOK_S)

    def look() -> None:
        nonlocal looks
        looks += 1

    found.prefixes.tidy = look  # type: ignore[method-assign]
    async with publishing(regional(replica("a")), found) as (_, store):
        await until(lambda: len(store.written) >= 3)
        at_ms = [written.clock_ms for _, written in store.written]
        gaps_s = [(b - a) / 1e3 for a, b in pairwise(at_ms)]
        assert all(report.LONGEST_GAP_S - 2 * report.LOOK_S <= gap_s <= report.LONGEST_GAP_S for gap_s in gaps_s), (
            gaps_s
        )
        assert sorted(set(store.seqs)) == store.seqs


def test_unchanged_samples_and_probes_cause_no_report() -> None:
    flow = regional(replica("a"), replica("b"))
    reporter(flow, lambda: 10.0)
    found = Sample(10.0, 0, 0, 0.5)
    for at in (10.0, 10.2):
        flow.handle(ReplicaSampled("a", replace(found, at=at)), at)
        flow.handle(ReplicaProbed("a", True), at)
        flow.eligibility.serving_table(MODEL, at)
    news = flow.news
    flow.handle(ReplicaSampled("a", replace(found, at=10.3)), 10.3)
    flow.handle(ReplicaProbed("a", True), 10.3)
    assert flow.report_holds_until(news, 10.3) > 10.3
    woken: list[float] = []
    flow.wake = lambda: woken.append(flow.news)
    flow.handle(ReplicaProbed("a", True), 10.35)
    assert not woken
    for one in (ReplicaSampled("a", replace(found, at=10.4, running=1)), ReplicaProbed("a", False)):
        flow.handle(one, 10.4)
        assert flow.report_holds_until(news, 10.4) == 10.4
        news = flow.news
    assert len(woken) == 1  # once: the woken task reads the rest itself


async def test_under_constant_change_it_is_written_at_most_four_times_a_second(faster: None) -> None:
    flow = regional(replica("a"))
    async with publishing(flow) as (_, store):
        while len(store.written) < 8:
            flow.accepted_bytes["g"] = flow.accepted_bytes.get("g", 0.0) + 1.0
            await asyncio.sleep(0.002)
        assert min(store.gaps_s) >= report.STORE_GAP_S * 0.95
        assert sorted(set(store.seqs)) == store.seqs
        assert store.written[-1][1].accepted_bytes["g"] > store.written[1][1].accepted_bytes["g"]


async def test_the_last_of_many_changes_is_written(faster: None) -> None:
    flow = regional(replica("a"))
    async with publishing(flow) as (_, store):
        for n in range(20):
            flow.accepted_bytes["g"] = float(n)
            await asyncio.sleep(0.003)
        await until(lambda: store.written[-1][1].accepted_bytes == {"g": 19.0})


async def test_a_store_that_hangs_does_not_hold_up_the_other_path(faster: None) -> None:
    flow = regional(replica("a"))
    async with publishing(flow) as (found, store):
        store.hangs.clear()
        flow.accepted_bytes["g"] = 5.0
        stream = found.Reports(region_pb2.ReportsRequest(), None)
        seen = [await anext(stream)]
        async with asyncio.timeout(60.0):
            while len(seen) < 4:
                seen.append(await anext(stream))
        assert seen[-1].accepted_bytes["g"] == 5.0
        await stream.aclose()
        assert 5.0 not in [value for _, one in store.written for value in one.accepted_bytes.values()]


async def test_withdrawal_reports_draining_then_deletes_the_key() -> None:
    store = Watched()
    await store.open()
    found = live(regional(replica("a")))
    await found.open(store)
    stream = found.Reports(region_pb2.ReportsRequest(), None)
    assert not (await anext(stream)).draining
    await found.withdraw()
    assert (await anext(stream)).draining
    await stream.aclose()
    changes = store.cluster.changes_after(1, report_key("london", "r1"))
    assert [change.kind for change in changes][-2:] == [ChangeKind.PUT, ChangeKind.DELETE]
    assert decode(changes[-2].value).draining
    assert sorted(set(store.seqs)) == store.seqs
    await found.withdraw()
    await store.close()


async def test_withdrawing_from_a_store_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FINAL_REPORT_S", 0.1)
    store = Watched()
    await store.open()
    found = live(regional(replica("a")))
    await found.open(store)
    store.hangs.clear()
    async with asyncio.timeout(60.0):
        await found.withdraw()
    await store.close()


async def test_an_outage_ends_with_the_newest_report(faster: None) -> None:
    flow = regional(replica("a"))
    async with publishing(flow) as (found, store):
        store.outage()
        before = len(store.written)
        flow.accepted_bytes["g"] = 3.0
        await until(lambda: found.latest.accepted_bytes == {"g": 3.0})
        assert len(store.written) == before
        store.restore()
        await until(lambda: store.written[-1][1].accepted_bytes == {"g": 3.0})


# -- over gRPC


async def test_a_ping_is_answered_with_our_clock() -> None:
    found = reporter(regional(replica("a")), lambda: 12.5)
    async with calling(found) as stub:
        answer = await stub.Ping(region_pb2.PingRequest(nonce=99, balancer="g"), timeout=60.0)
    assert (answer.nonce, answer.clock_ms, answer.incarnation) == (99, 12_500.0, 7)


async def test_a_change_goes_out_within_100_ms() -> None:
    flow = regional(replica("a"))
    took: list[float] = []
    clock = asyncio.get_running_loop().time
    async with publishing(flow) as (found, _), calling(found) as stub:
        stream = stub.Reports(region_pb2.ReportsRequest(balancer="g"), timeout=60.0)
        await stream.read()
        for n in range(1, 6):
            await asyncio.sleep(0.15)  # it waits for a change by now
            took_s = unhindered()
            flow.handle(RequestArrived(replace(request(f"q{n}"), issuer="g")), clock())
            while (await stream.read()).accepted_bytes.get("g") != flow.accepted_bytes["g"]:
                pass
            took.append(took_s())
        stream.cancel()
    assert sorted(took)[2] <= 0.1  # the machine may stall, but not most of the time


async def test_an_idle_reporter_does_not_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    look = report.Reporter.look
    monkeypatch.setattr(report.Reporter, "look", lambda self: (looks.append(0.0), look(self))[1])
    flow = regional(replica("a"))
    async with publishing(flow) as (found, _):
        begun = found.latest.seq
        await until(lambda: found.latest.seq > begun)  # after a second
    assert len(looks) < 10  # while a check every LOOK_S would be 20


async def test_two_readers_each_see_every_number_once_and_growing() -> None:
    flow = regional(replica("a"))
    async with publishing(flow) as (found, _), calling(found) as stub:
        streams = [stub.Reports(region_pb2.ReportsRequest(balancer="g"), timeout=60.0) for _ in range(2)]
        for stream in streams:
            seqs = []
            for n in range(4):
                flow.accepted_bytes["g"] = flow.accepted_bytes.get("g", 0.0) + n + 1.0
                seqs.append((await stream.read()).seq)
            assert sorted(set(seqs)) == seqs
        for stream in streams:
            stream.cancel()
        await until(lambda: len(found.report_readers) == 0)


async def test_a_slow_reader_gets_the_newest_and_not_what_it_missed(faster: None) -> None:
    flow = regional(replica("a"))
    async with publishing(flow) as (found, _):
        stream = found.Reports(region_pb2.ReportsRequest(), None)
        first = await anext(stream)
        for n in range(10):
            flow.accepted_bytes["g"] = float(n)
            await until(lambda n=n: found.latest.accepted_bytes == {"g": float(n)})
        second = await anext(stream)
        assert second.accepted_bytes == {"g": 9.0}
        assert second.seq >= first.seq + 10
        await stream.aclose()


async def test_too_many_readers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "STREAMS_MAX", 1)
    async with publishing(regional(replica("a"))) as (found, _), calling(found) as stub:
        held = stub.Reports(region_pb2.ReportsRequest(balancer="g"), timeout=60.0)
        await held.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Reports(region_pb2.ReportsRequest(balancer="h"), timeout=60.0).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        held.cancel()
        await until(lambda: len(found.report_readers) == 0)
        again = stub.Reports(region_pb2.ReportsRequest(balancer="h"), timeout=60.0)
        assert (await again.read()).region == "london"
        again.cancel()
        await until(lambda: len(found.report_readers) == 0)


async def test_numbers_only_grow_and_are_not_spent_on_what_is_not_published(faster: None) -> None:
    flow = regional(replica("a"))
    flow.handle(swapped(replica("a")), 0.0)
    async with publishing(flow) as (found, store):
        await until(lambda: len(store.written) >= 4)
        assert found.latest.seq <= len(store.written) + 2


async def test_reports_of_instances_that_share_replicas_add_up_to_that_of_a_single_one() -> None:
    names = [f"g{n}" for n in range(1, 7)]
    alone = regional(*map(replica, names))
    together = {me: regional(*map(replica, names), instance=me) for me in ("r1", "r2", "r3")}
    for me, flow in together.items():
        others = frozenset(together) - {me}
        for peer in others:
            loads = {n: PeerLoad(str(replica(n).address)) for n in names}
            flow.handle(PeerReported(peer, loads, {MODEL: 2} if peer == "r2" else {}, whole=True), 0.0)
        flow.handle(PeersChanged(others, others), 0.0)
    load = PeerLoad(str(replica("g2").address), 1, 100, 200, 1)
    for flow in (alone, together["r1"]):
        flow.replicas.ledger.reserve("q", Reservation("g2", 100, 200))
    for me in ("r2", "r3"):
        together[me].handle(PeerReported("r1", {"g2": load}, {}), 0.0)
    fields = {me: reporter(flow).build().models[0] for me, flow in together.items()}
    whole = reporter(alone).build().models[0]
    for field in (
        "replicas_ready", "replicas_total", "slots_total", "slots_free", "kv_tokens_total", "kv_tokens_free",
        "in_flight",
    ):  # fmt: skip
        assert sum(getattr(one, field) for one in fields.values()) == getattr(whole, field), field
    assert all(one.replicas_total for one in fields.values())
    assert {one.usable_share for one in fields.values()} == {1.0}
    assert fields["r1"].used_share == pytest.approx((1 + 2) / 12)  # with what waits at r2
    assert fields["r1"].queued_requests == 0
    together["r1"].handle(PeersChanged(frozenset(), frozenset(), serving=False), 0.0)
    given_up = reporter(together["r1"]).build().models[0]
    assert (given_up.replicas_total, given_up.slots_total, given_up.in_flight, given_up.usable_share) == (0, 0, 0, 1.0)


async def test_ping_answer_lists_known_attempts_and_their_quiet_time() -> None:
    found = reporter(regional(replica("a")))
    asked = region_pb2.PingRequest(nonce=3, balancer="virginia/g1", attempts=["a/1", "b/2"])
    assert list((await found.Ping(asked, None)).quiet_ms) == []  # unknown here
    found.quiet_s = lambda *asked: {("virginia/g1", "a/1"): 1.25}.get(asked)
    assert list((await found.Ping(asked, None)).quiet_ms) == [1250, report.UNKNOWN]
    assert found.quiet_ms("tokyo/g1", ["a/1"]) == [report.UNKNOWN]  # another process of the same name
    assert found.quiet_ms("virginia/g1", ["a/1"] * (report.ASKED_MAX + 1)) == []
