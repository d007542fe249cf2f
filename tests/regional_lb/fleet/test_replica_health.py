"""Health taken together: never more than the stated share ejected, panic, readmission, and what each may use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import MODEL, OTHER_MODEL, replica

from farhop.balance import outcome
from farhop.balance.health.replica import HealthConfig, Mode
from farhop.balance.ledger import Reservation
from farhop.balance.machine import Address
from regional_lb.fleet.replica_health import BROKEN, ReplicaHealthTracker
from regional_lb.fleet.table import ReducedCapacity
from regional_lb.fleet.view import ReplicaProbed, view_of

OOM = outcome.ENGINE_OUT_OF_MEMORY


def tracker(n: int = 4, **config) -> ReplicaHealthTracker:
    made = ReplicaHealthTracker(HealthConfig(**{"streak": 3, "rise": 1, "fall": 2, **config}))
    made.adopt(view_of([replica(f"r{i}", slots=100) for i in range(n)]))
    for i in range(n):
        made.probed(ReplicaProbed(f"r{i}", True), 0.0)
    return made


def able(made: ReplicaHealthTracker, now: float, model: str = MODEL) -> list[str]:
    return made.find(model, now)[0]


def reduced(made: ReplicaHealthTracker, now: float) -> dict[str, ReducedCapacity]:
    return {name: held for name, held in made.reduced(now) if held is not None}


def test_one_out_of_memory_answer_ejects() -> None:
    made = tracker()
    assert made.broke("r1", OOM, 0.0, began_well=True)
    assert able(made, 0.0) == ["r0", "r2", "r3"]
    assert made.health["r1"].read(0.0).why == BROKEN[OOM]
    assert made.ejections == {"engine_out_of_memory": 1}
    made.broke("r2", outcome.ENGINE_ERROR, 0.0, began_well=True)  # a failure like any other
    assert "r2" in able(made, 0.0)
    assert not made.broke("gone", OOM, 0.0, began_well=True)


def test_engine_failures_of_one_tenant_count_once_if_others_succeed_after() -> None:
    """An engine may repeat a request's own words in its error."""

    def says(tenant: str, now: float) -> bool:
        made.admit("r1", now - 0.6)  # as the one trial, if it was ejected
        made.answered("r1", True, now - 0.5, tenant="other")
        made.answered("r1", False, now, tenant=tenant)
        made.broke("r1", outcome.ENGINE_BROKEN, now, began_well=False, tenant=tenant)
        return "r1" not in able(made, now)

    made = tracker()
    assert says("mallory", 1.0)
    for now in (100.0, 101.0, 102.0):
        assert not says("mallory", now)
    assert says("other", 103.0)
    made.adopt(view_of([replica("r1", address=Address("10.9.9.9", 1)), *(replica(f"r{n}") for n in (0, 2, 3))]))
    made.probed(ReplicaProbed("r1", True), 104.0)
    assert says("mallory", 105.0)


def test_an_answer_that_began_as_a_failure_is_counted_once() -> None:
    made = tracker(2, eject_share_max=0.0)
    made.answered("r0", False, 0.0)
    made.broke("r0", OOM, 0.0, began_well=False)
    assert made.outliers.failing("r0") == pytest.approx(0.1)
    made.broke("r0", OOM, 0.0, began_well=True)
    assert made.outliers.failing("r0") == pytest.approx(0.19)


def test_the_share_is_per_model_and_a_replica_on_trial_counts() -> None:
    made = ReplicaHealthTracker(HealthConfig(eject_share_max=0.5, eject_s=30.0))
    models = {"a": {MODEL}, "b": {MODEL}, "c": {OTHER_MODEL}, "d": {OTHER_MODEL}, "e": {OTHER_MODEL}}
    made.adopt(view_of([replica(name, models=frozenset(of)) for name, of in models.items()]))
    for name in models:
        made.probed(ReplicaProbed(name, True), 0.0)
    for name in models:
        made.broke(name, OOM, 0.0, began_well=True)
    assert (able(made, 0.0), able(made, 0.0, OTHER_MODEL)) == (["b"], ["d", "e"])  # one of two, one of three
    assert set(able(made, 31.0)) == {"a", "b"}
    made.broke("b", OOM, 31.0, began_well=True)  # `a` is half open: if its trial failed now, no replica would be left
    assert made.health["b"].steady


def test_a_replica_that_leaves_or_lost_the_model_counts_as_out() -> None:
    """One of four may go where two others serve: the last that is able never does."""
    made = ReplicaHealthTracker(HealthConfig(eject_share_max=1.0))
    leaving = replica("c", draining=True), replica("d", missing=frozenset({MODEL}))
    made.adopt(view_of([replica("a"), replica("b"), *leaving]))
    for name in made.health:
        made.probed(ReplicaProbed(name, True), 0.0)
    for name in ("a", "b"):
        made.broke(name, OOM, 0.0, began_well=True)
    assert able(made, 0.0) == ["b"]


