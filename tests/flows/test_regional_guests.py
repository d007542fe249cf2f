"""The regional machine and work from other regions: the reserve, the promise, the last resort."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playbook import answered, held, sent
from worlds import regional, replica, replicas_of, request

from farhop.balance import outcome
from farhop.balance.ledger import Reservation
from farhop.balance.machine import AttemptBegan, AttemptEnded, RequestArrived
from regional_lb.scheduler.admission import (
    ForeignConfig,
    Headroom,
    foreign_refusal,
    headroom,
    is_foreign,
    last_resort_headroom,
)

GUEST = {"entry_region": "tokyo", "issuer": "tokyo/g1", "promised_ttft_ms": 400.0}
LAST = {**GUEST, "promised_ttft_ms": None}
OWN = {"entry_region": "london", "issuer": "london/g1", "promised_ttft_ms": 1.0}
ROOMY = {"slots": 10, "kv_tokens": 10_000, "prefill_tokens_max": 100_000}


def test_reserve_is_kept_for_local_requests(play) -> None:
    flow = regional(replica("r1", **ROOMY))
    book = play(flow)
    for n in range(9):
        book.on(RequestArrived(request(f"q{n}", 64, **GUEST))).expect(sent(f"q{n}", "r1"))
    refused = answered("g", outcome.FOREIGN_FULL, wait_ms=lambda ms: ms is not None)
    book.on(RequestArrived(request("g", 64, **GUEST))).expect(refused)
    assert flow.accepted_bytes["tokyo/g1"] == 640.0  # refused, but it came: the sender counts it
    assert flow.under_way == 9
    book.on(RequestArrived(request("o", 64, **OWN))).expect(sent("o", "r1"))
    book.on(AttemptEnded("q0", 1, 200, None)).expect().on(AttemptEnded("q1", 1, 200, None)).expect()
    book.on(RequestArrived(request("h", 64, **GUEST))).expect(sent("h", "r1"))


def test_the_last_resort_waits_and_is_not_refused(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .on(RequestArrived(request("a", 64))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b", 64, **GUEST))).expect(answered("b", outcome.FOREIGN_FULL))
        .on(RequestArrived(request("c", 64, **LAST))).expect(held("c"))
        .on(AttemptEnded("a", 1, 200, None)).expect(sent("c", "r1"))
    )  # fmt: skip


def test_the_last_resort_finds_a_smaller_reserve_and_passes_that_no_more(play) -> None:
    terms = ForeignConfig(reserve_share=0.3, last_resort_reserve_share=0.1)
    flow = regional(replica("r1", **ROOMY), foreign=terms)
    book = play(flow)
    for n in range(7):
        book.on(RequestArrived(request(f"q{n}", 64, **GUEST))).expect(sent(f"q{n}", "r1"))
    book.on(RequestArrived(request("g", 64, **GUEST))).expect(answered("g", outcome.FOREIGN_FULL))
    book.on(RequestArrived(request("q7", 64, **LAST))).expect(sent("q7", "r1"))
    book.on(RequestArrived(request("q8", 64, **LAST))).expect(sent("q8", "r1"))
    book.on(RequestArrived(request("late", 64, **LAST))).expect(held("late"))  # one slot is free, and kept
    # Nor does it stand before those that the slot is kept for, even if many like it wait.
    for n in range(12):
        book.on(RequestArrived(request(f"w{n}", 64, **LAST))).expect(held(f"w{n}"))
    book.on(RequestArrived(request("o", 64, **OWN))).expect(held("o"), sent("o", "r1"))
    book.on(AttemptEnded("q0", 1, 200, None)).expect()
    book.on(AttemptEnded("q1", 1, 200, None)).expect(sent("late", "r1"))


def test_reserve_is_small_while_many_requests_are_in_flight(play) -> None:
    """A twentieth of 400 slots would be 20."""
    large = {"slots": 400, "kv_tokens": 1_000_000, "prefill_tokens_max": 100_000}
    flow = regional(replica("r1", **large, prefill_ms_per_token=0.001))
    book = play(flow)
    for n in range(392):
        book.on(RequestArrived(request(f"q{n}", 64, **LAST))).expect(sent(f"q{n}", "r1"))
    book.on(RequestArrived(request("late", 64, **LAST))).expect(held("late"))  # log2 392 is 8.6: eight are kept
    for n in range(8):
        book.on(RequestArrived(request(f"o{n}", 64, **OWN))).expect(held(f"o{n}"), sent(f"o{n}", "r1"))


def test_kv_cache_reserve_applies_to_the_last_resort_too(play) -> None:
    terms = ForeignConfig(reserve_share=0.5, last_resort_reserve_share=0.5)
    flow = regional(replica("r1", **ROOMY, prefill_ms_per_token=0.01), foreign=terms)
    book = play(flow).on(RequestArrived(request("a", 12_000, **OWN))).expect(sent("a", "r1"))  # 3,000 of 10,000 tokens
    book.on(RequestArrived(request("b", 12_000, **LAST))).expect(held("b"))
    book.on(RequestArrived(request("c", 12_000, **OWN))).expect(held("c"), sent("c", "r1"))
    book.on(AttemptEnded("a", 1, 200, None)).expect()
    book.on(AttemptEnded("c", 1, 200, None)).expect(sent("b", "r1"))  # an idle region accepts anything


def test_foreign_request_waits_where_its_promise_can_be_kept(play) -> None:
    flow = regional(replica("r1", **{**ROOMY, "prefill_tokens_max": 500}, prefill_ms_per_token=1.0))
    soon = {**GUEST, "promised_ttft_ms": 60_000.0}
    book = play(flow).on(RequestArrived(request("a", 4800, **OWN))).expect(sent("a", "r1"))
    book.on(RequestArrived(request("b", 64, **OWN))).expect(held("b"))
    book.on(RequestArrived(request("c", 64, **soon))).expect(held("c"))
    book.on(RequestArrived(request("d", 64, **{**GUEST, "promised_ttft_ms": 1.0}))).expect(
        answered("d", outcome.BROKEN_PROMISE))  # fmt: skip
    book.at(0.1).on(AttemptBegan("a", 1, 200)).expect(sent("b", "r1"), sent("c", "r1"))


def test_a_promise_that_would_be_broken_badly_is_not_taken(play) -> None:
    flow = regional(replica("r1", **ROOMY, prefill_ms_per_token=1.0))
    long = {**GUEST, "promised_ttft_ms": 200.0}  # up to 900 ms
    found = "ms, and 200 ms were promised"
    (
        play(flow)
        .on(RequestArrived(request("a", 3200, **long))).expect(sent("a", "r1"))  # 800 tokens
        .on(RequestArrived(request("b", 3200, **long))).expect(
            answered("b", outcome.BROKEN_PROMISE, detail=lambda d: found in d, wait_ms=pytest.approx(800.0)))
        .on(RequestArrived(request("c", 3200, **OWN))).expect(sent("c", "r1"))
    )  # fmt: skip


def test_refusal_states_that_no_replica_is_healthy(play) -> None:
    flow = regional(replica("r1"), up=False)
    play(flow).on(RequestArrived(request("a", **GUEST))).expect(answered("a", outcome.NO_REPLICA))


def test_headroom_excludes_the_reserve() -> None:
    both = replicas_of(replica("r1", **ROOMY), replica("r2", **ROOMY))
    left = headroom(both.whole, 0.1)
    assert (left.slots, left.kv_tokens, left.idle) == (18, pytest.approx(18_000.0), True)
    for n in range(19):
        both.ledger.reserve(str(n), Reservation(f"r{n % 2 + 1}", 0, 1000))
    left = headroom(both.whole, 0.1)
    assert (left.slots, left.kv_tokens, left.idle) == (0, 0.0, False)
    assert headroom(replicas_of(replica("r1", slots=2)).whole, 0.1).slots == 2  # of few slots none is reserved
    assert headroom(replicas_of().whole, 0.1).slots == 0


@given(st.floats(0.0, 1.0), st.integers(0, 200))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_reserve_against_the_last_resort_is_bounded_by_share_and_logarithm_of_requests_in_flight(
    share: float, under_way: int
) -> None:
    book = replicas_of(replica("r1", slots=200, kv_tokens=200_000), reserved=[Reservation("r1", 0, 1000)] * under_way)
    free, left = headroom(book.whole, 0.0), last_resort_headroom(book.whole, share)
    kept, most = free.slots - left.slots, 200 * log2(max(2, under_way)) / max(2, under_way)
    assert kept <= share * 200
    assert kept <= most
    assert left.slots == 0 or kept >= int(min(share * 200, most)), "nor less than either"
    assert (free.kv_tokens - left.kv_tokens) / 1000 <= min(share * 200, most) + 1e-9
    assert last_resort_headroom(replicas_of().whole, share).slots == 0


def test_which_requests_are_foreign() -> None:
    assert is_foreign(request("a", **GUEST), "london")
    assert not is_foreign(request("a", **OWN), "london")
    assert not is_foreign(request("a", promised_ttft_ms=5.0), "london")
    assert is_foreign(request("a", **LAST), "london")  # whichever way it came


def test_the_cache_is_part_of_headroom_unless_an_engine_is_idle() -> None:
    terms = ForeignConfig()
    idle = headroom(replicas_of(replica("r1", **ROOMY)).whole, 0.1)
    assert foreign_refusal(400.0, 50_000.0, idle, 0.0, terms) is None
    busy = headroom(replicas_of(replica("r1", **ROOMY), reserved=[Reservation("r1", 0, 5000)]).whole, 0.1)
    assert foreign_refusal(400.0, 4000.0, busy, 0.0, terms) is None
    for asked in ((4001.0, busy), (1.0, Headroom(0, 9.0, idle=False))):
        refusal = foreign_refusal(400.0, *asked, 0.0, terms)
        assert refusal is not None
        assert refusal.outcome is outcome.FOREIGN_FULL
