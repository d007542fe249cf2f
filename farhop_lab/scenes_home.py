"""The demo's scenes (a) to (f): served at home, bound by law, and through failures of replicas and of etcd."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from farhop_lab.collector import tree
from farhop_lab.stage import code_of, region_of

if TYPE_CHECKING:
    from farhop_lab.collector import SpanRecord
    from farhop_lab.stage import Stage

ETCD_STOPPED_S = 5.0
BURST = 48


async def at_home(stage: Stage) -> None:
    """(a) A request is served by its own region and streams."""
    for name in stage.names:
        pieces, result = await stage.stream(name, "anywhere", "Where are you?")
        seen = f"{region_of(result)}, {pieces} pieces"
        held = result.ok and region_of(result) == name and pieces > 3
        stage.check("a", f"asked in {name}, served there, streaming", f"{name}, more than 3 pieces", seen, held)


async def eu_stays(stage: Stage) -> None:
    """(b) The EU tenant is served in Frankfurt wherever it asks; without Frankfurt it is refused, and stays put."""
    for name in stage.names:
        result = await stage.ask(name, "eu-only", "Bleib in Europa.")
        stage.check("b", f"eu-only asks in {name}", "frankfurt", region_of(result), region_of(result) == "frankfurt")
    for engine in stage.world.regions["frankfurt"].engines:
        await engine.kill()
    others = [name for name in stage.names if name != "frankfurt"]
    before = await stage.prompt_tokens(others)
    result = await stage.ask("tokyo", "eu-only", "Und jetzt?")
    after = await stage.prompt_tokens(others)
    seen = code_of(result)
    stage.check("b", "eu-only, frankfurt's engines killed", "503 no_region_serving", seen,
                seen == "503 no_region_serving")  # fmt: skip
    moved = f"{after - before:.0f} tokens"
    stage.check("b", "its prompt reached an engine elsewhere", "0 tokens", moved, after == before)
    await stage.world.start_engines("frankfurt")
    await stage.world.wait_until_serving(frozenset(stage.names))
    result = await stage.ask("tokyo", "eu-only", "Wieder da?")
    stage.check("b", "eu-only, frankfurt back", "frankfurt", region_of(result), region_of(result) == "frankfurt")


async def unlawful(stage: Stage) -> None:
    """(c) A request that no region may serve is 451, with the clause."""
    result = await stage.ask("virginia", "eu-only", "To Japan!", headers={"x-farhop-allow": "jp"})
    seen = code_of(result)
    stage.check("c", "eu-only asks to be served within jp", "451 no_lawful_region", seen,
                seen == "451 no_lawful_region")  # fmt: skip


async def replica_killed(stage: Stage) -> None:
    """(d) A replica killed with SIGKILL under load: nothing not yet started fails."""
    filler = "All work and no play makes a GPU a dull board. " * 160
    begun: list[None] = []
    asks = [
        asyncio.create_task(stage.stream("virginia", "anywhere", f"{i}: {filler}", max_tokens=160, begun=begun))
        for i in range(BURST)
    ]
    while len(begun) < BURST // 4:
        await asyncio.sleep(0.005)
    await stage.world.regions["virginia"].engines[0].kill()
    results = await asyncio.gather(*asks)
    whole = sum(result.ok for _, result in results)
    lost = [result for pieces, result in results if not result.ok and pieces == 0]
    broken = [result for pieces, result in results if not result.ok and pieces > 0]
    unclean = [r for r in broken if r.error is None or r.error.code != "upstream_died_mid_stream"]
    seen = f"{len(lost)} lost of {BURST} ({whole} whole, {len(broken)} had started)"
    stage.check("d", "a replica killed under a burst: requests not started", "0 lost", seen, not lost)
    stage.check("d", "streams it had started end with a clean error event", "0 unclean", f"{len(unclean)} unclean",
                not unclean)  # fmt: skip
    await stage.world.start_engine("virginia", 0)


async def store_stopped(stage: Stage) -> None:
    """(e) etcd stopped for 5 s: service goes on."""
    etcd = stage.world.etcd
    if etcd is None:
        stage.say("     (e) left out: this etcd is not ours to stop")
        return
    await etcd.kill()
    end = time.monotonic() + ETCD_STOPPED_S
    served = failed = 0
    while time.monotonic() < end:
        results = await asyncio.gather(*(stage.ask(name, "anywhere", "Still there?") for name in stage.names))
        served += sum(result.ok for result in results)
        failed += sum(not result.ok for result in results)
        await asyncio.sleep(0.1)
    await etcd.start()
    seen = f"{failed} failed, {served} served"
    stage.check("e", f"etcd stopped for {ETCD_STOPPED_S:g} s", "0 failed", seen, failed == 0 and served > 0)


async def one_trace(stage: Stage) -> None:
    """(f) One trace over both tiers and the engine."""
    trace_id = f"{random.SystemRandom().getrandbits(128):032x}"
    headers = {"traceparent": f"00-{trace_id}-{1:016x}-01"}
    await stage.ask("tokyo", "anywhere", "Follow me.", headers=headers)
    spans = await stage.world.collector.wait_for(trace_id, spans=7, timeout_s=5.0)
    services = sorted({span.service for span in spans})
    for line in tree(spans):
        stage.say(f"       {line}")
    want = ["engine", "farhop-global", "farhop-regional"]
    stage.check("f", "one trace, from both tiers and the engine", " ".join(want), " ".join(services),
                services == want)  # fmt: skip
    path = _ancestry(spans, "llm_request")
    expected = ["farhop.global", "farhop.relay", "farhop.regional", "farhop.relay", "llm_request"]
    stage.check("f", "its parents, from the edge to the engine", f"{len(expected)} in order", " > ".join(path),
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
