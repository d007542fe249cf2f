"""Placing, holding and letting go are tested as the flow does them (tests/flows); here is what they keep to."""

from __future__ import annotations

from worlds import MODEL, regional, replica, request

from farhop.balance.machine import Forward, Hold, RequestArrived
from regional_lb.placing import K_WAITING


def test_who_finds_room_goes_and_who_does_not_waits_and_nobody_is_both() -> None:
    flow = regional(replica("r1", slots=1))
    commands = [c for n in range(3) for c in flow.handle(RequestArrived(request(f"q{n}")), 0.0)]
    assert [type(c) for c in commands if isinstance(c, Forward | Hold)] == [Forward, Hold, Hold]
    assert (flow.queue.waiting(MODEL), len(flow.ledger), flow.under_way) == (2, 1, 3)


def test_as_many_are_compared_as_are_worth_it() -> None:
    assert 2 <= K_WAITING <= 16  # each costs a match, at every slot that frees
