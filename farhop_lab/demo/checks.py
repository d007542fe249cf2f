"""The demo's parts (a) to (k), (n) and (o): one region, failures, several regions, resumed streams, a drill.

(a) to (f) in one region: served at home, bound by law, through failures of replicas and of etcd. (g) to (k) over an
emulated ocean: when the far hop pays, overflow, a region lost, a link frozen. (n) streams that are resumed; (o) a drill
by its command. Traffic between regions crosses emulated links.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_lab.demo.checker import code_of, region_of
from farhop_lab.demo.entry import near
from farhop_lab.world import world_file
from farhop_lab.world.collector import tree
from farhop_lab.world.faults import Control, Faults, LocalWorld
from farhop_lab.world.world import HOST

if TYPE_CHECKING:
    from farhop_lab.demo.checker import Checker
    from farhop_lab.world.client import Result
    from farhop_lab.world.collector import SpanRecord

ETCD_STOPPED_S = 5.0
BURST = 48
STREAMS = 48
EACH = 12  # clients in each region at once
FLOOD = 240  # requests, faster than Tokyo can read their prompts
FLOOD_EVERY_S = 0.004
QUEUE_MAX = 80
MOVES_WITHIN_S = 2.0
PREFIX_BYTES = 4096  # what a node of the prefix trie covers at most
CALM_S = 1.0  # by then reports describe an idle region, and no wait is uncertain
PATIENCE_S = 15.0
DRILL_S = 150.0


async def at_home(checker: Checker) -> None:
    """(a) A request is served by its own region and streams."""
    for name in checker.names:
        pieces, result = await checker.stream(name, "anywhere", "Where are you?")
        seen = f"{region_of(result)}, {pieces} pieces"
        held = result.ok and region_of(result) == name and pieces > 3
        checker.check("a", f"asked in {name}, served there, streaming", f"{name}, more than 3 pieces", seen, held)


async def eu_stays(checker: Checker) -> None:
    """(b) The EU tenant is served in Frankfurt wherever it asks; without Frankfurt it is refused and served nowhere
    else.
    """
    for name in checker.names:
        result = await checker.ask(name, "eu-only", "Bleib in Europa.")
        checker.check("b", f"eu-only asks in {name}", "frankfurt", region_of(result), region_of(result) == "frankfurt")
    for engine in checker.world.regions["frankfurt"].engines:
        await engine.kill()
    others = [name for name in checker.names if name != "frankfurt"]
    before = await checker.prompt_tokens(others)
    result = await checker.ask("tokyo", "eu-only", "Und jetzt?")
    after = await checker.prompt_tokens(others)
    seen = code_of(result)
    checker.check("b", "eu-only, frankfurt's engines killed", "503 no_region_serving", seen,
                seen == "503 no_region_serving")  # fmt: skip
    moved = f"{after - before:.0f} tokens"
    checker.check("b", "its prompt reached an engine elsewhere", "0 tokens", moved, after == before)
    for name in checker.names:  # or the wait for its return might read a report from before
        await _until_no_replica_ready(checker, "frankfurt", name)
    await checker.world.start_engines("frankfurt")
    await checker.world.wait_until_serving(frozenset(checker.names))
    result = await checker.ask("tokyo", "eu-only", "Wieder da?")
    checker.check("b", "eu-only, frankfurt back", "frankfurt", region_of(result), region_of(result) == "frankfurt")


async def unlawful(checker: Checker) -> None:
    """(c) A request that no region may serve gets 451, with the clause."""
    result = await checker.ask("virginia", "eu-only", "To Japan!", headers={"x-farhop-allow": "jp"})
    seen = code_of(result)
    checker.check("c", "eu-only asks to be served within jp", "451 no_lawful_region", seen,
                seen == "451 no_lawful_region")  # fmt: skip


async def replica_killed(checker: Checker) -> None:
    """(d) A replica killed with SIGKILL under load: no request that had not started fails."""
    filler = "All work and no play makes a GPU a dull board. " * 160
    begun: list[None] = []
    asks = [
        asyncio.create_task(checker.stream("virginia", "anywhere", f"{i}: {filler}", max_tokens=160, begun=begun))
        for i in range(BURST)
    ]
    while len(begun) < BURST // 4:
        await asyncio.sleep(0.005)
    await checker.world.regions["virginia"].engines[0].kill()
    results = await asyncio.gather(*asks)
    whole = sum(result.ok for _, result in results)
    lost = [result for pieces, result in results if not result.ok and pieces == 0]
    broken = [result for pieces, result in results if not result.ok and pieces > 0]
    unclean = [r for r in broken if r.error is None or r.error.code != "upstream_died_mid_stream"]
    seen = f"{len(lost)} lost of {BURST} ({whole} whole, {len(broken)} had started)"
    checker.check("d", "a replica killed under a burst: requests not started", "0 lost", seen, not lost)
    checker.check("d", "streams it had started end with a clean error event", "0 unclean", f"{len(unclean)} unclean",
                not unclean)  # fmt: skip
    await checker.world.start_engine("virginia", 0)


async def store_stopped(checker: Checker) -> None:
    """(e) etcd stopped for 5 s: requests are served all the same."""
    etcd = checker.world.etcd
    if etcd is None:
        checker.progress("     (e) left out: this etcd is not ours to stop")
        return
    await etcd.kill()
    end = time.monotonic() + ETCD_STOPPED_S
    served = failed = 0
    while time.monotonic() < end:
        results = await asyncio.gather(*(checker.ask(name, "anywhere", "Still there?") for name in checker.names))
        served += sum(result.ok for result in results)
        failed += sum(not result.ok for result in results)
        await asyncio.sleep(0.1)
    await etcd.start()
    seen = f"{failed} failed, {served} served"
    checker.check("e", f"etcd stopped for {ETCD_STOPPED_S:g} s", "0 failed", seen, failed == 0 and served > 0)


async def one_trace(checker: Checker) -> None:
    """(f) One trace over both tiers and the engine."""
    trace_id = f"{random.SystemRandom().getrandbits(128):032x}"
    headers = {"traceparent": f"00-{trace_id}-{1:016x}-01"}
    await checker.ask("tokyo", "anywhere", "Follow me.", headers=headers)
    spans = await checker.world.collector.wait_for(trace_id, spans=7, timeout_s=PATIENCE_S)
    services = sorted({span.service for span in spans})
    for line in tree(spans):
        checker.progress(f"       {line.partition(']')[0]}]")  # which process's span; `farhop ask` shows its attributes
    want = ["engine", "farhop-global", "farhop-regional"]
    checker.check("f", "one trace, from both tiers and the engine", " ".join(want), " ".join(services),
                services == want)  # fmt: skip
    path = _ancestry(spans, "llm_request")
    expected = ["farhop.global", "farhop.relay", "farhop.regional", "farhop.relay", "llm_request"]
    checker.check("f", "its parents, from the edge to the engine", f"{len(expected)} in order", " > ".join(path),
                path == expected)  # fmt: skip


def _ancestry(spans: list[SpanRecord], name: str) -> list[str]:
    """Names from the root down to the span so named."""
    by_id = {span.span_id: span for span in spans}
    at = next((span for span in spans if span.name == name), None)
    path: list[str] = []
    while at is not None and len(path) < len(spans):
        path.append(at.name)
        at = by_id.get(at.parent_id)
    return path[::-1]


async def everyone_at_home(checker: Checker) -> None:
    """(g) Clients in each region are each served at home."""
    asks = [checker.ask(name, "anywhere", f"client {i}") for name in checker.names for i in range(EACH)]
    results = await asyncio.gather(*asks)
    served = [region_of(result) for result in results]
    home = sum(region == checker.names[i // EACH] for i, region in enumerate(served))
    seen = f"{home} of {len(results)}"
    want = f"{len(results)} of {len(results)}"
    checker.check("g", f"{EACH} clients in each region at once, served at home", want, seen, seen == want)
    for i, region in enumerate(served):
        if region != checker.names[i // EACH]:
            await checker.why(checker.names[i // EACH], results[i])


async def prefix_across_the_ocean(checker: Checker) -> None:
    """(h) A long conversation returns to the region with its prefix, across an ocean; a short one stays at home."""
    long_talk = "The minutes of the meeting, in full, with every word that anybody said in it. " * 1400
    names = sorted(checker.world.regions)
    before = {name: (await _known(checker, name, name))["prefix_nodes"] for name in names}
    # An agent's: another's prefix might be drawn to be prefilled at home, too, once in twenty times (pick).
    tools = [{"type": "function", "function": {"name": "minutes", "parameters": {"type": "object"}}}]
    first = await checker.ask("tokyo", "anywhere", long_talk, tools=tools)
    # So long a prompt goes to the region whose GPUs were measured to be a little faster; the test is that it returns
    # there.
    begun = region_of(first)
    entry = "virginia" if begun != "virginia" else "tokyo"
    history = [{"role": "user", "content": long_talk}, {"role": "assistant", "content": first.text}]
    end, nodes = time.monotonic() + PATIENCE_S, before.get(begun, 0) + len(long_talk) // PREFIX_BYTES
    while time.monotonic() < end and (await _known(checker, begun, entry))["prefix_nodes"] < nodes:
        await asyncio.sleep(0.05)  # until the region has reported what it caches
    await asyncio.sleep(CALM_S)
    turn = await checker.ask(entry, "anywhere", "And what was decided?", history=history, tools=tools)
    cached = turn.usage.cached_tokens if turn.usage is not None and turn.usage.cached_tokens is not None else 0
    total = turn.usage.prompt_tokens if turn.usage is not None else 0
    what = f"a long talk begun in {begun} goes on from {entry}"
    checker.check("h", what, begun, region_of(turn), region_of(turn) == begun)
    checker.check("h", "its prompt tokens found in the KV cache there", "more than 90 %", f"{cached} of {total}",
                total > 0 and cached > 0.9 * total)  # fmt: skip
    await checker.ask("tokyo", "anywhere", "Hello there.")
    short = await checker.ask("virginia", "anywhere", "Hello there.")
    checker.check("h", "a short one, cached there too, stays at home", "virginia", region_of(short),
                region_of(short) == "virginia")  # fmt: skip
    if region_of(short) != "virginia":
        await checker.why("virginia", short)


async def overflow(checker: Checker) -> None:
    """(i) Tokyo overloaded: the overflow is served elsewhere, nothing fails or breaks the law, its queue stays
    bounded.
    """
    filler = "Far too much to read for one region alone, and yet it must be read. " * 110
    free: list[asyncio.Task[Result]] = []
    for i in range(FLOOD):
        free.append(asyncio.create_task(checker.ask("tokyo", "anywhere", f"{i} {filler}", max_tokens=200)))
        await asyncio.sleep(FLOOD_EVERY_S)
    bound = [asyncio.create_task(checker.ask("tokyo", "japan-only", f"{i} {filler}", max_tokens=24)) for i in range(12)]
    longest = 0
    while not all(task.done() for task in (*free, *bound)):
        status = await checker.status(checker.world.regions["tokyo"].regional_admin)
        longest = max(longest, status["queued_requests"])
        await asyncio.sleep(0.05)
    by_region = Counter(region_of(task.result()) for task in free)
    lawful = Counter(region_of(task.result()) for task in bound)
    failed = sum(not task.result().ok for task in (*free, *bound))
    spread = ", ".join(f"{region} {count}" for region, count in by_region.most_common())
    checker.check("i", f"{FLOOD} requests flood tokyo: failed", "0 failed", f"{failed} failed", failed == 0)
    checker.check(
        "i",
        "the overflow is served elsewhere",
        "tokyo and others",
        spread,
        len(by_region) > 1 and by_region["tokyo"] > 0,
    )
    checker.check("i", "japan-only, in the midst of it", "tokyo alone", ", ".join(lawful), set(lawful) == {"tokyo"})
    checker.check("i", "tokyo's own queue", f"at most {QUEUE_MAX}", f"{longest}", longest <= QUEUE_MAX)


async def region_killed(checker: Checker) -> None:
    """(j) Tokyo killed, balancers and all: no request that had not started fails; back, its traffic returns
    gradually.
    """
    tokyo = checker.world.regions["tokyo"]
    # A client's ordered list: by a DNS answer, where there is a server.
    listed = await near(checker.world, "tokyo") or checker.names
    others = [checker.world.regions[name].entry for name in listed if name != "tokyo"]
    begun: list[None] = []
    filler = "Something to chew on for a while. " * 200
    asks = [
        asyncio.create_task(
            checker.stream("tokyo", "anywhere", f"{i} {filler}", max_tokens=120, entries=others, begun=begun)
        )
        for i in range(36)
    ]
    while len(begun) < 6:
        await asyncio.sleep(0.005)
    children = [*tokyo.engines, tokyo.regional, tokyo.global_]
    await asyncio.gather(*(child.kill() for child in children if child is not None))
    asks += [asyncio.create_task(checker.stream("tokyo", "anywhere", f"after {i}", entries=others)) for i in range(12)]
    results = await asyncio.gather(*asks)
    lost = sum(not result.ok and pieces == 0 for pieces, result in results)
    started = sum(not result.ok and pieces > 0 for pieces, result in results)
    seen = f"{lost} lost of {len(results)} ({started} had started)"
    checker.check("j", "tokyo killed, all of it: requests not started", "0 lost", seen, lost == 0)
    if checker.world.dns is not None:
        led = await near(checker.world, "tokyo", without="tokyo")
        checker.check("j", "DNS: a network near tokyo is led elsewhere", "not tokyo", ", ".join(led),
                    bool(led) and "tokyo" not in led)  # fmt: skip
    shares: list[float] = []
    await _until_down(checker, "tokyo", "frankfurt")  # a region that is missed only for a moment comes back at once
    watching = asyncio.create_task(_watch_return(checker, "tokyo", "frankfurt", shares))
    await checker.world.start_engines("tokyo")
    await checker.world.start_balancers("tokyo")
    await checker.world.wait_until_serving(frozenset(checker.names))
    await watching
    paced = len(shares) > 1 and shares[0] < 1.0 == shares[-1] and shares == sorted(shares)
    seen = f"{shares[0]:.0%} at first, then {shares[-1]:.0%}".replace("%", " %") if shares else "never up"
    checker.check("j", "tokyo comes back for a growing share of requests", "less than all, then all", seen, paced)
    # From frankfurt, japan's own tenant has nowhere else to go; all others come back at the pace of the retry guard.
    result = await checker.ask("frankfurt", "japan-only", "Is Tokyo back?")
    checker.check("j", "tokyo is used again", "tokyo", region_of(result), region_of(result) == "tokyo")


async def streams_go_on(checker: Checker) -> None:
    """(n) Frankfurt dies under streams that its entry carries: they continue elsewhere and equal unbroken ones."""
    world, frankfurt = checker.world, checker.world.regions["frankfurt"]
    whole = await asyncio.gather(*_talks(checker))
    begun: list[None] = []
    talks = _talks(checker, begun)
    while len(begun) < STREAMS // 2:
        await asyncio.sleep(0.005)
    carried = sum(not talk.done() for talk in talks)
    children = [*frankfurt.engines, frankfurt.regional]
    await asyncio.gather(*(child.kill() for child in children if child is not None))
    results = await asyncio.gather(*talks)
    alike = sum(result.ok and result.text == one.text for (_, result), (_, one) in zip(results, whole, strict=True))
    seen = f"{alike} the same, {await _resumed(checker, 'frankfurt')} went on elsewhere"
    checker.check(
        "n", f"frankfurt killed except its entry, under {carried} streams", f"{STREAMS} as without the failure", seen,
        alike == STREAMS,
    )  # fmt: skip
    for one_of_each in {code_of(result): result for _, result in results if not result.ok}.values():
        await checker.why("frankfurt", one_of_each)
    await _until_down(checker, "frankfurt", "virginia")
    shares: list[float] = []
    watching = asyncio.create_task(_watch_return(checker, "frankfurt", "virginia", shares))
    await world.start_engines("frankfurt")
    await world.start_regional("frankfurt")
    await world.wait_until_serving(frozenset(checker.names))
    await watching


def _talks(checker: Checker, begun: list[None] | None = None) -> list[asyncio.Task[tuple[int, Result]]]:
    return [
        asyncio.create_task(
            checker.stream("frankfurt", "anywhere", f"{i}: go on about the sea.", max_tokens=200, begun=begun)
        )
        for i in range(STREAMS)
    ]


async def _resumed(checker: Checker, region: str) -> int:
    """Streams of a region's entry that were continued elsewhere."""
    page = await checker.page(f"{checker.world.regions[region].global_admin}/metrics")
    counted = (line for line in page.splitlines() if line.startswith("farhop_resumes_total{"))
    return sum(int(float(line.split()[-1])) for line in counted if 'outcome="resumed"' in line)