def test_failures_before_a_recovery_do_not_count_against_a_replica() -> None:
    """A stall: probes give it up, it is back, and then come the failures of what was under way all the time."""
    made = tracker()
    for at in (1.0, 2.0):
        made.probed(ReplicaProbed("r1", False), at)
    made.probed(ReplicaProbed("r1", True), 9.0)
    for _ in range(20):
        made.answered("r1", False, 10.0, sent_at=0.5)
    assert not made.broke("r1", OOM, 10.0, began_well=True, sent_at=0.5)
    assert "r1" in able(made, 10.0)
    assert (made.outliers.failing("r1"), made.ejections) == (0.0, {})


def test_a_slow_replica_is_ejected_and_tried_until_it_recovers() -> None:
    made, now = tracker(2), 0.0

    def serve(seconds: int, ms: float) -> None:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            made.began("r0", 100.0, 1000.0, 20.0, now)
            if made.health["r1"].steady:
                made.began("r1", ms, 1000.0, 20.0, now)
            made.probed(ReplicaProbed("r0", True), now)

    serve(30, 100.0)
    serve(6, 700.0)
    assert made.health["r1"].read(now).why == "slower than its peers, by its own usual"
    assert made.ejections == {"outlier": 1}
    serve(6, 700.0)
    assert made.admit("r1", now)
    made.answered("r1", True, now)  # its answers are good, only slow
    assert made.began("r1", 700.0, 1000.0, 20.0, now)
    assert made.health["r1"].read(now).until == now + 10.0
    serve(10, 100.0)
    assert made.admit("r1", now)
    made.answered("r1", True, now)
    assert not made.began("r1", 100.0, 1000.0, 20.0, now)
    serve(30, 100.0)
    assert made.health["r1"].steady
    assert made.ejections == {"outlier": 2}


def test_a_model_that_cannot_spare_a_replica_keeps_it_for_all() -> None:
    made = ReplicaHealthTracker(HealthConfig())
    both = frozenset({MODEL, OTHER_MODEL})
    made.adopt(view_of([replica("a", models=both), replica("b"), replica("c")]))
    for name in made.health:
        made.probed(ReplicaProbed(name, True), 0.0)
    made.broke("a", OOM, 0.0, began_well=True)  # no other replica serves the other model
    assert able(made, 0.0, OTHER_MODEL) == ["a"]
    made.broke("b", OOM, 0.0, began_well=True)
    assert able(made, 0.0) == ["a", "c"]


def test_in_panic_ejections_are_overlooked_and_failed_probes_are_not() -> None:
    made = tracker()
    for name in ("r0", "r1"):
        made.broke(name, OOM, 0.0, began_well=True)
    assert (able(made, 0.0), made.modes[MODEL]) == (["r2", "r3"], Mode.NORMAL)
    assert not made.admit("r0", 0.0)
    made.refused("r2", 0.0)
    assert (able(made, 0.0), made.modes[MODEL]) == (["r0", "r1", "r3"], Mode.PANIC)
    assert made.admit("r0", 0.0)
    assert made.admit("r0", 0.0)
    assert (made.offered("r0", 0.0), made.offered("r2", 0.0)) == (pytest.approx(0.9, abs=0.1), 0.0)
    made.refused("r3", 0.0)
    assert (able(made, 0.0), made.modes[MODEL]) == (["r0", "r1"], Mode.PANIC)
    for name in ("r0", "r1"):
        made.refused(name, 31.0)
    for name in ("r2", "r3"):
        made.refused(name, 31.0)
    assert (able(made, 31.0), made.modes[MODEL]) == ([], Mode.ALL_DOWN)


def test_panic_can_be_turned_off() -> None:
    made = tracker(2, panic_share=0.0)
    made.broke("r0", OOM, 0.0, began_well=True)
    made.refused("r1", 0.0)
    assert (able(made, 0.0), made.modes[MODEL]) == ([], Mode.ALL_DOWN)


def test_a_replica_that_joins_later_has_a_slow_start_and_the_first_ones_do_not() -> None:
    made = tracker(2)
    assert reduced(made, 0.0) == {}
    made.adopt(view_of([replica(f"r{i}", slots=100) for i in range(3)]))
    made.probed(ReplicaProbed("r2", True), 50.0)
    assert [reduced(made, at) for at in (50.0, 55.0, 60.0)] == [
        {"r2": ReducedCapacity(10)},
        {"r2": ReducedCapacity(50)},
        {},
    ]
    assert not made.reducing


def test_a_crowd_that_fails_fast_counts_for_as_long_as_it_would_have_been_there() -> None:
    made = tracker(2)
    made.answered("r0", False, 1.0)
    made.lingers(Reservation("r0", 10, 300), until=6.0, now=1.0)
    (held,) = reduced(made, 1.0).values()
    assert (held.requests, held.kv_tokens) == (1, 300)
    assert held.slots == 90
    assert reduced(made, 6.0)["r0"].requests == 0
    made.lingers(Reservation("gone", 10, 300), until=6.0, now=1.0)
    alone = tracker(1)
    alone.lingers(Reservation("r0", 10, 300), until=6.0, now=1.0)
    assert reduced(alone, 1.0) == {}  # there is no other replica to move to


