"""The global machine when regions refuse, fail or vanish, and when the law changes under way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playbook import Expected, Playbook, answered, held, sent, timer
from worlds import everywhere, instance, law, request, seen, worldwide

from farhop.balance import machine, outcome
from farhop.balance.health.reading import State
from farhop.balance.health.region import LivenessConfig
from farhop.balance.machine import (
    AttemptBegan,
    AttemptEnded,
    AttemptFailed,
    AttemptRefused,
    ClientLeft,
    LawChanged,
    RequestArrived,
    Resume,
    TimerFired,
)
from farhop.balance.retry import TRANSPORT_RETRIES_MAX
from global_lb.fleet.view import ChannelChanged, RegionForced, RegionReported
from global_lb.routing.flow import (
    ASK_AGAIN_S,
    AT_ONCE_MS,
    LOOK_AGAIN_S,
    LOOK_SOON_S,
    MOVE_AGAIN_S,
    RESUME_WAIT_S,
    RESUMES_MAX,
)
from topology.law import Law
from topology.model import Rule


def test_a_refusal_is_answered_by_the_runner_up(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london", attempt=1))
        .at(0.1).on(AttemptRefused("a", 1, outcome.QUEUE_FULL, 800.0)).expect(sent("a", "frankfurt", attempt=2))
        .at(0.2).on(AttemptBegan("a", 2, 200)).expect()
        .at(0.3).on(AttemptEnded("a", 2, 200, None)).expect()
    )  # fmt: skip
    assert (flow.under_way, len(flow.ledger)) == (0, 0)


def test_a_transport_failure_is_answered_by_the_runner_up(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptFailed("a", 1, outcome.CONNECT_TIMEOUT)).expect(sent("a", "frankfurt", attempt=2))
        .on(AttemptFailed("a", 2, outcome.DIED_BEFORE_START)).expect(sent("a", "tokyo", attempt=3))
        .on(AttemptFailed("a", 3, outcome.CONNECT_FAILED)).expect(
            answered("a", outcome.NO_REGION, detail=lambda d: "london: connect_timeout" in d and "tokyo: " in d))
    )  # fmt: skip
    assert (flow.under_way, flow.budget.retrying) == (0, 0)


def test_region_is_not_blamed_if_a_complete_answer_takes_too_long(play) -> None:
    """Told by the region, or found out here: it is the answer, and nothing is held against anybody."""
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a", stream=False))).expect(sent("a", "london"))
        .at(1.0).on(AttemptFailed("a", 1, outcome.WHOLE_ANSWER_TIMEOUT)).expect(
            answered("a", outcome.WHOLE_ANSWER_TIMEOUT))
        .on(RequestArrived(request("b", stream=False, deadline=90.0))).expect(sent("b", "london"))
        .at(2.0).on(AttemptRefused("b", 1, outcome.WHOLE_ANSWER_TIMEOUT)).expect(
            answered("b", outcome.WHOLE_ANSWER_TIMEOUT))
        .on(RequestArrived(request("c", deadline=90.0))).expect(sent("c", "london"))
    )  # fmt: skip
    assert flow.regions.liveness["london"].read(2.0).state is State.UP
    assert flow.budget.retrying == 0


def test_region_is_not_blamed_for_a_closed_idle_connection(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .at(0.1).on(AttemptFailed("a", 1, outcome.KEPT_CLOSED)).expect(sent("a", "frankfurt", attempt=2))
        .on(AttemptBegan("a", 2, 200)).expect()
        .on(AttemptEnded("a", 2, 200, None)).expect()
        .on(RequestArrived(request("b"))).expect(sent("b", "london"))
    )  # fmt: skip
    assert flow.regions.liveness["london"].read(0.1).state is State.UP


def test_the_only_lawful_region_is_tried_again_after_a_transport_failure(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a", tenant="german"))).expect(sent("a", "frankfurt"))
        .on(AttemptFailed("a", 1, outcome.DIED_BEFORE_START)).expect(sent("a", "frankfurt", attempt=2))
        .on(AttemptRefused("a", 2, outcome.QUEUE_FULL)).expect(answered("a", outcome.NO_REGION))
    )  # fmt: skip


def test_a_region_that_reports_its_replica_s_failure_is_not_tried_again(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a", tenant="german"))).expect(sent("a", "frankfurt"))
        .on(AttemptRefused("a", 1, outcome.DIED_BEFORE_START)).expect(answered("a", outcome.NO_REGION))
    )  # fmt: skip


def test_if_all_regions_refuse_the_answer_lists_each_reason(play) -> None:
    flow = worldwide()
    found = "frankfurt: no_replica_serving; london: queue_full; tokyo: queue_timeout"
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.QUEUE_FULL)).expect(sent("a", "frankfurt"))
        .on(AttemptRefused("a", 2, outcome.NO_REPLICA)).expect(sent("a", "tokyo"))
        .on(AttemptRefused("a", 3, outcome.QUEUE_TIMEOUT)).expect(
            answered("a", outcome.NO_REGION, detail=lambda d: found in d, retry_after_s=2.0))
    )  # fmt: skip


def test_answer_is_unlawful_if_all_regions_refuse_by_their_own_law(play) -> None:
    flow = worldwide(patience_s=30.0)
    (
        play(flow)
        .on(RequestArrived(request("a", tenant="european"))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.UNLAWFUL_HERE)).expect(sent("a", "frankfurt"))
        .on(AttemptRefused("a", 2, outcome.UNLAWFUL_HERE)).expect(
            answered("a", outcome.UNLAWFUL, detail=lambda d: "london: unlawful_here" in d))
    )  # fmt: skip


def test_answer_is_not_unlawful_if_some_region_was_not_asked(play) -> None:
    flow = worldwide(view=seen(instance("london"), instance("frankfurt", replicas_ready=0)))
    (
        play(flow)
        .on(RequestArrived(request("a", tenant="european"))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.UNLAWFUL_HERE)).expect(answered("a", outcome.NO_REGION))
    )  # fmt: skip


def test_final_refusal_is_passed_to_the_client(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.DEADLINE)).expect(answered("a", outcome.DEADLINE))
        .on(RequestArrived(request("b"))).expect(sent("b", "london"))
        .on(AttemptRefused("b", 1, outcome.STOPPING)).expect(sent("b", "frankfurt"))
    )  # fmt: skip


def test_a_failure_after_the_start_ends_the_stream(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptBegan("a", 1, 200)).expect()
        .on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM)).expect(
            answered("a", outcome.DIED_MID_STREAM, detail="region london failed while answering"))
    )  # fmt: skip
    assert len(flow.ledger) == 0


def test_region_is_not_blamed_for_streams_it_breaks_off_while_alive(play) -> None:
    flow, book = worldwide(), None
    for lives, state in ((True, State.UP), (False, State.SUSPECT)):
        book = play(flow) if book is None else book
        for n in range(3):
            book.on(RequestArrived(request(f"{state} {n}"))).expect(sent(f"{state} {n}", "london"))
            book.on(AttemptBegan(f"{state} {n}", 1, 200)).expect()
        for n in range(3):
            broken = AttemptFailed(f"{state} {n}", 1, outcome.DIED_MID_STREAM, target_lives=lives)
            book.on(broken).expect(answered(f"{state} {n}", outcome.DIED_MID_STREAM))
        assert flow.regions.liveness["london"].read(0.0).state is state


def test_refused_request_is_tried_a_bounded_number_of_times(play) -> None:
    flow = worldwide(patience_s=59.0, view=seen(instance("london")))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    for attempt in range(1, 8):
        refusal = AttemptRefused("a", attempt, outcome.QUEUE_FULL)
        book.on(refusal).expect(held("a", until=2.0 * attempt))
        # The report and the timer are due together, and either may come first.
        again = [RegionReported("london"), TimerFired("a")]
        first, second = again if attempt % 2 else again[::-1]
        book.at(2.0 * attempt).on(first).expect(sent("a", "london", attempt=attempt + 1))
        book.on(second).expect(*([timer("a", at=2.0 * attempt + LOOK_AGAIN_S)] if attempt % 2 else []))
    book.on(AttemptRefused("a", 8, outcome.QUEUE_FULL)).expect(answered("a", outcome.NO_REGION))


def test_client_may_disconnect_at_any_point(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(ClientLeft("a")).expect()
        .on(AttemptFailed("a", 1, outcome.DIED_BEFORE_START)).expect()
        .on(RequestArrived(request("b"))).expect(sent("b", "london"))
        .on(AttemptBegan("b", 1, 200)).expect()
        .on(ClientLeft("b")).expect()
        .on(ClientLeft("b")).expect()
    )  # fmt: skip
    assert (flow.under_way, len(flow.ledger)) == (0, 0)


def test_deadline_ends_the_attempt_in_flight(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a", deadline=5.0))).expect(sent("a", "london"))
        .at(4.0).on(TimerFired("a")).expect(timer("a", at=5.0))
        .at(5.0).on(TimerFired("a")).expect(answered("a", outcome.DEADLINE))
        .on(RequestArrived(request("late", deadline=5.0))).expect(answered("late", outcome.DEADLINE))
        .on(TimerFired("unknown")).expect()
        .on(RequestArrived(request("b", deadline=6.0))).expect(sent("b", "london"))
        # Its timer is late: the failure arrives first, and no further region is tried.
        .at(6.1).on(AttemptFailed("b", 1, outcome.CONNECT_TIMEOUT)).expect(answered("b", outcome.DEADLINE))
    )  # fmt: skip
    assert flow.under_way == 0


def test_events_of_an_earlier_attempt_are_ignored(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.QUEUE_FULL)).expect(sent("a", "frankfurt", attempt=2))
        .on(AttemptRefused("a", 1, outcome.QUEUE_FULL)).expect()
        .on(AttemptFailed("a", 1, outcome.DIED_BEFORE_START)).expect()
        .on(AttemptBegan("a", 1, 200)).expect()
        .on(AttemptEnded("a", 1, 200, None)).expect()
        .on(RequestArrived(request("a"))).expect(answered("a", outcome.INVALID_FIELD))
    )  # fmt: skip
    assert flow.under_way == 1


def test_law_that_narrows_in_flight_binds_the_next_attempt(play) -> None:
    flow = worldwide()
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    flow.law = law(epoch=2, anyone=Rule(allow=("uk", "apac")))
    book.on(AttemptRefused("a", 1, outcome.QUEUE_FULL)).expect(
        sent("a", "tokyo", lawful=frozenset({"london", "tokyo"}))
    )


def test_law_widened_in_flight_does_not_allow_more_regions(play) -> None:
    flow = worldwide()
    book = play(flow).on(RequestArrived(request("a", tenant="german"))).expect(sent("a", "frankfurt"))
    flow.law = law(epoch=2, german=Rule(allow=("world",)))
    book.on(AttemptRefused("a", 1, outcome.QUEUE_FULL)).expect(answered("a", outcome.NO_REGION))
    book.on(RequestArrived(request("b", tenant="german"))).expect(sent("b", "london"))


def test_request_is_unlawful_if_old_and_new_law_share_no_region(play) -> None:
    flow = worldwide()
    book = play(flow).on(RequestArrived(request("a", tenant="german"))).expect(sent("a", "frankfurt"))
    flow.law = law(epoch=2, german=Rule(allow=("uk",)))
    narrowed = "london: not lawful when the request came"
    book.on(AttemptFailed("a", 1, outcome.CONNECT_FAILED))
    book.expect(answered("a", outcome.UNLAWFUL, detail=lambda d: narrowed in d))


def test_a_region_taken_out_of_the_topology_finishes_what_it_began_and_gets_nothing_more(play) -> None:
    flow = worldwide()
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.on(AttemptBegan("a", 1, 200)).expect()
    book.on(RequestArrived(request("b"))).expect(sent("b", "london"))
    before = law(epoch=2).topology
    flow.law = Law(replace(before, regions={n: r for n, r in before.regions.items() if n != "london"}))
    book.on(RequestArrived(request("c"))).expect(sent("c", "frankfurt"))  # though it still reports
    book.on(AttemptFailed("b", 1, outcome.CONNECT_FAILED)).expect(sent("b", "frankfurt", attempt=2))
    book.on(AttemptEnded("a", 1, 200, None)).expect()
    book.on(RequestArrived(request("d", tenant="lost"))).expect(answered("d", outcome.UNLAWFUL))


def test_law_that_narrows_while_a_request_is_held_binds_it(play) -> None:
    flow = worldwide(patience_s=9.0, view=seen(instance("london", replicas_ready=0)))
    book = play(flow).on(RequestArrived(request("a"))).expect(held("a"))
    book.on(RequestArrived(request("b", tenant="european"))).expect(held("b"))
    flow.law = law(epoch=2, anyone=Rule(allow=("apac",)), european=Rule(allow=("mars",)))
    book.on(everywhere()).expect(answered("b", outcome.UNLAWFUL))


def test_request_lost_by_a_region_is_sent_to_another(play) -> None:
    """Nothing comes back, not even a failure: only the region's liveness tells."""
    book = play(worldwide()).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.at(0.5).on(ChannelChanged("london", up=False)).expect()
    book.at(LOOK_AGAIN_S).on(TimerFired("a")).expect(
        Expected(machine.Cancel, id="a", attempt=1), sent("a", "frankfurt", attempt=2)
    )


