"""No request leaves reference cycles, since the garbage collector's walk delays all requests: cycles are counted
here.
"""

from __future__ import annotations

import asyncio
import gc
import os

import pytest
from inprocess import HOP_KEY, Engine, both, chat, send, streaming, topology

OURS = ("farhop", "global_lb", "regional_lb")
TIMES = 5


async def test_requests_probes_and_scrapes_leave_no_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "FARHOP_TEST_HOP", HOP_KEY)
    async with Engine().running() as engine, both(engine, topology()) as b:
        await asyncio.sleep(0.2)  # garbage left by the start is collected
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for behaviour in ("serve", "error", "die", "vanish"):
                engine.behaviour = behaviour
                for body in (None, streaming(), b"{"):
                    for _ in range(TIMES):
                        await send(b.entry, chat(body=body) if body is not None else chat())
            await b.at_rest()
            await asyncio.sleep(0.2)
            gc.collect()
            left = {f"{_module(one)}.{getattr(one, '__qualname__', type(one).__name__)}" for one in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert [name for name in left if name.startswith(OURS)] == []


def _module(one: object) -> str:
    """Of a function its own, else of its type."""
    return str(getattr(one, "__module__", "") or type(one).__module__)