def test_a_replica_that_always_fails_and_may_not_be_ejected_keeps_one_slot() -> None:
    made = tracker(4, eject_share_max=0.0)
    for _ in range(2000):
        made.answered("r0", False, 1.0)
    assert made.outliers.failing("r0") > 0.999
    assert reduced(made, 1.0) == {"r0": ReducedCapacity(1)}


@pytest.mark.parametrize("burst", [False, True])
@pytest.mark.parametrize("victims", [["ok"], ["ok", "bad"], ["bad"], []])
def test_failures_of_one_tenant_make_no_outlier_if_others_succeed(victims: list[str], burst: bool) -> None:
    """A tenant whose prompts share a prefix brings all its requests that no engine can bear to one replica: there are
    eight for each request of others. What fails for others, too, or for all that ask, is still an outlier."""
    made, share = tracker(6), 1.0
    for second in range(40):
        now = float(second)
        for n in range(6):
            for one in victims if n == 0 and second >= 2 else ["ok"]:
                made.answered(f"r{n}", one == "ok", now, tenant="other")
        for _ in range(100 if burst and second == 10 else 8):
            made.answered("r0", False, now + 0.5, tenant="mallory")
        made.probed(ReplicaProbed("r0", True), now + 0.9)
        share = min(share, made.share("r0", now + 0.9))
    assert (made.ejections == {}) == (victims == ["ok"])
    assert (share > 0.9) == (victims == ["ok"])


def test_an_outlier_is_ejected_and_starts_again() -> None:
    made = tracker(3)
    for n in range(30):
        for name in ("r0", "r1", "r2"):
            made.answered(name, name != "r1" or n % 3 == 2, 0.5)  # two of three fail, never three in a row
    assert made.health["r1"].steady
    assert made.probed(ReplicaProbed("r0", True), 2.0)
    assert able(made, 2.0) == ["r0", "r2"]
    assert made.health["r1"].read(2.0).why == "fails more than its peers"
    assert made.outliers.failing("r1") == 0.0
    assert made.ejections == {"outlier": 1}


def test_states_are_counted_and_strangers_are_no_news() -> None:
    made = tracker(3)
    made.refused("r0", 0.0)
    assert made.states(0.0) == {"up": 2, "suspect": 0, "down": 1, "draining": 0}
    assert (made.offered("r0", 0.0), made.offered("r1", 0.0)) == (0.0, 1.0)
    assert made.answered_at("r1") == made.answered_at("gone") == float("-inf")
    made.answered("r1", True, 7.0)
    assert made.answered_at("r1") == 7.0
    assert not made.refused("gone", 0.0)
    assert not made.answered("gone", True, 0.0)
    assert not made.probed(ReplicaProbed("gone", True), 0.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ok", "fail", "oom", "probe", "later", "trial", "slow"]),
            st.integers(0, 5),
            st.integers(0, 9),
        ),
        max_size=80,
    ),
    st.sampled_from([0.1, 0.34, 0.5, 1.0]),
    st.integers(1, 6),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_never_more_than_the_share_is_ejected_and_recovered_replicas_return(steps, share: float, n: int) -> None:
    made, now = tracker(n, eject_share_max=share, eject_s=2.0), 0.0
    for what, which, much in steps:
        name = f"r{which % n}"
        if what in ("ok", "fail"):
            for _ in range(much):
                made.answered(name, what == "ok", now)
        elif what == "oom":
            made.broke(name, OOM, now, began_well=True)
        elif what == "probe":
            made.probed(ReplicaProbed(name, True), now)
        elif what == "trial":
            if name in able(made, now):
                made.admit(name, now)
        elif what == "slow":
            for second in range(0, 30, 2):
                for peer in made.health:
                    slow = second >= 20 and peer == name
                    made.began(peer, 900.0 if slow else 100.0, 1000.0, 20.0, now + second)
            now += 30.0
        else:
            now += much
        out = [r for r, health in made.health.items() if not health.steady]
        assert len(out) <= share * n
        assert len(out) < n
        assert able(made, now)
        for held in reduced(made, now).values():
            assert 1 <= held.slots <= 100
    now += 20.0 + 30.0  # the longest back-off, and a trial that was lost
    for health in made.health.values():
        assert health.admit(now)
        health.succeeded(now)
    for tick in range(700):
        made.probed(ReplicaProbed("r0", True), now + tick)
    assert {made.share(name, now + 700.0) for name in made.health} == {1.0}
    assert all(health.steady for health in made.health.values())


@pytest.mark.parametrize("share_max", [0.0, 0.2])
def test_a_share_too_small_for_one_replica_ejects_none(share_max: float) -> None:
    made = tracker(4, eject_share_max=share_max)
    for name in made.health:
        made.broke(name, OOM, 0.0, began_well=True)
    assert len(able(made, 0.0)) == 4
