"""What must be as if nothing had ever been broken, QUIET_S after the last fault: read from the machines, never written.

Each property returns its findings: what is wrong, where, and by how much. Shares have random variation: a wrong share
is `sure` if chance (SIGMAS) does not explain it, otherwise it is checked again over more answers.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import msgspec

from farhop.balance.health.reading import State
from farhop.balance.health.replica import Mode
from farhop_lab.chaos import workload
from farhop_lab.chaos.workload import TENANT
from farhop_lab.sim.sites import MODEL
from global_lb.routing.flow import GlobalFlow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from farhop_lab.chaos.workload import EngineTimings
    from farhop_lab.sim.balancer import BalancerProcess
    from farhop_lab.sim.region import RegionProcess
    from farhop_lab.sim.world import World

SHARE_OFF = 0.20
ESTIMATE_OFF = 0.25
SIGMAS = 3.0
# Share of a region's requests that go elsewhere by chance: those that come while two prefills are under way here.
NEAR_HOME = 0.02
IDLE_WAIT_MS = 1.0
RTT_SLACK_MS = 2.0

PROPERTIES = ("shares", "estimates", "standing", "answers", "open", "ledgers", "law", "sound")
"""Fair shares; estimates; no replica or region ejected, suspect, reduced or avoided; all requests answered; no open
request that is not served; ledgers, slots, queues and budgets empty once idle; the last law in force; no machine raised
or broke its invariants.
"""


class Finding(msgspec.Struct, frozen=True, order=True):
    """Something wrong. `property` is one of PROPERTIES. `sure`: more answers cannot change it."""

    property: str
    subject: str
    what: str
    sure: bool = True


# -- shares


def shares(world: World, truth: EngineTimings, asked: dict[str, int]) -> Iterator[Finding]:
    """Shares of the answers since `truth` counts; `asked` is the number of requests of each region's clients since
    then.
    """
    for name, region in world.regions.items():
        counts = {replica: truth.count(name, replica) for replica in region.processes}
        yield from share_findings(name, asked[name], counts)


def share_findings(region: str, asked: int, counts: Mapping[str, int]) -> Iterator[Finding]:
    """Of one region: `asked` by its own clients, answered by its replicas."""
    total, part = sum(counts.values()), 1.0 / len(counts)
    yield from _share(region, total, asked, NEAR_HOME, f"({asked} were asked by its own clients)")
    for replica, count in counts.items():
        yield from _share(f"{region}/{replica}", count, total * part, 1.0 - part, f"of its region's {total}")


def _share(subject: str, count: int, fair: float, variance: float, of: str) -> Iterator[Finding]:
    """`variance` is that of chance, as a share of the fair count (binomial: 1 - p)."""
    off, allowed = abs(count - fair), SHARE_OFF * fair
    if off > allowed:
        sure = off > allowed + SIGMAS * sqrt(variance * fair)
        yield Finding("shares", subject, f"{count} answers where {fair:.0f} are fair {of}", sure)


# -- estimates


def estimates(world: World, truth: EngineTimings) -> Iterator[Finding]:
    """Every estimate of both tiers against the true times of the engines since `truth` counts."""
    for name, region in world.regions.items():
        flow = region.flow
        yield from _off(
            f"{name}", "bytes per token", flow.replicas.estimates.bytes_per_token(MODEL), _bytes_per_token()
        )
        table = flow.replicas.table(flow.replicas.whole.of)  # what a pick reads
        for replica, row in table.of.at.items():
            answers = truth.by.get((name, replica), [])
            if len(answers) < 2:
                continue  # its share is reported
            service_ms = workload.service_ms(answers)
            load = 1.0 + service_ms / 1e3 * len(answers) / max(1e-9, world.now - truth.since_s)
            subject = f"{name}/{replica}"
            yield from _off(
                subject, "prefill ms/token", table.prefill_ms_per_token.item(row), workload.prefill_ms_per_token()
            )
            tpot_ms = table.tpot_alone_ms.item(row) + (load - 1.0) * table.batch_interference_ms.item(row)
            yield from _off(subject, "tpot ms", tpot_ms, workload.tpot_ms(answers))
            yield from _off(subject, "service ms", table.service_ms.item(row), service_ms)
    for balancer, tier in _globals(world):
        for name, seen in tier.regions.view.regions.items():
            subject = f"{balancer.name} of {name}"
            wire_ms = world.wire.rtt_ms(balancer.region, name)
            yield from _off(subject, "rtt ms", seen.rtt_ms, wire_ms, slack=RTT_SLACK_MS)
            yield from _off(subject, "output tokens", _output(tier), workload.ANSWER_TOKENS)
            yield from _reported(subject, tier, name)


def _reported(subject: str, flow: GlobalFlow, name: str) -> Iterator[Finding]:
    for instance in flow.regions.view.regions[name].instances:
        capacity = instance.models.get(MODEL)
        if capacity is None:
            yield Finding("estimates", subject, "its report names no model")
            continue
        true_ms = workload.prefill_ms_per_token()
        yield from _off(subject, "reported prefill ms/token", capacity.prefill_ms_per_token, true_ms)


def _output(flow: GlobalFlow) -> float:
    return flow.estimates.output_tokens(TENANT, MODEL, None)


def _bytes_per_token() -> float:
    return workload.PROMPT_BYTES / workload.PROMPT_TOKENS


def _off(subject: str, name: str, estimate: float, truth: float, *, slack: float = 0.0) -> Iterator[Finding]:
    if abs(estimate - truth) > ESTIMATE_OFF * truth + slack:
        yield Finding("estimates", subject, f"{name}: {estimate:.4g}, in truth {truth:.4g}")


# -- standing


def standing(world: World) -> Iterator[Finding]:
    """No replica or region is out, suspect, reduced or avoided, as no cause holds any more. A replica that is back from
    an ejection is in its slow start for longer than that, which is neither.
    """
    for name, region in world.regions.items():
        if not region.alive:
            yield Finding("standing", name, "its balancer is not running")
            continue
        yield from _replicas(name, region)
    for balancer, flow in _globals(world):
        yield from _regions(world, balancer, flow)


def _replicas(name: str, region: RegionProcess) -> Iterator[Finding]:
    now, tracker = region.relay.clock(), region.flow.replicas.health_tracker
    for replica in region.processes:
        health = tracker.read(replica, now)
        if health.state is not State.UP:
            yield Finding("standing", f"{name}/{replica}", f"{health.state}: {health.why}")
        elif (excess := tracker.outliers.excess(replica, now)) > SHARE_OFF:
            yield Finding(
                "standing", f"{name}/{replica}", f"kept from {excess:.0%} of its slots: fails more than its peers"
            )
    if (mode := tracker.modes.get(MODEL, Mode.NORMAL)) is not Mode.NORMAL:
        yield Finding("standing", name, f"mode {mode}")


def _regions(world: World, balancer: BalancerProcess, flow: GlobalFlow) -> Iterator[Finding]:
    now = balancer.relay.clock()
    for name in world.regions:
        subject, known = f"{balancer.name} of {name}", flow.regions.liveness.get(name)
        if known is None:
            yield Finding("standing", subject, "unknown")
            continue
        health = known.read(now)
        if health.state is not State.UP:
            yield Finding("standing", subject, f"{health.state}: {health.why}")
        elif (cold := flow.regions.admitted_share(name, now)) < 1.0:
            yield Finding("standing", subject, f"asked gladly by {cold:.0%} of requests")


# -- requests


def answers(world: World, since_s: float) -> Iterator[Finding]:
    """All requests since then that are over got a complete answer."""
    failed: dict[tuple[str, str], int] = {}
    for record in world.measures.records:
        if record.arrived_at >= since_s and not record.served:
            failed[record.entry, record.outcome] = failed.get((record.entry, record.outcome), 0) + 1
    for (entry, outcome), count in failed.items():
        yield Finding("answers", entry, f"{count} requests ended as {outcome} though nothing is broken")


def open_requests(world: World, before_s: float) -> Iterator[Finding]:
    """No request from before that time is still open, except those whose connection from the client to an entry in
    another region was broken by a black hole: only the client's patience ends these.
    """
    late = [
        one
        for one in world.measures.unfinished()
        if one.arrived_at < before_s and not world.entries[one.entry].broken_off(one.id)
    ]
    if late:
        oldest = min(one.arrived_at for one in late)
        entries = ", ".join(sorted({one.entry for one in late}))
        yield Finding("open", entries, f"{len(late)} requests are open, the oldest for {world.now - oldest:.0f} s")


# -- idle


def ledgers(world: World) -> Iterator[Finding]:
    """No request is under way: nothing is held, reserved, queued or counted."""
    for name, region in world.regions.items():
        for what, count in _regional_books(region):
            if count:
                yield Finding("ledgers", name, f"{what}: {count:g} at rest")
        for replica, process in region.processes.items():
            waiting, running, _ = process.engine.metrics()
            if waiting or running:
                what = f"its engine works on {waiting + running} requests that nobody sent"
                yield Finding("ledgers", f"{name}/{replica}", what)
    for balancer, flow in _globals(world):
        for what, count in _global_books(balancer, flow):
            if count:
                yield Finding("ledgers", balancer.name, f"{what}: {count:g} at rest")
        for name, seen in flow.regions.view.regions.items():
            waits = [one.models[MODEL].wait_ms for one in seen.instances if MODEL in one.models]
            if max(waits, default=0.0) > IDLE_WAIT_MS:
                yield Finding("estimates", f"{balancer.name} of {name}", f"wait ms: {max(waits):.4g}, in truth 0")


def _regional_books(region: RegionProcess) -> list[tuple[str, float]]:
    flow, table = region.flow, region.flow.replicas.whole
    now = region.relay.clock()
    return [
        ("requests under way", max(region.relay.under_way, flow.under_way)),
        ("reservations", len(flow.replicas.ledger)),
        ("targets with load", len(flow.replicas.ledger.targets())),
        ("queued requests", len(flow.queue)),
        ("queued tokens", flow.queue.tokens),
        ("retries in the budget", flow.budget.retrying),
        ("in flight by the table", float(table.in_flight.sum())),
        ("prefill backlog by the table", float(table.backlog_tokens.sum())),
        ("KV tokens taken by the table", float(table.kv_taken_tokens.sum())),
        ("wait ms", max(0.0, flow.wait_estimate.wait_ms(MODEL, now) - IDLE_WAIT_MS)),
    ]


def _global_books(balancer: BalancerProcess, flow: GlobalFlow) -> list[tuple[str, float]]:
    sent = flow.regions.loads.values()
    return [
        ("requests under way", max(balancer.relay.under_way, flow.under_way)),
        ("reservations", len(flow.ledger)),
        ("held requests", len(flow.held)),
        ("retries in the budget", flow.budget.retrying),
        ("bytes outstanding", sum(one.outstanding_bytes for one in sent)),
        ("requests outstanding", sum(one.outstanding_requests for one in sent)),
    ]


def law(world: World, epoch: int) -> Iterator[Finding]:
    """Every process follows the last law."""
    for name, region in world.regions.items():
        if region.flow.law.epoch != epoch:
            yield Finding("law", name, f"epoch {region.flow.law.epoch}, in force is {epoch}")
    for balancer, flow in _globals(world):
        if flow.law.epoch != epoch:
            yield Finding("law", balancer.name, f"epoch {flow.law.epoch}, in force is {epoch}")


def sound(world: World) -> Iterator[Finding]:
    """No machine broke its invariants."""
    for violation in world.journal.first_violations[:3]:
        yield Finding("sound", "world", violation)


def _globals(world: World) -> Iterator[tuple[BalancerProcess, GlobalFlow]]:
    for those in world.balancers.values():
        for balancer in those:
            assert isinstance(balancer.flow, GlobalFlow)
            if balancer.alive:
                yield balancer, balancer.flow
