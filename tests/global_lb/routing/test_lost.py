"""Who waits for a lost region, and until when. As events tell it: tests/flows/test_global_breaking.py."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import everywhere, request, worldwide

from farhop.balance import outcome, retry
from farhop.balance.health.reading import State
from global_lb.routing import lost
from global_lb.routing.request_state import RequestState

ALL = frozenset(("london", "frankfurt", "tokyo"))
REASONS = outcome.DIED_MID_STREAM, outcome.NO_REPLICA, outcome.QUEUE_FULL, outcome.UNLAWFUL_HERE


@given(
    prompt_bytes=st.sampled_from([1024, 31_744, 400_000]),
    prefill_ms=st.sampled_from([0.01, 0.2, 2.0]),
    cached=st.sampled_from([True, True, False]),
    lost_at=st.sampled_from([2.5, 1.0, None]),
    now=st.sampled_from([2.5, 3.0, 5.0, 7.6]),
    drained=st.sampled_from([False, False, True]),
    lawful=st.sampled_from([ALL, ALL - {"london"}]),
    refusal=st.sampled_from([None, None, *REASONS]),
    before=st.sampled_from([None, None, None, 2.6, 6.0]),
    held_for=st.sampled_from([None, "", "london"]),
    attempts=st.integers(0, retry.ATTEMPTS_MAX),
    first_token_by=st.sampled_from([None, 4.0, 90.0]),
    deadline=st.sampled_from([3.5, 60.0]),
)
def test_a_request_waits_for_a_lawful_lost_region_and_no_longer_than_its_cache_is_worth(
    prompt_bytes, prefill_ms, cached, lost_at, now, drained, lawful, refusal, before, held_for, attempts,
    first_token_by, deadline,
) -> None:  # fmt: skip
    flow = worldwide(view=everywhere(prefill_ms_per_token=prefill_ms))
    asked = request("a", prompt_bytes, deadline=deadline, first_token_by=first_token_by)
    if cached:
        flow.regions.caches("london", asked.chain)
    for region in ALL:
        flow.regions.liveness_of(region).reported(now)
    london = flow.regions.liveness_of("london")
    if lost_at is not None:
        london.channel(up=False, now=lost_at)
    if drained:
        london.forced.force(State.DRAINING, "racks", inf, now=0.0)
    state = RequestState(asked, lawful, flow.law, attempts=attempts)
    state.refusals = {"london": refusal} if refusal is not None else {}
    state.waited_for = {"london": before} if before is not None else {}
    decision = flow.consider(asked, now, lawful, frozenset(state.refusals))
    found = lost.region_to_wait_for(state, decision, flow.regions, held_for, now)
    if found is None:
        return
    region, until = found
    assert region == "london" in lawful
    assert now < until
    assert not drained
    assert attempts <= retry.ATTEMPTS_MAX // 2
    if before is not None:
        assert until == before
        assert refusal in (None, outcome.NO_REPLICA) or held_for == "london"
        return
    assert cached
    assert refusal in (None, outcome.DIED_MID_STREAM)
    chosen, candidates = decision.chosen, decision.candidates
    worth_s = candidates.fill_up_ms(candidates.at[chosen.region], prompt_bytes) / 1e3
    assert worth_s >= lost.WORTH_MIN_S
    assert until <= min(deadline, lost_at + min(worth_s, lost.WAIT_MAX_S) + 1e-9)
    if first_token_by is not None:
        assert until + chosen.bare_ttft_ms / 1e3 <= first_token_by + 1e-9


def test_no_request_waits_if_no_region_is_lost() -> None:
    flow = worldwide(view=everywhere(prefill_ms_per_token=2.0))
    asked = request("a", 31_744)
    flow.regions.caches("london", asked.chain)
    decision = flow.consider(asked, 1.0, ALL - {"london"})
    assert lost.region_to_wait_for(RequestState(asked, ALL, flow.law), decision, flow.regions, None, 1.0) is None


@pytest.mark.parametrize(
    ("prompt_bytes", "deadline", "until"),
    [(31_744, 60.0, 1.0 + 1.5872), (400_000, 60.0, 1.0 + lost.WAIT_MAX_S), (31_744, 2.0, 2.0)],
    ids=["its prefill", "the most", "its deadline"],
)
def test_the_wait_is_what_the_prefill_elsewhere_would_take(prompt_bytes: int, deadline: float, until: float) -> None:
    flow = worldwide(view=everywhere(prefill_ms_per_token=0.2))
    asked = request("a", prompt_bytes, deadline=deadline)
    flow.regions.caches("london", asked.chain)
    flow.regions.liveness_of("london").channel(up=False, now=1.0)
    decision = flow.consider(asked, 1.0)
    found = lost.region_to_wait_for(RequestState(asked, ALL, flow.law), decision, flow.regions, None, 1.0)
    assert found == ("london", pytest.approx(until))
