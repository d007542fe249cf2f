"""What is known of replicas across views, and the table that says it in numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import MODEL, OTHER_MODEL, replica, request

from farhop.balance import outcome
from farhop.balance.estimate import Estimates
from farhop.balance.health import HealthConfig, State
from farhop.balance.ledger import Reservation
from farhop.balance.machine import Address
from regional_lb.fleet import Fleet
from regional_lb.view import ReplicaProbed, ReplicaSampled, Sample, view_of


@pytest.fixture
def fleet() -> Fleet:
    known = Fleet(HealthConfig(streak=2, fall=2, rise=1), Estimates())
    known.adopt(view_of([replica("r1"), replica("r2"), replica("r3", models=frozenset({OTHER_MODEL}))]))
    for name in ("r1", "r2", "r3"):
        known.hear(ReplicaProbed(name, True), 0.0)
    return known


def names(fleet: Fleet, model: str = MODEL, without: tuple[str, ...] = ()) -> list[str]:
    return list(fleet.able(model, 0.0).without(without).names)


def test_who_is_healthy_by_model(fleet: Fleet) -> None:
    assert names(fleet) == ["r1", "r2"]
    assert names(fleet, OTHER_MODEL) == ["r3"]
    assert names(fleet, "nowhere") == []
    assert names(fleet, without=("r1",)) == ["r2"]


def test_what_is_known_survives_a_swap_and_what_left_is_forgotten(fleet: Fleet) -> None:
    fleet.caches("r1", request("a").chain)
    fleet.prefilled("r1", 1020.0, 1000.0)
    fleet.adopt(view_of([replica("r1")]))
    assert names(fleet) == ["r1"]
    assert fleet.trie.bytes_held("r1") == 1024
    assert fleet.speeds["r1"].prefill_ms_per_token == pytest.approx(1.0)
    assert set(fleet.health) == set(fleet.speeds) == set(fleet.trie.locations) == {"r1"}
    fleet.adopt(view_of([replica("r1"), replica("r2")]))
    assert fleet.health["r2"].read(0.0).state is State.DOWN  # as good as new


def test_a_sample_renews_one_replica_and_survives_a_swap(fleet: Fleet) -> None:
    view, table, other = fleet.view, fleet.whole, fleet.view.replicas["r2"]
    sample = Sample(5.0, waiting=2, running=1, kv_usage=0.5, kv_tokens=128)
    fleet.hear(ReplicaSampled("r1", sample), 0.0)
    assert fleet.view is view  # whoever else there is costs nothing
    assert fleet.whole is table
    assert fleet.view.replicas["r2"] is other
    assert (fleet.view.replicas["r1"].sample, fleet.view.replicas["r1"].kv_tokens) == (sample, 128)
    fleet.caches("r1", request("a").chain)
    assert fleet.trie.bytes_held("r1") == 512  # the mirror is as large as the cache
    fleet.adopt(view_of([replica("r1"), replica("r2")]))
    assert (fleet.view.replicas["r1"].sample, fleet.view.replicas["r1"].kv_tokens) == (sample, 128)
    fleet.adopt(view_of([replica("r1", address=Address("elsewhere", 1))]))
    assert fleet.view.replicas["r1"].sample is None  # another process


def test_a_view_that_was_handed_over_is_never_written(fleet: Fleet) -> None:
    handed = view_of([replica("r1")])
    fleet.adopt(handed)
    fleet.hear(ReplicaSampled("r1", Sample(5.0, 0, 0, 0.0)), 0.0)
    assert handed.replicas["r1"].sample is None


def test_a_replica_with_a_fault_is_not_able(fleet: Fleet) -> None:
    fleet.hear(ReplicaProbed("r1", True, "GPU 0: XID 79"), 1.0)
    assert names(fleet) == ["r2"]
    assert fleet.health["r1"].read(1.0).why == "GPU 0: XID 79"
    fleet.hear(ReplicaProbed("r1", True), 2.0)
    assert names(fleet) == ["r1", "r2"]


def test_what_is_said_of_a_replica_that_left_is_no_news(fleet: Fleet) -> None:
    fleet.adopt(view_of([replica("r1")]))
    fleet.answered("r2", 200, 0.0)
    fleet.hear(ReplicaSampled("r2", Sample(0.0, 0, 0, 0.0)), 0.0)
    fleet.failed("r2", outcome.CONNECT_FAILED, 0.0)
    fleet.caches("r2", request("a").chain)
    assert fleet.trie.nodes == 0
    assert set(fleet.health) == {"r1"}


def test_a_mirror_is_as_large_as_the_cache_it_mirrors(fleet: Fleet) -> None:
    fleet.adopt(view_of([replica("r1", kv_tokens=128)]))  # 512 bytes
    fleet.caches("r1", request("a", 4096).chain)
    assert fleet.trie.bytes_held("r1") == 512


def test_our_own_bounds_say_nothing_of_a_replica(fleet: Fleet) -> None:
    for _ in range(10):
        fleet.failed("r1", outcome.UPSTREAM_FULL, 0.0)
    assert fleet.health["r1"].steady
    assert names(fleet) == ["r1", "r2"]


def test_errors_eject_but_never_the_last(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.answered("r1", 500, 0.0)
        fleet.answered("r2", 400, 0.0)  # the client's fault
    assert names(fleet) == ["r2"]
    for _ in range(9):
        fleet.failed("r2", outcome.DIED_BEFORE_START, 0.0)
    assert names(fleet) == ["r2"]  # one of three is out, two would be more than half
    fleet.caches("r2", request("a").chain)
    fleet.failed("r2", outcome.CONNECT_FAILED, 0.0)
    assert names(fleet) == []  # but where nobody is at home, nobody is
    assert fleet.trie.bytes_held("r2") == 0


def test_a_trial_after_an_ejection_is_one(fleet: Fleet) -> None:
    fleet.failed("r1", outcome.CONNECT_FAILED, 0.0)
    assert names(fleet) == ["r2"]
    ready = list(fleet.able(MODEL, 1.5).names)
    assert ready == ["r1", "r2"]  # the back-off of a second is over
    assert fleet.admit("r1", 1.5)
    assert list(fleet.able(MODEL, 1.6).names) == ["r2"]  # its trial is under way
    fleet.answered("r1", 200, 1.7)
    assert list(fleet.able(MODEL, 1.8).names) == ["r1", "r2"]


_EVENTS = ("reserve", "began", "release", "probe", "fail", "refuse", "answer", "admit", "later", "swap", "sample")
_steps = st.lists(
    st.tuples(
        st.sampled_from((*_EVENTS, "break")),
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(_steps)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_table_and_cached_health_never_lag_behind_what_they_stand_for(steps) -> None:
    fleet = Fleet(HealthConfig(streak=2, fall=2, rise=1), Estimates())
    replicas = [replica(f"r{i}") for i in range(4)]
    fleet.adopt(view_of(replicas))
    now, held = 0.0, 0
    for what, which, n in steps:
        name = f"r{which}"
        if what == "reserve":
            fleet.ledger.reserve(f"q{held}", Reservation(name, n * 300, n * 400))
            held += 1
        elif what in ("began", "release"):
            getattr(fleet.ledger, what)(f"q{n}")
        elif what == "probe":
            fleet.hear(ReplicaProbed(name, n > 2), now)
        elif what == "fail":
            fleet.failed(name, outcome.DIED_BEFORE_START, now)
        elif what == "refuse":
            fleet.failed(name, outcome.CONNECT_FAILED, now)
        elif what == "answer":
            fleet.answered(name, 500 if n < 3 else 200, now)
        elif what == "admit" and name in fleet.health:
            fleet.admit(name, now)
        elif what == "later":
            now += n * 4.0
        elif what == "swap":
            fleet.adopt(view_of(replicas[: 1 + which]))
        elif what == "sample":
            sample = Sample(now, waiting=n // 4, running=n, kv_usage=0.0, kv_tokens=n * 500)
            fleet.hear(ReplicaSampled(name, sample), now)
        elif what == "break":
            fleet.hear(ReplicaProbed(name, True, "GPU 0: XID 79" if n > 2 else ""), now)
        _agrees(fleet, now)


def _agrees(fleet: Fleet, now: float) -> None:
    able = [r for r, h in fleet.health.items() if h.read(now).state in (State.UP, State.SUSPECT)]
    assert list(fleet.able(MODEL, now).names) == able
    table = fleet.whole
    for name, place in table.of.at.items():
        load, known = fleet.ledger.load(name), fleet.view.replicas[name]
        assert table.kv_tokens[place] == known.kv_tokens
        assert table.waiting[place] == (known.sample.waiting if known.sample is not None else 0)
        assert table.in_flight[place] == load.in_flight
        assert table.backlog_tokens[place] == load.prefill_tokens
        assert table.kv_taken_tokens[place] == load.kv_tokens
        fits = load.in_flight == 0 or (
            load.in_flight < known.slots
            and (not load.prefill_tokens or load.prefill_tokens + 10 <= known.prefill_tokens_max)
            and load.kv_tokens + 10 + 5 <= 0.95 * known.kv_tokens
        )
        fits = fits and (known.sample is None or not known.sample.waiting or now - known.sample.at >= 3.0)
        assert bool(table.room(10.0, 5.0, now)[place]) is fits


def test_who_prefills_is_looked_for_apart_and_forgotten_with_the_rest() -> None:
    known = Fleet(HealthConfig(rise=1), Estimates())
    known.adopt(view_of([replica("p", role="prefill"), replica("d")]))
    for name in ("p", "d"):
        known.hear(ReplicaProbed(name, True), 0.0)
    assert known.able(MODEL, 0.0).names == ("d",)
    assert known.able_to_prefill(MODEL, 0.0).names == ("p",)
    assert known.able_to_prefill("nowhere", 0.0).names == ()
    known.failed("p", outcome.CONNECT_FAILED, 0.0)
    assert known.able_to_prefill(MODEL, 0.0).names == ()
    known.computed("gone", 100.0, 1000.0)  # no news
    before = known.speeds["p"].prefill_ms_per_token
    known.computed("p", 500.0, 1000.0)
    assert known.speeds["p"].prefill_ms_per_token > before
    assert known.whole.prefill_ms_per_token[known.whole.of.at["p"]] == known.speeds["p"].prefill_ms_per_token