def test_broken_channel_shortens_the_check_of_its_requests(play) -> None:
    book = play(worldwide()).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.at(0.1).on(ChannelChanged("london", up=False)).expect(timer("a", at=0.1 + LOOK_SOON_S))
    book.at(0.1 + LOOK_SOON_S).on(TimerFired("a")).expect(
        Expected(machine.Cancel, id="a", attempt=1), sent("a", "frankfurt", attempt=2)
    )


LONDON_AWAY = seen(instance("frankfurt"), instance("tokyo"))


def london_comes_back(book: Playbook, wait_ms: float, own_wait_ms: float = 0.0) -> Playbook:
    """With a queue of so many ms of its own, and Frankfurt has one of `wait_ms`. What is done about it is next."""
    view = seen(instance("frankfurt", wait_ms=wait_ms), instance("london", wait_ms=own_wait_ms), instance("tokyo"))
    return book.at(0.5).on(view).expect().on(RegionReported("london")).expect().on(ChannelChanged("london", up=True))


def test_a_queued_request_without_a_promised_start_goes_to_the_region_that_is_back(play) -> None:
    book = play(worldwide(view=LONDON_AWAY)).on(RequestArrived(request("a", tenant="european")))
    book.expect(sent("a", "frankfurt", promised_ttft_ms=None))
    london_comes_back(book, 9_000.0).expect(
        Expected(machine.Cancel, id="a", attempt=1),
        sent("a", "london", attempt=2, waited_s=0.5, promised_ttft_ms=lambda ms: ms is not None),
    )
    book.on(RegionReported("london")).expect()
    book.on(AttemptBegan("a", 2, 200)).expect().on(AttemptEnded("a", 2, 200, None)).expect()


