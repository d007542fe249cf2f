"""What a request takes at the least, by how many are under way and how many leave."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.occupancy import AGES, LEFT_LEAST, Occupancy
from farhop.balance.ledger import Ledger, Load, Reservation

RUN = settings(max_examples=100, deadline=None, derandomize=True)


class Target:
    """One target whose ledger tells an occupancy."""

    def __init__(self) -> None:
        self.occupancy, self.now, self._load = Occupancy(), 0.0, Load()
        self._ledger, self._ids, self._next = Ledger(self._changed), [], 0

    def _changed(self, _target: str, load: Load) -> None:
        self.occupancy.changed(self._load, load, self.now)
        self._load = load

    def comes(self, now: float, *, begins: bool = True) -> None:
        self.now, name = now, f"q{self._next}"
        self._next += 1
        self._ledger.reserve(name, Reservation("gpu", 10, 100))
        if begins:
            self._ledger.began(name, now)
        self._ids.append(name)

    def leaves(self, now: float, *, newest: bool = False) -> None:
        self.now = now
        self._ledger.release(self._ids.pop(-1 if newest else 0))

    def takes_ms(self, now: float) -> float:
        return self.occupancy.service_ms(now)


def test_until_a_request_has_left_the_estimate_follows_the_ages_of_running_ones() -> None:
    target = Target()
    assert target.takes_ms(0.0) == 0.0
    for second in range(8):
        target.comes(float(second))
    assert target.takes_ms(8.0) == pytest.approx(AGES * 4_500.0)  # 1 to 8 s
    target = Target()
    target.comes(0.0)
    assert target.takes_ms(8.0) == pytest.approx(8_000.0)  # a single one: it has taken that


def test_requests_under_way_count_by_their_age_until_as_many_have_left() -> None:
    """Every other one ends at once, the others do not: of those that ended the mean is nothing."""
    target = Target()
    for n in range(40):
        target.comes(n / 10)
        if n % 2:
            target.leaves(n / 10, newest=True)
    assert target.takes_ms(4.0) == 0.0  # 20 of 40 left
    target.comes(4.0)
    ages_s = sum(4.0 - n / 10 for n in range(0, 40, 2))
    assert target.takes_ms(4.0) == pytest.approx(1e3 * ages_s / 20)


def test_requests_of_long_ago_are_forgotten() -> None:
    target = Target()
    for n in range(int(10 * LEFT_LEAST)):
        target.comes(n * 1.0)
        target.leaves(n * 1.0 + 0.1)
    for _ in range(int(2 * LEFT_LEAST)):
        target.comes(10 * LEFT_LEAST)
    took_ms = target.takes_ms(10 * LEFT_LEAST + 10.0)
    assert took_ms == pytest.approx((0.1 + 20.0) * 1e3, rel=0.01)  # seconds under way at LEFT_LEAST of those that left


def test_a_new_set_of_targets_replaces_the_running_requests_and_keeps_learned_times() -> None:
    target = Target()
    for _ in range(4):
        target.comes(0.0)
    occupancy = target.occupancy
    occupancy.are_now([Load(in_flight=2, decoding=2, began_s=0.0), Load()], 10.0)
    assert occupancy.in_flight == 2
    assert occupancy.service_ms(20.0) == pytest.approx(min(60.0, AGES * 20.0) * 1e3)
    occupancy.are_now([], 20.0)
    assert occupancy.service_ms(30.0) == 0.0


def test_requests_without_a_first_token_give_no_estimate() -> None:
    target = Target()
    for _ in range(4):
        target.comes(0.0, begins=False)
    assert target.takes_ms(60.0) == 0.0


@RUN
@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.sampled_from(("comes", "begins", "leaves"))), max_size=200))
def test_it_is_never_negative_nor_above_what_ages_allow_and_looking_changes_nothing(
    steps: list[tuple[float, str]],
) -> None:
    seen, unseen, now, began = Target(), Target(), 0.0, []
    for gap_s, what in steps:
        now += gap_s
        for target in (seen, unseen):
            if what != "leaves":
                target.comes(now, begins=what == "begins")
            elif target.occupancy.in_flight:
                target.leaves(now)
        began = [*began, now] if what == "begins" else began
        took_ms = seen.takes_ms(now)
        assert 0.0 <= took_ms <= AGES * (now - min(began, default=now)) * 1e3 + 1e-6
    assert seen.takes_ms(now + 1.0) == pytest.approx(unseen.takes_ms(now + 1.0))
