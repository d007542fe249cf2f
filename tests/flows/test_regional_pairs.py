"""Playbooks of prefill and decode on two replicas: the pair, and everything that can break it in either half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playbook import Expectation, Expected, Playbook, answered, held, sent, timer
from worlds import MODEL, law, regional, replica, request, swapped

from farhop.balance import outcome
from farhop.balance.machine import (
    Address,
    AttemptBegan,
    AttemptEnded,
    AttemptFailed,
    ClientLeft,
    LawChanged,
    Prefill,
    PrefillEnded,
    PrefillFailed,
    Recall,
    RequestArrived,
    TimerFired,
    Usage,
)
from regional_lb.fleet.view import ReplicaProbed
from regional_lb.scheduler.flow import RegionalFlow
from topology.model import Rule

Play = Callable[[RegionalFlow], Playbook]
BYTES = 4000  # 1,000 tokens: 100 ms of prefill
HELD = 1000 + 100  # its prompt, and an answer of 100


def _flow(*prefillers: str, decode: tuple[str, ...] = ("d1",), **fields: Any) -> RegionalFlow:
    own = [replica(name, role="decode", **fields) for name in decode]
    return regional(*own, *(replica(name, role="prefill", prefill_ms_per_token=0.05) for name in prefillers))


def _ask(name: str = "q", size: int = BYTES, **fields: Any) -> RequestArrived:
    return RequestArrived(request(name, size, **{"divisible": True, **fields}))


def _pair(name: str, decode: str, prefill: str, **fields: Any) -> Expectation:
    return sent(name, decode, prefill=Prefill(prefill, Address(f"{prefill}.example", 8000)), **fields)


def _alone(name: str, decode: str, **fields: Any) -> Expectation:
    return sent(name, decode, prefill=None, **fields)


def _load(flow: RegionalFlow, name: str) -> tuple[int, int, int]:
    load = flow.replicas.ledger.load(name)
    return load.in_flight, load.prefill_tokens, load.kv_tokens


def test_long_prompt_is_prefilled_at_one_replica_and_decoded_at_another(play: Play) -> None:
    flow = _flow("p1")
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1", attempt=1, promised_ttft_ms=pytest.approx(50.0)))
    assert (_load(flow, "p1"), _load(flow, "d1")) == ((1, 1000, 1000), (1, 0, HELD))
    book.at(0.06).on(PrefillEnded("q", 1)).expect()
    assert (_load(flow, "p1"), _load(flow, "d1")) == ((0, 0, 0), (1, 0, HELD))
    chain = request("q", BYTES).chain
    assert set(flow.replicas.trie.match(chain)) == {"p1"}
    book.at(0.08).on(AttemptBegan("q", 1, 200)).expect()
    assert set(flow.replicas.trie.match(chain)) == {"p1", "d1"}
    whole = (*chain, 1)
    book.at(1.0).on(AttemptEnded("q", 1, 200, Usage(1000, 50, 992), chain=whole, answer_bytes=200)).expect()
    assert flow.replicas.trie.match(whole) == {"p1": len(chain), "d1": len(whole)}
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)


def test_each_replica_of_a_pair_learns_only_from_its_own_part(play: Play) -> None:
    flow = _flow("p1")
    before = flow.replicas.speeds["d1"].prefill_ms_per_token
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    book.at(0.2).on(PrefillEnded("q", 1)).expect()  # four times as slow as estimated
    book.at(0.9).on(AttemptBegan("q", 1, 200)).expect()
    book.at(1.9).on(AttemptEnded("q", 1, 200, Usage(1000, 51, 992))).expect()
    flow.replicas.age(3.0)
    assert flow.replicas.speeds["p1"].prefill_ms_per_token > 0.1
    assert flow.replicas.speeds["d1"].prefill_ms_per_token == before
    assert flow.replicas.speeds["d1"].tpot_ms == pytest.approx(20.0)  # a second for fifty
    assert (flow.learning.predicted_tokens, flow.learning.actual_tokens) == (0.0, 0.0)


@pytest.mark.parametrize("fields", [{"size": 1024}, {"divisible": False}, {"model": "qwen"}])
def test_short_prompts_and_those_of_other_kinds_or_models_are_not_split(play: Play, fields: dict[str, Any]) -> None:
    flow = _flow("p1", models=frozenset({MODEL, "qwen"}))
    play(flow).on(_ask(**fields)).expect(_alone("q", "d1"))


def test_the_next_turn_goes_straight_to_where_the_first_one_is_cached(play: Play) -> None:
    flow = _flow("p1", decode=("d1", "d2"))
    book = play(flow).on(_ask(prefix="alice")).expect(_pair("q", lambda name: name in ("d1", "d2"), "p1"))
    there = next(name for name in ("d1", "d2") if flow.replicas.ledger.load(name).in_flight)
    book.at(0.1).on(PrefillEnded("q", 1)).expect()
    book.at(0.1).on(AttemptBegan("q", 1, 200)).expect()
    book.at(0.2).on(AttemptEnded("q", 1, 200, None)).expect()
    book.at(1.0).on(_ask("next", BYTES + 400, prefix="alice")).expect(_alone("next", there))


def test_request_is_sent_undivided_without_a_prefill_replica(play: Play) -> None:
    flow = _flow("p1")
    book = play(flow).on(ReplicaProbed("p1", False)).expect()
    for at in (0.1, 0.2):
        book.at(at).on(ReplicaProbed("p1", False)).expect()
    book.at(0.3).on(_ask()).expect(_alone("q", "d1"))


def test_request_is_sent_undivided_without_room_to_prefill(play: Play) -> None:
    flow = _flow("p1", decode=("d1", "d2"))
    book = play(flow).on(_ask("a", 9000)).expect(_pair("a", lambda _: True, "p1"))
    book.on(_ask("b", 9000)).expect(_alone("b", lambda _: True))


def test_another_prefill_replica_takes_over_from_a_dead_one(play: Play) -> None:
    flow = _flow("p1", "p2")
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1", attempt=1))
    again = _pair("q", "d1", "p2", attempt=2)
    book.at(0.02).on(PrefillFailed("q", 1, outcome.CONNECT_FAILED)).expect(again)
    assert (_load(flow, "p1"), _load(flow, "p2"), _load(flow, "d1")) == ((0, 0, 0), (1, 1000, 1000), (1, 0, HELD))
    assert flow.replicas.health["p1"].read(0.02).state == "down"
    book.on(PrefillEnded("q", 1)).expect()  # outdated
    book.on(PrefillFailed("q", 1, outcome.CONNECT_FAILED)).expect()
    assert _load(flow, "p2") == (1, 1000, 1000)
    book.at(0.1).on(PrefillEnded("q", 2)).expect()
    assert len(flow.replicas.ledger) == 1


def test_request_is_sent_undivided_if_the_only_prefill_replica_dies(play: Play) -> None:
    flow = _flow("p1")
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    book.at(0.02).on(PrefillFailed("q", 1, outcome.DIED_BEFORE_START)).expect(_alone("q", "d1", attempt=2))
    assert _load(flow, "d1") == (1, 1000, HELD)


def test_prefill_refused_by_the_engine_is_sent_undivided_without_blame(play: Play) -> None:
    """A prompt that is too long, say: the decode engine says so to the client."""
    flow = _flow("p1", "p2")
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    book.at(0.02).on(PrefillFailed("q", 1, outcome.ENGINE_ERROR)).expect(_alone("q", "d1", attempt=2))
    assert flow.replicas.health["p1"].read(0.02).state == "up"


def test_prefill_replica_that_fails_its_probes_is_given_up(play: Play) -> None:
    flow = _flow("p1")
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    book.at(0.1).on(ReplicaProbed("p1", False)).expect()
    book.at(0.2).on(ReplicaProbed("p1", False)).expect()
    commands = flow.handle(ReplicaProbed("p1", False), 0.3)
    assert [type(command).__name__ for command in commands] == ["Cancel", "SetTimer", "Forward"]
    assert flow.replicas.ledger.load("p1").in_flight == 0
    assert flow.replicas.ledger.load("d1").prefill_tokens == 1000


def test_the_decode_half_fails_and_both_are_asked_again(play: Play) -> None:
    flow = _flow("p1", decode=("d1", "d2"))
    book = play(flow).on(_ask()).expect(_pair("q", lambda _: True, "p1"))
    first = next(name for name in ("d1", "d2") if flow.replicas.ledger.load(name).in_flight)
    other = "d2" if first == "d1" else "d1"
    book.at(0.1).on(PrefillEnded("q", 1)).expect()
    book.at(0.2).on(AttemptFailed("q", 1, outcome.DIED_BEFORE_START)).expect(_pair("q", other, "p1", attempt=2))
    assert (_load(flow, first), len(flow.replicas.ledger)) == ((0, 0, 0), 2)


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_disconnected_client_frees_both_replicas(play: Play, half: str) -> None:
    flow = _flow("p1")
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    if half == "decode":
        book.at(0.1).on(PrefillEnded("q", 1)).expect()
    book.at(0.2).on(ClientLeft("q")).expect()
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)
    book.on(PrefillEnded("q", 1)).expect()


@pytest.mark.parametrize("half", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_ends_either_half(play: Play, half: str, stream: bool) -> None:
    flow = _flow("p1")
    book = play(flow).on(_ask(deadline=2.0, stream=stream)).expect(_pair("q", "d1", "p1"))
    if half == "decode":
        book.at(0.04).on(PrefillEnded("q", 1)).expect()
    if not stream:  # the prefill should be over by now
        book.at(0.06).on(TimerFired("q")).expect(timer("q", at=2.0))
    book.at(2.0).on(TimerFired("q")).expect(answered("q", outcome.DEADLINE))
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)


def test_the_law_is_asked_again_between_two_pairs(play: Play) -> None:
    flow = _flow("p1", "p2")
    book = play(flow).on(_ask("a")).expect(_pair("a", "d1", "p1"))
    book.on(_ask("b")).expect(_pair("b", "d1", "p2"))
    flow.law = law(epoch=2, anyone=Rule(allow=("eu",)))
    book.on(PrefillFailed("a", 1, outcome.DIED_BEFORE_START)).expect(answered("a", outcome.UNLAWFUL_HERE))
    book.on(PrefillFailed("b", 1, outcome.ENGINE_ERROR)).expect(answered("b", outcome.UNLAWFUL_HERE))
    assert len(flow.replicas.ledger) == 0


def test_law_changed_between_prefill_and_decode_prevents_the_decode(play: Play) -> None:
    flow = _flow("p1")
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    book.on(LawChanged(law(epoch=2, anyone=Rule(allow=("eu",))))).expect(Expected(Recall, id="q", attempt=1))
    book.on(PrefillFailed("q", 1, outcome.UNLAWFUL_HERE)).expect(answered("q", outcome.UNLAWFUL_HERE))
    assert len(flow.replicas.ledger) == 0
    assert {flow.replicas.health_tracker.read(name, 0.0).state for name in ("p1", "d1")} == {"up"}


def test_removed_prefill_replica_finishes_its_requests(play: Play) -> None:
    flow = _flow("p1")
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    book.on(swapped(replica("d1", role="decode"))).expect()
    book.at(0.1).on(PrefillEnded("q", 1)).expect()
    assert len(flow.replicas.ledger) == 1
    book.at(0.2).on(_ask("r", prefix="bob")).expect(_alone("r", "d1"))


def test_a_request_waiting_for_a_decode_replica_gets_a_pair_in_its_turn(play: Play) -> None:
    flow = _flow("p1", slots=1)
    book = play(flow).on(_ask("a")).expect(_pair("a", "d1", "p1"))
    book.on(_ask("b")).expect(held("b"))
    book.at(0.05).on(PrefillEnded("a", 1)).expect()
    book.at(0.1).on(AttemptBegan("a", 1, 200)).expect()
    book.at(1.0).on(AttemptEnded("a", 1, 200, None)).expect(_pair("b", "d1", "p1"))
