"""When a silent attempt is lost, and that what is only slow never is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.health.inquiry import LATER_S, QUIET_S, STALL_FLOOR_S, STALL_PAUSES, Inquiry, stall_s

WAY_S = 0.2


def test_an_attempt_that_has_not_begun_is_lost_when_its_upstream_does_not_know_it_twice_in_a_row() -> None:
    known = Inquiry()
    assert not known.lost(2.0, None, WAY_S, 10.0, began=False)
    assert not known.lost(3.0, 3.0, WAY_S, 11.0, began=False)  # it was only in flight
    assert not known.lost(4.0, None, WAY_S, 12.0, began=False)
    assert known.lost(5.0, None, WAY_S, 13.0, began=False)


def test_one_inquiry_is_enough_after_the_path_broke() -> None:
    known = Inquiry()
    known.path_broke = True
    assert not known.lost(4.0, 3.9, WAY_S, 10.0, began=False)
    assert known.lost(4.5, None, WAY_S, 11.0, began=False)


def test_bytes_received_between_two_inquiries_void_the_first() -> None:
    known = Inquiry()
    assert not known.lost(2.0, None, WAY_S, 10.0, began=False)
    known.clear()
    assert not known.lost(1.5, None, WAY_S, 14.0, began=False)


def test_a_begun_answer_gets_the_time_in_which_tcp_may_bring_it() -> None:
    known = Inquiry()
    known.path_broke = True
    found = [known.lost(4.0 + after, None, WAY_S, 10.0 + after, began=True) for after in (0.0, 1.0, 2.0, 3.9, 4.0)]
    assert found == [False, False, False, False, True]


def test_a_stream_is_lost_if_its_upstream_goes_on_sending_and_nothing_arrives() -> None:
    known = Inquiry()
    found = [known.lost(5.0 + after, after % 0.1, WAY_S, 10.0 + after, began=True) for after in (0.0, 2.0, 6.0)]
    assert found == [False, False, True]


@given(
    pauses=st.lists(st.floats(QUIET_S, 600.0), min_size=1, max_size=20),
    lag_s=st.floats(-LATER_S, LATER_S),
    began=st.booleans(),
    path_broke=st.booleans(),
)
def test_a_stream_whose_engine_pauses_is_never_lost(
    pauses: list[float], lag_s: float, began: bool, path_broke: bool
) -> None:
    """An engine that pauses is silent there as long as here, give or take the way."""
    known = Inquiry()
    known.path_broke = path_broke
    now = 0.0
    for silent_s in pauses:
        now += silent_s
        assert not known.lost(silent_s, max(0.0, silent_s - lag_s), WAY_S, now, began=began) or (
            began and silent_s - max(0.0, silent_s - lag_s) > LATER_S + WAY_S
        )


@given(pause_s=st.floats(0.0, 1e4), most_s=st.floats(0.1, 1e4))
def test_a_stream_may_be_silent_for_several_times_its_own_pauses(pause_s: float, most_s: float) -> None:
    limit_s = stall_s(pause_s, most_s)
    assert limit_s <= most_s
    assert limit_s == most_s or limit_s >= max(STALL_FLOOR_S, STALL_PAUSES * pause_s)
