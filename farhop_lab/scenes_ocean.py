"""The demo's scenes (g) to (k), an ocean apart: home first, the far hop where it pays, overflow, a region lost, a link
frozen. What crosses between regions crosses the emulated ocean.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from farhop_lab.stage import region_of

if TYPE_CHECKING:
    from farhop_lab.client import Result
    from farhop_lab.stage import Stage

EACH = 12  # clients in each region at once
FLOOD = 240  # requests, faster than Tokyo can read their prompts
FLOOD_EVERY_S = 0.004
QUEUE_MAX = 80
MOVES_WITHIN_S = 2.0
PREFIX_BYTES = 4096  # what a node of the prefix trie covers at most
CALM_S = 1.0  # reports are then of a region at rest, and no wait is in doubt any more
PATIENCE_S = 15.0


async def everyone_at_home(stage: Stage) -> None:
    """(g) Clients in each region are each served at home."""
    asks = [stage.ask(name, "anywhere", f"client {i}") for name in stage.names for i in range(EACH)]
    results = await asyncio.gather(*asks)
    served = [region_of(result) for result in results]
    home = sum(region == stage.names[i // EACH] for i, region in enumerate(served))
    seen = f"{home} of {len(results)}"
    want = f"{len(results)} of {len(results)}"
    stage.check("g", f"{EACH} clients in each region at once, served at home", want, seen, seen == want)


async def prefix_across_the_ocean(stage: Stage) -> None:
    """(h) A long conversation returns to where its prefix is cached, across an ocean; a short one stays at home."""
    long_talk = "The minutes of the meeting, in full, with every word that anybody said in it. " * 1400
    names = sorted(stage.world.regions)
    before = {name: (await _known(stage, name, name))["prefix_nodes"] for name in names}
    first = await stage.ask("tokyo", "anywhere", long_talk)
    # So long a prompt goes wherever GPUs were measured to be a little faster; what counts is that it returns there.
    begun = region_of(first)
    entry = "virginia" if begun != "virginia" else "tokyo"
    history = [{"role": "user", "content": long_talk}, {"role": "assistant", "content": first.text}]
    end, nodes = time.monotonic() + PATIENCE_S, before.get(begun, 0) + len(long_talk) // PREFIX_BYTES
    while time.monotonic() < end and (await _known(stage, begun, entry))["prefix_nodes"] < nodes:
        await asyncio.sleep(0.05)  # until the region has told what it holds
    await asyncio.sleep(CALM_S)
    turn = await stage.ask(entry, "anywhere", "And what was decided?", history=history)
    cached = turn.usage.cached_tokens if turn.usage is not None and turn.usage.cached_tokens is not None else 0
    total = turn.usage.prompt_tokens if turn.usage is not None else 0
    what = f"a long talk begun in {begun} goes on from {entry}"
    stage.check("h", what, begun, region_of(turn), region_of(turn) == begun)
    stage.check("h", "its prompt tokens found in the KV cache there", "more than 90 %", f"{cached} of {total}",
                total > 0 and cached > 0.9 * total)  # fmt: skip
    await stage.ask("tokyo", "anywhere", "Hello there.")
    short = await stage.ask("virginia", "anywhere", "Hello there.")
    stage.check("h", "a short one, cached there too, stays at home", "virginia", region_of(short),
                region_of(short) == "virginia")  # fmt: skip


async def overflow(stage: Stage) -> None:
    """(i) Tokyo overloaded: the overflow is served elsewhere, nothing fails nor strays, its queue stays bounded."""
    filler = "Far too much to read for one region alone, and yet it must be read. " * 110
    free: list[asyncio.Task[Result]] = []
    for i in range(FLOOD):
        free.append(asyncio.create_task(stage.ask("tokyo", "anywhere", f"{i} {filler}", max_tokens=200)))
        await asyncio.sleep(FLOOD_EVERY_S)
    bound = [asyncio.create_task(stage.ask("tokyo", "japan-only", f"{i} {filler}", max_tokens=24)) for i in range(12)]
    longest = 0
    while not all(task.done() for task in (*free, *bound)):
        status = await stage.status(stage.world.regions["tokyo"].regional_admin)
        longest = max(longest, status["queued_requests"])
        await asyncio.sleep(0.05)
    where = Counter(region_of(task.result()) for task in free)
    lawful = Counter(region_of(task.result()) for task in bound)
    failed = sum(not task.result().ok for task in (*free, *bound))
    told = ", ".join(f"{region} {count}" for region, count in where.most_common())
    stage.check("i", f"{FLOOD} requests flood tokyo: failed", "0 failed", f"{failed} failed", failed == 0)
    stage.check(
        "i", "the overflow is served elsewhere", "tokyo and others", told, len(where) > 1 and where["tokyo"] > 0
    )
    stage.check("i", "japan-only, in the midst of it", "tokyo alone", ", ".join(lawful), set(lawful) == {"tokyo"})
    stage.check("i", "tokyo's own queue", f"at most {QUEUE_MAX}", f"{longest}", longest <= QUEUE_MAX)


async def region_killed(stage: Stage) -> None:
    """(j) Tokyo killed, balancers and all: nothing not yet started fails; back, it is used again, paced."""
    tokyo = stage.world.regions["tokyo"]
    others = [stage.world.regions[name].entry for name in stage.names if name != "tokyo"]
    begun: list[None] = []
    filler = "Something to chew on for a while. " * 200
    asks = [
        asyncio.create_task(
            stage.stream("tokyo", "anywhere", f"{i} {filler}", max_tokens=120, entries=others, begun=begun)
        )
        for i in range(36)
    ]
    while len(begun) < 6:
        await asyncio.sleep(0.005)
    children = [*tokyo.engines, tokyo.regional, tokyo.global_]
    await asyncio.gather(*(child.kill() for child in children if child is not None))
    asks += [asyncio.create_task(stage.stream("tokyo", "anywhere", f"after {i}", entries=others)) for i in range(12)]
    results = await asyncio.gather(*asks)
    lost = sum(not result.ok and pieces == 0 for pieces, result in results)
    started = sum(not result.ok and pieces > 0 for pieces, result in results)
    seen = f"{lost} lost of {len(results)} ({started} had started)"
    stage.check("j", "tokyo killed, all of it: requests not started", "0 lost", seen, lost == 0)
    shares: list[float] = []
    await _until_down(stage, "tokyo", "frankfurt")  # who is only missed for a moment comes back at once
    watching = asyncio.create_task(_watch_return(stage, "tokyo", "frankfurt", shares))
    await stage.world.start_engines("tokyo")
    await stage.world.start_balancers("tokyo")
    await stage.world.wait_until_serving(frozenset(stage.names))
    await watching
    paced = len(shares) > 1 and shares[0] < 1.0 == shares[-1] and shares == sorted(shares)
    seen = f"{shares[0]:.0%} at first, then {shares[-1]:.0%}".replace("%", " %") if shares else "never up"
    stage.check("j", "tokyo comes back for a growing share of requests", "less than all, then all", seen, paced)
    # From frankfurt, japan's own tenant has nowhere else to go; everybody else comes back at the pace of the guard.
    result = await stage.ask("frankfurt", "japan-only", "Is Tokyo back?")
    stage.check("j", "tokyo is used again", "tokyo", region_of(result), region_of(result) == "tokyo")


async def _known(stage: Stage, region: str, seen_from: str) -> dict[str, Any]:
    """What the global balancer of `seen_from` knows of a region."""
    status = await stage.status(stage.world.regions[seen_from].global_admin)
    known: dict[str, Any] = next(one for one in status["regions"] if one["region"] == region)
    return known


async def _until_down(stage: Stage, region: str, seen_from: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and (await _known(stage, region, seen_from))["state"] != "down":
        await asyncio.sleep(0.02)


async def _watch_return(stage: Stage, region: str, seen_from: str, shares: list[float]) -> None:
    """Note what share of requests goes to `region` gladly, from when it is up again until they all do."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and (not shares or shares[-1] < 1.0):
        known = await _known(stage, region, seen_from)
        if known["state"] == "up":
            shares.append(known["cold_share"])
        await asyncio.sleep(0.02)


