"""The regional machine and its replicas' health: failed requests, slow start, panic, black holes that draw no
traffic.
"""

from __future__ import annotations

from collections import Counter

import pytest
from playbook import answered, held, sent
from worlds import regional, replica, request, swapped

from farhop.balance import outcome
from farhop.balance.health.reading import State
from farhop.balance.health.replica import HealthConfig, Mode
from farhop.balance.machine import AttemptBegan, AttemptEnded, AttemptFailed, Forward, RequestArrived, Usage
from regional_lb.fleet.black_hole import BlackHoleGuard
from regional_lb.fleet.view import ReplicaProbed
from regional_lb.scheduler.flow import RegionalFlow
from regional_lb.scheduler.policy import PolicyConfig

OOM = outcome.ENGINE_OUT_OF_MEMORY
MODEL = "llama"


def go(flow: RegionalFlow, name: str, now: float) -> str | None:
    """Where a new request goes at once, None if it waits."""
    commands = flow.handle(RequestArrived(request(name, prefix=name, deadline=now + 600.0)), now)
    return commands[-1].target if isinstance(commands[-1], Forward) else None


def test_out_of_memory_error_ejects_the_replica_at_once(play) -> None:
    flow = regional(replica("r1"), replica("r2"))
    first = go(flow, "a", 0.0)
    other = "r2" if first == "r1" else "r1"
    (
        play(flow)
        .at(0.1).on(AttemptBegan("a", 1, 500)).expect()
        .on(AttemptEnded("a", 1, 500, None, OOM)).expect()  # relayed: an engine's own answer is never retried
        .on(RequestArrived(request("b"))).expect(sent("b", other))
        .on(RequestArrived(request("c"))).expect(sent("c", other))
        .on(RequestArrived(request("d"))).expect(held("d"))
        .at(30.1).on(ReplicaProbed("r1", True)).expect(sent("d", first))  # half open: the one trial
        .on(RequestArrived(request("e"))).expect(held("e"))
        .at(30.2).on(AttemptBegan("d", 1, 200)).expect()
        .at(30.3).on(AttemptEnded("d", 1, 200, Usage(256, 10))).expect(sent("e", first))
    )  # fmt: skip


def test_an_error_event_in_a_stream_counts_although_it_began_well(play) -> None:
    flow = regional(replica("r1"), replica("r2"))
    first = go(flow, "a", 0.0)
    assert first is not None
    play(flow).at(0.1).on(AttemptBegan("a", 1, 200)).expect().on(AttemptEnded("a", 1, 200, None, OOM)).expect()
    assert flow.replicas.health[first].read(0.1).state is State.DOWN
    assert flow.replicas.ledger.load(first).in_flight == 0


def test_panic_mode_uses_all_replicas_instead_of_overloading_the_healthy_ones(play) -> None:
    flow = regional(replica("r1"), replica("r2"))
    first = go(flow, "a", 0.0)
    assert first is not None
    other = "r2" if first == "r1" else "r1"
    book = play(flow).at(0.1).on(AttemptBegan("a", 1, 500)).expect().on(AttemptEnded("a", 1, 500, None, OOM)).expect()
    for _ in range(3):
        book.on(ReplicaProbed(other, False)).expect()
    assert flow.replicas.mode(MODEL, 0.1) is Mode.PANIC
    book.on(RequestArrived(request("b"))).expect(sent("b", first))
    for _ in range(3):
        book.on(ReplicaProbed(first, False)).expect()
    assert flow.replicas.mode(MODEL, 0.1) is Mode.ALL_DOWN
    book.on(RequestArrived(request("c"))).expect(answered("c", outcome.NO_REPLICA))


@pytest.mark.parametrize("policy", ["predictive", "least-load", "round-robin", "random", "p2c", "session"])
def test_a_replica_that_joins_is_not_run_over_under_any_policy(policy: str) -> None:
    """Fifty wait when it comes up: it may have a tenth of its slots, and more as time goes by."""
    roomy = {"kv_tokens": 10**6, "prefill_tokens_max": 10**6, "prefill_ms_per_token": 0.001}
    flow = regional(replica("r1", slots=10, **roomy))
    flow.policies.override({"": PolicyConfig(name=policy)})
    for n in range(60):
        go(flow, f"q{n}", 0.0)
    fresh = replica("r2", slots=40, **roomy)
    old = flow.replicas.view.replicas["r1"]
    flow.handle(swapped(old, fresh), 1.0)
    most = []
    for second in range(11):
        flow.handle(ReplicaProbed("r2", True), 1.0 + second)
        most.append(flow.replicas.ledger.load("r2").in_flight)
    assert most == [4, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]


class _NoGuard(BlackHoleGuard):
    def failed(self, name: str, kv_tokens: int, until: float, now: float, slots: int) -> None:
        """Failing costs nothing."""


