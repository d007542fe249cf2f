from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

# Raw connections and the relay between them; see tests/farhop/relay.
sys.path.insert(0, str(Path(__file__).parents[1] / "farhop" / "relay"))
sys.path.insert(0, str(Path(__file__).parent))

from relay_stage import Stage


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What ships runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def stage() -> AsyncIterator[Callable[..., Awaitable[Stage]]]:
    """Makes stages; all are taken down and checked at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**settings: Any) -> Stage:
            return await stack.enter_async_context(Stage(**settings))

        yield make
