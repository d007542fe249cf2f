"""`make demo`: boots the default world and plays its scenes, a checked line each; real processes, real kills.

The last line counts the checks that held, and the exit code says the same.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farhop_lab import scenes_home as home
from farhop_lab import scenes_ocean as ocean
from farhop_lab.stage import Stage
from farhop_lab.world import World, WorldError, WorldSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

SCENES: tuple[Callable[[Stage], Coroutine[Any, Any, None]], ...] = (
    home.at_home,
    home.eu_stays,
    home.unlawful,
    home.replica_killed,
    home.store_stopped,
    home.one_trace,
    ocean.everyone_at_home,
    ocean.prefix_across_the_ocean,
    ocean.overflow,
    ocean.region_killed,
    ocean.link_frozen,
)


async def run(say: Callable[[str], None] = print) -> bool:
    """Boot, play every scene, stop; True if every check held."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="farhop-demo-") as folder:
        try:
            async with World(WorldSettings(), Path(folder)) as world:
                regions = ", ".join(world.regions)
                engines = f"{world.settings.replicas} {world.settings.profile} engines each"
                up_s = time.monotonic() - began
                say(f"world: {regions}; {engines}; wire and engines {world.settings.speedup:g} x; up in {up_s:.1f} s")
                stage = Stage(world, say)
                for scene in SCENES:
                    await scene(stage)
        except WorldError as error:
            say(f"demo: the world did not come up: {error}")
            return False
    passed = sum(check.held for check in stage.checks)
    say(f"demo: took {time.monotonic() - began:.0f} s")
    say(f"demo: passed {passed} of {len(stage.checks)}")
    return passed == len(stage.checks)
