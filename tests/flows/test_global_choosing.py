"""The global machine's choices: where a request goes, why not elsewhere, and what is learned from it."""

from __future__ import annotations

import pytest
from playbook import Expected, answered, held, sent, timer
from worlds import (
    MODEL,
    OTHER_MODEL,
    SEED,
    capacity,
    everywhere,
    instance,
    law,
    report_in,
    request,
    seen,
    text,
    worldwide,
)

from farhop.balance import machine, outcome
from farhop.balance.machine import (
    AttemptBegan,
    AttemptEnded,
    AttemptFailed,
    AttemptRefused,
    ClientLeft,
    RequestArrived,
    TimerFired,
    Usage,
)
from farhop.balance.prefix import chain
from global_lb.fleet.regions import Spill
from global_lb.fleet.view import ChannelChanged, RegionForced, RegionReported
from global_lb.routing.flow import ASK_AGAIN_S, LOOK_AGAIN_S, LOOK_HELD_S
from topology.model import Residency, Rule

ALL = frozenset({"frankfurt", "london", "tokyo"})


def serve(book, name: str, now: float, usage: Usage | None = None) -> None:
    """Its first attempt begins and ends well."""
    book.at(now).on(AttemptBegan(name, 1, 200)).expect().on(AttemptEnded(name, 1, 200, usage)).expect()


def test_the_nearest_lawful_region_serves(play) -> None:
    flow = worldwide()
    forward = Expected(
        machine.Forward,
        id="a",
        attempt=1,
        target="london",
        address=instance("london").tier,
        promised_ttft_ms=pytest.approx(1.0 + 5.0 + 25.6),  # wire, wait, 256 tokens
        lawful=ALL,
        reasons=lambda decision: [s.region for s in decision.ranked] == ["london", "frankfurt", "tokyo"],
    )
    book = play(flow).on(RequestArrived(request("a"))).expect(timer("a", at=LOOK_AGAIN_S), forward)
    serve(book, "a", 0.1)
    book.on(RequestArrived(request("b", tenant="german"))).expect(
        sent("b", "frankfurt", lawful=frozenset({"frankfurt"}))
    )
    assert (flow.under_way, len(flow.ledger)) == (1, 1)


def test_long_wait_sends_a_request_to_a_farther_region(play) -> None:
    flow = worldwide(view=seen(instance("london", wait_ms=500.0), instance("frankfurt"), instance("tokyo")))
    play(flow).on(RequestArrived(request("a"))).expect(sent("a", "frankfurt"))


def test_slow_decode_sends_a_request_to_a_farther_region(play) -> None:
    flow = worldwide(view=seen(instance("london", tpot_ms=80.0), instance("frankfurt")))
    play(flow).on(RequestArrived(request("a"))).expect(sent("a", "frankfurt"))


def test_a_long_request_goes_to_a_region_that_can_hold_it(play) -> None:
    view = seen(instance("london", context_tokens=1000), instance("frankfurt", context_tokens=4000), instance("tokyo"))
    flow = worldwide(view=view)
    (
        play(flow)
        .on(RequestArrived(request("a", 3600))).expect(sent("a", "london"))  # 900 tokens, and 100 of an answer
        .on(RequestArrived(request("b", 3601))).expect(sent("b", "frankfurt"))
        .on(RequestArrived(request("c", 3201, max_tokens=200))).expect(sent("c", "frankfurt"))
        .on(RequestArrived(request("d", 40_000))).expect(sent("d", "tokyo"))  # which does not say
        .on(RequestArrived(request("e", 40_000, tenant="european"))).expect(sent("e", "london"))  # none is allowed
    )  # fmt: skip
    assert flow.consider(request("f", 3601), 0.0).absent == {"london": "cannot hold so long a request"}


CONTEXTS = {"london": 1000, "frankfurt": 1000, "tokyo": 4000}


