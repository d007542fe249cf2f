"""What is known of replicas across views, and the table that says it in numbers."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from worlds import MODEL, OTHER_MODEL, replica, request

from farhop.balance import outcome
from farhop.balance.estimate.estimates import Estimates
from farhop.balance.health.reading import State
from farhop.balance.health.replica import HealthConfig
from farhop.balance.ledger import Reservation
from farhop.balance.machine import Address
from farhop.balance.prefix import chain
from regional_lb.fleet.kv_events import Cleared, KvEvent, Linked, Stored
from regional_lb.fleet.replicas import Replicas
from regional_lb.fleet.view import BlocksChanged, ReplicaProbed, ReplicaSampled, Sample, variant_of, view_of
from regional_lb.scheduler.policy import Need


@pytest.fixture
def replicas() -> Replicas:
    known = Replicas(HealthConfig(streak=2, fall=2, rise=1), Estimates())
    known.adopt(view_of([replica("r1"), replica("r2"), replica("r3", models=frozenset({OTHER_MODEL}))]))
    for name in ("r1", "r2", "r3"):
        known.handle(ReplicaProbed(name, True), 0.0)
    return known


def names(replicas: Replicas, model: str = MODEL, without: tuple[str, ...] = ()) -> list[str]:
    return list(replicas.able(model, 0.0).without(without).names)


def test_a_leaving_or_mismatched_replica_takes_no_new_work(replicas: Replicas) -> None:
    both = frozenset({MODEL, OTHER_MODEL})
    replicas.adopt(view_of([
        replica("r1", draining=True), replica("r2", models=both, missing=frozenset({MODEL})),
        replica("r3", models=both),
    ]))  # fmt: skip
    assert names(replicas) == ["r3"]
    assert names(replicas, OTHER_MODEL) == ["r2", "r3"]
    assert replicas.health_tracker.read("r1", 0.0).state is State.DRAINING
    assert replicas.health_tracker.read("r2", 0.0).state is State.UP  # it serves the other
    replicas.adopt(view_of([replica("r1"), replica("r2", missing=both), replica("r3", models=frozenset())]))
    assert names(replicas) == ["r1"]
    assert replicas.health_tracker.read("r2", 0.0).why == "its /v1/models lists none of its models"
    assert replicas.health_tracker.read("r3", 0.0).why == "its /v1/models has not said what it serves"
    for _ in range(2):
        replicas.handle(ReplicaProbed("r2", False), 0.0)
    assert replicas.health_tracker.read("r2", 0.0).why == "probes fail"


def test_another_process_under_the_same_name_has_proven_nothing(replicas: Replicas) -> None:
    replicas.adopt(view_of([replica("r1", address=Address("elsewhere", 1)), replica("r2")]))
    assert names(replicas) == ["r2"]
    replicas.handle(ReplicaProbed("r1", True), 0.0)
    assert names(replicas) == ["r1", "r2"]


def test_healthy_replicas_by_model(replicas: Replicas) -> None:
    assert names(replicas) == ["r1", "r2"]
    assert names(replicas, OTHER_MODEL) == ["r3"]
    assert names(replicas, "nowhere") == []
    assert names(replicas, without=("r1",)) == ["r2"]


def test_state_of_replicas_survives_a_new_view_and_that_of_removed_ones_is_forgotten(replicas: Replicas) -> None:
    replicas.caches("r1", request("a").chain)
    replicas.prefilled("r1", 8020.0, 8000.0, 0.0)
    replicas.age(1.0)
    measured = replicas.speeds["r1"].prefill_ms_per_token
    replicas.adopt(view_of([replica("r1")]))
    assert names(replicas) == ["r1"]
    assert replicas.trie.bytes_held("r1") == 1024
    assert replicas.speeds["r1"].prefill_ms_per_token == measured > 0.5
    assert set(replicas.health) == set(replicas.speeds) == set(replicas.trie.locations) == {"r1"}
    replicas.adopt(view_of([replica("r1"), replica("r2")]))
    assert replicas.health["r2"].read(0.0).state is State.DOWN  # like a new one


def test_a_sample_renews_one_replica_and_survives_a_swap(replicas: Replicas) -> None:
    view, table, other = replicas.view, replicas.whole, replicas.view.replicas["r2"]
    sample = Sample(5.0, waiting=2, running=1, kv_usage=0.5, kv_tokens=128)
    replicas.handle(ReplicaSampled("r1", sample), 0.0)
    assert replicas.view is view  # the number of other replicas costs nothing
    assert replicas.whole is table
    assert replicas.view.replicas["r2"] is other
    assert (replicas.view.replicas["r1"].sample, replicas.view.replicas["r1"].kv_tokens) == (sample, 128)
    replicas.caches("r1", request("a").chain)
    assert replicas.trie.bytes_held("r1") == 512  # the mirror is as large as the cache
    replicas.adopt(view_of([replica("r1"), replica("r2")]))
    assert (replicas.view.replicas["r1"].sample, replicas.view.replicas["r1"].kv_tokens) == (sample, 128)
    replicas.adopt(view_of([replica("r1", address=Address("elsewhere", 1))]))
    assert replicas.view.replicas["r1"].sample is None  # another process


def test_a_view_that_was_handed_over_is_never_written(replicas: Replicas) -> None:
    handed = view_of([replica("r1")])
    replicas.adopt(handed)
    replicas.handle(ReplicaSampled("r1", Sample(5.0, 0, 0, 0.0)), 0.0)
    assert handed.replicas["r1"].sample is None


def test_a_replica_with_a_fault_is_not_able(replicas: Replicas) -> None:
    replicas.handle(ReplicaProbed("r1", True, "GPU 0: XID 79"), 1.0)
    assert names(replicas) == ["r2"]
    assert replicas.health["r1"].read(1.0).why == "GPU 0: XID 79"
    replicas.handle(ReplicaProbed("r1", True), 2.0)
    assert names(replicas) == ["r1", "r2"]


def test_events_of_a_replica_that_left_change_nothing(replicas: Replicas) -> None:
    replicas.adopt(view_of([replica("r1")]))
    replicas.answered("r2", 200, 0.0)
    replicas.handle(ReplicaSampled("r2", Sample(0.0, 0, 0, 0.0)), 0.0)
    replicas.failed("r2", outcome.CONNECT_FAILED, 0.0)
    replicas.caches("r2", request("a").chain)
    assert replicas.trie.nodes == 0
    assert set(replicas.health) == {"r1"}


def test_a_mirror_is_as_large_as_the_cache_it_mirrors(replicas: Replicas) -> None:
    replicas.adopt(view_of([replica("r1", kv_tokens=128)]))  # 512 bytes
    replicas.caches("r1", request("a", 4096).chain)
    assert replicas.trie.bytes_held("r1") == 512


def test_a_limit_of_this_balancer_does_not_count_against_a_replica(replicas: Replicas) -> None:
    for _ in range(10):
        replicas.failed("r1", outcome.UPSTREAM_FULL, 0.0)
    assert replicas.health["r1"].steady
    assert names(replicas) == ["r1", "r2"]


def test_errors_eject_but_never_the_last(replicas: Replicas) -> None:
    for _ in range(2):
        replicas.answered("r1", 500, 0.0)
        replicas.answered("r2", 400, 0.0)  # the client's fault
    assert names(replicas) == ["r2"]
    for _ in range(9):
        replicas.failed("r2", outcome.DIED_BEFORE_START, 0.0)
    assert names(replicas) == ["r2"]  # one of three is out, two would be more than half
    replicas.caches("r2", request("a").chain)
    replicas.failed("r2", outcome.CONNECT_FAILED, 0.0)
    assert names(replicas) == ["r1"]  # but if no replica is healthy: panic mode, and r1's errors are ignored
    replicas.failed("r1", outcome.CONNECT_FAILED, 30.0)
    assert list(replicas.able(MODEL, 30.0).names) == ["r2"]  # its trial is due
    assert replicas.trie.bytes_held("r2") == 0


def test_a_trial_after_an_ejection_is_one(replicas: Replicas) -> None:
    replicas.failed("r1", outcome.CONNECT_FAILED, 0.0)
    assert names(replicas) == ["r2"]
    ready = list(replicas.able(MODEL, 1.5).names)
    assert ready == ["r1", "r2"]  # the back-off of a second is over
    assert replicas.admit("r1", 1.5)
    assert list(replicas.able(MODEL, 1.6).names) == ["r2"]  # its trial is under way
    replicas.answered("r1", 200, 1.7)
    assert list(replicas.able(MODEL, 1.8).names) == ["r1", "r2"]


def test_who_asks_what_engines_serve_is_told_of_what_may_be_another_process(replicas: Replicas) -> None:
    told: list[tuple[str, outcome.Outcome]] = []
    replicas.recheck_engine = lambda name, reason: told.append((name, reason))
    for reason in (outcome.DIED_BEFORE_START, outcome.CONNECT_FAILED, outcome.TOO_LONG, outcome.MODEL_NOT_SERVED):
        replicas.failed("r1", reason, 0.0)
    assert told == [("r1", outcome.CONNECT_FAILED), ("r1", outcome.MODEL_NOT_SERVED)]


@pytest.mark.parametrize("reason", sorted(outcome.REFUSALS_OF_THE_WELL, key=lambda one: one.reason))
def test_a_trial_that_is_refused_by_an_engine_that_is_well_ends_the_ejection(
    replicas: Replicas, reason: outcome.Outcome
) -> None:
    replicas.failed("r1", outcome.CONNECT_FAILED, 0.0)
    assert replicas.admit("r1", 1.5)
    replicas.failed("r1", reason, 1.7, 1.5)
    assert names(replicas) == ["r1", "r2"]
    assert replicas.health["r1"].read(1.8).state is State.UP


_EVENTS = ("reserve", "began", "release", "probe", "fail", "refuse", "answer", "admit", "later", "swap", "sample")
_steps = st.lists(
    st.tuples(
        st.sampled_from((*_EVENTS, "break", "unready")),
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(_steps)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_table_and_cached_health_never_lag_behind_what_they_stand_for(steps) -> None:
    replicas = Replicas(HealthConfig(streak=2, fall=2, rise=1), Estimates())
    four = [replica(f"r{i}") for i in range(4)]
    replicas.adopt(view_of(four))
    now, held = 0.0, 0
    for what, which, n in steps:
        name = f"r{which}"
        if what == "reserve":
            replicas.ledger.reserve(f"q{held}", Reservation(name, n * 300, n * 400))
            held += 1
        elif what == "began":
            replicas.ledger.began(f"q{n}", now)
        elif what == "release":
            replicas.ledger.release(f"q{n}")
        elif what == "probe":
            replicas.handle(ReplicaProbed(name, n > 2), now)
        elif what == "fail":
            replicas.failed(name, outcome.DIED_BEFORE_START, now)
            replicas.lingers(Reservation(name, 0, n * 100), now, now, outcome.DIED_BEFORE_START)
        elif what == "refuse":
            replicas.failed(name, outcome.CONNECT_FAILED, now)
        elif what == "answer":
            replicas.answered(name, 500 if n < 3 else 200, now)
        elif what == "admit" and name in replicas.health:
            replicas.admit(name, now)
        elif what == "later":
            now += n * 4.0
        elif what == "swap":
            last = {"draining": n % 3 == 1, "missing": frozenset({MODEL} if n % 3 == 2 else ())}
            replicas.adopt(view_of([*four[:which], replica(f"r{which}", **last)]))
        elif what == "sample":
            sample = Sample(now, waiting=n // 4, running=n, kv_usage=(None, 0.0, 0.2)[n % 3], kv_tokens=n * 500)
            replicas.handle(ReplicaSampled(name, sample), now)
        elif what == "break":
            replicas.handle(ReplicaProbed(name, True, "GPU 0: XID 79" if n > 2 else ""), now)
        elif what == "unready":
            replicas.handle(ReplicaProbed(name, True, ready=False, strain="GPU 0: 99 °C"), now)
        _agrees(replicas, now)


def _agrees(replicas: Replicas, now: float) -> None:
    known = replicas.view.replicas
    able = {r for r, h in replicas.health.items() if h.read(now).state in (State.UP, State.SUSPECT)}
    serving = [name for name in known if not (known[name].draining or known[name].missing)]
    able &= {*serving}
    if len(able) < 0.5 * len(serving):
        able |= {name for name in serving if replicas.health[name].held_out(now)}
    assert list(replicas.able(MODEL, now).names) == [name for name in known if name in able]
    table = replicas.whole
    for name, place in table.of.at.items():
        load, known = replicas.ledger.load(name), replicas.view.replicas[name]
        assert table.kv_tokens[place] == known.kv_tokens
        queued = _queued(known.sample)
        assert table.waiting[place] == queued
        held, held_tokens = replicas.health_tracker.black_holes.load(name)
        slots = max(1, ceil(replicas.health_tracker.share(name, now) * known.slots))
        assert held <= known.slots
        assert table.slots[place] == slots
        assert table.in_flight[place] == load.in_flight + held
        assert table.backlog_tokens[place] == load.prefill_tokens
        taken, counted = table.kv_taken_tokens.item(place), load.kv_tokens + held_tokens
        assert -1e-6 <= taken <= counted + 1e-6
        if known.sample is None or known.sample.kv_usage is None:
            assert taken == counted
        fits = load.in_flight + held < slots and (
            load.in_flight == 0
            or (load.prefill_tokens < known.prefill_tokens_max and taken + 10 + 5 <= known.kv_tokens + 1e-6)
        )
        fits = fits and (not queued or now - known.sample.at >= 3.0)
        assert bool(table.room(10.0, 5.0, now)[place]) is fits


def _queued(sample: Sample | None) -> int:
    if sample is None:
        return 0
    return sample.waiting if sample.queued is None else sample.queued


def test_a_waiting_request_counts_as_queued_only_if_two_scrapes_in_a_row_show_one(replicas: Replicas) -> None:
    def scraped(at: float, waiting: int) -> bool:
        replicas.handle(ReplicaSampled("r1", Sample(at, waiting, running=3, kv_usage=0.1)), at)
        return bool(replicas.whole.room(10.0, 5.0, at)[replicas.whole.of.at["r1"]])

    assert not scraped(0.0, 1)  # nothing was known before
    assert scraped(0.5, 0)
    assert scraped(1.0, 1)
    assert not scraped(1.5, 1)
    assert scraped(2.0, 0)
    assert not scraped(2.5, 2)  # two are not an accident
    assert scraped(3.0, 0)
    assert not scraped(9.0, 1)  # and so long ago counts as nothing


def test_a_queue_that_an_engine_only_repeats_while_nothing_is_sent_there_keeps_nothing_away(replicas: Replicas) -> None:
    """As vLLM's figures stand still once all its requests were cancelled: only a request gets it to write new ones."""

    def scraped(at: float, kv_usage: float = 0.9) -> bool:
        replicas.handle(ReplicaSampled("r1", Sample(at, waiting=15, running=106, kv_usage=kv_usage)), at)
        return bool(replicas.whole.room(10.0, 5.0, at)[replicas.whole.of.at["r1"]])

    assert not any(scraped(0.5 * n, 0.9 - 0.01 * n) for n in range(20))  # it works: for others
    assert not any(scraped(9.5 + 0.5 * n, 0.71) for n in range(6))
    assert scraped(12.5, 0.71)
    assert scraped(13.0, 0.71)
    replicas.ledger.reserve("a", Reservation("r1", 10, 15))
    assert not scraped(13.5, 0.71)  # one request is enough to find out
    replicas.ledger.release("a")
    assert scraped(14.0, 0.71)
    assert not scraped(14.5, 0.7)  # it moved