def test_returned_region_takes_the_oldest_requests_and_only_those_that_begin_at_once() -> None:
    flow = worldwide(view=LONDON_AWAY)
    for name in "abcdefgh":
        flow.handle(RequestArrived(request(name, 10_000, tenant="european")), 0.0)
    view = seen(instance("frankfurt", wait_ms=9_000.0), instance("london"), instance("tokyo"))
    events = (view, RegionReported("london"), ChannelChanged("london", up=True))
    done = [command for event in events for command in flow.handle(event, 0.5)]
    fetched = [command.id for command in done if isinstance(command, machine.Forward)]
    assert 0 < len(fetched) < 8
    assert fetched == list("abcdefgh")[: len(fetched)]
    last = flow.requests[fetched[-1]].decision
    assert last is not None
    assert last.chosen is not None
    assert last.chosen.wait_ms <= AT_ONCE_MS


@pytest.mark.parametrize(
    ("tenant", "view", "fields", "wait_ms"),
    [
        ("european", LONDON_AWAY, {}, 100.0),  # it will begin soon where it is
        ("anyone", LONDON_AWAY, {}, 9_000.0),  # it has a promise: its region lets it go
        ("european", LONDON_AWAY, {"once": True}, 9_000.0),  # it may not be sent twice
        ("german", everywhere(), {}, 9_000.0),  # no other region may serve it
    ],
)
def test_returned_region_takes_no_request_served_or_released_elsewhere(play, tenant, view, fields, wait_ms) -> None:
    book = play(worldwide(view=view)).on(RequestArrived(request("a", tenant=tenant, **fields)))
    london_comes_back(book.expect(sent("a", "frankfurt")), wait_ms).expect()


def test_returned_region_takes_only_requests_that_begin_at_once(play) -> None:
    book = play(worldwide(view=LONDON_AWAY)).on(RequestArrived(request("a", tenant="european")))
    london_comes_back(book.expect(sent("a", "frankfurt")), 9_000.0, AT_ONCE_MS + 1.0).expect()