async def link_frozen(stage: Stage) -> None:
    """(k) The link to Frankfurt frozen: its traffic moves within 2 s, and comes back."""
    ocean = stage.world.ocean
    assert ocean is not None
    before = await _until_served_in(stage, "frankfurt")  # what went before may still weigh on it
    stage.check(
        "k", "not-us asks in virginia, before", "frankfurt", region_of(before), region_of(before) == "frankfurt"
    )
    ocean.freeze("frankfurt")
    frozen_at = time.monotonic()
    moved_s: float | None = None
    waiting: list[asyncio.Task[Result]] = []
    while moved_s is None and time.monotonic() - frozen_at < 3 * MOVES_WITHIN_S:
        waiting.append(asyncio.create_task(stage.ask("virginia", "not-us", "And now?")))
        await asyncio.wait(waiting[-1:], timeout=0.2)
        if waiting[-1].done() and waiting[-1].result().ok:
            moved_s = time.monotonic() - frozen_at
    seen = "never" if moved_s is None else f"{moved_s:.1f} s, {region_of(waiting[-1].result())}"
    stage.check("k", "the link to frankfurt frozen: its traffic moves", f"within {MOVES_WITHIN_S:g} s", seen,
                moved_s is not None and moved_s <= MOVES_WITHIN_S)  # fmt: skip
    stuck = await asyncio.gather(*waiting)
    served = sum(result.ok for result in stuck)
    stage.check("k", "requests that were on the frozen link meanwhile", f"{len(stuck)} served", f"{served} served",
                served == len(stuck))  # fmt: skip
    ocean.heal("frankfurt")
    back = await _until_served_in(stage, "frankfurt")
    stage.check(
        "k", "the link thawed: its traffic comes back", "frankfurt", region_of(back), region_of(back) == "frankfurt"
    )


async def _until_served_in(stage: Stage, region: str) -> Result:
    """Ask from virginia, for the tenant that shuns it, until `region` serves or patience ends; the last answer."""
    end = time.monotonic() + PATIENCE_S
    while True:
        result = await stage.ask("virginia", "not-us", "Who is nearest?")
        if region_of(result) == region or time.monotonic() > end:
            return result
        await asyncio.sleep(0.1)
