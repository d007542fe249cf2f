"""`make demo`: starts the default world and runs the demo's parts, a checked line each; real processes, real kills.

The last line counts the checks that held, and so does the exit code.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farhop_lab.demo import checks, entry
from farhop_lab.demo.checker import Checker
from farhop_lab.world.world import World, WorldError, WorldSettings, has_entry_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

PARTS: tuple[Callable[[Checker], Coroutine[Any, Any, None]], ...] = (
    checks.at_home,
    checks.eu_stays,
    checks.unlawful,
    checks.replica_killed,
    checks.store_stopped,
    checks.one_trace,
    checks.everyone_at_home,
    checks.prefix_across_the_ocean,
    checks.overflow,
    checks.region_killed,
    checks.link_frozen,
    entry.led_by_dns,
    entry.entry_drained,
    checks.streams_go_on,
    checks.drilled,
)


async def run(progress: Callable[[str], None] = print) -> bool:
    """Start, run every part, stop; True if every check held."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="farhop-demo-") as folder:
        try:
            async with World(WorldSettings(dns=has_entry_hosts()), Path(folder)) as world:
                regions = ", ".join(world.regions)
                engines = f"{world.settings.replicas} {world.settings.profile} engines each"
                up_s = time.monotonic() - began
                progress(
                    f"world: {regions}; {engines}; wire and engines {world.settings.speedup:g} x; up in {up_s:.1f} s"
                )
                checker = Checker(world, progress)
                for part in PARTS:
                    await part(checker)
        except WorldError as error:
            progress(f"demo: the world did not come up: {error}")
            return False
    passed = sum(check.held for check in checker.checks)
    progress(f"demo: took {time.monotonic() - began:.0f} s")
    progress(f"demo: passed {passed} of {len(checker.checks)}")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if passed < len(checker.checks) and load > 2 * cores:
        progress(f"demo: this machine is busy (load {load:.0f}, {cores} cores): bounds in seconds are for one at rest")
    return passed == len(checker.checks)
