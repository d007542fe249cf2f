"""A whole run on a store in memory, with an injector and engines of this test's own: short, but every phase real."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from drill_documents import WORLD, made
from test_checks import REST

from farhop_drill import runner as runner_module
from farhop_drill.injectors import InjectError
from farhop_drill.machine import DrillVerdict
from farhop_drill.oracle import Oracle
from farhop_drill.outcome import Outcome
from farhop_drill.probe import Client, Probe, ProbeResult
from farhop_drill.records import DrillLock, Order, Records
from farhop_drill.runner import LIVE_EVERY_S, STOP_POLL_S, TICK_S, DrilledFleet, Runner
from farhop_drill.status_poller import StatusPoller
from farhop_lab.memory_store import MemoryStore
from topology import law_document

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from farhop_drill.document import Drill, Step
    from farhop_drill.measures import Canary

HELD = DrillLock(run="r1", drill="a-drill", author="me", since_s=1.0)
PLACES = {name: {one.country, *one.jurisdictions} for name, one in WORLD.regions.items()}


class Bench:
    """The injector, the engines, and what was done to them."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.did, self.region, self.code = store, list[str](), "virginia", ""
        self.inject_fails = False
        self.facts = REST

    async def inject(self, step: Step) -> None:
        self.did.append(f"inject {step.name}")
        if self.inject_fails:
            raise InjectError("no")
        self.region = "frankfurt"

    async def renew(self) -> None:
        self.did.append("renew")

    async def restore(self) -> None:
        self.did.append("restore")
        self.region = "virginia"

    async def close(self) -> None: ...

    async def ask(self, entries: Sequence[str], key: str, body: dict[str, Any], request_s: float) -> ProbeResult:
        return ProbeResult(status=200, region=self.region, code=self.code, text="x", ttft_ms=1.0)

    async def look(self) -> Any:
        return self.facts

    async def status(self) -> dict[str, Any]:
        return dict(REST.statuses[0])

    def runner(self, drill: Drill, tenant: str = "anywhere") -> Runner:
        clock = asyncio.get_running_loop().time

        def probe(value: Callable[[Canary], None]) -> Probe:
            client = Client("virginia", tenant, "k", ("http://v",))
            return Probe(drill.canaries, [client], "m", self.ask, clock, value, "s")

        outcome = Outcome(
            run="r1", drill=drill.drill, title=drill.title, author="me", fleet="here", epoch_s=1.0,
            verdict=DrillVerdict.NOT_RUN, why="", document={},
        )  # fmt: skip
        poller = StatusPoller([self.status], clock)
        poller.begin()
        return Runner(
            drill, HELD, Records(self.store),
            DrilledFleet(self, self.look, poller, probe, Oracle(PLACES, law_document.document_of(WORLD)), {}),
            outcome, clock, lambda _text: None,
        )  # fmt: skip


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    store = MemoryStore(Random(1))
    await store.open()
    yield Bench(store)
    await store.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()  # the poller


async def test_a_run_from_its_checks_to_its_verdict(bench: Bench) -> None:
    outcome = await bench.runner(made()).run()
    assert [one for one in bench.did if one != "renew"] == ["inject a part", "inject all", "restore"]
    assert (outcome.verdict, outcome.why) == (DrillVerdict.PASS, "")
    assert {"rto_s", "failback_s", "decide_s"} <= set(outcome.measures)
    assert [one.kind for one in outcome.done] == ["check", "inject", "inject", "restore"]
    assert await Records(bench.store).holder() is None


async def test_one_answer_from_outside_the_law_ends_it_and_all_is_taken_back(bench: Bench) -> None:
    drill = made(aborts=[{"measure": "residency_violations", "above": 0}], after_s=0)
    bench.region = "frankfurt"
    runner = bench.runner(drill, "eu-only")

    async def inject(_step: Step) -> None:
        bench.did.append("inject")
        bench.region = "tokyo"

    bench.inject = inject  # type: ignore[method-assign]
    outcome = await runner.run()
    assert outcome.verdict is DrillVerdict.ABORTED
    assert "residency_violations" in outcome.why
    assert bench.did[-1] == "restore"
    assert {one.verdict for one in outcome.judged} == {DrillVerdict.ABORTED}


