"""The global machine with hot regions, regions that refuse foreign requests, and regions that come back."""

from __future__ import annotations

from collections import Counter

import pytest
from playbook import answered, sent
from worlds import REGIONS, instance, report_in, request, seen, worldwide

from farhop.balance import outcome
from farhop.balance.machine import AttemptEnded, AttemptFailed, AttemptRefused, RequestArrived
from global_lb.fleet.regions import Spill
from global_lb.fleet.view import ChannelChanged, RegionForced, RegionReported, ViewSwapped
from global_lb.routing.flow import GlobalFlow

FULL = outcome.FOREIGN_FULL
FAR = ("frankfurt", "tokyo")


def at(now: float, **used: float) -> ViewSwapped:
    """Reports of all regions, received now, with these shares of 16 slots used."""
    fields = {"received_at": now, "slots_total": 16}
    return seen(*(instance(region, used_share=used.get(region, 0.1), **fields) for region in REGIONS))


def taken(flow: GlobalFlow, now: float, count: int = 300, **fields: object) -> Counter[str]:
    """Where so many requests go, each over before the next."""
    served: Counter[str] = Counter()
    for i in range(count):
        name = f"{now}-{i}"
        *_, last = flow.handle(RequestArrived(request(name, deadline=now + 60.0, **fields)), now)
        served[last.target] += 1
        flow.handle(AttemptEnded(name, 1, 500, None), now)
    return served


def hot() -> GlobalFlow:
    flow = worldwide(view=at(0.0))
    for now in (0.5, 1.5, 2.6):
        flow.handle(at(now, london=0.95), now)
        report_in(flow, REGIONS, now)
    return flow


def test_lasting_overload_spills_requests_and_is_explained(play) -> None:
    def reasons(decision) -> bool:
        london = next(s for s in decision.ranked if s.region == "london")
        return london.hot and london.penalty_ms == 300.0 and decision.spilled_from == "london"

    play(hot()).at(2.6).on(RequestArrived(request("a"))).expect(sent("a", "frankfurt", reasons=reasons))


def test_short_overload_spills_nothing() -> None:
    flow = worldwide(view=at(0.0))
    flow.handle(at(0.5, london=0.99), 0.5)
    flow.handle(at(1.0, london=0.99), 1.0)
    assert taken(flow, 1.1) == {"london": 300}


def test_a_hot_region_serves_requests_with_no_other_or_only_a_far_lawful_region(play) -> None:
    def alone(decision) -> bool:
        return decision.spilled_from is None and decision.chosen.hot

    book = play(hot()).at(2.6)
    book.on(RequestArrived(request("a", narrow=(("uk",),)))).expect(sent("a", "london", reasons=alone))
    far = worldwide(view=at(0.0), spill=Spill(penalty_ms=100.0))
    for now in (0.5, 2.6):
        far.handle(at(now, london=0.95), now)
    play(far).at(2.6).on(RequestArrived(request("a", narrow=(("uk", "apac"),)))).expect(sent("a", "london"))


def test_requests_return_gradually_to_a_region_that_was_hot() -> None:
    flow = hot()
    shares = []
    for now in (3.0, 12.0, 23.0):
        flow.handle(at(now, london=0.5), now)
        report_in(flow, REGIONS, now)
        shares += [taken(flow, now)["london"] / 300] if now < 23.0 else []
    assert shares == [pytest.approx(0.05, abs=0.04), pytest.approx(0.5, abs=0.08)]
    assert taken(flow, 23.0) == {"london": 300}


def test_the_admitted_share_is_shown() -> None:
    flow = hot()
    assert (flow.regions.admitted_share("london", 2.6), flow.regions.admitted_share("tokyo", 2.6)) == (0.0, 1.0)
    flow.handle(at(3.0, london=0.1), 3.0)
    shares = [flow.regions.admitted_share("london", now) for now in (3.0, 8.0, 13.0, 60.0)]
    assert shares == [pytest.approx(0.05), pytest.approx(0.3), pytest.approx(0.55), 1.0]  # 5 % a second


def test_a_region_that_was_down_or_drained_is_returned_to_at_a_pace() -> None:
    flow = worldwide(view=at(0.0))
    flow.handle(ChannelChanged("london", False), 1.0)
    report_in(flow, ["frankfurt", "tokyo"], 4.0)  # London has been silent for three seconds
    assert taken(flow, 4.0) == {"frankfurt": 300}
    report_in(flow, ["london"], 5.0)
    assert taken(flow, 5.0)["london"] < 40
    report_in(flow, REGIONS, 30.0)
    assert taken(flow, 30.0) == {"london": 300}
    flow.handle(RegionForced("london", True, "racks"), 30.0)
    flow.handle(RegionForced("london", False), 31.0)
    assert taken(flow, 31.0)["london"] < 40


