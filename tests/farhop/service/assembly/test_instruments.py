"""Each tier's instruments bear its name, and say what is amiss with them."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from structlog.testing import capture_logs

from farhop.service.assembly.instruments import Instruments
from farhop.service.config.process import Limits
from farhop.service.process.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping


def instruments(tier: str) -> Instruments:
    config: Any = SimpleNamespace(region="virginia", instance="r1", limits=Limits())
    return Instruments(tier, "pick", config, Clock(Random(1)), Random(1), SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", ["global", "regional"])
async def test_metrics_are_labelled_with_the_tier(tier: str) -> None:
    made = instruments(tier)
    made.telemetry.begin()
    assert made.metrics.in_flight == 1
    page = made.metrics.render().decode()
    assert f'tier="{tier}"' in page
    assert 'region="virginia"' in page
    await made.tracing.close(0.0)


@pytest.fixture
def said() -> Iterator[list[MutableMapping[str, Any]]]:
    """What is logged, however the process's log was set up before."""
    before = structlog.get_config()
    structlog.reset_defaults()
    with capture_logs() as entries:
        yield entries
    structlog.configure(**before)


async def test_unusable_telemetry_setting_is_logged(
    monkeypatch: pytest.MonkeyPatch, said: list[MutableMapping[str, Any]]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "no_such_sampler")
    made = instruments("regional")
    assert made.tracing.problems
    assert [entry["problem"] for entry in said] == list(made.tracing.problems)
    await made.tracing.close(0.0)