def drawn(policy: str, guarded: bool, waits: bool) -> Counter[str]:
    """Of 600 requests at 100/s, whom they went to. One of four replicas answers 503 after 2 ms, others serve 400 ms.

    Ejection is off: the guard has to do alone. `waits`: three times as many, so that they queue.
    """
    roomy = {"slots": 10, "kv_tokens": 10**6, "prefill_tokens_max": 10**6, "prefill_ms_per_token": 0.001}
    replicas = [replica(f"r{n}", **roomy, tpot_ms=1.6) for n in range(4)]
    flow = regional(*replicas, health=HealthConfig(streak=1000, eject_share_max=0.0, outlier_factor=0.0))
    flow.policies.override({"": PolicyConfig(name=policy)})
    if not guarded:
        flow.replicas.health_tracker.black_holes = _NoGuard()
        flow.replicas.health_tracker.outliers.excess = lambda _name, _now: 0.0  # type: ignore[method-assign]
    went: Counter[str] = Counter()
    ends: list[tuple[float, str, str]] = []

    def carry(commands, now: float) -> None:
        for command in commands:
            if isinstance(command, Forward):
                went[command.target] += 1
                ends.append((now + (0.002 if command.target == "r0" else 0.4), command.id, command.target))

    step_s = 0.01 / (3 if waits else 1)
    for n in range(600):
        now = n * step_s
        for end in sorted(e for e in ends if e[0] <= now):
            ends.remove(end)
            at, name, target = end
            status = 503 if target == "r0" else 200
            attempt = flow.requests[name].attempts
            carry(flow.handle(AttemptBegan(name, attempt, status), at), at)
            carry(flow.handle(AttemptEnded(name, attempt, status, Usage(256, 200) if status == 200 else None), at), at)
        if n % 100 == 0:
            for one in replicas:
                carry(flow.handle(ReplicaProbed(one.name, True), now), now)
        carry(flow.handle(RequestArrived(request(f"q{n}", prefix=f"q{n}", deadline=now + 600.0)), now), now)
    return went


@pytest.mark.parametrize(("policy", "waits"), [("least-load", False), ("p2c", False), ("round-robin", True)])
def test_fast_failing_replica_attracts_no_requests_even_if_not_ejected(policy: str, waits: bool) -> None:
    bare, guarded = drawn(policy, False, waits), drawn(policy, True, waits)
    fair = 1.0 / 4.0
    assert bare["r0"] / bare.total() > 1.5 * fair  # the behaviour of a naive balancer
    assert guarded["r0"] / guarded.total() < 0.5 * fair
    assert min(guarded[f"r{n}"] for n in (1, 2, 3)) > guarded["r0"]


def test_one_failure_among_many_costs_no_more_than_a_slot(play) -> None:
    flow = regional(*(replica(f"r{n}", slots=50) for n in range(2)))
    target = go(flow, "a", 0.0)
    assert target is not None
    flow.handle(AttemptFailed("a", 1, outcome.DIED_BEFORE_START), 0.1)
    table = flow.eligibility.serving_table(MODEL, 0.1)
    row = table.of.at[target]
    assert table.slots[row] == 45  # a tenth of its answers failed
    assert table.in_flight[row] == 1  # the one that is gone; its second attempt is at the other
    assert flow.replicas.ledger.load(target).in_flight == 0


@pytest.mark.parametrize("status", [500, 200])
@pytest.mark.parametrize("innocent", [True, False])
def test_requests_that_engines_cannot_bear_keep_no_replica_from_other_tenants(innocent: bool, status: int) -> None:
    """Each second a replica gives a good answer or so to one tenant, and eight failures to another: by status, or by
    the engine's word that it is out of memory. Without the first tenant they would say that all engines are broken."""
    flow = regional(*(replica(f"r{n}", slots=50, kv_tokens=10**6) for n in range(6)))
    said = OOM if status == 200 else None

    def ask(name: str, tenant: str, now: float, status: int, said: outcome.Outcome | None) -> None:
        commands = flow.handle(RequestArrived(request(name, prefix=name, tenant=tenant, deadline=now + 60.0)), now)
        if isinstance(commands[-1], Forward):
            flow.handle(AttemptBegan(name, 1, status), now)
            flow.handle(AttemptEnded(name, 1, status, None, said), now)

    for second in range(30):
        now = float(second)
        for one in flow.replicas.view.replicas:
            flow.handle(ReplicaProbed(one, True), now)
        for n in range(6 * innocent):
            ask(f"good {second} {n}", "anyone", now, 200, None)
        for n in range(48):
            ask(f"bad {second} {n}", "other", now + n / 96, status, said)
    ejections = sum(flow.replicas.health_tracker.ejections.values())
    assert ejections == 0 if innocent else ejections >= 3
