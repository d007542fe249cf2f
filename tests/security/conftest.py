from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

# The worlds and both tiers in one process serve here, too.
sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What ships runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}
