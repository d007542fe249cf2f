"""Bounds: what stands there by default holds together, and nonsense is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from regional_lb import admission
from regional_lb.config import Foreign, Queue, Watch
from regional_lb.flow import FlowConfig


def test_defaults_are_those_of_the_machine() -> None:
    assert (Queue().wait_s, Foreign().reserve_share, Watch().rise) == (30.0, 0.1, 2)
    machine, queue = FlowConfig("r"), Queue()
    assert (queue.stands_s, queue.standing_wait_s) == (machine.queue_stands_s, machine.queue_standing_wait_s)
    assert admission.Foreign(**Foreign().model_dump()) == machine.foreign


def test_the_last_resort_is_kept_no_more_from_than_any_guest() -> None:
    assert Foreign(reserve_share=0.2, last_resort_reserve_share=0.2)
    with pytest.raises(ValidationError, match=r"last_resort_reserve_share 0\.05 is above reserve_share 0\.01: set it"):
        Foreign(reserve_share=0.01)


@pytest.mark.parametrize(("part", "field"), [(Queue, "wait_s"), (Watch, "probe_s"), (Foreign, "reserve_share")])
def test_nonsense_is_refused(part: type[Queue] | type[Watch] | type[Foreign], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        part(**{field: -1})
