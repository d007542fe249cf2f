"""The update budget alone: holds, doublings, one skip in a window, changes of attributes."""

from __future__ import annotations

from math import inf

import pytest

from entry_anycast.announcing.budget import Budget, BudgetConfig


def test_a_hold_doubles_while_the_route_does_not_stand_and_is_forgotten_once_it_does() -> None:
    budget, now = Budget(BudgetConfig(window_s=900.0, hold_s=900.0, hold_max_s=3600.0)), 0.0
    held = []
    for stood_s in (0.0, 10.0, 10.0, 10.0, 900.0):
        budget.announced(now)
        now += stood_s
        budget.withdrawn(now)
        held.append(budget.announce_at(now, last=False) - now)
        now = budget.hold_until
    assert held == [900.0, 1800.0, 3600.0, 3600.0, 900.0]


def test_the_last_healthy_site_skips_one_hold_in_a_window() -> None:
    budget = Budget(BudgetConfig())
    budget.announced(0.0)
    budget.withdrawn(10.0)
    assert budget.announce_at(20.0, last=True) == 20.0
    budget.announced(20.0)
    budget.withdrawn(30.0)
    assert budget.announce_at(40.0, last=True) == 920.0


def test_attributes_change_so_often_in_a_window_and_no_more() -> None:
    budget = Budget(BudgetConfig(changes=2))
    for at in (0.0, 5.0):
        assert budget.change_at(at) <= at
        budget.changed(at)
    assert budget.change_at(6.0) == 900.0


@pytest.mark.parametrize(("left_s", "hold"), [(0.0, float("-inf")), (60.0, 160.0), (1e9, 100.0 + 14_400.0)])
def test_hold_loaded_from_disk_is_clipped_to_its_bounds(left_s: float, hold: float) -> None:
    budget = Budget(BudgetConfig())
    budget.remember(left_s, 1, 100.0)
    assert budget.hold_until == hold


def test_a_process_killed_while_it_announced_counts_as_a_withdrawal() -> None:
    """What ends its route is the watchdog, or the session's end: the budget of the next one must know."""
    budget = Budget(BudgetConfig())
    budget.remember(-inf, 0, 100.0, announced_s=5.0)
    assert (budget.announce_at(100.0, last=False), budget.doublings) == (1000.0, 0)
    again = Budget(BudgetConfig())
    again.remember(-3.0, 0, 5000.0, announced_s=3.0)  # announced when the hold was over, and killed soon after
    assert (again.announce_at(5000.0, last=False), again.doublings) == (6800.0, 1)
    stood = Budget(BudgetConfig())
    stood.remember(-5000.0, 2, 9000.0, announced_s=5000.0)
    assert (stood.announce_at(9000.0, last=False), stood.doublings) == (9900.0, 0)


def test_a_hold_is_not_skipped_again_by_a_restart() -> None:
    budget = Budget(BudgetConfig())
    budget.remember(880.0, 0, 100.0, skipped_s=20.0)
    assert budget.announce_at(100.0, last=True) == 980.0
    budget.remember(880.0, 0, 100.0, skipped_s=1e9)
    assert budget.announce_at(100.0, last=True) == 100.0
