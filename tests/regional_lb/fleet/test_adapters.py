"""Which adapters are where, and that affinity is a cost like others: it gives way to a full replica."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from worlds import MODEL, replica, replicas_of

from farhop.balance import outcome
from farhop.balance.ledger import Reservation
from regional_lb.fleet.adapters import LOAD_MS, LOAD_MS_MAX, Adapters
from regional_lb.fleet.replicas import Replicas
from regional_lb.fleet.view import Lora, ReplicaSampled, Sample, view_of
from regional_lb.scheduler.pick import pick
from regional_lb.scheduler.policy import Need, Predictive
from regional_lb.scheduler.policy.load import LeastLoad

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)
SQL = frozenset({"sql"})


def lora(*running: str, most: int = 2, waiting: tuple[str, ...] = ()) -> Lora:
    return Lora(most, frozenset(running), frozenset(waiting))


def serving(*names: str, adapters: frozenset[str] = SQL, **more: object) -> Replicas:
    return replicas_of(*(replace(replica(name, **more), adapters=adapters) for name in names))


def report(known: Replicas, name: str, value: Lora) -> None:
    known.handle(ReplicaSampled(name, Sample(0.0, 0, 0, 0.0, lora=value)), 0.0)


def choose(known: Replicas, model: str = "sql", policy: object = None, seed: int = 1) -> str:
    table = known.whole
    delay_ms = known.adapters.delay_ms(model, table, 0.0)
    choice = pick(NEED, table, (), policy or Predictive(), 0.0, Random(seed), delay_ms=delay_ms)
    assert choice.chosen is not None
    return choice.chosen.replica


def test_a_model_that_is_no_adapter_costs_nothing() -> None:
    known = serving("r1", "r2")
    assert known.adapters.delay_ms(MODEL, known.whole, 0.0) is None


def test_a_replica_with_the_adapter_loaded_is_preferred() -> None:
    known = serving("r1", "r2")
    report(known, "r2", lora("sql"))
    assert known.adapters.delay_ms("sql", known.whole, 0.0).tolist() == [LOAD_MS, 0.0]
    assert {choose(known, seed=seed) for seed in range(20)} == {"r2"}
    report(known, "r2", lora())  # it does not run any more, but is still loaded
    assert {choose(known, seed=seed) for seed in range(20)} == {"r2"}


def test_a_busy_replica_with_the_adapter_loses_to_an_idle_one_without() -> None:
    known = serving("r1", "r2", prefill_tokens_max=100_000)
    report(known, "r2", lora("sql"))
    speed_ms = known.speeds["r2"].prefill_ms_per_token
    known.ledger.reserve("busy", Reservation("r2", int(1.5 * LOAD_MS / speed_ms), 100))
    assert {choose(known, seed=seed) for seed in range(20)} == {"r1"}
    known.adapters.sent("r1", "sql")
    assert known.adapters.loaded("r1") == ("sql",)


def test_where_others_run_in_all_places_it_waits_longer() -> None:
    many = frozenset({"sql", "a", "b"})
    known = serving("r1", "r2", adapters=many)
    report(known, "r1", lora("a", "b"))
    report(known, "r2", lora("a"))
    first, second = known.adapters.delay_ms("sql", known.whole, 0.0).tolist()
    assert (first - known.whole.service_ms.item(0), second) == (LOAD_MS, LOAD_MS)
    assert choose(known) == "r2"


def test_the_least_recently_used_makes_room() -> None:
    known = serving("r1", adapters=frozenset("abc"))
    report(known, "r1", lora("a", waiting=("b",)))
    assert known.adapters.loaded("r1") == ("a", "b")
    known.adapters.sent("r1", "a")
    known.adapters.sent("r1", "c")
    assert known.adapters.loaded("r1") == ("a", "c")
    known.adapters.sent("r1", "nobody's")
    assert known.adapters.loaded("r1") == ("a", "c")
    known.failed("r1", outcome.CONNECT_FAILED, 0.0)
    assert known.adapters.loaded("r1") == ()


def test_policies_without_milliseconds_ignore_adapter_loading_time() -> None:
    known = serving("r1", "r2")
    report(known, "r2", lora("sql"))
    known.ledger.reserve("one", Reservation("r2", 0, 10))
    assert choose(known, policy=LeastLoad()) == "r1"


def test_the_time_to_load_an_adapter_is_learned_within_bounds() -> None:
    adapters = Adapters()
    for _ in range(40):
        adapters.learn(900.0, 1.0)
    assert 890.0 < adapters.load_ms(1.0) < 900.0
    adapters.learn(-1e9, 1.0)
    assert adapters.load_ms(1.0) > 600.0
    for _ in range(100):
        adapters.learn(1e12, 1.0)
    assert adapters.load_ms(1.0) <= LOAD_MS_MAX


def test_adapter_load_time_of_a_stall_is_damped_and_forgotten() -> None:
    adapters = Adapters()
    adapters.learn(9000.0, 1.0)
    assert adapters.load_ms(1.0) < 2.0 * LOAD_MS
    for _ in range(20):
        adapters.learn(9000.0, 1.0)
    assert adapters.load_ms(1.0) > 8000.0
    assert adapters.load_ms(1801.0) == pytest.approx(LOAD_MS, rel=0.15)


def test_a_swap_keeps_what_is_known_of_remaining_replicas() -> None:
    known = serving("r1", "r2")
    report(known, "r1", lora("sql"))
    known.adopt(view_of([replace(replica("r1"), adapters=SQL)]))
    assert known.adapters.loaded("r1") == ("sql",)
    known.adopt(view_of([replica("r1")]))
    assert (known.adapters.loaded("r1"), known.adapters.names) == ((), frozenset())
    known.adapters.on_report("r9", lora("sql"))
    known.adapters.forget("r9")
    assert known.adapters.loaded("r9") == ()


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdx"), st.integers(0, 3)), max_size=40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_more_is_remembered_than_fits_and_only_what_is_served(steps) -> None:
    adapters = Adapters()
    adapters.adopt({"r1": frozenset("abcd")})
    most = 4
    for one, name, n in steps:
        if one:
            most = max(n, 1)
            adapters.on_report("r1", lora(name, most=n))
            if name != "x":
                assert name in adapters.loaded("r1")
        else:
            adapters.sent("r1", name)
        assert len(adapters.loaded("r1")) <= most
        assert set(adapters.loaded("r1")) <= set("abcd")
