from __future__ import annotations

import pytest

from farhop.balance.machine import Request, Tokens
from farhop_lab.sim.baselines.tastes import CacheAware, LeastLoad, LlmD, RoundRobin, Saturation
from farhop_lab.sim.baselines.words import Board, Sample, Target

NAMES = ["us/0", "us/1", "us/2"]


def ask(text: bytes = b"") -> Request:
    return Request("r", "t", "m", len(text), len(text), (), 100.0, tokens=Tokens(text))


def board() -> Board:
    return Board("us", [Target(name, "us") for name in NAMES], {"us": 1.0})


def saw(seen: Board, at: float, **samples: tuple[int, float]) -> None:
    for name, (waiting, usage) in samples.items():
        seen.seen[name.replace("_", "/")] = Sample(waiting, 1, usage), at


def test_round_robin_takes_the_next_that_may_be_asked() -> None:
    taste, seen, order = RoundRobin(), board(), []
    for among in (NAMES, NAMES, NAMES, NAMES, ["us/0", "us/2"], NAMES, ["us/1"], ["us/1"]):
        target = taste.choose(ask(), among, seen, 0.0)
        taste.sent(ask(), target, seen, 0.0)
        order.append(target[-1])
    assert "".join(order) == "01202011"


def test_least_load_takes_the_fewest_in_flight_and_the_first_of_equals() -> None:
    taste, seen = LeastLoad(), board()
    assert taste.choose(ask(), NAMES, seen, 0.0) == "us/0"
    seen.in_flight.update({"us/0": 2, "us/1": 1, "us/2": 1})
    assert taste.choose(ask(), NAMES, seen, 0.0) == "us/1"
    assert taste.choose(ask(), ["us/0"], seen, 0.0) == "us/0"


def test_sglang_follows_a_match_of_more_than_its_threshold_and_else_the_smallest_tree() -> None:
    taste, seen = CacheAware(), board()
    assert taste.choose(ask(b"a" * 100), NAMES, seen, 0.0) == "us/0", "all trees are empty"
    taste.sent(ask(b"a" * 100), "us/1", seen, 0.0)
    taste.sent(ask(b"b" * 50), "us/0", seen, 0.0)
    assert taste.choose(ask(b"a" * 31 + b"c" * 69), NAMES, seen, 0.0) == "us/1"
    assert taste.choose(ask(b"a" * 30 + b"c" * 70), NAMES, seen, 0.0) == "us/2", "30 % is not more than 30 %"
    taste.sent(ask(b"d" * 99), "us/2", seen, 0.0)
    assert taste.choose(ask(b"a" * 30 + b"c" * 70), NAMES, seen, 0.0) == "us/0"


@pytest.mark.parametrize(
    ("loads", "balanced"),
    [((64, 0, 0), True), ((65, 0, 0), False), ((195, 130, 130), True), ((196, 130, 130), False)],
)
def test_sglang_goes_by_load_where_both_thresholds_are_passed(loads: tuple[int, ...], balanced: bool) -> None:
    # (195, 130): apart by 65 > 64, but 195 is not more than 1.5 x 130.
    taste, seen = CacheAware(), board()
    taste.sent(ask(b"a" * 100), "us/0", seen, 0.0)
    seen.in_flight.update(dict(zip(NAMES, loads, strict=True)))
    assert taste.choose(ask(b"a" * 100), NAMES, seen, 0.0) == ("us/0" if balanced else "us/1")


def test_llm_d_adds_up_queue_kv_and_prefix() -> None:
    taste, seen = LlmD(), board()
    saw(seen, 0.0, us_0=(4, 0.5), us_1=(1, 0.9), us_2=(0, 1.0))
    taste.sent(ask(b"a" * 60), "us/0", seen, 0.0)
    scores = taste.scores(ask(b"a" * 60 + b"b" * 40), NAMES, seen)
    assert scores == pytest.approx(
        {
            "us/0": 2 * 0.0 + 2 * 0.5 + 3 * 0.6,
            "us/1": 2 * 0.75 + 2 * 0.1 + 3 * 0.0,
            "us/2": 2 * 1.0 + 2 * 0.0 + 3 * 0.0,
        }
    )
    assert taste.choose(ask(b"a" * 60 + b"b" * 40), NAMES, seen, 0.0) == "us/0"
    assert taste.choose(ask(b"b" * 100), NAMES, seen, 0.0) == "us/2"


def test_llm_d_gives_all_queues_the_same_where_none_differs() -> None:
    taste, seen = LlmD(), board()
    saw(seen, 0.0, us_0=(3, 0.0), us_1=(3, 0.5), us_2=(3, 0.0))
    assert taste.scores(ask(b"x"), NAMES, seen) == {"us/0": 4.0, "us/1": 3.0, "us/2": 4.0}


def test_llm_d_is_saturated_by_queues_by_memory_and_by_old_metrics() -> None:
    full, seen = Saturation(), board()
    assert full(NAMES, seen, 0.0), "nothing is known of any"
    saw(seen, 10.0, us_0=(5, 0.0), us_1=(0, 0.8), us_2=(0, 0.4))
    assert [full.of(name, seen, 10.2) for name in NAMES] == pytest.approx([1.0, 1.0, 0.5])
    assert not full(NAMES, seen, 10.2)
    assert full(["us/0", "us/1"], seen, 10.2)
    assert full.of("us/2", seen, 10.21) == 1.0, "older than 200 ms"
    assert full(NAMES, seen, 10.21)
    saw(seen, 11.0, us_0=(10, 0.0), us_1=(0, 0.0), us_2=(5, 0.0))
    assert full(NAMES, seen, 11.0), "2 + 0 + 1 over three"