async def test_blocked_is_not_run(bench: Bench) -> None:
    bench.facts = msgspec.structs.replace(REST, emergency_stop="by ops: incident")
    outcome = await bench.runner(made()).run()
    assert (outcome.verdict, bench.did, outcome.canaries) == (DrillVerdict.NOT_RUN, [], [])
    assert "lever" in outcome.why


async def test_a_runner_that_finds_the_lock_taken_does_not_run(bench: Bench) -> None:
    other = DrillLock(run="r2", drill="d", author="other", since_s=1.0)
    assert await Records(bench.store).lock(other)
    outcome = await bench.runner(made()).run()
    assert outcome.verdict is DrillVerdict.NOT_RUN
    assert await Records(bench.store).holder() == other


async def test_a_step_that_fails_is_taken_back(bench: Bench) -> None:
    bench.inject_fails = True
    outcome = await bench.runner(made()).run()
    assert (outcome.verdict, bench.did[-1]) == (DrillVerdict.ABORTED, "restore")
    assert "step 1 could not be injected" in outcome.why


async def test_engaging_the_lever_aborts_a_running_drill(bench: Bench) -> None:
    steps = [{"name": "long", "inject": [{"do": "drain", "region": "virginia"}], "soak_s": 20}]
    running = asyncio.create_task(bench.runner(made(steps=steps)).run())
    while "inject long" not in bench.did:
        await asyncio.sleep(0.01)
    await Records(bench.store).engage(Order(author="ops", why="incident", at_s=1.0))
    outcome = await running
    assert (outcome.verdict, bench.did[-1]) == (DrillVerdict.ABORTED, "restore")
    assert outcome.why == "the emergency stop was engaged by ops: incident"


async def test_abort_restores_in_the_same_turn_and_reports_its_duration(bench: Bench) -> None:
    """Within a second of what causes it: abort conditions are looked at, and orders read, twice in that time."""
    assert TICK_S + LIVE_EVERY_S < 1.0
    assert TICK_S + STOP_POLL_S < 1.0
    steps = [{"name": "long", "inject": [{"do": "drain", "region": "virginia"}], "soak_s": 20}]
    runner = bench.runner(made(steps=steps))
    running = asyncio.create_task(runner.run())
    while "inject long" not in bench.did:
        await asyncio.sleep(0.01)
    turns = 0
    runner.stop("told to")
    while bench.did[-1] != "restore":
        await asyncio.sleep(0)
        turns += 1
    assert turns < 50
    outcome = await running
    assert outcome.verdict is DrillVerdict.ABORTED
    assert outcome.measures["restore_s"] < TICK_S + 1.0


async def test_a_renewal_under_way_writes_nothing_after_what_is_restored(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(runner_module, "RENEW_S", 0.01)
    gate = asyncio.Event()

    async def renew() -> None:
        bench.did.append("renew")
        await gate.wait()
        bench.did.append("renewed")

    async def restore() -> None:
        bench.did.append("restore")
        gate.set()
        await asyncio.sleep(0.05)

    bench.renew, bench.restore = renew, restore  # type: ignore[method-assign]
    steps = [{"name": "long", "inject": [{"do": "drain", "region": "virginia"}], "soak_s": 20}]
    runner = bench.runner(made(steps=steps))
    running = asyncio.create_task(runner.run())
    while "renew" not in bench.did:
        await asyncio.sleep(0.01)
    runner.stop("told to")
    assert (await running).verdict is DrillVerdict.ABORTED
    assert bench.did == ["inject long", "renew", "restore"]


async def test_a_runner_that_is_cancelled_takes_back_what_it_injected(bench: Bench) -> None:
    steps = [{"name": "long", "inject": [{"do": "drain", "region": "virginia"}], "soak_s": 20}]
    running = asyncio.create_task(bench.runner(made(steps=steps)).run())
    while "inject long" not in bench.did:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.did[-1] == "restore"
    assert await Records(bench.store).holder() is None