@pytest.mark.parametrize("event", [AttemptFailed, AttemptRefused])
def test_a_request_refused_for_its_length_goes_where_longer_ones_fit(play, event) -> None:
    """Whether the engine said so, or its region that has asked all it could."""
    view = seen(*(instance(region, context_tokens=tokens) for region, tokens in CONTEXTS.items()))
    flow = worldwide(view=view)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london", longer=True))
        .at(0.1).on(event("a", 1, outcome.TOO_LONG)).expect(sent("a", "tokyo", longer=False, attempt=2))
        .at(0.2).on(AttemptBegan("a", 2, 400)).expect()
        .on(RequestArrived(request("b", tenant="european"))).expect(sent("b", "london", longer=False))
        .at(0.3).on(event("b", 1, outcome.TOO_LONG)).expect(answered("b", outcome.TOO_LONG))
    )  # fmt: skip
    assert (flow.under_way, len(flow.ledger)) == (1, 1)


def test_length_refusal_by_a_removed_region_does_not_count_for_others(play) -> None:
    """What it could hold is not known any more."""
    flow = worldwide(view=seen(*(instance(region, context_tokens=tokens) for region, tokens in CONTEXTS.items())))
    left = seen(
        *(instance(region, context_tokens=tokens, draining=region == "london") for region, tokens in CONTEXTS.items())
    )
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .at(0.1).on(left).expect()
        .on(AttemptFailed("a", 1, outcome.TOO_LONG)).expect(sent("a", "frankfurt", attempt=2))
    )  # fmt: skip


def test_instance_with_the_least_wait_of_a_region_is_chosen(play) -> None:
    flow = worldwide(view=seen(instance("london", "a", wait_ms=50.0), instance("london", "b", wait_ms=10.0)))
    b = Expected(machine.Forward, address=instance("london", "b").tier)
    play(flow).on(RequestArrived(request("a"))).expect(timer("a"), b)


def test_two_equal_instances_share_what_comes_between_reports(play) -> None:
    flow = worldwide(view=seen(instance("london", "a"), instance("london", "b")))
    asked = [flow.handle(RequestArrived(request(f"q{n}")), 0.0)[-1].address.host for n in range(4)]
    assert asked == ["london-a.example", "london-b.example"] * 2


def test_answer_lists_the_clauses_if_no_region_is_lawful(play) -> None:
    flow = worldwide(under=law(strict=Rule(allow=("eu",), deny=("DE",))))

    def clauses(detail: str) -> bool:
        return "strict: processing denies DE" in detail and "london, tokyo: tenant strict: processing allows" in detail

    (
        play(flow)
        .on(RequestArrived(request("a", tenant="strict"))).expect(answered("a", outcome.UNLAWFUL, detail=clauses))
        .on(RequestArrived(request("b", tenant="lost"))).expect(answered("b", outcome.UNLAWFUL))
        .on(RequestArrived(request("c", tenant="nobody"))).expect(answered("c", outcome.UNLAWFUL))
        .on(RequestArrived(request("d", narrow=(("eu",), ("uk",))))).expect(answered("d", outcome.UNLAWFUL))
        .on(RequestArrived(request("e", key="home", narrow=(("eu",),)))).expect(answered("e", outcome.UNLAWFUL))
        .on(RequestArrived(request("f", lawful=frozenset()))).expect(answered("f", outcome.UNLAWFUL))
        .on(RequestArrived(request("g", key="home", lawful=ALL))).expect(sent("g", "london"))
    )  # fmt: skip
    assert flow.under_way == 1


def test_answer_lists_the_regions_if_no_lawful_region_serves(play) -> None:
    flow = worldwide(view=seen(instance("tokyo"), instance("london", replicas_ready=0)))
    found = "london: no ready replica of this model"
    (
        play(flow)
        .on(RequestArrived(request("a", tenant="european"))).expect(
            answered("a", outcome.NO_REGION, retry_after_s=2.0, detail=lambda d: found in d and "frankfurt: down" in d,
                     reasons=lambda decision: decision.chosen is None))
        .on(RequestArrived(request("b"))).expect(sent("b", "tokyo"))
    )  # fmt: skip


