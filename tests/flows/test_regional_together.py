"""Playbooks of two replicas asked at once (SGLang): the pair, all that can break it, and that nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playbook import Expectation, Playbook, answered, held, sent
from worlds import regional, replica, request

from farhop.balance import machine, outcome
from farhop.balance.machine import (
    Address,
    AttemptBegan,
    AttemptEnded,
    AttemptFailed,
    ClientLeft,
    Forward,
    Prefill,
    PrefillEnded,
    PrefillFailed,
    RequestArrived,
    TimerFired,
    Usage,
)
from regional_lb.fleet.view import Replica, ReplicaProbed
from regional_lb.scheduler.flow import RegionalFlow

Play = Callable[[RegionalFlow], Playbook]
BYTES = 4000  # 1,000 tokens
HELD = 1000 + 100  # its prompt, and an answer of 100


def _p(name: str, **fields: Any) -> Replica:
    more = {"handover": "sglang", "bootstrap_port": 8998, "prefill_ms_per_token": 0.05, **fields}
    return replica(name, role="prefill", **more)


def _d(name: str, **fields: Any) -> Replica:
    return replica(name, role="decode", handover="sglang", **fields)


def _ask(name: str = "q", size: int = BYTES, **fields: Any) -> RequestArrived:
    return RequestArrived(request(name, size, **{"divisible": True, **fields}))


def _in_a_room_of(name: str) -> Callable[[object], bool]:
    def is_it(half: object) -> bool:
        assert isinstance(half, Prefill)
        assert half.room is not None
        place = (half.target, half.address, half.bootstrap_port)
        return place == (name, Address(f"{name}.example", 8000), 8998) and 0 <= half.room < 2**63

    return is_it


def _pair(name: str, decode: Any, prefill: str, **fields: Any) -> Expectation:
    return sent(name, decode, prefill=_in_a_room_of(prefill), **fields)


def _load(flow: RegionalFlow, name: str) -> tuple[int, int, int]:
    load = flow.replicas.ledger.load(name)
    return load.in_flight, load.prefill_tokens, load.kv_tokens


def test_prefill_and_decode_engines_are_asked_together_and_freed_separately(play: Play) -> None:
    flow = regional(_p("p1"), _d("d1"))
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1", attempt=1, promised_ttft_ms=pytest.approx(50.0)))
    assert (_load(flow, "p1"), _load(flow, "d1")) == ((1, 1000, 1000), (1, 0, HELD))
    book.at(0.06).on(AttemptBegan("q", 1, 200)).expect()
    book.at(0.07).on(PrefillEnded("q", 1)).expect()
    assert (_load(flow, "p1"), _load(flow, "d1")) == ((0, 0, 0), (1, 0, HELD))
    assert set(flow.replicas.trie.match(request("q", BYTES).chain)) == {"p1"}  # it drops what the other took over
    whole = (*request("q", BYTES).chain, 1)
    book.at(1.06).on(AttemptEnded("q", 1, 200, Usage(1000, 51, 0), chain=whole, answer_bytes=204)).expect()
    assert set(flow.replicas.trie.match(whole)) == {"p1"}  # nor does it keep the answer
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)
    assert flow.replicas.speeds["d1"].tpot_ms == pytest.approx(20.0)  # a second for fifty, from its first token on
    assert (flow.learning.predicted_tokens, flow.learning.actual_tokens) == (0.0, 0.0)


def test_each_pair_of_requests_gets_a_distinct_bootstrap_room(play: Play) -> None:
    flow = regional(_p("p1", slots=9, prefill_tokens_max=90_000), _d("d1", slots=9, kv_tokens=90_000))
    rooms = set()
    for n in range(8):
        forward = flow.handle(_ask(f"q{n}"), 0.0)[-1]
        assert isinstance(forward, Forward)
        assert forward.prefill is not None
        rooms.add(forward.prefill.room)
    assert len(rooms) == 8


def test_a_short_prompt_is_divided_too_for_its_decode_engine_takes_nothing_else(play: Play) -> None:
    flow = regional(_p("p1"), _d("d1"))
    play(flow).on(_ask(size=100)).expect(_pair("q", "d1", "p1"))


def test_undividable_request_goes_to_a_mixed_replica_or_is_answered_with_the_reason(play: Play) -> None:
    flow = regional(_p("p1"), _d("d1"), replica("m1"))
    play(flow).on(_ask(divisible=False)).expect(sent("q", "m1", prefill=None))
    why = "no replica of this model takes one with several prompts or answers, or that asks what its prompt was"
    alone = regional(_p("p1"), _d("d1"))
    play(alone).on(_ask(divisible=False)).expect(answered("q", outcome.NO_REPLICA, detail=why))


def test_prefill_and_decode_engines_of_different_handovers_are_not_paired(play: Play) -> None:
    """vLLM's prefill engine is nobody for SGLang's decode engine, nor the other way round; a mixed one is no pair's."""
    flow = regional(replica("p1", role="prefill"), _d("d1"))
    why = "no replica that prefills for those of this model is healthy"
    play(flow).on(_ask()).expect(answered("q", outcome.NO_REPLICA, detail=why))
    play(regional(_p("p1"), replica("d1", role="decode"))).on(_ask()).expect(sent("q", "d1", prefill=None))
    mixed = regional(replica("p1", role="prefill"), replica("m1", handover="sglang"))
    play(mixed).on(_ask()).expect(sent("q", "m1", prefill=None))


