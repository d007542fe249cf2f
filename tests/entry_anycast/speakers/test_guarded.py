"""The watchdog's parent side, over real processes: it beats, and what hangs is ended."""

from __future__ import annotations

import asyncio
import os
import signal

from entry_anycast.speakers.guarded import Guarded


async def test_a_guarded_process_lives_while_it_is_fed_and_ends_when_asked() -> None:
    ended = asyncio.Event()
    guarded = Guarded(1.0, ended.set)
    await guarded.start(["exec", "sleep", "60"])
    await asyncio.sleep(1.5)
    assert not ended.is_set()
    assert await guarded.end() is not None
    assert guarded.pid is None


async def test_a_watchdog_that_hangs_is_killed() -> None:
    ended = asyncio.Event()
    guarded = Guarded(0.3, ended.set)
    await guarded.start(["exec", "sleep", "60"])
    assert guarded.pid is not None
    os.kill(guarded.pid, signal.SIGSTOP)
    async with asyncio.timeout(20.0):
        await ended.wait()
    await guarded.end()