def test_never_offered_model_is_not_found(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a", model="gpt-9"))).expect(
            answered("a", outcome.UNKNOWN_MODEL, retry_after_s=None, detail=lambda d: "`gpt-9`" in d))
        .on(seen(instance("london", models={OTHER_MODEL: capacity()}))).expect()
        # A model that was offered once exists, though no region serves it at the moment.
        .on(RequestArrived(request("b"))).expect(answered("b", outcome.NO_REGION))
    )  # fmt: skip


def test_model_is_not_reported_missing_before_any_region_reports(play) -> None:
    flow = worldwide(view=seen())
    play(flow).on(RequestArrived(request("a"))).expect(answered("a", outcome.NO_REGION))


def test_unacknowledged_load_shifts_requests_between_two_reports(play) -> None:
    flow = worldwide(view=seen(instance("london"), instance("frankfurt")))
    targets = [flow.handle(RequestArrived(request(f"q{n}")), 0.0)[-1].target for n in range(4)]
    # Each 256 tokens sent to London add 12.8 ms to its wait; Frankfurt is 11 ms further.
    assert targets == ["london", "frankfurt", "london", "frankfurt"]
    (
        play(flow).on(seen(instance("london", accepted=2048.0), instance("frankfurt")))
        .expect().on(RequestArrived(request("b"))).expect(sent("b", "london"))
    )  # fmt: skip


def test_an_answered_request_no_longer_counts_as_load(play) -> None:
    flow = worldwide(view=seen(instance("london"), instance("frankfurt")))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.at(0.1).on(AttemptBegan("a", 1, 200)).expect()
    book.on(RequestArrived(request("b"))).expect(sent("b", "london"))


def test_warm_region_is_preferred_as_far_as_its_cache_hits_are_confirmed(play) -> None:
    flow = worldwide(view=seen(instance("london", wait_ms=900.0), instance("frankfurt")))
    long = {"prompt_bytes": 16_384, "prefix": "alice"}
    book = play(flow).on(RequestArrived(request("a", **long))).expect(sent("a", "frankfurt"))
    serve(book, "a", 0.5)
    book.on(seen(instance("london"), instance("frankfurt", accepted=16_384.0))).expect()
    # 4096 tokens of prefill are 410 ms; Frankfurt is 11 ms further and has all of them cached.
    book.on(RequestArrived(request("b", **long))).expect(sent("b", "frankfurt"))
    serve(book, "b", 1.0, Usage(4096, 10, cached_tokens=0))
    assert flow.regions.cache_hit_calibration["frankfurt"].value == pytest.approx(0.955)
    for n in range(200):
        flow.handle(RequestArrived(request(f"c{n}", **long)), 1.0)
        flow.handle(AttemptEnded(f"c{n}", 1, 200, Usage(4096, 10, cached_tokens=0)), 1.0)
    # A region whose promised hits never come is trusted less, but never not at all: it may still prove the opposite.
    assert 0.1 <= flow.regions.cache_hit_calibration["frankfurt"].value < 0.2
    cache_hit_calibration = flow.regions.cache_hit_calibration["frankfurt"].value
    book.on(RequestArrived(request("d", **long)))
    book.expect(
        sent("d", "frankfurt", reasons=lambda d: d.chosen.hit_tokens == pytest.approx(4096 * cache_hit_calibration))
    )
    book.on(AttemptEnded("d", 1, 200, Usage(4096, 10, cached_tokens=4096))).expect()
    assert flow.regions.cache_hit_calibration["frankfurt"].value > cache_hit_calibration


def test_an_error_leaves_no_hint(play) -> None:
    flow = worldwide()
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.on(AttemptBegan("a", 1, 400)).expect().on(AttemptEnded("a", 1, 400, None)).expect()
    assert flow.regions.trie.nodes == 0


def test_hints_obey_the_law(play) -> None:
    secretive = Residency(processing=Rule(allow=("world",)), hints=Rule(allow=("DE",)))
    flow = worldwide(under=law(secretive=secretive))
    book = play(flow).on(RequestArrived(request("a", tenant="secretive"))).expect(sent("a", "london"))
    serve(book, "a", 0.1)
    assert flow.regions.trie.nodes == 0  # this balancer is in London
    book.on(RequestArrived(request("b"))).expect(sent("b", "london"))
    serve(book, "b", 0.2)
    assert flow.regions.trie.match(chain.chain(text("b", 1024), SEED)) == {"london": 4}


