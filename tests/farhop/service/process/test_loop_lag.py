"""Whatever holds the loop shows."""

from __future__ import annotations

import asyncio
import time

from farhop.service.process import loop_lag
from farhop.service.process.loop_lag import LoopLag


def test_loop_lag_gives_the_worst_recent_delay_and_the_total() -> None:
    made = LoopLag()
    assert made.worst_s() == made.total_s == 0.0
    for late_s in (0.001, 0.5, -0.001, 0.002):
        made.looked(late_s)
    assert made.worst_s() == 0.5
    assert round(made.total_s, 6) == 0.503
    for _ in range(loop_lag.KEPT):
        made.looked(0.0)
    assert made.worst_s() == 0.0


async def test_a_loop_that_is_held_is_late() -> None:
    made = LoopLag()
    made.open()
    time.sleep(2 * loop_lag.EVERY_S)  # noqa: ASYNC251 - it is what is measured
    while not made.total_s:
        await asyncio.sleep(0.01)
    await made.close()
    assert made.worst_s() >= 0.9 * loop_lag.EVERY_S
