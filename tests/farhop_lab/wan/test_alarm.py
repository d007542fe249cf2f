"""The alarm rings in order, not early, by the kernel's timer, and not after it is closed."""

from __future__ import annotations

import asyncio
import sys

import pytest

from farhop_lab.wan.alarm import SLACK_S, Alarm, _KernelTimer, _LoopTimer

KINDS = [True, False] if sys.platform == "linux" else [False]


@pytest.mark.parametrize("precise", KINDS)
async def test_alarm_fires_in_order_and_never_early(precise: bool) -> None:
    alarm = Alarm(precise=precise)
    seen: list[tuple[float, float]] = []
    done = asyncio.Event()
    began = alarm.now()
    for after in (0.03, 0.001, 0.02, 0.001, -1.0, 0.0105, 0.04):
        due = began + after
        alarm.at(due, lambda due=due: seen.append((due, alarm.now())))  # type: ignore[misc]
    alarm.at(began + 0.05, done.set)
    await asyncio.wait_for(done.wait(), 60.0)
    alarm.close()
    assert [due for due, _ in seen] == sorted(due for due, _ in seen)
    assert len(seen) == 7
    assert all(at >= due - SLACK_S - 1e-6 for due, at in seen)


@pytest.mark.skipif(sys.platform != "linux", reason="needs timerfd")
async def test_alarm_uses_a_kernel_timer_with_nanoseconds_and_no_loop_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How late it rings is the machine's affair; that it does not go through timers of whole milliseconds is ours."""
    set_: list[tuple[int, int]] = []
    ring = _KernelTimer.set

    def noted(timer: _KernelTimer, due: float | None) -> None:
        ring(timer, due)
        set_.append((timer._value.seconds, timer._value.nanoseconds))

    monkeypatch.setattr(_KernelTimer, "set", noted)
    monkeypatch.setattr(_LoopTimer, "set", lambda *_: pytest.fail("a timer of the loop was asked for"))
    alarm, rung = Alarm(), asyncio.Event()
    due = alarm.now() + 0.0012345
    alarm.at(due, rung.set)
    asked = divmod(int(due * 1e9), 1_000_000_000)
    assert set_ == [asked]
    await asyncio.wait_for(rung.wait(), 60.0)
    # Some kernels fire before the moment, or once more after being disarmed. Then the alarm is set again.
    assert set_[-1] == (0, 0), "nobody waits any more: it is disarmed"
    assert set(set_) == {asked, (0, 0)}
    alarm.close()


async def test_an_earlier_alarm_may_be_set_while_another_waits_and_within_a_callback() -> None:
    alarm = Alarm()
    seen: list[str] = []
    done = asyncio.Event()
    now = alarm.now()
    alarm.at(now + 60.0, lambda: seen.append("the one that waits"))

    def second() -> None:
        seen.append("second")
        done.set()

    def first() -> None:
        seen.append("first")
        alarm.at(alarm.now() + 0.005, second)

    alarm.at(now + 0.005, first)
    await asyncio.wait_for(done.wait(), 60.0)
    alarm.close()
    assert seen == ["first", "second"]


async def test_failing_callback_does_not_stop_the_others() -> None:
    alarm = Alarm()
    done = asyncio.Event()
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))

    def fail() -> None:
        raise RuntimeError("broken")

    alarm.at(alarm.now() + 0.002, fail)
    alarm.at(alarm.now() + 0.010, done.set)
    await asyncio.wait_for(done.wait(), 60.0)
    alarm.close()
    assert [str(fault) for fault in faults] == ["broken"]


@pytest.mark.parametrize("precise", KINDS)
async def test_closed_alarm_does_not_fire(precise: bool) -> None:
    alarm = Alarm(precise=precise)
    seen: list[int] = []
    alarm.at(alarm.now() + 0.005, lambda: seen.append(1))
    alarm.close()
    alarm.close()
    alarm.at(alarm.now() + 0.005, lambda: seen.append(2))
    await asyncio.sleep(0.02)
    assert seen == []
