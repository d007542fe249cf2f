"""The predictive score of a region, term by term."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import field, request

from farhop.balance import cost
from global_lb.policy import Predictive
from global_lb.table import BETA


def score(said=None, **fields):
    """London, as it is said to be, for one request of 1024 bytes and an answer of 100 tokens."""
    told = field(request("a", **fields), london={"rtt_ms": 10.0, **(said or {})})
    policy = Predictive()
    return told.scored(0, policy.score(told).item(0) - policy.shift(told))


def test_the_wire_the_wait_and_the_prefill() -> None:
    one = score()
    assert (one.rtt_ms, one.upload_ms, one.wait_ms, one.prefill_ms) == (10.0, 0.0, 5.0, pytest.approx(25.6))
    assert one.ttft_ms == pytest.approx(40.6)
    assert one.score == pytest.approx(40.6)


def test_a_large_body_pays_for_its_upload() -> None:
    assert score(body_bytes=200_000).upload_ms == 30.0  # three more round trips


def test_a_hit_is_discounted_by_residence_and_never_more_than_the_prompt() -> None:
    full, half, beyond = (
        score({"depth": 2}),
        score({"depth": 2, "residence": 0.5}),
        score({"depth": 16, "residence": 0.5}),
    )
    assert (full.believed_tokens, full.hit_tokens, full.uncached_tokens) == (128.0, 128.0, 128.0)
    assert (half.believed_tokens, half.hit_tokens, half.uncached_tokens) == (128.0, 64.0, 192.0)
    assert (beyond.believed_tokens, beyond.hit_tokens) == (256.0, 128.0)


def test_slow_decode_costs_in_proportion_to_the_answer() -> None:
    told = field(request("a"), london={"rtt_ms": 1.0}, tokyo={"rtt_ms": 1.0, "tpot_ms": 30.0})
    quick, slow = Predictive().score(told).tolist()
    assert slow - quick == pytest.approx(BETA * 100 * 10.0)


def test_each_region_counts_tokens_by_its_own_measure() -> None:
    assert score({"bytes_per_token": 2.0}).uncached_tokens == 512.0


numbers = st.fixed_dictionaries({
    "rtt_ms": st.floats(0.1, 500), "wait_ms": st.floats(0, 5000), "prefill_ms_per_token": st.floats(0.001, 10),
    "tpot_ms": st.floats(1, 100), "bytes_per_token": st.floats(0.5, 20), "residence": st.floats(0.1, 1),
    "depth": st.integers(0, 40), "unacknowledged_bytes": st.floats(0, 1e6), "replicas_ready": st.integers(1, 64),
})  # fmt: skip


@given(st.lists(numbers, min_size=1, max_size=6), st.integers(1, 1_000_000), st.floats(0, 4000))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_all_at_once_is_what_each_alone_would_be_by_the_cost_model(said, n_bytes: int, output: float) -> None:
    names = [f"r{n}" for n in range(len(said))]
    asked = request("a", prompt_bytes=n_bytes, body_bytes=n_bytes, chain=())
    told = field(asked, output, "r0", **dict(zip(names, said, strict=True)))
    policy = Predictive()
    shift, scores = policy.shift(told), policy.score(told)
    least = min(one["tpot_ms"] for one in said)
    for place, one in enumerate(said):
        spelled = told.scored(place, scores.item(place) - shift)
        ttft_ms = cost.ttft_ms(
            one["rtt_ms"], cost.upload_ms(n_bytes, one["rtt_ms"]), spelled.wait_ms, spelled.uncached_tokens,
            one["prefill_ms_per_token"],
        )  # fmt: skip
        wait_ms = cost.reckoned_wait_ms(
            one["wait_ms"], one["unacknowledged_bytes"] / one["bytes_per_token"], 0.0,
            one["prefill_ms_per_token"] / one["replicas_ready"],
        )  # fmt: skip
        assert spelled.wait_ms == pytest.approx(wait_ms)
        assert spelled.ttft_ms == pytest.approx(ttft_ms, rel=1e-6)
        wanted = cost.score_ms(ttft_ms, output, one["tpot_ms"], least, BETA, 0.0, 0.0, 0.0)
        assert spelled.score == pytest.approx(wanted, rel=1e-6, abs=1e-6)
