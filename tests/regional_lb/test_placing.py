"""Placing, holding and letting go are tested as the flow does them (tests/flows); here is what they keep to."""

from __future__ import annotations

import pytest
from worlds import MODEL, regional, replica, request

from farhop.balance.chain import bytes_at
from farhop.balance.machine import AttemptBegan, ClientLeft, Forward, Hold, RequestArrived, SetTimer, TimerFired
from regional_lb.placing import GROWN_SHARE, K_WAITING


def test_who_finds_room_goes_and_who_does_not_waits_and_nobody_is_both() -> None:
    flow = regional(replica("r1", slots=1))
    commands = [c for n in range(3) for c in flow.handle(RequestArrived(request(f"q{n}")), 0.0)]
    assert [type(c) for c in commands if isinstance(c, Forward | Hold)] == [Forward, Hold, Hold]
    assert (flow.queue.waiting(MODEL), len(flow.ledger), flow.under_way) == (2, 1, 3)


def test_a_hit_takes_its_place_in_the_cache_once_for_all_who_use_it() -> None:
    flow = regional(replica("r1", slots=8))
    stem = tuple(range(1, 9))  # 8 blocks of 256 B, 512 tokens
    taken = []
    for n, own in enumerate(((), (101, 102, 103, 104), (), (201, 202, 203, 204))):
        asked = request(f"q{n}", prompt_bytes=bytes_at(len(stem + own)), chain=stem + own, max_tokens=10)
        flow.handle(RequestArrived(asked), 0.0)
        held = flow.ledger.held(f"q{n}")
        assert held is not None
        taken.append(held.kv_tokens - int(GROWN_SHARE * 10))
        flow.handle(AttemptBegan(f"q{n}", 1, 200), 0.1)
    assert taken == [512, 256, 0, 256]
    for n in range(4):
        flow.handle(ClientLeft(f"q{n}"), 0.2)
    again = request("last", prompt_bytes=bytes_at(12), chain=(*stem, 301, 302, 303, 304), max_tokens=10)
    flow.handle(RequestArrived(again), 0.3)
    last = flow.ledger.held("last")
    assert last is not None
    # Two thirds are cached and need no prefill, but nobody else holds them: they cannot be evicted for its sake alone.
    assert (last.prefill_tokens, last.kv_tokens) == (256, 768 + int(GROWN_SHARE * 10))


@pytest.mark.parametrize("stands_s", [0.0, 100.0])
def test_who_waits_by_choice_is_never_refused_for_it(stands_s: float) -> None:
    flow = regional(
        *(replica(name, slots=8, kv_tokens=100_000) for name in ("r1", "r2")),
        queue_wait_s=1.0, queue_stands_s=stands_s, queue_standing_wait_s=0.2,
    )  # fmt: skip
    stem = tuple(range(1, 39))  # 26 KiB, 6,656 tokens
    flow.trie.insert("r1", stem)
    other = request("other", prompt_bytes=bytes_at(28), chain=(*stem[:17], *range(51, 62)), max_tokens=10)
    (first,) = (c for c in flow.handle(RequestArrived(other), 0.0) if isinstance(c, Forward))
    assert first.target == "r1"
    long = request("long", prompt_bytes=bytes_at(40), chain=(*stem, 39, 40), max_tokens=10)
    commands = flow.handle(RequestArrived(long), 0.1)
    assert [type(c) for c in commands] == [Hold, SetTimer]
    due = commands[1].at
    assert due <= 1.1
    (late,) = (c for c in flow.handle(TimerFired("long"), due) if isinstance(c, Forward))
    assert late.target == "r2"  # r1 is at the other one's prompt still
    assert not len(flow.queue)


def test_as_many_are_compared_as_are_worth_it() -> None:
    assert 2 <= K_WAITING <= 16  # each costs a match, at every slot that frees