def test_returned_region_takes_neither_begun_streams_nor_abandoned_requests(play) -> None:
    book = play(worldwide(view=LONDON_AWAY)).on(RequestArrived(request("a", tenant="european")))
    book.expect(sent("a", "frankfurt")).on(AttemptBegan("a", 1, 200)).expect()
    book.on(RequestArrived(request("b", tenant="european"))).expect(sent("b", "frankfurt"))
    book.on(ClientLeft("b")).expect()
    london_comes_back(book, 9_000.0).expect()


def test_returned_region_does_not_take_a_request_that_it_refused(play) -> None:
    """In overload that lasts: it keeps its place in the queue that took it."""
    book = play(worldwide()).on(RequestArrived(request("a", tenant="european"))).expect(sent("a", "london"))
    book.on(AttemptRefused("a", 1, outcome.BROKEN_PROMISE, 50.0)).expect(sent("a", "frankfurt", attempt=2))
    book.on(AttemptRefused("a", 2, outcome.FOREIGN_FULL, 5.0)).expect(
        sent("a", "london", attempt=3, promised_ttft_ms=None)
    )
    book.at(0.5).on(seen(instance("frankfurt"), instance("london", wait_ms=9_000.0))).expect()
    book.on(RegionReported("frankfurt")).expect()


def test_a_region_that_was_never_away_takes_no_request_while_another_is_away(play) -> None:
    full = [instance(name, headroom_foreign_tokens=0) for name in ("frankfurt", "tokyo")]
    book = play(worldwide(view=seen(*full))).on(RequestArrived(request("a")))
    book.expect(sent("a", "frankfurt", promised_ttft_ms=None))
    book.at(0.5).on(seen(instance("frankfurt", wait_ms=9_000.0), instance("tokyo"))).expect()
    book.on(RegionReported("tokyo")).expect()


def test_request_is_not_moved_if_its_channel_has_recovered(play) -> None:
    book = play(worldwide()).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.at(0.1).on(ChannelChanged("london", up=False)).expect(timer("a", at=0.1 + LOOK_SOON_S))
    book.at(0.3).on(ChannelChanged("london", up=True)).expect()
    book.at(0.1 + LOOK_SOON_S).on(TimerFired("a")).expect(timer("a", at=0.1 + LOOK_SOON_S + LOOK_AGAIN_S))


def test_begun_answer_is_not_moved_whatever_the_state_of_its_region(play) -> None:
    book = play(worldwide()).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.on(AttemptBegan("a", 1, 200)).expect()
    book.at(0.5).on(ChannelChanged("london", up=False)).expect()
    book.at(LOOK_AGAIN_S).on(TimerFired("a")).expect(timer("a", at=60.0))


def test_requests_stay_if_every_region_is_suspect(play) -> None:
    flow = worldwide()
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.at(3.5).on(TimerFired("a")).expect(timer("a", at=3.5 + LOOK_AGAIN_S))  # no report from any region for 3.5 s


def test_request_unknown_to_its_region_is_sent_elsewhere_without_blame(play) -> None:
    flow = worldwide()
    book = play(flow)
    for n in range(LivenessConfig().relay_streak):
        book.on(RequestArrived(request(f"r{n}"))).expect(sent(f"r{n}", "london"))
        book.on(AttemptFailed(f"r{n}", 1, outcome.LOST)).expect(sent(f"r{n}", "frankfurt", attempt=2))
    assert flow.regions.liveness["london"].read(0.0).state is State.UP  # the region itself reported it
    assert flow.ledger.load("london").in_flight == 0


def test_request_unknown_to_the_only_lawful_region_is_retried_there(play) -> None:
    flow = worldwide(view=seen(instance("london")))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    for attempt in range(1, TRANSPORT_RETRIES_MAX + 1):
        again = sent("a", "london", attempt=attempt + 1)
        book.on(AttemptFailed("a", attempt, outcome.LOST)).expect(again)
    last = AttemptFailed("a", TRANSPORT_RETRIES_MAX + 1, outcome.LOST)
    book.on(last).expect(answered("a", outcome.NO_REGION))


def goes_on(request_id: str, target: str, attempt: int) -> tuple[Expected, Expected]:
    """A stream is continued in this region."""
    return timer(request_id), Expected(Resume, id=request_id, target=target, attempt=attempt)


def test_broken_stream_continues_from_the_runner_up(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .at(0.1).on(AttemptBegan("a", 1, 200)).expect()
        .at(0.2).on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(
            goes_on("a", "frankfurt", 2))
        .at(0.3).on(AttemptRefused("a", 2, outcome.QUEUE_FULL, 800.0)).expect(goes_on("a", "tokyo", 3))
        .at(0.4).on(AttemptBegan("a", 3, 200)).expect()
        .at(0.5).on(AttemptEnded("a", 3, 200, None)).expect()
    )  # fmt: skip
    assert (flow.under_way, len(flow.ledger)) == (0, 0)


def test_stream_that_cannot_continue_ends_with_the_error(play) -> None:
    flow = worldwide()
    for number, (tenant, how) in enumerate((
        ("anyone", {"resumable": False}),
        ("german", {"resumable": True, "target_lives": True}),  # its only region has tried what it could
    )):  # fmt: skip
        name, region = str(number), ("london", "frankfurt")[number]
        (
            play(flow)
            .on(RequestArrived(request(name, tenant=tenant))).expect(sent(name, region))
            .on(AttemptBegan(name, 1, 200)).expect()
            .on(AttemptFailed(name, 1, outcome.DIED_MID_STREAM, **how)).expect(answered(name, outcome.DIED_MID_STREAM))
        )  # fmt: skip
    assert (flow.under_way, len(flow.ledger)) == (0, 0)


