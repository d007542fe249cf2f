"""The predictive score of a region, term by term."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import candidates, request

from farhop.balance.estimate import cost
from global_lb.fleet.table import BETA, BETA_TOOLS
from global_lb.routing.policy import Predictive


def score(reports=None, **fields):
    """London, as it reports itself to be, for one request of 1024 bytes and an answer of 100 tokens."""
    found = candidates(request("a", **fields), london={"rtt_ms": 10.0, **(reports or {})})
    policy = Predictive()
    return found.scored(0, policy.score(found).item(0) - policy.shift(found))


def test_a_score_adds_round_trip_wait_and_prefill() -> None:
    one = score()
    assert (one.rtt_ms, one.upload_ms, one.wait_ms, one.prefill_ms) == (10.0, 0.0, 5.0, pytest.approx(25.6))
    assert one.ttft_ms == pytest.approx(40.6)
    assert one.behind_ms == pytest.approx(5.0 * 5.0 / 25.6)  # no better estimate than that all are like this one
    assert one.score == pytest.approx(40.6 + 25.0 / 25.6)
    assert score({"wait_ms": 100.0}).behind_ms == pytest.approx(100.0)  # the same time again


def test_a_large_body_pays_for_its_upload() -> None:
    assert score(body_bytes=200_000).upload_ms == 30.0  # three more round trips


def test_a_hit_is_discounted_by_the_calibration_and_never_more_than_the_prompt() -> None:
    full, half, beyond = (
        score({"depth": 2}),
        score({"depth": 2, "cache_hit_calibration": 0.5}),
        score({"depth": 16, "cache_hit_calibration": 0.5}),
    )
    assert (full.predicted_tokens, full.hit_tokens, full.uncached_tokens) == (128.0, 128.0, 128.0)
    assert (half.predicted_tokens, half.hit_tokens, half.uncached_tokens) == (128.0, 64.0, 192.0)
    assert (beyond.predicted_tokens, beyond.hit_tokens) == (256.0, 128.0)


@pytest.mark.parametrize(("tools", "beta"), [(False, BETA), (True, BETA_TOOLS)])
def test_slow_decode_costs_in_proportion_to_the_answer(tools: bool, beta: float) -> None:
    found = candidates(request("a", tools=tools), london={"rtt_ms": 1.0}, tokyo={"rtt_ms": 1.0, "tpot_ms": 30.0})
    quick, slow = Predictive().score(found).tolist()
    assert slow - quick == pytest.approx(beta * 100 * 10.0)
    assert found.scored(1, slow).decode_ms == pytest.approx(beta * 100 * 10.0)


def test_a_prefill_is_paid_by_all_it_stalls() -> None:
    idle = {"rtt_ms": 1.0, "replicas_ready": 2, "slots_total": 100, "slots_free": 100, "tpot_ms": 20.0}
    busy = {**idle, "slots_free": 60, "batch_interference_ms": 0.5}  # twenty at each, and a token alone takes 10 ms
    found = candidates(request("a"), london=idle, tokyo=busy)
    one, other = Predictive().score(found).tolist()
    assert other - one == pytest.approx(BETA * (100 * 20 * 0.5 + 20 * (25.6 - 10.0)))


def test_a_miss_is_paid_by_those_behind_it_where_others_wait() -> None:
    """In queues as long a request stays with its prefix, for as long as the wire and its prefill say so, too; one that
    finds nothing anywhere goes where fewer wait."""
    here, there = {"rtt_ms": 1.0, "wait_ms": 900.0}, {"rtt_ms": 101.0, "wait_ms": 700.0}
    for usual, costs in ((512.0, 2.0), (2048.0, 0.5)):
        found = candidates(request("a"), london={**here, "depth": 16}, tokyo=there)  # 1024 bytes, 25.6 ms
        found.mean_work_bytes = usual
        one, other = Predictive().score(found).tolist()
        assert other - one == pytest.approx(101.0 - 1.0 - 200.0 + 25.6 + costs * 700.0)
    missed = candidates(request("a"), london=here, tokyo=there)
    one, other = Predictive().score(missed).tolist()
    assert other - one == pytest.approx(100.0 - 2 * 200.0)


def test_each_region_counts_tokens_by_its_own_measure() -> None:
    assert score({"bytes_per_token": 2.0}).uncached_tokens == 512.0


numbers = st.fixed_dictionaries({
    "rtt_ms": st.floats(0.1, 500), "wait_ms": st.floats(0, 5000), "prefill_ms_per_token": st.floats(0.001, 10),
    "tpot_ms": st.floats(1, 100), "bytes_per_token": st.floats(0.5, 20), "cache_hit_calibration": st.floats(0.1, 1),
    "depth": st.integers(0, 40), "unacknowledged_bytes": st.floats(0, 1e6), "replicas_ready": st.integers(1, 64),
    "slots_total": st.just(512), "slots_free": st.integers(0, 512), "batch_interference_ms": st.floats(0, 3),
})  # fmt: skip


@given(
    st.lists(numbers, min_size=1, max_size=6),
    st.integers(1, 1_000_000),
    st.floats(0, 4000),
    st.one_of(st.none(), st.floats(0, 1e6)),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_vectorised_region_scores_equal_the_cost_model_one_by_one(reports, n_bytes, output, usual) -> None:
    names = [f"r{n}" for n in range(len(reports))]
    asked = request("a", prompt_bytes=n_bytes, body_bytes=n_bytes, chain=())
    found = candidates(asked, output, "r0", **dict(zip(names, reports, strict=True)))
    found.mean_work_bytes = usual
    policy = Predictive()
    shift, scores = policy.shift(found), policy.score(found)
    batches = [(512 - one["slots_free"]) / one["replicas_ready"] for one in reports]
    tokens_ms = [
        cost.token_ms(one["tpot_ms"], one["batch_interference_ms"], n) for one, n in zip(reports, batches, strict=True)
    ]
    for place, one in enumerate(reports):
        spelled = found.scored(place, scores.item(place) - shift)
        ttft_ms = one["rtt_ms"] + cost.upload_ms(n_bytes, one["rtt_ms"]) + spelled.wait_ms
        uncached = spelled.uncached_tokens
        work_tokens = (
            cost.prefill_work(uncached, n_bytes / one["bytes_per_token"])
            if n_bytes >= 4 * cost.LONG_TOKENS
            else uncached
        )
        ttft_ms += work_tokens * one["prefill_ms_per_token"]
        sent_tokens = one["unacknowledged_bytes"] / one["bytes_per_token"]
        wait_ms = one["wait_ms"] + sent_tokens * one["prefill_ms_per_token"] / one["replicas_ready"]
        assert spelled.wait_ms == pytest.approx(wait_ms)
        step_ms = max(spelled.prefill_ms, one["tpot_ms"]) + (0.5 * one["tpot_ms"] if batches[place] >= 1.0 else 0.0)
        first_ms = ttft_ms - spelled.prefill_ms + step_ms
        assert spelled.ttft_ms == pytest.approx(first_ms, rel=1e-6)
        alone_ms = max(0.0, one["tpot_ms"] - one["batch_interference_ms"] * batches[place])
        stalled_ms = cost.stalled_ms(spelled.prefill_ms, alone_ms, batches[place])
        wanted = ttft_ms + BETA * (output * (tokens_ms[place] - min(tokens_ms)) + stalled_ms)
        wanted += cost.behind_ms(
            wait_ms,
            work=work_tokens * one["bytes_per_token"],
            mean_work=n_bytes if usual is None else max(usual, 1.0),
            ms_per_unit=one["prefill_ms_per_token"] / one["bytes_per_token"],
        )
        assert spelled.score == pytest.approx(wanted, rel=1e-6, abs=1e-6)
        decoding_ms = BETA * output * (one["tpot_ms"] - min(tokens_ms))
        assert spelled.decode_ms == pytest.approx(decoding_ms, rel=1e-6, abs=1e-9)
        told_ms = ttft_ms + decoding_ms + spelled.interference_ms + spelled.stall_ms + spelled.behind_ms
        assert told_ms == pytest.approx(wanted, rel=1e-6, abs=1e-6)
        assert sum(policy.terms(spelled).values()) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
