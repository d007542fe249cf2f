from __future__ import annotations

from farhop.balance.machine import Request, Tokens
from farhop_lab.sim.baselines.router import BalancerSeen, EnginesSeen, RouterState, Sample, Target
from farhop_lab.sim.baselines.skywalker import LongestPrefix, SelectivePushing

NAMES = ["us/0", "us/1", "us/2"]


def ask(text: bytes = b"", issuer: str = "") -> Request:
    return Request("r", "t", "m", len(text), len(text), (), 100.0, issuer=issuer, tokens=Tokens(text))


def state() -> RouterState:
    peers = [Target(name, name, balancer=True) for name in ("asia", "eu")]
    return RouterState("us", [*(Target(name, "us") for name in NAMES), *peers], {"us": 1.0, "eu": 91.0, "asia": 166.0})


def saw(seen: RouterState, *waiting: int) -> None:
    seen.on_engines(EnginesSeen("us", {name: Sample(n, 9, 0.9) for name, n in zip(NAMES, waiting, strict=True)}), 0.0)


def report_load(seen: RouterState, line: int, *, available: bool = True, up: bool = True) -> None:
    seen.on_balancer(BalancerSeen("eu", line, available, up))


def test_a_replica_is_available_iff_nothing_is_pending_there() -> None:
    eligibility, seen = SelectivePushing(), state()
    saw(seen, 0, 1, 0)
    report_load(seen, 0)
    assert eligibility.candidates(ask(), seen, 0.0) == ["us/0", "us/2"]
    seen.in_flight["us/0"] = 50  # requests sent since the last probe are not counted
    assert eligibility.candidates(ask(), seen, 0.0) == ["us/0", "us/2"]


def test_a_remote_router_is_available_iff_its_queue_is_short_shorter_than_mine_and_it_has_a_replica() -> None:
    eligibility, seen = SelectivePushing(), state()
    saw(seen, 1, 1, 1)
    seen.queued = 20
    assert eligibility.candidates(ask(), seen, 0.0) == [], "nobody has said a word"
    for line, mine, free in ((10, 20, True), (11, 20, False), (4, 4, True), (5, 4, False)):
        seen.queued = mine
        report_load(seen, line)
        assert eligibility.candidates(ask(), seen, 0.0) == (["eu"] if free else []), (line, mine)
    report_load(seen, 0, available=False)
    assert eligibility.candidates(ask(), seen, 0.0) == []
    report_load(seen, 0, up=False)
    assert eligibility.candidates(ask(), seen, 0.0) == []


def test_forwarded_request_is_never_forwarded_again() -> None:
    eligibility, seen = SelectivePushing(), state()
    seen.queued = 3
    saw(seen, 1, 1, 1)
    report_load(seen, 0)
    assert eligibility.candidates(ask(), seen, 0.0) == ["eu"]
    assert eligibility.candidates(ask(issuer="asia"), seen, 0.0) == []


def test_the_longest_prefix_wins_if_it_is_more_than_half() -> None:
    picker, seen = LongestPrefix(), state()
    picker.sent(ask(b"a" * 51), "us/1", seen, 0.0)
    picker.sent(ask(b"a" * 60), "us/2", seen, 0.0)
    seen.in_flight.update({"us/0": 1, "us/1": 2, "us/2": 9})
    text = b"a" * 60 + b"b" * 40
    assert picker.choose(ask(text), NAMES, seen, 0.0) == "us/2"
    assert picker.choose(ask(text), ["us/0", "us/1"], seen, 0.0) == "us/1", "51 of 100, among those available"
    assert picker.choose(ask(b"a" * 50 + b"b" * 50), NAMES, seen, 0.0) == "us/0", "half is not more than half"


def test_equal_matches_go_to_the_fewest_in_flight() -> None:
    picker, seen = LongestPrefix(), state()
    for name in ("us/1", "us/2"):
        picker.sent(ask(b"a" * 60), name, seen, 0.0)
    seen.in_flight.update({"us/0": 0, "us/1": 5, "us/2": 4})
    assert picker.choose(ask(b"a" * 100), NAMES, seen, 0.0) == "us/2"
