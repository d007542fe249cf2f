"""The bound: no router exceeds it, perfect reuse counts each block once, and more GPUs never lower it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.scenarios.load import Scenario, parse
from farhop_lab.studies import bound
from farhop_lab.studies.bound import Demand
from farhop_lab.studies.cell import Key, run
from tests.conftest import further

TEXT = """
name: small
sites:
  virginia: {gpu: l4, replicas: 1}
  tokyo: {gpu: a100, replicas: 1}
work:
  - kind: requests
    figures: {prompt_tokens: 2000, shared_tokens: 1000, groups: 2, answer_tokens: 40}
    per_s: {virginia: 5, tokyo: 5}
duration_s: 12
warm_up_s: 2
objective: {ttft_ms: 60000, tpot_ms: 60000}
"""
WORK = st.lists(st.builds(Demand, st.integers(0, 30_000), st.integers(1, 2_000)), min_size=1, max_size=8)


def small(text: str = TEXT) -> Scenario:
    return parse(text, "it", Path(), ["farhop"])


@pytest.mark.parametrize(
    ("router", "load"), further([("farhop", 0.5), ("farhop", 3.0), ("omniscient", 3.0)], ("omniscient", 3.0))
)
def test_no_router_exceeds_the_upper_bound(router: str, load: float) -> None:
    scenario = small()
    found = run(scenario.document(), scenario.folder, Key("small", router, load, 1), "r")
    assert 0 < sum(found.good) <= bound.of(scenario, 1, load)


def test_shared_prefix_is_computed_once() -> None:
    work = bound.demands(small(), 1, 1.0)
    own = sorted(one.own_tokens for one in work)
    # Two texts in each of two regions; the first to have one computes it, all others compute their own half.
    assert own[:-4]
    assert all(1000 <= tokens <= 1016 for tokens in own[:-4])
    assert all(2000 <= tokens <= 2016 for tokens in own[-4:])


def test_a_closed_loop_scenario_has_no_upper_bound() -> None:
    scenario = small(TEXT.replace("per_s", "clients"))
    with pytest.raises(ValueError, match="closed loop"):
        bound.demands(scenario, 1, 1.0)


@settings(max_examples=50)
@given(WORK, st.sampled_from(["l4", "a100", "h100"]), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_no_price_is_above_what_a_gpu_takes_for_it_alone(work, gpu, theta, alpha):
    profile = PROFILES[gpu]
    for one in work:
        if one.own_tokens + one.answer_tokens > profile.kv_tokens:
            continue
        alone, left = 0.0, one.own_tokens
        while left > 0:
            chunk = min(left, profile.prefill_tokens_per_step)
            alone += profile.step_ms(profile.prefill_ms(chunk, one.own_tokens - left), 0)
            left -= chunk
        alone += sum(profile.step_ms(0, 1, one.own_tokens + written) for written in range(1, one.answer_tokens))
        assert bound.cost_ms(one, profile, theta, alpha) <= alone * (1 + 1e-9)


@settings(max_examples=10)
@given(WORK, st.integers(1, 3))
def test_more_gpus_answer_no_less(work, replicas):
    less = bound.share_max(work, {"a100": replicas}, 10.0)
    assert bound.share_max(work, {"a100": replicas + 1}, 10.0) >= less
    assert 0.0 <= bound.answers_max(work, {"a100": replicas, "l4": 1}, 10.0) <= len(work)