def test_an_answers_speed_belongs_to_the_mean_load_of_its_time_not_to_the_last() -> None:
    """Beside 10 requests for a second and 90 for another, of which but one are over before it ends; a new view comes
    in between. Without a time, or if the sum began anew, what there is counts."""
    known = Replicas(HealthConfig(), Estimates())
    known.adopt(view_of([replica("a")]))
    for n in range(90):
        known.now = float(n >= 10)
        known.ledger.reserve(f"q{n}", Reservation("a", 1, 1))
    known.adopt(view_of([replica("a"), replica("b")]))
    known.now = 2.0
    for n in range(89):
        known.ledger.release(f"q{n}")
    loads = []
    known.speeds.ended = lambda *of: loads.append(of[4])  # type: ignore[method-assign]
    known.served("a", 2000.0, 2000.0, 101, (0.0, 0.0), 2.0)
    known.served("a", 0.0, 0.0, 101, (2.0, known.whole.in_flight_s.item(0)), 2.0)
    known.served("a", 1000.0, 1000.0, 101, (1.0, 1e9), 2.0)
    assert loads == [0.5 * (10 + 90), 2.0, 2.0]


def test_a_version_has_its_own_able_replicas_as_cheap_as_a_model() -> None:
    known = Replicas(HealthConfig(rise=1), Estimates())
    known.adopt(view_of([replica("r1", version="v1"), replica("r2", version="v2"), replica("r3", version="v2")]))
    for name in ("r1", "r2", "r3"):
        known.handle(ReplicaProbed(name, True), 0.0)
    v2 = variant_of(MODEL, "v2")
    assert known.able(v2, 0.0).names == ("r2", "r3")
    assert known.able(v2, 0.0) is known.able(v2, 0.0)
    assert known.table(known.able(v2, 0.0)).of.names == ("r2", "r3")
    known.failed("r2", outcome.CONNECT_FAILED, 0.0)
    assert known.able(v2, 0.0).names == ("r3",)
    assert known.able(variant_of(MODEL, "v9"), 0.0).names == ()


