"""The bounds a global balancer ships with are those of the design."""

from __future__ import annotations

import msgspec
import pytest

from global_lb.bounds import FlowConfig, Spill


def test_a_region_is_hot_from_nine_tenths_and_cold_again_below_three_quarters() -> None:
    guard = Spill().guard
    assert (guard.spill_at, guard.return_at, guard.hold_s, guard.ramp_per_s) == (0.90, 0.75, 2.0, 0.05)


def test_bounds_do_not_change_while_it_runs() -> None:
    config = FlowConfig("paris")
    with pytest.raises(AttributeError):
        config.held_max = 1  # type: ignore[misc]
    assert msgspec.structs.replace(config, held_max=1).held_max == 1
