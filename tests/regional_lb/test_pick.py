"""Room, choice and expected wait over replicas; what is known of them across views."""

from __future__ import annotations

from random import Random

import pytest
from worlds import MODEL, OTHER_MODEL, replica, request

from farhop.balance import outcome
from farhop.balance.estimate import Estimates, Speed
from farhop.balance.health import HealthConfig, State
from farhop.balance.ledger import Ledger, Load, Reservation
from regional_lb.pick import Fleet, any_room, expected_wait_ms, has_room, pick
from regional_lb.policy import Need, Predictive
from regional_lb.view import Sample, view_of

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def sample(waiting: int, at: float = 0.0, running: int = 0) -> Sample:
    return Sample(at=at, waiting=waiting, running=running, kv_usage=0.0)


@pytest.mark.parametrize(
    ("load", "uncached", "fits"),
    [
        (Load(), 1e9, True),  # idle
        (Load(1, 0, 500), 256.0, True),
        (Load(2, 0, 500), 256.0, False),  # both slots taken
        (Load(1, 1744, 1744), 256.0, True),  # 2000 tokens of prefill
        (Load(1, 1745, 1745), 256.0, False),
        (Load(1, 0, 1745), 5000.0, True),  # nothing is being prefilled: one may exceed the bound
        (Load(1, 0, 9144), 256.0, True),  # 9500 of 10,000
        (Load(1, 0, 9145), 256.0, False),
    ],
)
def test_room(load: Load, uncached: float, fits: bool) -> None:
    assert has_room(replica("r"), load, NEED, uncached, now=0.0) is fits


def test_an_engine_that_queues_has_no_room_while_its_word_is_fresh() -> None:
    busy = replica("r", sample=sample(waiting=1, at=10.0))
    assert not has_room(busy, Load(), NEED, 0.0, now=12.9)
    assert has_room(busy, Load(), NEED, 0.0, now=13.0)
    assert not any_room([busy, busy], Ledger(), now=12.9)
    assert any_room([busy, replica("s")], Ledger(), now=12.9)
    assert not any_room([], Ledger(), now=0.0)


def choose(replicas, hits=None, ledger=None, speeds=None, seed=1):
    speeds = {r.name: Speed(r.prefill_ms_per_token, r.tpot_ms) for r in replicas} | (speeds or {})
    return pick(NEED, replicas, hits or {}, ledger or Ledger(), speeds, Predictive(), 0.0, Random(seed))


def test_the_choice_comes_with_its_field_and_who_was_full() -> None:
    ledger = Ledger()
    for n in range(2):
        ledger.reserve(f"q{n}", Reservation("r1", 0, 10))
    choice = choose([replica("r1"), replica("r2", prefill_ms_per_token=0.3)], ledger=ledger)
    assert choice.chosen.replica == "r2"
    assert [s.replica for s in choice.field] == ["r1", "r2"]
    assert choice.full == ("r1",)
    nobody = choose([replica("r1")], ledger=ledger)
    assert (nobody.chosen, nobody.full) == (None, ("r1",))


def test_near_ties_go_to_the_less_loaded_and_clear_wins_do_not() -> None:
    ledger = Ledger()
    ledger.reserve("q", Reservation("r1", 0, 10))
    replicas = [replica("r1"), replica("r2")]
    assert {choose(replicas, ledger=ledger, seed=s).chosen.replica for s in range(20)} == {"r2"}
    assert {choose(replicas, seed=s).chosen.replica for s in range(20)} == {"r1", "r2"}
    warm = {"r1": 4}  # the whole prompt of 1024 bytes
    assert {choose(replicas, warm, ledger, seed=s).chosen.replica for s in range(20)} == {"r1"}


def test_expected_wait() -> None:
    one, two = replica("r1", slots=1), replica("r2", slots=1)
    speeds = {"r1": Speed(0.1, 20.0), "r2": Speed(0.1, 20.0)}
    ledger = Ledger()
    assert expected_wait_ms([], ledger, speeds, 0, 0.0) == 0.0
    assert expected_wait_ms([one, two], ledger, speeds, 0, 0.0) == 0.0
    ledger.reserve("a", Reservation("r1", 100, 100))
    ledger.reserve("b", Reservation("r2", 100, 100))
    # 256 tokens of 20 ms: each is through after 5.12 s, one of two every 2.56 s.
    assert expected_wait_ms([one, two], ledger, speeds, 0, 0.0) == pytest.approx(2560.0)
    assert expected_wait_ms([one, two], ledger, speeds, 3, 0.0) == pytest.approx(10240.0)
    roomy = replica("r1", slots=9)
    assert expected_wait_ms([roomy], ledger, speeds, 0, 0.0) == pytest.approx(10.0)  # 100 tokens of prefill ahead


def test_what_others_run_at_an_engine_counts_for_its_wait() -> None:
    speeds = {"r1": Speed(0.1, 20.0)}
    theirs = replica("r1", sample=sample(waiting=7, running=4))
    # Eight go first or are it, four run: one leaves every 1.28 s.
    assert expected_wait_ms([theirs], Ledger(), speeds, 0, 0.0) == pytest.approx(8 * 1280.0)


@pytest.fixture
def fleet() -> Fleet:
    known = Fleet(HealthConfig(streak=2, fall=2, rise=1))
    known.adopt(view_of([replica("r1"), replica("r2"), replica("r3", models=frozenset({OTHER_MODEL}))]), Estimates())
    for name in ("r1", "r2", "r3"):
        known.health[name].probed(True, 0.0)
    return known


def names(fleet: Fleet, model: str = MODEL, without: tuple[str, ...] = ()) -> list[str]:
    return [r.name for r in fleet.healthy(model, 0.0, without)]


def test_who_is_healthy_by_model(fleet: Fleet) -> None:
    assert names(fleet) == ["r1", "r2"]
    assert names(fleet, OTHER_MODEL) == ["r3"]
    assert names(fleet, "nowhere") == []
    assert names(fleet, without=("r1",)) == ["r2"]


def test_what_is_known_survives_a_swap_and_what_left_is_forgotten(fleet: Fleet) -> None:
    fleet.caches("r1", request("a").chain)
    fleet.speeds["r1"].began(1020.0, 1000.0)
    fleet.adopt(view_of([replica("r1")]), Estimates())
    assert names(fleet) == ["r1"]
    assert fleet.trie.bytes_held("r1") == 1024
    assert fleet.speeds["r1"].prefill_ms_per_token == pytest.approx(1.0)
    assert set(fleet.health) == set(fleet.speeds) == set(fleet.trie.locations) == {"r1"}
    fleet.adopt(view_of([replica("r1"), replica("r2")]), Estimates())
    assert fleet.health["r2"].read(0.0).state is State.DOWN  # as good as new


def test_what_is_said_of_a_replica_that_left_is_no_news(fleet: Fleet) -> None:
    fleet.adopt(view_of([replica("r1")]), Estimates())
    fleet.answered("r2", 200, 0.0)
    fleet.failed("r2", outcome.CONNECT_FAILED, 0.0)
    fleet.caches("r2", request("a").chain)
    assert fleet.trie.nodes == 0
    assert set(fleet.health) == {"r1"}


def test_a_mirror_is_as_large_as_the_cache_it_mirrors(fleet: Fleet) -> None:
    fleet.adopt(view_of([replica("r1", kv_tokens=128)]), Estimates())  # 512 bytes
    fleet.caches("r1", request("a", 4096).chain)
    assert fleet.trie.bytes_held("r1") == 512


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
