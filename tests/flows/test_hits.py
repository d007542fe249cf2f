"""What is believed to be cached in each region beside what is found there, live: conversations over three regions.

Prints a line a region (`pytest -s`); the same figures stand in `farhop status` and in the metrics.
"""

from __future__ import annotations

import re
import urllib.request
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tests.conftest import RunningWorld

TALKS, TURNS, TURN_BYTES = 3, 4, 1500
# The tolerance: both tiers count in bytes, an engine in blocks of tokens.
OFF_AT_MOST, OFF_TOKENS = 0.35, 200.0


def _figures(running: RunningWorld, seen_from: str) -> dict[str, tuple[float, float]]:
    admin = running.world.regions[seen_from].global_admin
    status: dict[str, Any] = msgspec.json.decode(urllib.request.urlopen(f"{admin}/status").read())
    return {one["region"]: (one["predicted_hit_tokens"], one["actual_hit_tokens"]) for one in status["regions"]}


def test_predicted_and_actual_hits_agree_in_every_region(running: RunningWorld) -> None:
    before = {name: _figures(running, name) for name in running.world.regions}
    for name in running.world.regions:
        for talk in range(TALKS):
            result = ""
            for turn in range(TURNS):
                result += f"{name} {talk} {turn} " + f"word{talk}{turn} " * (TURN_BYTES // 8)
                assert running.ask(name, "anywhere", result, max_tokens=4).ok
    after = {name: _figures(running, name) for name in running.world.regions}
    sums = {
        region: [sum(after[entry][region][n] - before[entry][region][n] for entry in after) for n in (0, 1)]
        for region in after
    }
    for region, (believed, found) in sums.items():
        print(f"\n{region}: believed {believed:.0f}, found {found:.0f} tokens", end="")
    # Later turns repeat the earlier ones: about 2,000 tokens in each of the nine conversations.
    assert sum(found for _, found in sums.values()) > 9 * 500
    for region, (believed, found) in sums.items():
        assert abs(believed - found) <= OFF_AT_MOST * found + OFF_TOKENS, region
    for entry, regions in after.items():
        page = urllib.request.urlopen(f"{running.world.regions[entry].global_admin}/metrics").read().decode()
        for n, metric in enumerate(("predicted", "actual")):
            found = re.findall(rf'farhop_region_prefix_{metric}_tokens_total{{[^}}]*target="(\w+)"[^}}]*}} (\S+)', page)
            assert {region: float(one) for region, one in found} == {
                region: figures[n] for region, figures in regions.items() if region in dict(found)
            }
            assert entry in dict(found)
