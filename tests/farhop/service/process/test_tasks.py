from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import farhop.service.process.tasks
from farhop.service.process.tasks import Tasks, all_of, in_turns, until


async def test_closing_ends_all_and_waits_for_it() -> None:
    tasks, ended = Tasks(), []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    tasks.start(work("a"), "a")
    tasks.start(work("b"), "b")
    await asyncio.sleep(0)
    assert len(tasks) == 2
    await tasks.close()
    await tasks.close()
    assert sorted(ended) == ["a", "b"]
    assert len(tasks) == 0


async def test_a_task_that_takes_its_cancellation_for_something_else_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an HTTP client's time-out does that fires in the same turn of the loop."""
    monkeypatch.setattr(farhop.service.process.tasks, "_CANCEL_AGAIN_S", 0.01)
    tasks, taken = Tasks(), []

    async def work() -> None:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                taken.append(1)
        await asyncio.Event().wait()

    tasks.start(work(), "work")
    await asyncio.sleep(0)
    async with asyncio.timeout(60.0):
        await tasks.close()
    assert len(taken) == 2


async def test_a_failure_is_reported_at_once_and_leaves_the_others() -> None:
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: seen.append(context))
    tasks = Tasks()

    async def fail() -> None:
        raise ZeroDivisionError

    other = tasks.start(asyncio.Event().wait(), "other")  # type: ignore[arg-type]
    await asyncio.wait({tasks.start(fail(), "the watcher")})
    await asyncio.sleep(0)
    assert [type(context["exception"]) for context in seen] == [ZeroDivisionError]
    assert "the watcher" in seen[0]["message"]
    assert not other.done()
    await tasks.close()
    assert len(seen) == 1


async def test_settling_waits_and_cancels_nothing() -> None:
    tasks, done = Tasks(), []

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.append(1)

    tasks.start(work(), "work")
    await tasks.join()
    assert done == [1]


@pytest.mark.parametrize("bad", range(3))
async def test_every_step_is_taken_and_the_first_error_is_raised(bad: int) -> None:
    taken: list[int] = []

    async def step(n: int) -> None:
        taken.append(n)
        if n >= bad:
            raise OSError(f"step {n}")

    with pytest.raises(OSError, match=f"step {bad}"):
        await all_of(*(lambda n=n: step(n) for n in range(3)))
    assert taken == [0, 1, 2]


async def test_being_cancelled_is_no_error_of_a_step() -> None:
    async def step() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await all_of(step)


async def test_others_run_where_long_work_stops() -> None:
    seen: list[str] = []

    def long() -> Iterator[None]:
        for n in range(3):
            seen.append(f"long {n}")
            yield

    async def other() -> None:
        for n in range(3):
            seen.append(f"other {n}")
            await asyncio.sleep(0)

    await asyncio.gather(in_turns(long()), other())
    assert seen == ["long 0", "other 0", "long 1", "other 1", "long 2", "other 2"]


async def test_until_polls_a_condition_and_ends_at_its_timeout() -> None:
    looks = iter([False, False, True])
    assert await until(lambda: next(looks), 60.0)
    assert list(looks) == []
    assert not await until(lambda: False, 0.0)
    assert await until(lambda: True, 0.0), "it may be so already"