def test_bytes_per_token_and_output_tokens_are_learned_from_usage(play) -> None:
    flow = worldwide()
    book = play(flow).on(RequestArrived(request("a", 4096))).expect(sent("a", "london"))
    serve(book, "a", 0.1, Usage(2048, 7))
    assert flow.estimates.bytes_per_token(MODEL) == pytest.approx(2.0)
    assert flow.estimates.output_tokens("anyone", MODEL, None) == pytest.approx(7.0)


def test_a_drain_moves_traffic_and_ends_by_itself(play) -> None:
    flow = worldwide(spill=Spill(ramp_per_s=1.0))  # the return at once
    (
        play(flow)
        .on(RegionForced("london", True, "new racks", until=30.0)).expect()
        .on(RequestArrived(request("a"))).expect(
            sent("a", "frankfurt", reasons=lambda d: d.absent == {"london": "draining: new racks"}))
        .at(1.0).on(RegionReported("london")).expect()
        .at(29.9).on(RegionReported("london")).expect().on(RegionReported("frankfurt")).expect()
        .on(RequestArrived(request("b"))).expect(sent("b", "frankfurt"))
        .at(30.0).on(RegionReported("london")).expect()
        .on(RequestArrived(request("c"))).expect(sent("c", "london"))
        .on(RegionForced("london", True, "again")).expect()
        .on(RequestArrived(request("d"))).expect(sent("d", "frankfurt"))
        .on(RegionForced("london", False)).expect()
        .on(RequestArrived(request("e"))).expect(sent("e", "london"))
    )  # fmt: skip


def test_draining_instance_gets_no_new_requests(play) -> None:
    flow = worldwide(view=seen(instance("london", draining=True), instance("frankfurt")))
    play(flow).on(RequestArrived(request("a"))).expect(sent("a", "frankfurt"))


def test_a_suspect_region_serves_only_if_no_other_is_up(play) -> None:
    flow = worldwide()
    book = play(flow).on(ChannelChanged("london", False)).expect()
    suspected = {"london": "suspect: channel broken"}
    book.on(RequestArrived(request("a"))).expect(sent("a", "frankfurt", reasons=lambda d: d.absent == suspected))
    book.on(RequestArrived(request("b", narrow=(("uk",),)))).expect(sent("b", "london"))


def test_a_region_is_down_only_with_a_broken_channel_and_no_recent_report(play) -> None:
    flow = worldwide()
    book = play(flow).on(ChannelChanged("london", False)).expect()
    here = {"narrow": (("uk",),)}
    book.at(2.9).on(RequestArrived(request("a", **here))).expect(sent("a", "london"))
    book.at(3.0).on(RequestArrived(request("b", **here)))  # and no report for three seconds
    book.expect(answered("b", outcome.NO_REGION, detail=lambda d: "down: no recent report and channel broken" in d))
    book.on(RegionReported("london")).expect()
    book.on(RequestArrived(request("c", **here))).expect(sent("c", "london"))


def test_relay_failures_count_against_a_region_until_it_answers(play) -> None:
    flow = worldwide(view=seen(instance("london"), instance("tokyo")))
    book = play(flow)
    for n in range(3):
        book.on(RequestArrived(request(f"q{n}"))).expect(sent(f"q{n}", "london"))
        book.on(AttemptFailed(f"q{n}", 1, outcome.CONNECT_FAILED)).expect(sent(f"q{n}", "tokyo", attempt=2))
    book.on(RequestArrived(request("a"))).expect(sent("a", "tokyo"))
    book.on(RequestArrived(request("b", narrow=(("uk",),)))).expect(sent("b", "london"))
    book.on(AttemptRefused("b", 1, outcome.QUEUE_FULL)).expect(answered("b", outcome.NO_REGION))
    book.on(RequestArrived(request("c"))).expect(sent("c", "london"))


