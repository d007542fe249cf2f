"""What regions' refusals come to, taken together."""

from __future__ import annotations

from worlds import law, request

from farhop.balance import outcome
from global_lb.routing.request_state import RequestState

LAW = law()


def test_the_law_is_the_answer_only_where_every_lawful_region_gives_it() -> None:
    lawful = frozenset({"london", "tokyo"})
    state = RequestState(request("a"), lawful, LAW, refusals={"london": outcome.UNLAWFUL_HERE})
    assert not state.law_refused(lawful)
    state.refusals["tokyo"] = outcome.QUEUE_FULL
    assert not state.law_refused(lawful)
    state.refusals["tokyo"] = outcome.UNLAWFUL_UNREAD
    assert state.law_refused(lawful)


def test_a_path_is_unsupported_if_all_tried_regions_refuse_it() -> None:
    state = RequestState(request("a"), frozenset({"london", "tokyo"}), LAW)
    assert not state.all_say(outcome.PATH_UNSUPPORTED)  # no region was asked
    state.refusals["london"] = outcome.PATH_UNSUPPORTED
    assert state.all_say(outcome.PATH_UNSUPPORTED)
    state.refusals["tokyo"] = outcome.NO_REPLICA
    assert not state.all_say(outcome.PATH_UNSUPPORTED)
    assert "london" in state.summary()
    assert "tokyo" in state.summary()
