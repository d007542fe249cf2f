"""The tuner beside its author's: the same dice give the same weights, however the samples fall."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from gorgo.tuner import GaussianESTuner
from gorgo.tuner import OnlineTuner as Published
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.sim.baselines.gorgo_tuner import HOP, LEAST, MOST, STEPS_MAX, WINDOW, EvolutionStrategy, OnlineTuner

INITIAL = {"rtt": 2.0, "queue": 0.104}
RANGES = dict.fromkeys(INITIAL, (LEAST, MOST))


def published(seed: int) -> Published:
    tuner = Published()
    fields: dict[str, Any] = {"enabled": True, "mode": "online-es", "hyperparam_ranges": RANGES}
    assert tuner.configure(fields, active_policy="gorgo-2d", current_defaults=INITIAL) is None
    assert tuner.online_tuner is not None
    tuner.online_tuner._rng = Random(seed)  # its random generator cannot be passed in
    return tuner


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.floats(0.0, 3.0), st.integers(1, 1200))
def test_weights_are_those_of_the_published_tuner(seed: int, drift: float, count: int) -> None:
    ours, theirs = OnlineTuner(INITIAL, Random(seed)), published(seed)
    dice, samples = Random(seed + 1), []
    store: dict[str, Any] = {"defaults": dict(INITIAL), "per_target": {}}
    for number in range(count):
        ttft_s = dice.expovariate(1.0) + drift * number / count
        ours.on_sample(ttft_s)
        samples.append({"ttft_seconds": ttft_s, "total_seconds": ttft_s})
        store = theirs.on_sample(samples[-WINDOW:], store, policy="gorgo-2d") or store
        found = {name: store["defaults"][name] for name in INITIAL}
        assert ours.weights == pytest.approx(found, rel=1e-12)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.lists(st.floats(-5.0, -0.1), min_size=1, max_size=120))
def test_the_search_alone(seed: int, scores: list[float]) -> None:
    ours = EvolutionStrategy(INITIAL, Random(seed))
    theirs = GaussianESTuner(INITIAL, RANGES, sigma_min=0.05, max_steps=STEPS_MAX, seed=seed)
    for score in scores:
        mine, other = ours.propose(), theirs.propose()
        assert mine == (None if other is None else pytest.approx(other, rel=1e-12))
        if mine is None or other is None:
            return
        ours.report(mine, score)
        theirs.report(other, score)
    assert ours.best == pytest.approx(theirs.best_params, rel=1e-12)


def test_tuner_finds_better_weights() -> None:
    """Where a heavy wire makes it slow, the wire's weight falls."""
    tuner, dice = OnlineTuner(INITIAL, Random(3)), Random(4)
    for _ in range(WINDOW + 60 * HOP):
        tuner.on_sample(tuner.weights["rtt"] + dice.random() * 0.01)
    assert tuner.weights["rtt"] < 0.5 * INITIAL["rtt"]
