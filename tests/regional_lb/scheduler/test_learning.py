"""What a finished request teaches, and what an answer says of the replica's memory."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from worlds import regional, replica, request

from farhop.balance.machine import AttemptBegan, AttemptEnded, RequestArrived, Usage
from regional_lb.scheduler.learning import ANSWER_SHARE, Learning
from regional_lb.scheduler.request_state import RequestState


def test_predicted_cached_tokens_are_compared_with_the_reported_ones() -> None:
    flow = regional(replica("r1"))
    for name in ("first", "again"):
        asked = replace(request("same", 8192), id=name)
        flow.handle(RequestArrived(asked), 0.0)
        flow.handle(AttemptBegan(name, 1, 200), 0.1)
        flow.handle(AttemptEnded(name, 1, 200, Usage(2048, 10, 0 if name == "first" else 1024)), 0.2)
    assert flow.learning.predicted_tokens > 1024.0  # its mirror knew the first prompt
    assert flow.learning.actual_tokens == 1024.0


def test_answer_without_text_does_not_count_as_missing_cache_report() -> None:
    flow = regional(replica("r1"))
    reported = []
    for name, usage in (("chat", Usage(256, 10, 0)), ("embedding", Usage(256, 0)), ("bare chat", Usage(256, 10))):
        flow.handle(RequestArrived(request(name)), 0.0)
        flow.handle(AttemptBegan(name, 1, 200), 0.1)
        flow.handle(AttemptEnded(name, 1, 200, usage), 0.2)
        reported.append(flow.replicas.unreported_hits.reported("r1"))
    assert reported == [True, True, False]


def test_an_answer_far_shorter_than_its_token_count_is_not_taken_as_cached() -> None:
    flow = regional(replica("r1"))
    learning, asked = Learning(flow.replicas), request("a", 1024)
    state = RequestState(asked, flow.selector.need_of(asked), asked.model, flow.law, replica="r1")
    chain = (*asked.chain, 1)
    least = ANSWER_SHARE * 100 * flow.replicas.estimates.bytes_per_token(asked.model)
    for answer_bytes, holds in ((int(least), True), (int(least) - 1, False)):
        ended = AttemptEnded("a", 1, 200, Usage(256, 100), chain=chain, answer_bytes=answer_bytes)
        assert learning.holds_answer(state, ended) is holds
    ended = AttemptEnded("a", 1, 200, Usage(256, 100), chain=asked.chain, answer_bytes=4096)
    assert not learning.holds_answer(state, ended)  # no event came after the prompt


def test_answers_far_longer_than_estimated_do_not_raise_the_estimate_above_their_length() -> None:
    """40 of 1,500 tokens where 256 were guessed. 40 more take what they would with such answers, or little more."""
    flow = regional(replica("r1", slots=256, kv_tokens=120_000))
    for begin_s in (0.0, 60.0):
        for n in range(40):
            asked = request(f"{begin_s} {n}", max_tokens=4096, deadline=200.0)
            flow.handle(RequestArrived(asked), begin_s)
            flow.handle(AttemptBegan(asked.id, 1, 200), begin_s + 0.1)
        if not begin_s:
            for n in range(40):
                flow.handle(AttemptEnded(f"{begin_s} {n}", 1, 200, Usage(256, 1500)), 30.0)
    assert flow.replicas.whole.kv_taken_tokens.item(0) == pytest.approx(40 * (256 + 1500), rel=0.1)