async def _known(checker: Checker, region: str, seen_from: str) -> dict[str, Any]:
    """What the global balancer of `seen_from` knows of a region."""
    status = await checker.status(checker.world.regions[seen_from].global_admin)
    known: dict[str, Any] = next(one for one in status["regions"] if one["region"] == region)
    return known


async def _until_down(checker: Checker, region: str, seen_from: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and (await _known(checker, region, seen_from))["state"] != "down":
        await asyncio.sleep(0.02)


async def _until_no_replica_ready(checker: Checker, region: str, seen_from: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        instances = (await _known(checker, region, seen_from))["instances"]
        if not any(model["replicas_ready"] for instance in instances for model in instance["models"].values()):
            return
        await asyncio.sleep(0.02)


async def _watch_return(checker: Checker, region: str, seen_from: str, shares: list[float]) -> None:
    """Record the share of requests for which `region` is open again, from its return until it is 1."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and (not shares or shares[-1] < 1.0):
        known = await _known(checker, region, seen_from)
        if known["state"] == "up":
            shares.append(known["admitted_share"])
        await asyncio.sleep(0.02)


async def link_frozen(checker: Checker) -> None:
    """(k) The link to Frankfurt frozen: its traffic moves within 2 s, and comes back."""
    network = checker.world.network
    assert network is not None
    before = await _until_served_in(checker, "frankfurt")  # earlier requests may still weigh on it
    checker.check(
        "k", "not-us asks in virginia, before", "frankfurt", region_of(before), region_of(before) == "frankfurt"
    )
    network.freeze("frankfurt")
    frozen_at = time.monotonic()
    moved_s: float | None = None
    waiting: list[asyncio.Task[Result]] = []
    while moved_s is None and time.monotonic() - frozen_at < 3 * MOVES_WITHIN_S:
        waiting.append(asyncio.create_task(checker.ask("virginia", "not-us", "And now?")))
        await asyncio.wait(waiting[-1:], timeout=0.2)
        if waiting[-1].done() and waiting[-1].result().ok:
            moved_s = time.monotonic() - frozen_at
    seen = "never" if moved_s is None else f"{moved_s:.1f} s, {region_of(waiting[-1].result())}"
    checker.check("k", "the link to frankfurt frozen: its traffic moves", f"within {MOVES_WITHIN_S:g} s", seen,
                moved_s is not None and moved_s <= MOVES_WITHIN_S)  # fmt: skip
    stuck = await asyncio.gather(*waiting)
    served = sum(result.ok for result in stuck)
    checker.check("k", "requests that were on the frozen link meanwhile", f"{len(stuck)} served", f"{served} served",
                served == len(stuck))  # fmt: skip
    network.heal("frankfurt")
    back = await _until_served_in(checker, "frankfurt")
    checker.check(
        "k", "the link thawed: its traffic comes back", "frankfurt", region_of(back), region_of(back) == "frankfurt"
    )


async def _until_served_in(checker: Checker, region: str) -> Result:
    """Ask from virginia, for the tenant that avoids it, until `region` serves or the time is over; the last answer."""
    end = time.monotonic() + PATIENCE_S
    while True:
        result = await checker.ask("virginia", "not-us", "Who is nearest?")
        if region_of(result) == region or time.monotonic() > end:
            return result
        await asyncio.sleep(0.1)


async def drilled(checker: Checker) -> None:
    """(o) Virginia lost by `farhop drill`, which checks, injects, measures from outside, restores and judges."""
    folder, control = checker.world.folder, Control(Faults(LocalWorld(checker.world)))
    await control.start(HOST)
    described = folder / "world.json"
    world = checker.world.describe(os.getpid(), (control.url, control.token))
    await asyncio.to_thread(world_file.write, described, world)
    command = ["drill", "run", "lose-a-region", "--set", "region=virginia", "--set", "soak_s=3", "--json"]
    command += ["--world", str(described), "--out", str(folder / "drills")]
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "farhop_cli", *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(DRILL_S):
            output, _ = await runner.communicate()
    finally:
        if runner.returncode is None:
            runner.terminate()  # it restores everything
            await runner.wait()
        await control.close()
    report = msgspec.json.decode(output, type=dict[str, Any]) if output else {}
    measures = report.get("measures", {})
    verdict = f"{report.get('verdict', 'nothing')}{', ' if report.get('why') else ''}{report.get('why', '')}"
    checker.check("o", "farhop drill run lose-a-region", "PASS", verdict, report.get("verdict") == "PASS")
    rto_s = measures.get("rto_s")
    seen = "not measured" if rto_s is None else f"{rto_s:.2f} s"
    checker.check("o", "virginia lost: until new requests are served again", "at most 1 s", seen,
                rto_s is not None and rto_s <= 1.0)  # fmt: skip
    violations, canaries = measures.get("residency_violations"), measures.get("canaries", 0.0)
    seen = "not measured" if violations is None else f"{violations:.0f} of {canaries:.0f}"
    checker.check("o", "answers from where the law does not allow it", "0", seen, violations == 0.0 and canaries > 0)
    report_s = report.get("report_s")
    seen = "none" if report_s is None else f"after {report_s:.2f} s"
    checker.check("o", "its report", "within 2 s", seen, report_s is not None and report_s <= 2.0)
