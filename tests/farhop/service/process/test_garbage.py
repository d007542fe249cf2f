"""When the collector walks everything: at rest, or after an hour; and that new objects are walked few at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from farhop.service.process.garbage import DUE, EVERY_S, IDLE_SHARE, LATEST_S, NEW, Garbage

BUSY_S = IDLE_SHARE * EVERY_S * 2


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collector_left_as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    yield
    gc.set_threshold(*before)
    gc.freeze()  # as in tests/conftest.py: thawed, a worker would scan everything that it collected again and again


def left_behind() -> weakref.ref[Cycle]:
    """A cycle that outlived a walk of new objects."""
    one = Cycle()
    gc.collect(0)
    return weakref.ref(one)


def after_walks(count: int) -> None:
    for _ in range(count):
        gc.collect(0)


async def test_new_objects_are_walked_few_at_a_time_and_nothing_else_is() -> None:
    garbage = Garbage()
    garbage.open()
    old = left_behind()
    walked: list[int] = []
    gc.callbacks.append(lambda phase, info: walked.append(info["generation"]) if phase == "stop" else None)
    try:
        kept = [[] for _ in range(NEW * 30)]
    finally:
        gc.callbacks.pop()
        garbage.close()
    assert len(kept) == NEW * 30
    assert len(walked) >= 20
    assert set(walked) == {0}
    assert old() is not None


def test_old_garbage_is_collected_once_the_process_is_at_rest() -> None:
    garbage, old = Garbage(), left_behind()
    garbage.look(0.0, 0.0)
    assert old() is not None  # few objects are new
    after_walks(DUE)
    garbage.look(1.0, BUSY_S)
    assert old() is not None  # requests would wait for it
    garbage.look(2.0, BUSY_S)
    assert old() is None


def test_a_process_that_is_never_at_rest_collects_once_an_hour() -> None:
    garbage, old = Garbage(), left_behind()
    for second in range(1, int(LATEST_S / EVERY_S)):
        garbage.look(second * EVERY_S, second * BUSY_S)
    assert old() is not None
    garbage.look(LATEST_S, LATEST_S)
    assert old() is None
    again = left_behind()
    garbage.look(LATEST_S + 1.0, LATEST_S * 2)
    assert again() is not None