def german(play, flow, *names: str) -> Playbook:
    """Streams that only Frankfurt may serve have begun there."""
    book = play(flow)
    for name in names:
        book.on(RequestArrived(request(name, tenant="german", deadline=90.0))).expect(sent(name, "frankfurt"))
        book.at(0.1).on(AttemptBegan(name, 1, 200)).expect()
    return book


def test_a_stream_without_another_region_waits_until_its_own_is_back(play) -> None:
    """A balancer that is started again finds the engines as they were."""
    flow = worldwide()
    book = german(play, flow, "a").at(1.0)
    book.on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(held("a", until=1.0 + ASK_AGAIN_S))
    book.at(1.1).on(ChannelChanged("frankfurt", False)).expect()
    book.at(1.5).on(RegionReported("london")).expect()
    book.at(2.0).on(ChannelChanged("frankfurt", True)).expect(goes_on("a", "frankfurt", 2))
    book.on(AttemptRefused("a", 2, outcome.NO_REPLICA)).expect(held("a", until=2.0 + ASK_AGAIN_S))  # not found yet
    book.at(2.0 + ASK_AGAIN_S).on(TimerFired("a")).expect(goes_on("a", "frankfurt", 3))
    book.on(AttemptBegan("a", 3, 200)).expect()
    book.on(AttemptEnded("a", 3, 200, None)).expect()
    assert (flow.under_way, len(flow.ledger)) == (0, 0)


def test_a_stream_goes_on_in_its_only_region_if_another_of_its_balancers_answers(play) -> None:
    flow = worldwide()
    book = german(play, flow, "a")
    book.on(RequestArrived(request("c", tenant="german"))).expect(sent("c", "frankfurt"))
    book.at(1.0).on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(held("a"))
    book.at(1.1).on(AttemptBegan("c", 1, 200)).expect()
    book.at(1.2).on(RegionReported("frankfurt")).expect(goes_on("a", "frankfurt", 2))


def test_a_stream_whose_only_region_stays_away_ends_after_a_while(play) -> None:
    flow = worldwide()
    book = german(play, flow, "a").at(4.0).on(ChannelChanged("frankfurt", False)).expect()  # and no report for 4 s
    book.on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(held("a", until=4.0 + ASK_AGAIN_S))
    book.at(4.0 + ASK_AGAIN_S).on(TimerFired("a")).expect(timer("a", at=4.0 + RESUME_WAIT_S))
    book.at(4.0 + RESUME_WAIT_S).on(TimerFired("a")).expect(answered("a", outcome.NO_REGION))
    assert (flow.under_way, len(flow.held)) == (0, 0)


def test_a_stream_does_not_wait_for_an_only_region_that_is_drained_or_forbidden_or_beside_too_many(play) -> None:
    dies = (outcome.DIED_MID_STREAM,)
    for how in ("drained", "forbidden", "crowded"):
        flow = worldwide(held_max=1 if how == "crowded" else 1024)
        book = german(play, flow, "a", "b").at(1.0)
        if how == "drained":
            book.on(RegionForced("frankfurt", True, "racks")).expect()
        elif how == "forbidden":
            book.on(LawChanged(law(2, german=Rule(allow=("uk",))))).expect(
                Expected(machine.Recall), Expected(machine.Recall)
            )
        else:
            book.on(AttemptFailed("b", 1, *dies, resumable=True)).expect(held("b"))
        book.on(AttemptFailed("a", 1, *dies, resumable=True)).expect(answered("a", *dies))


def test_stream_is_retried_if_no_region_continues_it_at_once(play) -> None:
    """Regions that live answer late where much breaks at once: that each was asked is no reason to give it up."""
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a", deadline=90.0))).expect(sent("a", "london"))
        .at(0.1).on(AttemptBegan("a", 1, 200)).expect()
        .at(0.2).on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(
            goes_on("a", "frankfurt", 2))
        .at(3.2).on(AttemptFailed("a", 2, outcome.CONNECT_TIMEOUT)).expect(goes_on("a", "tokyo", 3))
        .at(3.4).on(AttemptFailed("a", 3, outcome.FIRST_BYTE_TIMEOUT)).expect(goes_on("a", "tokyo", 4))
        .at(6.4).on(AttemptFailed("a", 4, outcome.CONNECT_TIMEOUT)).expect(held("a", until=6.4 + ASK_AGAIN_S))
        .at(6.5).on(RegionReported("tokyo")).expect()
        .at(6.4 + ASK_AGAIN_S).on(TimerFired("a")).expect(goes_on("a", "tokyo", 5))
        .at(8.5).on(AttemptBegan("a", 5, 200)).expect()
        .at(8.6).on(AttemptEnded("a", 5, 200, None)).expect()
    )  # fmt: skip
    assert (flow.under_way, len(flow.ledger), flow.budget.retrying) == (0, 0, 0)


def test_a_stream_waits_for_a_region_that_serves_and_no_longer_than_a_while(play) -> None:
    for comes_back in (True, False):
        flow = worldwide()
        book = begun(play, flow, "a")
        for region in ("frankfurt", "tokyo"):
            book.at(4.0).on(ChannelChanged(region, False)).expect()  # and no report for 4 s
        book.on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(
            held("a", until=4.0 + ASK_AGAIN_S))  # fmt: skip
        if comes_back:
            book.at(5.0).on(RegionReported("tokyo")).expect(goes_on("a", "tokyo", 2))
            book.on(AttemptBegan("a", 2, 200)).expect()
            book.on(AttemptEnded("a", 2, 200, None)).expect()
        else:
            book.on(ChannelChanged("london", False)).expect()
            book.at(4.0 + ASK_AGAIN_S).on(TimerFired("a")).expect(timer("a", at=4.0 + RESUME_WAIT_S))
            book.at(4.0 + RESUME_WAIT_S).on(TimerFired("a")).expect(answered("a", outcome.NO_REGION))
        assert (flow.under_way, len(flow.ledger)) == (0, 0)