def test_another_version_under_the_same_name_begins_with_an_empty_cache() -> None:
    known = Replicas(HealthConfig(rise=1), Estimates())
    one = request("a")
    known.adopt(view_of([replica("r1", version="v1")]))
    known.caches("r1", one.chain)
    known.adopt(view_of([replica("r1", version="v1")]))
    assert known.trie.count("r1") == len(one.chain)
    known.adopt(view_of([replica("r1", version="v2")]))
    assert known.trie.count("r1") == 0
    assert known.able(variant_of(MODEL, "v1"), 0.0).names == ()


# -- what replicas say of their caches


def telling(*changes: KvEvent, name: str = "r1") -> BlocksChanged:
    return BlocksChanged(name, 0, changes)


def blocks_of(tokens: int, first: int = 0) -> Stored:
    names = list(range(first, first + tokens // 16))
    return Stored(names, None, b"".join(bytes((n % 256, n // 256, 0, 0)) * 16 for n in names), 16)


def listened(**more: int) -> Replicas:
    replicas = Replicas(HealthConfig(rise=1), Estimates())
    replicas.adopt(view_of([replace(replica("r1", **more), kv_ranks=1), replica("r2")]))
    return replicas


def test_an_engine_that_forgets_all_empties_its_mirror() -> None:
    replicas = listened(kv_tokens=100_000)
    for name in ("r1", "r2"):
        replicas.caches(name, request("a").chain)
    assert replicas.handle(telling(Linked(up=True), blocks_of(160)), 0.0) == ""  # room that no replica has
    assert replicas.trie.bytes_held("r1") == 1024
    replicas.handle(telling(Cleared()), 0.0)
    assert (replicas.trie.bytes_held("r1"), replicas.trie.bytes_held("r2")) == (0, 1024)
    assert replicas.blocks.events_state("r1") == "exact"
    assert replicas.blocks.events_state("r2") is None
    replicas.handle(telling(Cleared(), name="r2"), 0.0)  # it was never tried
    replicas.handle(telling(Cleared(), name="nobody"), 0.0)


def test_a_mirror_is_no_larger_than_what_the_engine_holds() -> None:
    replicas = listened(kv_tokens=100_000)
    replicas.caches("r1", request("a", 256 * 1024).chain)
    assert replicas.trie.bytes_held("r1") == 256 * 1024
    replicas.handle(telling(Linked(up=True), blocks_of(16_000)), 0.0)
    assert replicas.trie.bytes_held("r1") == 256 * 1024  # it may hold blocks that it did not report
    replicas.trie.drop("r1")
    replicas.trie.add("r1", 400_000)
    replicas.handle(telling(Cleared(), blocks_of(16_000)), 0.0)
    replicas.caches("r1", request("a", 256 * 1024).chain)
    replicas.handle(ReplicaSampled("r1", Sample(0.0, 0, 0, 0.0)), 0.0)
    assert 64_000 <= replicas.trie.bytes_held("r1") <= 64_000 + 64 * 1024


def test_the_kv_events_of_another_process_start_again() -> None:
    replicas = listened()
    replicas.handle(telling(Cleared(), Linked(up=True), blocks_of(160)), 0.0)
    replicas.adopt(view_of([replace(replica("r1"), kv_ranks=1)]))
    assert replicas.blocks.events_state("r1") == "exact"
    replicas.adopt(view_of([replace(replica("r1", address=Address("elsewhere", 1)), kv_ranks=1)]))
    assert (replicas.blocks.events_state("r1"), len(replicas.blocks)) == ("cut", 0)
    replicas.adopt(view_of([replica("r1", address=Address("elsewhere", 1))]))
    assert replicas.blocks.events_state("r1") is None
    replicas.adopt(view_of([]))
    assert len(replicas.blocks) == 0


def depth_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(depth for depth, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def test_a_shorter_hit_than_expected_also_drops_siblings_of_the_prompt() -> None:
    replicas = listened(kv_tokens=100_000)
    shared = b"shared " * 600
    one, other = (chain.chain(shared + name * 2000, 1) for name in (b"a", b"b"))
    for path in (one, other):
        replicas.caches("r2", path)
    need = Need(prompt_tokens=1.0, output_tokens=1.0, bytes_per_token=4.0, chain=one)

    def overrated(chain: tuple[int, ...], predicted: float, cached: int) -> bool:
        return replicas.mirror.overrated("r2", chain, 4.0, predicted, cached)

    predicted = chain.bytes_at(replicas.trie.match_one("r2", one)) / 4.0
    assert not replicas.mirror.overrated(
        "r2", need.chain, need.bytes_per_token, predicted, int(predicted) - 40
    )  # within a block or two: no change
    assert replicas.trie.match_one("r2", other) == len(other)
    shared_depth = depth_shared(one, other)
    third = (*one[: shared_depth - 2], 1, 2, 3)
    replicas.caches("r2", third)
    assert not replicas.mirror.overrated(
        "r2", need.chain, need.bytes_per_token, predicted, chain.bytes_at(shared_depth - 1) // 4 - 16
    )
    assert replicas.trie.match_one("r2", other) == shared_depth  # the nodes below that are gone
    assert replicas.trie.match_one("r2", third) == len(third)
    assert not overrated(need.chain, predicted, 300)
    assert replicas.trie.match_one("r2", third) == len(third) - 3
    assert replicas.trie.match_one("r2", one) == len(one)  # the prompt itself is there now
    assert replicas.trie.bytes_held("r2") == chain.bytes_at(len(one))
    replicas.trie.evict("r2", one[-3])
    assert replicas.mirror.overrated(
        "r2", need.chain, need.bytes_per_token, predicted, 0
    )  # some of it was evicted in the meantime: to be reported again
    assert not replicas.mirror.overrated("nobody", need.chain, 4.0, predicted, 0)
    assert not overrated((), predicted, 0)


@given(
    st.integers(1, 3),
    st.dictionaries(st.integers(0, 299), st.integers(1, 8), max_size=300),
    st.sets(st.integers(0, 299), max_size=20),
    st.booleans(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_hits_by_place_equal_the_tries_by_name(
    size: int, depths: dict[int, int], without: set[int], leaves: bool
) -> None:
    known = Replicas(HealthConfig(), Estimates())
    replicas = [replica(f"r{i}") for i in range(100 * size)]
    known.adopt(view_of(replicas))
    path = request("a", 4096).chain
    if leaves:
        known.adopt(view_of(replicas[1:]))
        known.adopt(view_of([*replicas[1:], replica("new")]))
    for i, depth in depths.items():
        if f"r{i}" in known.trie:
            known.trie.insert(f"r{i}", path[:depth])
    some = known.whole.of.without(tuple(f"r{i}" for i in without))
    for _ in range(2):  # and again from the results that the first time remembered
        found = {}
        for held, places in known.mirror.hits(path, some):
            for place in np.arange(len(some))[places].reshape(-1).tolist():
                assert some.names[place] not in found
                found[some.names[place]] = held
        assert found == {
            name: chain.bytes_at(depth) for name, depth in known.trie.match(path).items() if name in some.at
        }


def test_hits_follow_a_replica_whose_slot_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhop.balance.prefix.trie.TURN_NODES", 2)
    known = Replicas(HealthConfig(), Estimates())
    known.adopt(view_of([replica("r1"), replica("r2")]))
    path = request("a", 4096).chain
    for name in ("r1", "r2"):
        known.trie.insert(name, path[:4])
    whole = known.whole.of
    assert [(held, places.tolist()) for held, places in known.mirror.hits(path, whole)] == [(1024, [0, 1])]
    known.trie.clear("r1")  # more than is removed at once: it is recorded elsewhere now
    assert known.mirror.hits(path, whole) == [(1024, 1)]
    known.trie.insert("r1", path[:1])
    assert sorted(known.mirror.hits(path, whole)) == [(256, 0), (1024, 1)]


def test_prefill_replicas_are_listed_apart_from_replicas_that_answer() -> None:
    known = Replicas(HealthConfig(rise=1), Estimates())
    known.adopt(view_of([replica("p", role="prefill"), replica("d")]))
    for name in ("p", "d"):
        known.handle(ReplicaProbed(name, True), 0.0)
    assert known.able(MODEL, 0.0).names == ("d",)
    assert known.able_to_prefill(MODEL, "vllm", 0.0).names == ("p",)
    assert known.able_to_prefill("nowhere", "vllm", 0.0).names == ()
    known.failed("p", outcome.CONNECT_FAILED, 0.0)
    assert known.able_to_prefill(MODEL, "vllm", 0.0).names == ()
    known.computed("gone", 100.0, 1000.0, 0.0)  # no change
    before = known.speeds["p"].prefill_ms_per_token
    known.computed("p", 500.0, 1000.0, 0.0)
    known.age(1.0)
    assert known.speeds["p"].prefill_ms_per_token > before
    assert known.whole.prefill_ms_per_token[known.whole.of.at["p"]] == known.speeds["p"].prefill_ms_per_token


@pytest.mark.parametrize(
    ("before", "after", "forgets"),
    [
        (Sample(0.0, 0, 0, started_at=100.0), Sample(1.0, 0, 0, started_at=160.0), True),
        (Sample(0.0, 0, 0, started_at=100.0), Sample(1.0, 0, 0, started_at=100.2), False),
        (Sample(0.0, 0, 0, prefix_queries=900.0), Sample(1.0, 0, 0, prefix_queries=20.0), True),
        (Sample(0.0, 0, 0, prefix_queries=900.0), Sample(1.0, 0, 0, prefix_queries=920.0), False),
        (Sample(0.0, 0, 0), Sample(1.0, 0, 0, asleep=True), True),
        (Sample(0.0, 0, 0, asleep=True), Sample(1.0, 0, 0, asleep=True), False),
        (Sample(0.0, 0, 0, asleep=True), Sample(1.0, 0, 0), False),
    ],
)
def test_another_process_behind_the_same_address_holds_nothing(
    replicas: Replicas, before: Sample, after: Sample, forgets: bool
) -> None:
    replicas.handle(ReplicaSampled("r1", before), 0.0)
    replicas.caches("r1", request("a").chain)
    assert replicas.trie.bytes_held("r1") > 0
    replicas.handle(ReplicaSampled("r1", after), 1.0)
    assert (replicas.trie.bytes_held("r1") == 0) is forgets
