"""What a request would meet: asked any number of times it changes nothing, and it is what then happens."""

from __future__ import annotations

from worlds import MODEL, OTHER_MODEL, regional, replica, request

from farhop.balance.machine import Forward, RequestArrived


def test_looking_changes_nothing_and_is_what_then_happens() -> None:
    flow = regional(replica("r1", prefill_ms_per_token=1.0), replica("r2"))
    asked = request("a")
    need = flow.outlook.need_of(asked)
    assert need.prompt_tokens == 256.0
    picks = [flow.outlook.consider(asked, need, 0.0) for _ in range(3)]
    assert [pick.chosen.replica for pick in picks] == ["r2"] * 3
    assert (flow.under_way, len(flow.ledger), flow.trie.nodes) == (0, 0, 0)
    _, forward = flow.handle(RequestArrived(asked), 0.0)
    assert isinstance(forward, Forward)
    assert forward.target == "r2"


def test_nobody_there_is_no_pick_and_no_wait() -> None:
    flow = regional(replica("r1"))
    asked = request("a", model=OTHER_MODEL)
    assert flow.outlook.consider(asked, flow.outlook.need_of(asked), 0.0) is None
    assert flow.outlook.consider(request("b"), flow.outlook.need_of(request("b")), 0.0, without=("r1",)) is None
    assert flow.outlook.wait_ms(OTHER_MODEL, 0.0) == 0.0


def test_only_guests_are_turned_away() -> None:
    flow = regional(replica("r1"))
    own = request("a")
    guest = request("b", entry_region="tokyo", promised_ttft_ms=1.0)
    flow.handle(RequestArrived(request("big", 64 * 1024)), 0.0)
    assert flow.outlook.turned_away(own, flow.outlook.need_of(own), 0.0) is None
    assert flow.outlook.turned_away(guest, flow.outlook.need_of(guest), 0.0) is not None
    assert flow.outlook.wait_ms(MODEL, 0.0) > 0.0


def test_a_pair_is_part_of_the_outlook() -> None:
    flow = regional(replica("p", role="prefill", prefill_ms_per_token=0.05), replica("d", role="decode"))
    asked = request("a", 4000, divisible=True)
    need = flow.outlook.need_of(asked)
    pick = flow.outlook.consider(asked, need, 0.0)
    assert pick is not None
    assert pick.prefill is not None
    assert (pick.chosen.replica, pick.prefill.replica, pick.prefill_ms) == ("d", "p", 50.0)
    for other in (
        flow.outlook.consider(asked, need, 0.0, whole=True),
        flow.outlook.consider(asked, need, 0.0, without=("p",)),
        flow.outlook.consider(request("b", 4000), need, 0.0),
    ):
        assert other is not None
        assert (other.prefill, other.prefill_ms) == (None, 100.0)