def test_request_waits_until_there_is_room_to_prefill(play: Play) -> None:
    flow = regional(_p("p1"), _d("d1"), _d("d2"))
    book = play(flow).on(_ask("a", 9000)).expect(_pair("a", lambda _: True, "p1"))
    book.on(_ask("b", 9000)).expect(held("b"))
    assert len(flow.replicas.ledger) == 2
    book.at(0.1).on(PrefillEnded("a", 1)).expect(_pair("b", lambda _: True, "p1"))


def test_a_prefiller_dies_before_the_answer_and_both_are_asked_again(play: Play) -> None:
    flow = regional(_p("p1"), _p("p2"), _d("d1"))
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1", attempt=1))
    book.on(PrefillFailed("q", 1, outcome.DIED_BEFORE_START)).expect(_pair("q", "d1", "p2", attempt=2))
    assert (_load(flow, "p1"), _load(flow, "p2")) == ((0, 0, 0), (1, 1000, 1000))
    book.on(PrefillEnded("q", 1)).expect()  # from the attempt before: outdated
    assert _load(flow, "p2") == (1, 1000, 1000)


def test_the_only_prefill_replica_is_retried_but_not_for_ever(play: Play) -> None:
    flow = regional(_p("p1"), _d("d1"))
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    attempts = 1
    while commands := flow.handle(PrefillFailed("q", attempts, outcome.PREFILL_FAILED), 0.01 * attempts):
        if isinstance(commands[-1], machine.Answer):
            break
        attempts += 1
    assert isinstance(commands[-1], machine.Answer)
    assert commands[-1].outcome in (outcome.PREFILL_FAILED, outcome.NO_REPLICA)
    assert 2 <= attempts <= 4
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)
    book.finished()


def test_other_engines_are_asked_if_both_are_silent(play: Play) -> None:
    flow = regional(_p("p1"), _p("p2"), _d("d1"), _d("d2"))
    book = play(flow).on(_ask()).expect(_pair("q", lambda _: True, "p1"))
    first = next(name for name in ("d1", "d2") if flow.replicas.ledger.load(name).in_flight)
    other = "d2" if first == "d1" else "d1"
    book.at(30.0).on(PrefillFailed("q", 1, outcome.FIRST_BYTE_TIMEOUT)).expect(_pair("q", other, "p2"))


def test_an_answer_that_has_begun_outlives_its_prefiller(play: Play) -> None:
    flow = regional(_p("p1"), _d("d1"))
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    book.at(0.1).on(AttemptBegan("q", 1, 200)).expect()
    book.at(0.2).on(PrefillFailed("q", 1, outcome.DIED_BEFORE_START)).expect()
    assert (_load(flow, "p1")[0], _load(flow, "d1")[0]) == (0, 1)
    book.at(0.3).on(AttemptEnded("q", 1, 200, None)).expect()
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)


def test_the_decode_half_fails_and_both_are_asked_again(play: Play) -> None:
    flow = regional(_p("p1"), _d("d1"), _d("d2"))
    book = play(flow).on(_ask()).expect(_pair("q", lambda _: True, "p1"))
    first = next(name for name in ("d1", "d2") if flow.replicas.ledger.load(name).in_flight)
    other = "d2" if first == "d1" else "d1"
    book.on(AttemptFailed("q", 1, outcome.DIED_BEFORE_START)).expect(_pair("q", other, "p1", attempt=2))
    assert (_load(flow, first), len(flow.replicas.ledger)) == ((0, 0, 0), 2)


