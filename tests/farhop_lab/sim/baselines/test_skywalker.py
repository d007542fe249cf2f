from __future__ import annotations

from farhop.balance.machine import Request, Tokens
from farhop_lab.sim.baselines.skywalker import LongestPrefix, SelectivePushing
from farhop_lab.sim.baselines.words import BalancerSeen, Board, EnginesSeen, Sample, Target

NAMES = ["us/0", "us/1", "us/2"]


def ask(text: bytes = b"", issuer: str = "") -> Request:
    return Request("r", "t", "m", len(text), len(text), (), 100.0, issuer=issuer, tokens=Tokens(text))


def board() -> Board:
    peers = [Target(name, name, balancer=True) for name in ("asia", "eu")]
    return Board("us", [*(Target(name, "us") for name in NAMES), *peers], {"us": 1.0, "eu": 91.0, "asia": 166.0})


def saw(seen: Board, *waiting: int) -> None:
    seen.hear_engines(EnginesSeen("us", {name: Sample(n, 9, 0.9) for name, n in zip(NAMES, waiting, strict=True)}), 0.0)


def said(seen: Board, line: int, *, available: bool = True, up: bool = True) -> None:
    seen.hear_balancer(BalancerSeen("eu", line, available, up))


def test_a_replica_is_available_iff_nothing_is_pending_there() -> None:
    scope, seen = SelectivePushing(), board()
    saw(seen, 0, 1, 0)
    said(seen, 0)
    assert scope.candidates(ask(), seen, 0.0) == ["us/0", "us/2"]
    seen.in_flight["us/0"] = 50  # what was sent since the last probe is not accounted for
    assert scope.candidates(ask(), seen, 0.0) == ["us/0", "us/2"]


def test_a_remote_router_is_available_iff_its_line_is_short_shorter_than_mine_and_it_has_a_replica() -> None:
    scope, seen = SelectivePushing(), board()
    saw(seen, 1, 1, 1)
    seen.line = 20
    assert scope.candidates(ask(), seen, 0.0) == [], "nobody has said a word"
    for line, mine, free in ((10, 20, True), (11, 20, False), (4, 4, True), (5, 4, False)):
        seen.line = mine
        said(seen, line)
        assert scope.candidates(ask(), seen, 0.0) == (["eu"] if free else []), (line, mine)
    said(seen, 0, available=False)
    assert scope.candidates(ask(), seen, 0.0) == []
    said(seen, 0, up=False)
    assert scope.candidates(ask(), seen, 0.0) == []


def test_what_was_forwarded_once_is_never_forwarded_again() -> None:
    scope, seen = SelectivePushing(), board()
    seen.line = 3
    saw(seen, 1, 1, 1)
    said(seen, 0)
    assert scope.candidates(ask(), seen, 0.0) == ["eu"]
    assert scope.candidates(ask(issuer="asia"), seen, 0.0) == []


def test_the_longest_prefix_wins_if_it_is_more_than_half() -> None:
    taste, seen = LongestPrefix(), board()
    taste.sent(ask(b"a" * 51), "us/1", seen, 0.0)
    taste.sent(ask(b"a" * 60), "us/2", seen, 0.0)
    seen.in_flight.update({"us/0": 1, "us/1": 2, "us/2": 9})
    text = b"a" * 60 + b"b" * 40
    assert taste.choose(ask(text), NAMES, seen, 0.0) == "us/2"
    assert taste.choose(ask(text), ["us/0", "us/1"], seen, 0.0) == "us/1", "51 of 100, among those available"
    assert taste.choose(ask(b"a" * 50 + b"b" * 50), NAMES, seen, 0.0) == "us/0", "half is not more than half"


def test_equal_matches_go_to_the_fewest_in_flight() -> None:
    taste, seen = LongestPrefix(), board()
    for name in ("us/1", "us/2"):
        taste.sent(ask(b"a" * 60), name, seen, 0.0)
    seen.in_flight.update({"us/0": 0, "us/1": 5, "us/2": 4})
    assert taste.choose(ask(b"a" * 100), NAMES, seen, 0.0) == "us/2"
