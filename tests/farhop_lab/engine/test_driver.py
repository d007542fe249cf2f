"""The live loop on a clock and a loop of the test's own: no drift, bounded lag, nothing after an abort."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.scheduler import EngineCore
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.driver import LAG_MAX_S, Driver

GPU = replace(
    PROFILES["l4"],
    step_overhead_ms=0,
    decode_floor_ms=10,
    decode_ms_per_sequence=0,
    kv_read_ms_per_token=0,
    prefill_ms_per_token=0,
)


class Handle:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class HandLoop:
    """A loop whose one pending call is made by hand, `late_s` after it was due."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pending: tuple[float, Callable[..., None], tuple[Any, ...], Handle] | None = None

    def call_soon(self, call: Callable[..., None], *args: Any) -> Handle:
        return self.call_later(0, call, *args)

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> Handle:
        assert self.pending is None
        handle = Handle()
        self.pending = (self.now + delay_s, call, args, handle)
        return handle

    def turn(self, late_s: float = 0.0) -> None:
        assert self.pending is not None
        due, call, args, handle = self.pending
        self.pending = None
        self.now = max(self.now, due + late_s)
        if not handle.cancelled:
            call(*args)


class Sink:
    def __init__(self) -> None:
        self.events: list[tuple[float, str | None]] = []

    def token(self, text: str, finished: str | None, now: float) -> None:
        self.events.append((round(now - 100, 6), finished))


def _driver() -> tuple[Driver, HandLoop, EngineCore]:
    loop, core = HandLoop(), EngineCore(GPU)
    return Driver(core, cast(asyncio.AbstractEventLoop, loop), lambda: loop.now), loop, core


def _sequence(name: str, tokens: int = 3) -> Sequence:
    return Sequence(name, EngineRequest(b"x" * 40, max_tokens=tokens, ignore_eos=True), TextModel("m"), GPU)


def test_late_wake_ups_do_not_add_up() -> None:
    driver, loop, core = _driver()
    ear = Sink()
    driver.submit(_sequence("a"), ear)
    loop.turn()
    for _ in range(3):
        loop.turn(late_s=0.004)
    assert ear.events == [(0.014, None), (0.024, None), (0.034, "length")]
    assert loop.pending is None
    assert driver.lag_s == 0
    assert not core.has_work


def test_a_host_far_behind_gives_the_time_up() -> None:
    driver, loop, _ = _driver()
    ear = Sink()
    driver.submit(_sequence("a"), ear)
    loop.turn()
    loop.turn(late_s=LAG_MAX_S * 4)
    loop.turn()
    assert [at for at, _ in ear.events] == [0.21, 0.22]
    assert driver.lag_s == pytest.approx(0.2)


def test_driver_pauses_without_work_and_resumes() -> None:
    driver, loop, _ = _driver()
    for name in "ab":
        ear = Sink()
        driver.submit(_sequence(name, 1), ear)
        loop.turn()
        loop.turn()
        assert len(ear.events) == 1
        assert loop.pending is None
        loop.now += 5


def test_simultaneous_requests_share_the_first_pass() -> None:
    driver, loop, core = _driver()
    ears = [Sink(), Sink()]
    driver.submit(_sequence("a"), ears[0])
    driver.submit(_sequence("b"), ears[1])
    loop.turn()
    loop.turn()
    assert ears[0].events == ears[1].events == [(0.01, None)]
    assert core.counters.steps == 2


def test_after_abort_or_close_nothing_is_emitted() -> None:
    driver, loop, core = _driver()
    left, stays = Sink(), Sink()
    driver.submit(_sequence("left"), left)
    driver.submit(_sequence("stays"), stays)
    loop.turn()
    driver.abort("left")
    driver.abort("left")
    loop.turn()
    assert (left.events, len(stays.events)) == ([], 1)
    assert core.counters.finished["abort"] == 1
    driver.close()
    loop.turn()
    assert len(stays.events) == 1
