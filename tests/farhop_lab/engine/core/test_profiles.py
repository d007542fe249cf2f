"""The GPUs' figures say what the field measured, and a step costs what its docstring derives."""

import pytest

from farhop_lab.engine.core.profiles import PROFILES, Profile


def test_gpu_profiles_match_published_figures() -> None:
    l4 = PROFILES["l4"]
    assert 512 * l4.prefill_ms_per_token == pytest.approx(302, abs=3)
    assert l4.kv_tokens == pytest.approx(25_000, rel=0.01)
    # 150 ms of wire buys ~256, ~1,600 and ~3,750 tokens of prefill.
    bought = [150 / PROFILES[name].prefill_ms_per_token for name in ("l4", "a100", "h100")]
    assert bought == pytest.approx([256, 1_600, 3_750], rel=0.01)
    assert PROFILES["h100"].prefill_tokens_per_step == 8_192


def test_a_mixed_step_costs_its_prefill_and_its_decodes_own_terms() -> None:
    gpu = PROFILES["l4"]
    assert gpu.step_ms(0, 1, 1_000) == pytest.approx(1 + 55 + 0.47, abs=0.01)
    assert gpu.step_ms(gpu.prefill_ms(16), 0) == pytest.approx(1 + 55)  # the weights are read even for a few tokens
    assert gpu.step_ms(590, 10, 10_000) == pytest.approx(1 + 590 + 4.7, abs=0.1)


def test_a_long_context_costs_more_to_compute_and_to_read() -> None:
    """At 100k tokens an H100 reads some 13 GB of KV a step, 3.9 ms, and computes them in 2.6 times what is linear."""
    gpu = PROFILES["h100"]
    assert gpu.step_ms(0, 1, 100_000) - gpu.step_ms(0, 1) == pytest.approx(3.9, abs=0.05)
    assert gpu.prefill_ms(100_000) == pytest.approx(2.63 * 100_000 * gpu.prefill_ms_per_token, rel=0.01)
    assert gpu.prefill_ms(1_000) == pytest.approx(1.016 * 40, rel=0.001)
    chunks = sum(gpu.prefill_ms(1_000, since) for since in range(0, 10_000, 1_000))
    assert chunks == pytest.approx(gpu.prefill_ms(10_000))


def test_speedup_divides_times_and_leaves_sizes() -> None:
    gpu = PROFILES["a100"]
    fast = gpu.scaled(4)
    assert fast.step_ms(fast.prefill_ms(700), 3, 900) == pytest.approx(gpu.step_ms(gpu.prefill_ms(700), 3, 900) / 4)
    assert (fast.kv_blocks, fast.max_model_len) == (gpu.kv_blocks, gpu.max_model_len)


@pytest.mark.parametrize("speedup", [0, -1, float("nan"), float("inf")])
def test_absurd_speedup_is_refused_by_name(speedup: float) -> None:
    with pytest.raises(ValueError, match="speedup"):
        PROFILES["l4"].scaled(speedup)


def test_absurd_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="time is negative"):
        Profile(
            "odd", prefill_ms_per_token=-1, decode_floor_ms=1, decode_ms_per_sequence=1, kv_blocks=1, max_model_len=1
        )
    with pytest.raises(ValueError, match="size is below 1"):
        Profile(
            "odd", prefill_ms_per_token=1, decode_floor_ms=1, decode_ms_per_sequence=1, kv_blocks=0, max_model_len=1
        )


def test_a_context_never_exceeds_the_cache() -> None:
    gpu = Profile("small", 1, 1, 1, kv_blocks=4, max_model_len=1_000)
    assert gpu.context_tokens == 64