LONG = 31_744  # bytes, whole blocks of the cache: 7,936 tokens, which `slow` regions prefill in 1.6 s


def slow(**config):
    """Regions that take twice as long to prefill a token."""
    return worldwide(view=everywhere(prefill_ms_per_token=0.2), **config)


def lost_worth_s(flow, region: str = "frankfurt") -> float:
    """What a request whose long prompt is cached in London would lose in another region."""
    asked = flow.consider(request("probe", LONG), 0.0, frozenset({region})).candidates
    return asked.fill_up_ms(asked.at[region], LONG) / 1e3


def broken(play, flow, name: str = "a", **fields):
    """A stream with a long prompt, cached in London alone, that broke there at 1.0 and waits."""
    book = begun(play, flow, name, prompt_bytes=LONG, **fields)
    book.at(1.0).on(AttemptFailed(name, 1, outcome.DIED_MID_STREAM, resumable=True)).expect(
        held(name, until=1.0 + lost_worth_s(flow)))  # fmt: skip
    return book


def test_a_stream_waits_for_a_lost_region_that_has_its_prompt_cached(play) -> None:
    """A balancer that is started again has lost no cache: its engines went on."""
    flow = slow()
    (
        broken(play, flow)
        .at(1.2).on(ChannelChanged("london", False)).expect()
        .at(1.6).on(RegionReported("london", renewed=True)).expect()  # its channel is still broken
        .at(1.7).on(ChannelChanged("london", True)).expect(goes_on("a", "london", 2))
        .at(1.8).on(AttemptBegan("a", 2, 200)).expect()
        .at(2.0).on(AttemptEnded("a", 2, 200, None)).expect()
    )  # fmt: skip
    assert (flow.under_way, len(flow.ledger), len(flow.held)) == (0, 0, 0)


def test_a_stream_waits_until_the_balancer_that_is_back_has_found_its_engines(play) -> None:
    def known(ready: int):
        return seen(instance("london", incarnation=2, replicas_ready=ready)).view.regions["london"]

    flow = slow()
    (
        broken(play, flow)
        .at(1.2).on(RegionReported("london", renewed=True, known=known(0))).expect()
        .at(1.9).on(RegionReported("london", known=known(0))).expect()
        .at(2.0).on(RegionReported("london", known=known(2))).expect(goes_on("a", "london", 2))
    )  # fmt: skip


def test_a_stream_waits_on_if_the_balancer_that_is_back_has_not_found_its_engines(play) -> None:
    """Its channel may be back before its first report is."""
    flow = slow()
    until = 1.0 + lost_worth_s(flow)
    book = broken(play, flow)
    book.at(1.1).on(ChannelChanged("london", False)).expect()
    book.at(1.2).on(ChannelChanged("london", True)).expect(goes_on("a", "london", 2))
    book.at(1.3).on(AttemptRefused("a", 2, outcome.NO_REPLICA)).expect(held("a", until=until))
    found = seen(instance("london", incarnation=2, received_at=1.9)).view.regions["london"]
    book.at(1.9).on(RegionReported("london", renewed=True, known=found)).expect(goes_on("a", "london", 3))


def test_a_balancer_that_never_finds_its_engines_leaves_attempts_for_other_regions(play) -> None:
    """Its channel says that it is back, and the report of before says that it serves."""
    flow = slow()
    book = broken(play, flow).at(1.1).on(ChannelChanged("london", False)).expect()
    book.at(1.2).on(ChannelChanged("london", True)).expect(goes_on("a", "london", 2))
    for attempt in (2, 3, 4):
        book.on(AttemptRefused("a", attempt, outcome.NO_REPLICA)).expect(held("a"))
        book.at(1.2 + 0.3 * attempt).on(ChannelChanged("london", False)).expect()
        book.on(ChannelChanged("london", True)).expect(goes_on("a", "london", attempt + 1))
    book.on(AttemptRefused("a", 5, outcome.NO_REPLICA)).expect(goes_on("a", "frankfurt", 6))


def test_a_request_that_waits_for_a_lost_region_does_not_hold_up_those_that_wait_for_any(play) -> None:
    flow = slow(patience_s=30.0)
    book = begun(play, flow, "a", prompt_bytes=LONG)
    for region in ("frankfurt", "tokyo"):
        book.at(2.9).on(RegionReported(region)).expect()
    book.at(3.0).on(ChannelChanged("london", False)).expect()  # nor has it reported for so long
    book.on(RequestArrived(request("again", LONG, prefix="a"))).expect(held("again"))
    for region in ("frankfurt", "tokyo"):
        book.at(3.1).on(RegionForced(region, True, "racks")).expect()
    book.on(RequestArrived(request("b"))).expect(held("b"))
    # London is back, and has not found its engines.
    known = seen(instance("london", incarnation=2, replicas_ready=0)).view.regions["london"]
    book.at(3.2).on(RegionReported("london", renewed=True, known=known)).expect()
    book.on(ChannelChanged("london", True)).expect()
    book.at(3.3).on(RegionForced("frankfurt", False, "")).expect(sent("b", "frankfurt"))
    assert list(flow.held) == ["again"]


def test_a_request_that_waits_for_a_lost_region_is_decided_again_only_when_the_region_changes(
    play, monkeypatch
) -> None:
    """A thousand may wait, and reports come twenty times a second from each region."""
    flow, decided = slow(), []
    book = broken(play, flow)
    consider = flow.consider
    monkeypatch.setattr(flow, "consider", lambda *args, **fields: decided.append(args) or consider(*args, **fields))
    for n in range(5):
        book.at(1.1 + 0.2 * n).on(RegionForced("tokyo", n % 2 == 0, "racks")).expect()
    assert decided == []