def test_waiting_for_a_region_that_comes_back(play) -> None:
    flow = worldwide(patience_s=10.0, view=seen(instance("london", replicas_ready=0)))
    (
        play(flow)
        .on(RequestArrived(request("a", tenant="european"))).expect(held("a", until=10.0))
        .at(1.0).on(RegionReported("london")).expect()
        .on(seen(instance("london", replicas_ready=0))).expect()
        .at(2.0).on(seen(instance("london"))).expect(sent("a", "london", attempt=1))
        .at(3.0).on(AttemptEnded("a", 1, 200, None)).expect()
    )  # fmt: skip


def test_waiting_ends_with_patience_or_with_the_client(play) -> None:
    flow = worldwide(patience_s=10.0, view=seen(instance("london", replicas_ready=0)))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(held("a", until=10.0))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(RequestArrived(request("c", deadline=5.0))).expect(held("c", until=5.0))
        .at(2.0).on(ClientLeft("b")).expect()
        .at(5.0).on(TimerFired("c")).expect(answered("c", outcome.DEADLINE))
        .at(9.9).on(TimerFired("a")).expect(timer("a", at=10.0))
        .at(10.0).on(TimerFired("a")).expect(answered("a", outcome.NO_REGION, retry_after_s=2.0))
        .on(seen(instance("london"))).expect()
    )  # fmt: skip


def test_a_request_held_after_refusals_is_sent_again_later(play) -> None:
    flow = worldwide(patience_s=10.0, view=seen(instance("london")))
    again = seen(instance("london", wait_ms=6.0))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.QUEUE_FULL)).expect(held("a", until=ASK_AGAIN_S))
        .at(0.1).on(again).expect()
        .at(1.0).on(seen(instance("london"), instance("tokyo"))).expect()
    )  # fmt: skip
    report_in(flow, ["london"], 1.9)
    book = play(flow).at(2.0).on(TimerFired("a")).expect(sent("a", "london", attempt=2))
    book.on(AttemptRefused("a", 2, outcome.QUEUE_FULL)).expect(held("a", until=2.0 + ASK_AGAIN_S))
    commands = []
    for event in (ChannelChanged("tokyo", True), RegionReported("tokyo")):
        commands += flow.handle(event, 3.0)
    assert [c.target for c in commands if isinstance(c, machine.Forward)] == ["tokyo"]


def test_held_requests_are_bounded_in_number(play) -> None:
    flow = worldwide(patience_s=10.0, view=seen(instance("london", replicas_ready=0)), held_max=1)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(held("a"))
        .on(RequestArrived(request("b"))).expect(answered("b", outcome.NO_REGION))
    )  # fmt: skip


def test_one_decision_applies_to_all_held_requests_of_the_same_kind(monkeypatch) -> None:
    """A thousand on hold must not cost a thousand decisions at every report."""
    flow = worldwide(patience_s=10.0, view=seen(instance("london", replicas_ready=0)))
    for n in range(50):
        flow.handle(RequestArrived(request(f"q{n}")), 0.0)
    decided = []
    consider = flow.consider
    monkeypatch.setattr(flow, "consider", lambda *asked: decided.append(asked) or consider(*asked))
    assert flow.handle(RegionReported("london"), 0.1) == []
    assert len(decided) == 0  # nothing changed that could let a request go
    assert flow.handle(RegionReported("london"), LOOK_HELD_S) == []
    assert len(decided) == 1  # except for changes that time alone may have made


def test_held_requests_are_released_in_order(play) -> None:
    flow = worldwide(patience_s=10.0, view=seen(instance("london", replicas_ready=0)))
    book = play(flow)
    for n in range(3):
        book.on(RequestArrived(request(f"q{n}"))).expect(held(f"q{n}"))
    book.on(RequestArrived(request("far", narrow=(("apac",),)))).expect(held("far"))
    book.on(everywhere()).expect(*(sent(f"q{n}", "london") for n in range(3)))
    book.on(ChannelChanged("tokyo", True)).expect(sent("far", "tokyo"))