def test_failover_to_a_region_is_not_ramped(play) -> None:
    flow = worldwide(view=at(0.0))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.on(AttemptFailed("a", 1, outcome.CONNECT_FAILED)).expect(
        sent("a", "frankfurt", reasons=lambda d: d.chosen.penalty_ms == 0.0))  # fmt: skip


def test_regions_that_come_back_together_keep_their_order() -> None:
    flow = worldwide(view=at(0.0))
    for region in REGIONS:
        flow.handle(ChannelChanged(region, False), 1.0)
    report_in(flow, REGIONS, 10.0)  # this process was stopped for a while: all regions were silent
    assert taken(flow, 15.0 - 3.0) == {"london": 300}


def test_a_request_refused_everywhere_is_taken_by_the_best_region_without_a_promise(play) -> None:
    def promised(ms: float | None) -> bool:
        return ms is not None

    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london", promised_ttft_ms=promised))
        .on(AttemptRefused("a", 1, outcome.BROKEN_PROMISE, 900.0)).expect(
            sent("a", "frankfurt", promised_ttft_ms=promised))
        .on(AttemptRefused("a", 2, FULL, 50.0)).expect(sent("a", "tokyo", promised_ttft_ms=promised))
        .on(AttemptRefused("a", 3, FULL, 5.0)).expect(sent("a", "frankfurt", attempt=4, promised_ttft_ms=None))
        .on(AttemptRefused("a", 4, outcome.QUEUE_FULL, 50.0)).expect(sent("a", "tokyo", promised_ttft_ms=None))
        .on(AttemptRefused("a", 5, outcome.QUEUE_FULL, 5.0)).expect(sent("a", "london", promised_ttft_ms=None))
        .on(AttemptRefused("a", 6, outcome.QUEUE_FULL, 5.0)).expect(answered("a", outcome.NO_REGION))
    )  # fmt: skip


def test_wait_in_one_region_is_reported_to_the_next(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london", waited_s=0.0))
        .at(0.2).on(AttemptRefused("a", 1, outcome.QUEUE_FULL, 900.0)).expect(sent("a", "frankfurt", waited_s=0.0))
        .at(3.2).on(AttemptRefused("a", 2, outcome.QUEUE_TIMEOUT, 900.0)).expect(
            sent("a", "tokyo", waited_s=pytest.approx(3.0)))
    )  # fmt: skip


def test_only_region_gets_no_promised_time(play) -> None:
    flow = worldwide()
    play(flow).on(RequestArrived(request("a", tenant="german"))).expect(sent("a", "frankfurt", promised_ttft_ms=None))


@pytest.mark.parametrize(
    ("full", "age_s", "promised"), [((), 0.0, True), (("tokyo",), 0.0, True), (FAR, 0.0, False), (FAR, 2.0, True)]
)
def test_no_attempt_is_made_if_no_region_takes_foreign_requests(
    play, full: tuple[str, ...], age_s: float, promised: bool
) -> None:
    # London itself serves nothing: every other region is abroad. A report of two seconds ago may be outdated.
    found = [instance(name, headroom_foreign_tokens=0 if name in full else 10**6, received_at=1.0) for name in FAR]
    flow = worldwide(view=seen(*found))
    flow.handle(seen(*found), 1.0)
    report_in(flow, FAR, 1.0 + age_s)
    *_, forward = flow.handle(RequestArrived(request("a")), 1.0 + age_s)
    assert (forward.promised_ttft_ms is not None) == promised


@pytest.mark.parametrize(
    ("tokyo_ms", "age_s", "target", "promised"),
    [(5.0, 0.0, "tokyo", True), (5e3, 0.0, "frankfurt", False), (5e3, 2.0, "frankfurt", True)],
)
def test_a_full_region_that_is_far_sooner_than_others_is_asked_once_and_without_a_promise(
    tokyo_ms: float, age_s: float, target: str, promised: bool
) -> None:
    found = [instance("frankfurt", headroom_foreign_tokens=0, received_at=1.0), instance("tokyo", wait_ms=tokyo_ms)]
    flow = worldwide(view=seen(*found))
    flow.handle(seen(*found), 1.0)
    report_in(flow, FAR, 1.0 + age_s)
    *_, forward = flow.handle(RequestArrived(request("a")), 1.0 + age_s)
    assert (forward.target, forward.promised_ttft_ms is not None) == (target, promised)


