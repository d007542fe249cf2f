"""Each tier's instruments bear its name, and say what is amiss with them."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from farhop.service.clock import Clock
from farhop.service.config import Limits
from farhop.service.instruments import Instruments


def instruments(tier: str) -> Instruments:
    config: Any = SimpleNamespace(region="virginia", instance="r1", limits=Limits())
    return Instruments(tier, "pick", config, Clock(Random(1)), Random(1), SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", ["global", "regional"])
async def test_what_is_counted_bears_the_tiers_name(tier: str) -> None:
    made = instruments(tier)
    made.telemetry.begin()
    assert made.metrics.in_flight == 1
    page = made.metrics.render().decode()
    assert f'tier="{tier}"' in page
    assert 'region="virginia"' in page
    await made.tracing.close(0.0)


async def test_a_setting_of_telemetry_that_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "no_such_sampler")
    made = instruments("regional")
    problems = made.tracing.problems
    assert problems
    assert problems[0] in "".join(capfd.readouterr()).replace("\\'", "'")
    await made.tracing.close(0.0)
