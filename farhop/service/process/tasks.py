"""Background tasks (watching, reporting): started here, logged when they fail, cancelled together.

A task that is not awaited fails silently, and a balancer whose watcher is dead looks alive. Never restarts a failed
task: the failure is a bug, and is logged as one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

_CANCEL_AGAIN_S = 0.5
_LOOK_S = 0.01


class Tasks:
    """The background tasks of one component."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine until it ends, or until `close`. An exception goes to the event loop's exception handler at
        once.
        """
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            problem = {"message": f"{task.get_name()} failed and has ended", "exception": error, "task": task}
            task.get_loop().call_exception_handler(problem)

    async def join(self) -> None:
        """Wait until all tasks have ended by themselves."""
        while self._running:
            await asyncio.wait(tuple(self._running))

    async def close(self) -> None:
        """Cancel all and wait for their end. Idempotent."""
        while self._running:
            for task in self._running:
                task.cancel()
            # Again after a while: a cancellation that meets a time-out of the task's own may be taken for that.
            await asyncio.wait(tuple(self._running), timeout=_CANCEL_AGAIN_S)

    def __len__(self) -> int:
        return len(self._running)


async def in_turns(work: Iterator[None]) -> None:
    """Run work that yields where others may run, and let them run there."""
    for _ in work:
        await asyncio.sleep(0)


async def until(seen: Callable[[], bool], within_s: float) -> bool:
    """Poll until a condition holds, for a bounded time; returns whether it did."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while not seen():
        if loop.time() >= end:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


async def all_of(*steps: Callable[[], Awaitable[object]]) -> None:
    """Take every step, in order, whatever becomes of the one before; raises the first error at the end."""
    first: Exception | None = None
    for step in steps:
        try:
            await step()
        except Exception as error:  # noqa: BLE001 - what is left must be closed, too; the first error is raised below
            first = first or error
    if first is not None:
        raise first
