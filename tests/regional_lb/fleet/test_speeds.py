"""How fast replicas are thought to be: by their own measurements while they are fresh, by their peers' when not."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import OTHER_MODEL, replica

from farhop.balance.ledger import Load
from farhop.balance.machine import Address
from regional_lb.fleet.speeds import ALIKE, REFRESH_S, UNCERTAINTY, Speeds
from regional_lb.fleet.view import Replica

RUN = settings(max_examples=100, deadline=None, derandomize=True)


def speeds(*replicas: Replica) -> Speeds:
    made = Speeds()
    made.adopt({one.name: one for one in replicas})
    made.refresh(0.0)
    return made


def serve(known: Speeds, since: float, seconds: int, load: float = 4.0, **tpot_ms: float) -> float:
    """Five answers a second at each of these, at so much a token; a token of prompt is a hundredth of it."""
    for n in range(seconds * 5):
        now = since + n / 5
        for name, ms in tpot_ms.items():
            known.began(name, 10.0 * ms + ms, 1000.0, now)
            known.ended(name, 100 * ms, 100 * ms, 101, load, now)
        known.refresh(now)
    return since + seconds


def alone(known: Speeds, name: str, load: float = 4.0) -> float:
    return known[name].tpot_at(load)


def test_without_any_sample_the_speed_is_the_configured_one_with_high_uncertainty() -> None:
    known = speeds(replica("a", tpot_ms=20.0, prefill_ms_per_token=0.1))
    speed = known["a"]
    assert speed.prefill_ms_per_token == pytest.approx(0.1)
    assert speed.tpot_at(1.0) == pytest.approx(20.0)
    assert speed.batch_interference_ms == pytest.approx(0.14)
    assert (speed.uncertainty, speed.sampled_at) == (UNCERTAINTY, None)
    assert (list(known), "a" in known, "b" in known) == (["a"], True, False)


def test_an_unused_replica_has_the_speed_of_its_peers_not_of_its_configuration() -> None:
    known = speeds(replica("a", tpot_ms=25.0), replica("b", tpot_ms=25.0), replica("c", tpot_ms=25.0, gpu="A100"))
    serve(known, 0.0, 10, a=8.0)
    assert alone(known, "a") == pytest.approx(8.0, rel=0.05)
    assert alone(known, "b") == pytest.approx(alone(known, "a"))
    assert known["b"].prefill_ms_per_token == pytest.approx(0.08, rel=0.05)
    # Of another kind of GPU it is only known that the configured value for this model is three times too slow.
    assert alone(known, "c") == pytest.approx(8.0, rel=0.4)
    assert known["c"].uncertainty == UNCERTAINTY > known["a"].uncertainty


def test_speeds_of_replicas_of_another_model_are_not_shared() -> None:
    known = speeds(replica("a", tpot_ms=25.0), replica("b", tpot_ms=25.0, models=frozenset({OTHER_MODEL})))
    serve(known, 0.0, 10, a=8.0)
    assert alone(known, "b") == pytest.approx(25.0, rel=0.05)


def test_a_replica_that_was_slow_once_has_its_peers_speed_half_a_minute_later() -> None:
    known = speeds(*(replica(name, tpot_ms=25.0) for name in "abcd"))
    now = serve(known, 0.0, 10, a=10.0, b=10.0, c=10.0, d=60.0)
    assert alone(known, "d") == pytest.approx(60.0, rel=0.3)
    uncertainty = [known["d"].uncertainty]
    off = [alone(known, "d")]
    for _ in range(3):
        now = serve(known, now, 10, a=10.0, b=10.0, c=10.0)
        uncertainty.append(known["d"].uncertainty)
        off.append(alone(known, "d"))
    assert uncertainty == sorted(uncertainty)
    assert off == sorted(off, reverse=True)
    assert off[-1] == pytest.approx(10.0, rel=0.25)
    serve(known, now, 4, a=10.0, b=10.0, c=10.0, d=10.0)
    assert alone(known, "d") == pytest.approx(10.0, rel=0.05)


def test_slow_first_answers_of_a_new_process_are_outweighed() -> None:
    known = speeds(*(replica(name, tpot_ms=10.0) for name in "abcd"))
    serve(known, 0.0, 1, a=10.0, b=10.0, c=10.0, d=400.0)
    assert alone(known, "d") < 60.0  # an engine that has just started
    serve(known, 1.0, 20, a=10.0, b=10.0, c=10.0)
    assert alone(known, "d") == pytest.approx(10.0, rel=0.25)


def test_an_idle_replica_without_peers_keeps_its_learned_speed_and_loses_it_within_a_day() -> None:
    known = speeds(replica("a", tpot_ms=25.0, prefill_ms_per_token=0.1))
    now = serve(known, 0.0, 40, a=8.0)
    known.refresh(now + 60.0)
    assert alone(known, "a") == pytest.approx(8.0, rel=0.2)
    known.refresh(now + 24 * 3600.0)
    assert alone(known, "a") == pytest.approx(25.0, rel=0.05)


def test_one_slow_second_of_a_new_region_is_soon_as_good_as_forgotten() -> None:
    known = speeds(replica("a", prefill_ms_per_token=0.1), replica("b", prefill_ms_per_token=0.1))
    known.prefilled("a", 800.0, 1000.0, 0.0)
    known.refresh(0.1)
    assert known["b"].prefill_ms_per_token > 0.5
    for n in range(1, 60):
        known.refresh(float(n))
    assert known["b"].prefill_ms_per_token < 0.25  # a second is remembered as a second, beside what is configured


def test_a_region_that_everyone_avoids_is_tried_again_after_two_minutes() -> None:
    """Whoever is known as slow is sent nothing, so nobody would see that it is fast again."""
    known = speeds(replica("a", tpot_ms=10.0, prefill_ms_per_token=0.1))
    now = serve(known, 0.0, 60, a=80.0)
    prefill_ms = []
    for n in range(240):
        known.refresh(now + n)
        prefill_ms.append(known["a"].prefill_ms_per_token)
    assert prefill_ms[60] == pytest.approx(0.8, rel=0.2)
    assert prefill_ms[150] < 0.15
    # And it is not known as slow by what was measured before, as soon as it is measured again.
    serve(known, now + 240, 2, a=10.0)
    assert known["a"].prefill_ms_per_token == pytest.approx(0.1, rel=0.1)


def test_replicas_that_differ_no_more_than_batching_does_have_equal_speeds() -> None:
    known = speeds(replica("a"), replica("b"), replica("c"))
    serve(known, 0.0, 10, a=20.0, b=20.0 * (1.0 + 0.9 * ALIKE), c=20.0 * (1.0 - 0.9 * ALIKE))
    assert alone(known, "a") == alone(known, "b") == alone(known, "c")


def test_a_slower_one_among_its_peers_is_known_to_be() -> None:
    known = speeds(replica("a"), replica("b"), replica("c"))
    now = serve(known, 0.0, 20, a=20.0, b=20.0, c=60.0)
    assert alone(known, "c") == pytest.approx(60.0, rel=0.25)
    found = known.slow("c", 4.0, now + 40.0)
    assert found.startswith("slow: ")
    assert "of its peers, last sample 40 s ago" in found
    assert known.slow("a", 4.0, now) == ""
    assert known.slow("c", 4.0, now) == known.slow("c", 4.0, now)


def test_a_slow_prefill_is_seen_where_decoding_is_not_slow() -> None:
    known = speeds(replica("a"), replica("b"), replica("c"))
    for n in range(100):
        for name, ms in (("a", 0.1), ("b", 0.1), ("c", 0.5)):
            known.prefilled(name, 1000.0 * ms, 1000.0, n / 5)
    known.refresh(20.0)
    assert "ms to prefill a token against 0.1 of its peers" in known.slow("c", 0.0, 20.0)


def test_batch_interference_is_that_of_the_kind_if_a_replicas_own_load_never_varied() -> None:
    known, dice = speeds(replica("a"), replica("b")), Random(5)
    for n in range(400):
        load = dice.randint(1, 60)
        known.ended("a", 100 * (10.0 + 0.3 * (load - 1)), 1e3, 101, load, n / 10)
        known.ended("b", 1000.0, 1e3, 101, 1.0, n / 10)
        if n % 5 == 0:
            known.refresh(n / 10)
    assert known["a"].batch_interference_ms == pytest.approx(0.3, rel=0.25)
    assert known["b"].batch_interference_ms == pytest.approx(0.3, rel=0.25)


def test_what_each_request_adds_is_guessed_from_the_contexts_that_are_read() -> None:
    known = speeds(replica("a", tpot_ms=20.0), replica("b", tpot_ms=40.0, gpu="A100"))
    known.loaded("a", Load(4, context_tokens=4 * 8000), 0.0)
    known.refresh(0.5)
    assert known["a"].batch_interference_ms == pytest.approx(0.007 * 8 * 20.0)
    assert known["b"].batch_interference_ms == pytest.approx(0.007 * 8 * 40.0)  # it has none yet: the same work
    known.loaded("b", Load(1, context_tokens=500), 0.5)
    known.refresh(1.0)
    assert known["b"].batch_interference_ms == pytest.approx(0.007 * 0.5 * 40.0)
    known.loaded("a", Load(), 1.0)
    known.refresh(20.0)
    assert known["a"].batch_interference_ms == pytest.approx(0.007 * 8 * 20.0)  # nothing newer is known


def test_a_token_is_known_at_the_present_load_while_load_rises() -> None:
    """Three engines from 20 to 170 requests in 15 s, as after a restart: what each request adds is learned meanwhile,
    and what a token takes is never thought to be a multiple of what it takes."""
    known, names = speeds(replica("a"), replica("b"), replica("c")), ("a", "b", "c")
    serve(known, 0.0, 5, 20.0, a=7.0, b=7.0, c=7.0)
    for n in range(75):
        now, load = 5.0 + n / 5, 20.0 + 2.0 * n
        for name in names:
            known.ended(name, 100 * (2.0 + 0.25 * load), 1e4, 101, load, now)
        known.refresh(now)
        for name in names:
            assert known[name].tpot_at(load) == pytest.approx(2.0 + 0.25 * load, rel=0.2)
    known.restarted("a")
    known.refresh(serve(known, 20.0, 5, 168.0, a=44.0, b=44.0, c=44.0))
    assert known["a"].tpot_at(168.0) == pytest.approx(44.0, rel=0.1)


def test_a_new_process_begins_with_configured_speeds_and_others_keep_theirs() -> None:
    known = speeds(replica("a"), replica("b"))
    serve(known, 0.0, 10, a=20.0, b=60.0)
    known.adopt({one.name: one for one in (replica("b"), replica("a"), replica("c"))})
    assert alone(known, "b") == pytest.approx(60.0, rel=0.3)
    known.adopt({"b": replica("b", address=Address("elsewhere", 1)), "a": replica("a")})
    assert known["b"].sampled_at is None
    assert alone(known, "b") == pytest.approx(20.0, rel=0.1)
    serve(known, 10.0, 5, b=60.0)
    known.restarted("b")
    known.restarted("nobody")
    known.refresh(15.0)
    assert known["b"].uncertainty == UNCERTAINTY
    known.adopt({})
    known.refresh(16.0)
    assert list(known) == []


def test_events_of_a_removed_replica_are_ignored() -> None:
    known = speeds(replica("a"))
    assert not known.began("gone", 100.0, 1000.0, 0.0)
    known.prefilled("gone", 100.0, 1000.0, 0.0)
    known.ended("gone", 100.0, 100.0, 10, 1.0, 0.0)
    assert known.due == pytest.approx(REFRESH_S, abs=0.01)
    known.ended("a", 100.0, 100.0, 10, 1.0, 0.0)
    assert known.due == -inf  # the first of its kind is used without waiting
    known.refresh(0.1)
    known.ended("a", 100.0, 100.0, 10, 1.0, 0.1)
    assert known.due > 0.5


FIGURE = st.floats(allow_nan=True, allow_infinity=True)
TOLD = st.tuples(st.integers(0, 3), FIGURE, FIGURE, st.integers(-5, 10**6), st.floats(0.0, 1e4), st.floats(0.0, 40.0))


@given(st.lists(st.tuples(FIGURE, FIGURE), min_size=4, max_size=4), st.lists(TOLD, max_size=40))
@RUN
def test_every_figure_is_positive_and_finite_whatever_is_measured_and_doubt_grows_with_age(
    guesses: list[tuple[float, float]], samples: list[tuple[int, float, float, int, float, float]]
) -> None:
    gpus = ("L4", "L4", "L4", "A100")
    known = speeds(*(
        replica(f"r{n}", gpu=gpus[n], prefill_ms_per_token=prefill, tpot_ms=tpot)
        for n, (prefill, tpot) in enumerate(guesses)
    ))  # fmt: skip
    now = 0.0
    for which, a, b, tokens, load, gap_s in samples:
        now += gap_s
        known.began(f"r{which}", a, abs(tokens), now)
        known.ended(f"r{which}", a, b, tokens, load, now)
        known.refresh(now)
        for name in known:
            speed = known[name]
            assert 1e-5 <= speed.prefill_ms_per_token <= 1e3
            assert 1e-4 <= speed.tpot_at(1.0) <= 1e5
            assert 1e-3 <= speed.service_ms <= 1e8
            assert 0.0 <= speed.batch_interference_ms < inf
            assert 0.0 < speed.uncertainty <= UNCERTAINTY
    before = {name: known[name].uncertainty for name in known}
    for _ in range(4):
        now += 7.0
        known.refresh(now)
        assert all(known[name].uncertainty >= before[name] - 1e-12 for name in known)
        before = {name: known[name].uncertainty for name in known}
    known.refresh(now + 1e5)
    for name in known:
        speed = known[name]
        assert speed.uncertainty == pytest.approx(UNCERTAINTY)
        assert speed.tpot_ms == pytest.approx(max(1e-4, min(speed.peers_tpot_ms, 1e5)), rel=1e-6)


@given(st.floats(1e-4, 1e5))
@RUN
def test_one_sample_moves_a_speed_only_a_little(odd_ms: float) -> None:
    known = speeds(replica("a"), replica("b"))
    now = serve(known, 0.0, 12, a=20.0, b=20.0)
    known.ended("a", 100 * odd_ms, 100 * odd_ms, 101, 4.0, now)
    known.refresh(now + 0.5)
    assert alone(known, "a") == pytest.approx(20.0, rel=0.05)


def test_a_whole_request_takes_no_less_than_those_under_way_have_taken() -> None:
    known = speeds(replica("a", tpot_ms=20.0), replica("b", tpot_ms=20.0), replica("c", tpot_ms=20.0, gpu="A100"))
    guess_ms = known["a"].service_ms
    known.loaded("a", Load(in_flight=8, decoding=8, began_s=8 * 1.0), 1.0)
    known.refresh(31.0)
    took_ms = known["a"].service_ms
    assert took_ms >= 30_000.0 > guess_ms
    assert known["b"].service_ms == pytest.approx(took_ms)  # by its peer
    assert known["c"].service_ms == pytest.approx(guess_ms)
    known.adopt({"a": replica("a", tpot_ms=20.0)})
    known.refresh(31.5)
    assert known["a"].service_ms >= 30_000.0
    known.loaded("a", Load(), 31.5)
    for _ in range(20):
        known.ended("a", 5_000.0, 5_000.0, 250, 4.0, 32.0)
    known.refresh(32.5)
    assert known["a"].service_ms == pytest.approx(5_000.0, rel=0.05)


def test_requests_at_removed_replicas_no_longer_count() -> None:
    known = speeds(replica("a", tpot_ms=20.0), replica("b", tpot_ms=20.0))
    guess_ms = known["b"].service_ms
    known.loaded("a", Load(in_flight=8, decoding=8, began_s=8 * 1.0), 1.0)
    known.refresh(31.0)
    assert known["b"].service_ms > guess_ms
    known.adopt({"b": replica("b", tpot_ms=20.0)})
    known.refresh(61.0)
    assert known["b"].service_ms == pytest.approx(guess_ms)