def test_no_more_wait_for_a_lost_region_than_may_be_on_hold(play) -> None:
    flow = slow(held_max=1)
    book = begun(play, flow, "a", "b", prompt_bytes=LONG)
    book.at(1.0).on(ChannelChanged("london", False)).expect()
    book.on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(held("a"))
    book.on(AttemptFailed("b", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(goes_on("b", "frankfurt", 2))


def test_a_stream_waits_no_longer_than_being_prefilled_elsewhere_takes(play) -> None:
    flow = slow()
    until = 1.0 + lost_worth_s(flow)
    assert until == pytest.approx(2.59, abs=0.01)
    book = broken(play, flow)
    book.at(1.2).on(ChannelChanged("london", False)).expect()
    book.at(until).on(TimerFired("a")).expect(goes_on("a", "frankfurt", 2))


def test_a_stream_that_loses_less_than_a_second_elsewhere_does_not_wait(play) -> None:
    flow = worldwide()
    assert 0.7 < lost_worth_s(flow) < 1.0
    book = begun(play, flow, "a", prompt_bytes=LONG)
    book.at(1.0).on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(goes_on("a", "frankfurt", 2))


def test_a_stream_goes_on_in_its_region_if_another_of_its_balancers_answers(play) -> None:
    flow = slow()
    (
        begun(play, flow, "a", "b", prompt_bytes=LONG)
        .on(RequestArrived(request("c"))).expect(sent("c", "london"))
        .at(1.0).on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(held("a"))
        .at(1.1).on(AttemptBegan("c", 1, 200)).expect()
        .at(1.2).on(RegionReported("london")).expect(goes_on("a", "london", 2))
        # Once: who breaks there again goes elsewhere.
        .at(1.3).on(AttemptBegan("a", 2, 200)).expect()
        .at(1.4).on(AttemptFailed("a", 2, outcome.DIED_MID_STREAM, resumable=True)).expect(goes_on("a", "frankfurt", 3))
    )  # fmt: skip


def test_a_new_request_waits_for_a_lost_region_only_if_that_has_its_prompt_cached(play) -> None:
    flow = slow()
    (
        begun(play, flow, "a", prompt_bytes=LONG)
        .at(1.0).on(ChannelChanged("london", False)).expect()
        .on(RequestArrived(request("again", LONG, prefix="a"))).expect(held("again", until=1.0 + lost_worth_s(flow)))
        .on(RequestArrived(request("short", prefix="a"))).expect(sent("short", "frankfurt"))
        .on(RequestArrived(request("new", LONG))).expect(sent("new", "frankfurt"))
        .at(1.5).on(ChannelChanged("london", True)).expect(sent("again", "london"))
    )  # fmt: skip


def test_a_request_that_wants_its_first_token_soon_waits_only_while_it_can_still_have_it(play) -> None:
    flow = slow()
    book = begun(play, flow, "a", prompt_bytes=LONG)
    book.at(1.0).on(ChannelChanged("london", False)).expect()
    elsewhere_s = flow.consider(request("probe", LONG, prefix="a"), 1.0).chosen.bare_ttft_ms / 1e3
    assert 1.5 < elsewhere_s < 2.0
    for name, left_s, waits_s in (
        ("late", 1.0, 0.0),
        ("soon", 2.5, 2.5 - elsewhere_s),
        ("any", 9.0, lost_worth_s(flow)),
    ):
        asked = request(name, LONG, prefix="a", deadline=90.0, first_token_by=1.0 + left_s)
        waits = held(name, until=pytest.approx(1.0 + waits_s))
        book.on(RequestArrived(asked)).expect(waits if waits_s else sent(name, "frankfurt"))
        book.on(ClientLeft(name)).expect()


def test_no_request_waits_for_a_lost_region_that_another_law_has_closed(play) -> None:
    flow = slow()
    book = broken(play, flow)
    book.at(1.1).on(LawChanged(law(2, anyone=Rule(allow=("eu",))))).expect(goes_on("a", "frankfurt", 2))


def test_no_request_waits_for_a_lost_region_that_an_operator_drained(play) -> None:
    flow = slow()
    book = begun(play, flow, "a", prompt_bytes=LONG)
    book.at(0.5).on(RegionForced("london", True, "racks")).expect()
    book.at(1.0).on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(goes_on("a", "frankfurt", 2))


def test_a_waiting_request_goes_elsewhere_when_an_operator_drains_the_lost_region(play) -> None:
    flow = slow()
    book = broken(play, flow)
    book.at(1.1).on(RegionForced("london", True, "racks")).expect(goes_on("a", "frankfurt", 2))


def test_no_request_waits_for_a_region_that_refused_it_before_it_was_lost(play) -> None:
    flow = slow()
    book = begun(play, flow, "a", prompt_bytes=LONG)
    book.on(RequestArrived(request("b", LONG, prefix="a"))).expect(sent("b", "london"))
    book.at(1.0).on(ChannelChanged("london", False)).expect()
    book.on(AttemptRefused("b", 1, outcome.QUEUE_FULL, 800.0)).expect(sent("b", "frankfurt", attempt=2))


def test_a_region_s_earlier_refusal_does_not_prevent_it_from_continuing_a_stream(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a", deadline=90.0, tenant="european"))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.QUEUE_FULL, 800.0)).expect(sent("a", "frankfurt", attempt=2))
        .at(0.1).on(AttemptBegan("a", 2, 200)).expect()
        .at(2.0).on(AttemptFailed("a", 2, outcome.DIED_MID_STREAM, resumable=True)).expect(goes_on("a", "london", 3))
    )  # fmt: skip


def test_stream_continues_where_the_current_law_allows(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptBegan("a", 1, 200)).expect()
        .on(LawChanged(law(2, anyone=Rule(allow=("uk", "JP"))))).expect()
        .on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True)).expect(goes_on("a", "tokyo", 2))
    )  # fmt: skip