def test_how_long_others_wait_in_a_full_region_counts_after_a_request_was_sent_there_too(play) -> None:
    found = [instance("frankfurt", foreign_wait_ms=300.0), instance("tokyo", wait_ms=5e3)]
    flow = worldwide(view=seen(*found))

    def waits(decision) -> bool:
        return decision.chosen.wait_ms >= 300.0

    for name in ("a", "b"):
        play(flow).on(RequestArrived(request(name))).expect(sent(name, "frankfurt", reasons=waits))


def test_of_a_regions_balancers_the_one_where_others_wait_less_is_asked(play) -> None:
    one, other = (instance("frankfurt", name=f"r{n}", foreign_wait_ms=ms) for n, ms in ((1, 300.0), (2, 5.0)))
    flow = worldwide(view=seen(one, other))
    for n in range(4):
        flow.handle(RequestArrived(request(f"q{n}")), 0.0)
        assert flow.requests[f"q{n}"].attempt.instance.name == "r2"


def test_the_wait_in_a_refusal_counts_until_the_next_report(play) -> None:
    flow = worldwide(view=at(0.0))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.QUEUE_FULL, 5000.0)).expect(sent("a", "frankfurt"))
        .on(RequestArrived(request("b"))).expect(sent("b", "frankfurt"))
        .on(AttemptEnded("a", 2, 500, None)).expect()
        .on(AttemptEnded("b", 1, 500, None)).expect()
        .at(1.0).on(at(1.0)).expect()
        .on(RequestArrived(request("c"))).expect(sent("c", "london"))
    )  # fmt: skip


def test_a_region_full_for_guests_is_asked_last_until_it_reports(play) -> None:
    flow = worldwide(view=at(0.0))
    here = {"narrow": (("eu", "apac"),)}
    (
        play(flow)
        .on(RequestArrived(request("a", **here))).expect(sent("a", "frankfurt"))
        .on(AttemptRefused("a", 1, FULL, 0.0)).expect(sent("a", "tokyo"))
        .on(RequestArrived(request("b", **here))).expect(
            sent("b", "tokyo", reasons=lambda d: d.spilled_from == "frankfurt"))
        .at(1.0).on(at(1.0)).expect()
        .on(RequestArrived(request("c", **here))).expect(sent("c", "frankfurt"))
    )  # fmt: skip


def moving(flow: GlobalFlow, **slots_free: int) -> None:
    """Waits that swing by 100 ms a second, the last report a second ago."""
    for i, wait_ms in enumerate((5.0, 105.0, 5.0)):
        fields = {"wait_ms": wait_ms, "received_at": float(i), "slots_total": 16, "used_share": 0.7}
        flow.handle(seen(*(instance(r, slots_free=slots_free.get(r, 5), **fields) for r in REGIONS)), float(i))
        report_in(flow, REGIONS, float(i))


def test_headroom_decides_between_waits_within_their_uncertainty() -> None:
    flow = worldwide()
    moving(flow, london=5, frankfurt=15)
    drawn = taken(flow, 3.0)
    assert drawn["frankfurt"] / 300 == pytest.approx(0.6, abs=0.1)  # of 5 + 15 + 5: Tokyo is within 200 ms, too
    assert taken(flow, 2.0) == {"london": 300}  # nothing can have changed since the report


def test_no_request_leaves_an_idle_local_region() -> None:
    flow = worldwide()
    moving(flow, frankfurt=15)
    flow.handle(at(3.0), 3.0)
    report_in(flow, REGIONS, 3.0)
    assert taken(flow, 4.0) == {"london": 300}


def test_restarted_regions_report_has_no_uncertainty(play) -> None:
    flow = worldwide(view=at(0.0), spill=Spill(ramp_per_s=1.0))
    for n in range(3):
        flow.handle(RequestArrived(request(f"q{n}")), 0.0)
        flow.handle(AttemptFailed(f"q{n}", 1, outcome.CONNECT_FAILED), 0.0)
    book = play(flow).on(RegionReported("london")).expect()
    book.on(RequestArrived(request("a", 64))).expect(sent("a", "frankfurt"))
    book.on(RegionReported("london", renewed=True)).expect()
    book.on(RequestArrived(request("b", 64))).expect(sent("b", "london"))
