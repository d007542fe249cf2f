"""Health as configured: defaults are the machine's, and nonsense is refused by name with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from farhop.balance.health.replica import HealthConfig
from regional_lb.fleet.config import Health


def test_defaults_are_those_of_the_machine() -> None:
    assert Health().thresholds(rise=2, fall=3) == HealthConfig()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"outlier_factor": 1.2}, "1.5 or more"),
        ({"eject_share_max": 1.5}, "eject_share_max"),
        ({"streak": 0}, "streak"),
        ({"slow_start_s": -1}, "slow_start_s"),
    ],
)
def test_nonsense_is_refused_and_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Health(**given)


def test_health_checks_are_switched_off_by_zero() -> None:
    assert Health(outlier_factor=0, slow_start_s=0, panic_share=0).outlier_factor == 0.0
