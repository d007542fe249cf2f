"""The probe's rate, its clients in turn, and what it notes of each answer. Time is the test's own."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from farhop_drill.document import Canaries
from farhop_drill.measures import Canary
from farhop_drill.probe import UNDER_WAY_MAX, Client, Probe, ProbeResult

if TYPE_CHECKING:
    from collections.abc import Sequence

CLIENTS = [Client(name, tenant, "key", (f"http://{name}",)) for name in ("a", "b") for tenant in ("t", "u")]


class World:
    """Answers at once, or never."""

    def __init__(self, *, answers: bool = True, code: str = "") -> None:
        self.answers, self.code, self.bodies, self.requests = answers, code, list[dict[str, Any]](), list[Canary]()

    async def ask(self, entries: Sequence[str], key: str, body: dict[str, Any], request_s: float) -> ProbeResult:
        self.bodies.append(body)
        if not self.answers:
            await asyncio.Event().wait()
        ttft_ms = None if self.code else 5.0
        return ProbeResult(status=200, region="a", code=self.code, text="words", ttft_ms=ttft_ms)

    def probe(self, rate_per_s: float, **options: Any) -> Probe:
        wanted = Canaries(rate_per_s=rate_per_s)
        clock = asyncio.get_running_loop().time
        return Probe(wanted, CLIENTS, "m", self.ask, clock, self.requests.append, "salt", **options)


async def test_clients_take_turns_and_a_quarter_of_each_ones_requests_is_long_and_repeats() -> None:
    world = World()
    probe = world.probe(50.0)
    probe.begin(asyncio.get_running_loop().time())
    while len(world.requests) < 40:
        await asyncio.sleep(0.01)
    await probe.stop(1.0)
    counts = Counter((one.entry, one.tenant) for one in world.requests[:40])
    assert set(counts.values()) == {10}
    long = [one.prompt for one in world.requests[:40] if one.prompt]
    assert len(long) in range(8, 13)
    assert len(set(long)) < len(long)
    texts = [body["messages"][0]["content"] for body in world.bodies]
    assert len(set(texts) - set(long)) == len(texts) - len([text for text in texts if text in long])
    assert all("min_tokens" not in body for body in world.bodies)


async def test_no_more_is_sent_than_may_be_under_way_and_none_is_left_behind() -> None:
    world = World(answers=False)
    probe = world.probe(50.0, emulated=True)
    probe.under_way = {asyncio.create_task(asyncio.sleep(60)) for _ in range(UNDER_WAY_MAX)}
    probe.begin(0.0)
    while probe.skipped < 2:
        await asyncio.sleep(0.01)
    assert world.bodies == []
    await probe.stop(0.0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_failure_is_noted_as_it_was() -> None:
    world = World(code="connect_failed")
    probe = world.probe(50.0)
    probe.begin(asyncio.get_running_loop().time())
    while not world.requests:
        await asyncio.sleep(0.01)
    await probe.stop(1.0)
    assert (world.requests[0].code, world.requests[0].first_s) == ("connect_failed", None)
