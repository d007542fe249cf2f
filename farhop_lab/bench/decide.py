"""CPU time per decision of both tiers' shipped machines. Never a test.

CPU time of this process, many rounds, the median of the repeats: on shared machines wall time misleads.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from farhop.balance import machine
from farhop.balance.machine import Address, Usage
from farhop.balance.prefix import chain
from farhop.store.documents.report import COUNT_LIMIT, ModelReport
from global_lb.fleet import view as global_view
from global_lb.routing import flow as global_flow
from regional_lb.fleet import view as regional_view
from regional_lb.scheduler import flow as regional_flow
from topology.law import Law
from topology.model import Key, Region, Residency, Rule, Tenant, Topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Flow

REPEATS = 5
REQUESTS = 400
MANY = (1000, 10_000)  # replicas of a large region
PROMPT_BYTES = 32 * 1024
MODEL = "m"


class Row(msgspec.Struct, frozen=True):
    """One measurement: median, minimum and maximum of the repeats, in CPU microseconds per request, report or page."""

    what: str
    median_us: float
    least_us: float
    most_us: float


def decide() -> list[Row]:
    """A request's whole passage through a machine (arrived, began, ended), 32 KB prompt, prefix chain computed before.

    A decision alone is law, trie, score and choice, each after the passage of the request before.
    """
    rows = [_row(f"regional, {n} replicas", partial(_regional, n)) for n in (2, 16, 64)]
    rows += [_row(f"global, {n} regions", partial(_global, n)) for n in (3, 12, 60)]
    rows += [_alone(n) for n in (3, 12, 60)]
    data = random.Random(1).randbytes(PROMPT_BYTES)
    seed = chain.seed_of(MODEL, "", "", "")
    rows.append(timed("prefix chain of 32 KB", lambda: chain.chain(data, seed), 2000))
    rows += [_row(f"regional, {n:,} replicas", partial(_regional, n)) for n in MANY]
    for n in (16, *MANY):
        rows.append(timed(f"pick of {n:,}, prompt new to all", _picking(_regional(n)), REQUESTS))
        rows.append(timed(f"pick of {n:,}, its beginning held by all", _picking(_begun(n)), REQUESTS))
        rows.append(timed(f"pick of {n:,}, the same, one of them down", _picking(_begun(n, down=1)), REQUESTS))
    return rows


def _picking(flow: regional_flow.RegionalFlow) -> Callable[[], object]:
    """One pick: eligible replicas, cached prefixes, scores, room, the choice and what is recorded of it."""
    asked = _request(0)
    return lambda: flow.selector.consider(asked, flow.selector.need_of(asked), 100.0)


def _begun(replicas: int, down: int = 0) -> regional_flow.RegionalFlow:
    """Every replica holds 1 or 3 KB of the prompt; the first `down` are broken."""
    flow, path = _regional(replicas), _request(0).chain
    for i in range(replicas):
        flow.replicas.trie.insert(f"gpu-{i}", path[: 4 + 8 * (i * 7919 % 3 == 0)])
    for i in range(down):
        flow.handle(regional_view.ReplicaProbed(f"gpu-{i}", ok=False, fault="broken"), 99.5)
    return flow


def _row(what: str, make: Callable[[], Flow]) -> Row:
    requests = [_request(i) for i in range(REQUESTS)]
    samples: list[float] = []
    for _ in range(REPEATS):
        flow = make()
        began = time.process_time()
        for i, request in enumerate(requests):
            now = 100.0 + i * 0.001  # reports are at most a second old, as in use
            flow.handle(machine.RequestArrived(request), now)
            flow.handle(machine.AttemptBegan(request.id, 1, 200), now + 0.0001)
            prefix = ((*request.chain, i + 1), 400) if isinstance(flow, regional_flow.RegionalFlow) else ((), 0)
            flow.handle(machine.AttemptEnded(request.id, 1, 200, Usage(8192, 100, 4096), None, *prefix), now + 0.0002)
        samples.append((time.process_time() - began) / REQUESTS * 1e6)
    return Row(what, statistics.median(samples), min(samples), max(samples))


def _alone(regions: int) -> Row:
    requests = [_request(i) for i in range(REQUESTS)]
    samples: list[float] = []
    for _ in range(REPEATS):
        flow, spent_s = _global(regions), 0.0
        for i, request in enumerate(requests):
            now = 100.0 + i * 0.001
            began = time.process_time()
            flow.consider(request, now)
            spent_s += time.process_time() - began
            flow.handle(machine.RequestArrived(request), now)
            flow.handle(machine.AttemptEnded(request.id, 1, 200, Usage(8192, 100, 4096)), now)
        samples.append(spent_s / REQUESTS * 1e6)
    return Row(f"global decision alone, {regions} regions", statistics.median(samples), min(samples), max(samples))


def timed(what: str, call: Callable[[], object], times: int) -> Row:
    """CPU µs of one call, of so many calls in a row, REPEATS times."""
    samples: list[float] = []
    for _ in range(REPEATS):
        began = time.process_time()
        for _ in range(times):
            call()
        samples.append((time.process_time() - began) / times * 1e6)
    return Row(what, statistics.median(samples), min(samples), max(samples))


def _request(index: int) -> machine.Request:
    """Requests of 40 conversations whose prompts share their first half, as turns do."""
    rng = random.Random(index % 40)
    data = rng.randbytes(PROMPT_BYTES // 2) + random.Random(index).randbytes(PROMPT_BYTES // 2)
    return machine.Request(
        id=f"{index:016x}",
        tenant="t",
        model=MODEL,
        prompt_bytes=PROMPT_BYTES,
        body_bytes=PROMPT_BYTES,
        chain=chain.chain(data, chain.seed_of(MODEL, "", "", "")),
        deadline=1e9,
        max_tokens=256,
    )


def _law(regions: int) -> Law:
    names = [f"r{i}" for i in range(regions)]
    tenant = Tenant("t", (Key("k", "0" * 64),), Residency(Rule(("world",))))
    known = {n: Region(n, n, "xx", frozenset(), 0.0, float(i)) for i, n in enumerate(names)}
    return Law(Topology("bench", 1, known, {"t": tenant}))


def _regional(replicas: int) -> regional_flow.RegionalFlow:
    flow = regional_flow.RegionalFlow(
        regional_flow.FlowConfig("r0"), _law(1), random.Random(1), weight_of=lambda _tenant: 1.0
    )
    known = [
        regional_view.Replica(
            name=f"gpu-{i}",
            address=Address("127.0.0.1", 8000 + i),
            models=frozenset((MODEL,)),
            gpu="h100",
            slots=256,
            kv_tokens=400_000,
            prefill_tokens_max=16_384,
            prefill_ms_per_token=0.04,
            tpot_ms=10.0,
        )
        for i in range(replicas)
    ]
    flow.handle(regional_view.ViewSwapped(regional_view.view_of(known)), 0.0)
    for replica in known:
        flow.handle(regional_view.ReplicaProbed(replica.name, ok=True), 99.0)
    return flow


def _global(regions: int) -> global_flow.GlobalFlow:
    flow = global_flow.GlobalFlow(
        global_flow.FlowConfig("r0"), _law(regions), random.Random(1), patience_s=lambda _tenant: 0.0
    )
    capacity = ModelReport(
        MODEL, replicas_ready=8, replicas_total=8, slots_total=0, slots_free=512, kv_tokens_total=0, kv_tokens_free=0,
        wait_ms=1.0, prefill_ms_per_token=0.04, tpot_ms=10.0, bytes_per_token=4.0, usable_share=0.0,
        headroom_foreign_tokens=COUNT_LIMIT,
    )  # fmt: skip
    known = {
        f"r{i}": global_view.Region(
            name=f"r{i}",
            rtt_ms=1.0 + 10.0 * i,
            instances=(
                global_view.Instance(
                    name=f"r{i}-0",
                    region=f"r{i}",
                    tier=Address("127.0.0.1", 9000 + i),
                    incarnation=1,
                    received_at=99.0,
                    clock_offset_ms=0.0,
                    draining=False,
                    accepted=0.0,
                    models={MODEL: capacity},
                ),
            ),
        )
        for i in range(regions)
    }
    flow.handle(global_view.ViewSwapped(global_view.View(known)), 99.0)
    for name in known:
        flow.handle(global_view.RegionReported(name), 99.5)
        flow.handle(global_view.ChannelChanged(name, up=True), 99.5)
    return flow