@pytest.mark.parametrize("lost", ["p1", "d1"])
def test_either_engine_that_fails_its_probes_is_given_up(play: Play, lost: str) -> None:
    flow = regional(_p("p1"), _p("p2"), _d("d1"), _d("d2"))
    forward = flow.handle(_ask(), 0.0)[-1]
    assert isinstance(forward, Forward)
    if lost == "d1":
        lost = forward.target
    for at in (0.1, 0.2):
        flow.handle(ReplicaProbed(lost, False), at)
    commands = flow.handle(ReplicaProbed(lost, False), 0.3)
    assert [type(command).__name__ for command in commands] == ["Cancel", "SetTimer", "Forward"]
    assert flow.replicas.ledger.load(lost).in_flight == 0
    assert len(flow.replicas.ledger) == 2


def test_a_deadline_frees_both(play: Play) -> None:
    flow = regional(_p("p1"), _d("d1"))
    book = play(flow).on(_ask(deadline=2.0)).expect(_pair("q", "d1", "p1"))
    book.at(2.0).on(TimerFired("q")).expect(answered("q", outcome.DEADLINE))
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)


def test_request_refused_by_the_only_prefill_engine_is_refused(play: Play) -> None:
    flow = regional(_p("p1"), _d("d1"))
    book = play(flow).on(_ask()).expect(_pair("q", "d1", "p1"))
    why = "the replica that prefills for those of this model refused it"
    book.on(PrefillFailed("q", 1, outcome.ENGINE_ERROR)).expect(answered("q", outcome.NO_REPLICA, detail=why))
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)


class _Story:
    """Requests at random under all that can happen to them, in any order; what the machine wants is done."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        several = [_p("p1"), _p("p2"), _d("d1"), _d("d2"), replica("m1")]
        self.names = [one.name for one in several]
        self.flow = regional(*several, seed=seed)
        self.attempts: dict[str, Forward] = {}
        self.now, self.serial = 0.0, 0

    def tell(self, event: machine.Event) -> None:
        for command in self.flow.handle(event, self.now):
            if isinstance(command, Forward):
                self.attempts[command.id] = command
            elif isinstance(command, machine.Answer | machine.Cancel):
                self.attempts.pop(command.id, None)
        for name in self.names:
            load = self.flow.replicas.ledger.load(name)
            assert min(load.in_flight, load.prefill_tokens, load.kv_tokens) >= 0
            assert load.in_flight <= self.flow.replicas.view.replicas[name].slots

    def step(self, what: str) -> None:
        self.now += self.rng.random() * 0.2
        if what == "arrive":
            self.serial += 1
            self.tell(_ask(f"q{self.serial}", self.rng.randrange(50, 7000), divisible=self.rng.random() < 0.8))
        elif what == "probe":
            self.tell(ReplicaProbed(self.rng.choice(self.names), self.rng.random() < 0.7))
        elif self.attempts:
            name = self.rng.choice(sorted(self.attempts))
            self.happen(what, name, self.attempts[name].attempt)

    def happen(self, what: str, name: str, number: int) -> None:
        reason = self.rng.choice((outcome.DIED_BEFORE_START, outcome.CONNECT_FAILED, outcome.FIRST_BYTE_TIMEOUT))
        events: dict[str, machine.Event] = {
            "began": AttemptBegan(name, number, 200),
            "ended": AttemptEnded(name, number, 200, Usage(10, 5, 0)),
            "failed": AttemptFailed(name, number, reason),
            "prefilled": PrefillEnded(name, number),
            "unprefilled": PrefillFailed(name, number, self.rng.choice((reason, outcome.ENGINE_ERROR))),
            "left": ClientLeft(name),
            "timer": TimerFired(name),
        }
        if what in ("ended", "left"):
            self.attempts.pop(name)
        self.tell(events[what])


WHAT = ("arrive", "arrive", "probe", "began", "ended", "failed", "prefilled", "unprefilled", "left", "timer")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(WHAT), max_size=60))
def test_no_state_leaks_in_any_order_of_events(seed: int, story: list[str]) -> None:
    world = _Story(seed)
    for what in story:
        world.step(what)
    for name in [f"q{n + 1}" for n in range(world.serial)]:
        world.tell(ClientLeft(name))
    flow = world.flow
    assert (flow.under_way, len(flow.replicas.ledger), len(flow.queue)) == (0, 0, 0)
    assert all(_load(flow, name) == (0, 0, 0) for name in world.names)