def moved(request_id: str, attempt: int) -> Expected:
    """A stream is to leave."""
    return Expected(machine.Move, id=request_id, attempt=attempt)


def begun(play, flow, *names: str, **fields):
    """Streams under way in London."""
    book = play(flow)
    for name in names:
        book.on(RequestArrived(request(name, deadline=90.0, **fields))).expect(sent(name, "london"))
        book.on(AttemptBegan(name, 1, 200)).expect()
    return book


def test_streams_leave_a_drained_region_at_its_pace(play) -> None:
    flow = worldwide()
    book = begun(play, flow, "a", "b")
    book.at(1.0).on(RegionForced("london", True, "racks", over_s=2.0, moves=True)).expect(
        timer("a", at=2.0), timer("b", at=3.0))  # fmt: skip
    book.at(2.0).on(TimerFired("a")).expect(timer("a", at=2.0 + MOVE_AGAIN_S), moved("a", 1))
    book.on(AttemptFailed("a", 1, outcome.STOPPING, resumable=True)).expect(goes_on("a", "frankfurt", 2))
    book.at(2.1).on(AttemptBegan("a", 2, 200)).expect()
    book.at(3.0).on(TimerFired("b")).expect(timer("b", at=3.0 + MOVE_AGAIN_S), moved("b", 1))
    book.on(AttemptEnded("b", 1, 200, None)).expect()  # it could not continue, and ended where it was
    book.on(AttemptEnded("a", 2, 200, None)).expect()
    assert flow.regions.liveness["london"].read(3.0).why == "racks"  # no failure is counted
    assert (flow.under_way, len(flow.ledger)) == (0, 0)


def test_a_request_without_another_lawful_region_stays_in_the_drained_one(play) -> None:
    flow = worldwide()
    book = play(flow).on(RequestArrived(request("a", tenant="german"))).expect(sent("a", "frankfurt"))
    book.on(AttemptBegan("a", 1, 200)).expect()
    book.at(1.0).on(RegionForced("frankfurt", True, "racks", moves=True)).expect(timer("a", at=1.0))
    book.at(1.0).on(TimerFired("a")).expect(timer("a", at=1.0 + MOVE_AGAIN_S))


def test_a_lifted_drain_moves_no_further_requests(play) -> None:
    flow = worldwide()
    book = begun(play, flow, "a")
    book.at(1.0).on(RegionForced("london", True, "racks", over_s=2.0, moves=True)).expect(timer("a", at=3.0))
    book.at(2.0).on(RegionForced("london", False)).expect()
    book.at(3.0).on(TimerFired("a")).expect(timer("a", at=90.0))
    book.on(RegionForced("london", True, "racks", until=4.0, moves=True)).expect(timer("a", at=3.0))
    book.at(5.0).on(TimerFired("a")).expect(timer("a", at=90.0))  # it ended by itself


def test_only_streams_leave_a_drained_region_even_if_they_begin_late(play) -> None:
    flow = worldwide()
    book = begun(play, flow, "a", stream=False)
    book.on(RequestArrived(request("b", deadline=90.0))).expect(sent("b", "london"))
    book.at(1.0).on(RegionForced("london", True, "racks", over_s=4.0, moves=True)).expect()
    book.at(2.0).on(AttemptBegan("b", 1, 200)).expect(timer("b", at=5.0))
    book.at(5.0).on(TimerFired("b")).expect(timer("b", at=5.0 + MOVE_AGAIN_S), moved("b", 1))
    book.on(RegionForced("london", True, "racks", over_s=4.0)).expect()  # the same, without


@given(st.lists(st.sampled_from(("begin", "break", "break for good", "refuse", "leave", "end", "law")), max_size=24))
def test_a_stream_is_never_begun_twice(steps: list[str]) -> None:
    """Whatever happens: once begun it is continued or ended, never sent anew, nor where it broke or was refused since,
    never beyond the law."""
    flow, epoch, attempt, begun, done = worldwide(), 1, 1, False, 0
    lawful = {"london", "frankfurt", "tokyo"}
    commands = flow.handle(RequestArrived(request("a")), 0.0)
    been: list[str] = []
    broke: list[str] = []
    since = 0  # of `been`: those before the last break
    for at, step in enumerate(["", *steps]):
        now = at * 0.01
        if step == "law":
            epoch += 1
            lawful = {"london", "tokyo"}
            commands = flow.handle(LawChanged(law(epoch, anyone=Rule(allow=("uk", "JP")))), now)
        elif step == "begin":
            begun |= not done
            commands = flow.handle(AttemptBegan("a", attempt, 200), now)
        elif step.startswith("break"):
            failed = AttemptFailed("a", attempt, outcome.DIED_MID_STREAM, resumable=begun and step == "break")
            if begun:
                broke, since = [*broke, been[-1]], len(been)
            commands = flow.handle(failed, now)
        elif step == "refuse":
            commands = flow.handle(AttemptRefused("a", attempt, outcome.QUEUE_FULL, 800.0), now) if not begun else []
        elif step == "leave":
            commands = flow.handle(ClientLeft("a"), now)
        elif step == "end":
            commands = flow.handle(AttemptEnded("a", attempt, 200, None), now)
        for command in commands:
            if isinstance(command, machine.Forward):
                attempt = command.attempt
                assert isinstance(command, Resume) == begun
                assert command.target in lawful
                assert not begun or command.target not in (*broke, *been[since:])
                been.append(command.target)
            elif isinstance(command, machine.Answer):
                done += 1
    assert done <= 1
    assert sum(1 for _ in been) <= 1 + RESUMES_MAX + TRANSPORT_RETRIES_MAX + 3
    if not flow.under_way:
        assert (len(flow.ledger), flow.under_way) == (0, 0)
