from __future__ import annotations

from farhop.balance.machine import Request, Tokens
from farhop_lab.sim.baselines.words import (
    BalancerSeen,
    Board,
    EnginesSeen,
    Sample,
    Target,
    forwarded,
    key_of,
    text_of,
)


def ask(name: str, text: bytes = b"", session: int = 0, issuer: str = "") -> Request:
    return Request(name, "t", "m", len(text), len(text), (), 100.0, session=session, issuer=issuer, tokens=Tokens(text))


def board() -> Board:
    targets = [Target("us/0", "us"), Target("us/1", "us"), Target("eu/0", "eu"), Target("asia", "asia", balancer=True)]
    return Board("us", targets, {"us": 1.0, "eu": 91.0, "asia": 166.0})


def test_targets_are_told_apart_by_place_and_kind() -> None:
    seen = board()
    assert (seen.engines, seen.local, seen.peers) == (["us/0", "us/1", "eu/0"], ["us/0", "us/1"], ["asia"])
    assert seen.by_region == {"us": ["us/0", "us/1"], "eu": ["eu/0"]}


def test_a_request_is_queued_then_running_then_forgotten_once() -> None:
    seen = board()
    seen.sent(ask("r1", b"x" * 401), "eu/0")
    assert (seen.in_flight["eu/0"], seen.queued_tokens["eu/0"], seen.running_tokens["eu/0"]) == (1, 101, 0)
    assert not seen.begun("r1")
    seen.began("r1")
    seen.began("r1")
    assert (seen.in_flight["eu/0"], seen.queued_tokens["eu/0"], seen.running_tokens["eu/0"]) == (1, 0, 101)
    assert seen.begun("r1")
    assert seen.over("r1")
    assert not seen.over("r1")
    assert (seen.in_flight["eu/0"], seen.queued_tokens["eu/0"], seen.running_tokens["eu/0"]) == (0, 0, 0)


def test_who_is_gone_serves_no_more_until_it_answers_again() -> None:
    seen = board()
    assert seen.pending("us/0") == 0
    seen.hear_engines(EnginesSeen("us", {"us/0": Sample(3, 1, 0.5), "us/1": Sample(0, 0, 0.0)}), 5.0)
    assert (seen.pending("us/0"), seen.seen["us/0"]) == (3, (Sample(3, 1, 0.5), 5.0))
    seen.hear_engines(EnginesSeen("us", None), 6.0)
    seen.hear_balancer(BalancerSeen("asia", 0, False, up=False))
    assert seen.serving([*seen.engines, *seen.peers]) == ["eu/0"]
    seen.hear_engines(EnginesSeen("us", {"us/0": Sample(0, 0, 0.0), "us/1": Sample(0, 0, 0.0)}), 7.0)
    seen.hear_balancer(BalancerSeen("asia", 0, True))
    assert seen.serving([*seen.engines, *seen.peers]) == ["us/0", "us/1", "eu/0", "asia"]


def test_a_key_is_the_session_or_else_the_first_characters() -> None:
    first, second = ask("a", b"p" * 100 + b"one"), ask("b", b"p" * 100 + b"two")
    assert key_of(first) == key_of(second) != key_of(ask("c", b"q" * 100 + b"one"))
    assert key_of(ask("d", b"whatever", session=7)) == 7


def test_a_router_reads_the_text_and_knows_who_sent_it_on() -> None:
    assert text_of(ask("a", b"hello")) == b"hello"
    assert not forwarded(ask("a"))
    assert forwarded(ask("a", issuer="eu"))
