"""The health of all replicas together: which may take work, how much of it, and which are ejected.

Invariants: the results of requests (streaks of failures, something broken in an answer, outliers) never eject more than
`eject_share_max` of a model's replicas, nor the last one; if fewer than `panic_share` are able, such ejections are
ignored, but never a failed probe, a fault or an operator's override; a replica that may take work may have at least one
request. Never chooses a replica, and never reads a clock: `now` is monotonic seconds.
"""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING

from farhop.balance import outcome
from farhop.balance.health.reading import Health, State
from farhop.balance.health.replica import HealthMachine, Mode, may_eject, panic
from regional_lb.fleet.black_hole import BlackHoleGuard
from regional_lb.fleet.outliers import SLOW, Outliers
from regional_lb.fleet.table import ReducedCapacity
from regional_lb.fleet.view import model_of, view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farhop.balance.health.replica import HealthConfig
    from farhop.balance.ledger import Reservation
    from farhop.balance.outcome import Outcome
    from regional_lb.fleet.view import ReplicaProbed, View

REDUCED_CHECK_S = 0.25  # how often who is reduced is looked at again
COMPARE_S = 1.0

_ABLE = (State.UP, State.SUSPECT)
_LEAVING = Health(State.DRAINING, "leaving, or drained where it is announced")
# An engine's own error says little about when it will recover: one such answer is enough to eject it.
BROKEN = {
    outcome.ENGINE_OUT_OF_MEMORY: "an answer said: out of GPU memory",
    outcome.ENGINE_BROKEN: "an answer said: GPU or engine broken",
}


class ReplicaHealthTracker:
    """See the module's docstring. Every method ignores names of replicas that are not (or no longer) in the view.

    `ejections` counts them, by reason, since the process began.
    """

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self.health: dict[str, HealthMachine] = {}
        self.modes: dict[str, Mode] = {}
        self.ejections: dict[str, float] = {}
        self.outliers = Outliers(config.outlier_factor)
        self.black_holes = BlackHoleGuard()
        self._view = view_of([])
        self._overlooked: dict[str, tuple[str, ...]] = {}  # by model in panic: replicas used although ejected
        self._broken_by: dict[str, str] = {}  # by replica, whose answer last said that it is broken
        self._touched: set[str] = set()  # those whose capacity is, or may be, reduced
        self._compare_at = -inf

    def adopt(self, view: View) -> None:
        """Take a new view: nothing is known yet of replicas that came; those that left are forgotten. Replicas of the
        first view are warm: it is this process that is new."""
        before, self._view = self._view.replicas, view
        first = not before
        for name, replica in view.replicas.items():
            known = before.get(name)
            if known is None or known.address != replica.address:  # another process has proven nothing
                self.health[name] = HealthMachine(self._config, warm=first)
                self._broken_by.pop(name, None)
        for name in self.health.keys() - view.replicas.keys():
            del self.health[name]
            self._broken_by.pop(name, None)
        self.outliers.adopt(view.replicas)
        for name in self.black_holes.names():
            if not self._has_peers(name):
                self.black_holes.forget(name)
        self.modes.clear()
        self._overlooked.clear()
        self._touched |= view.replicas.keys()

    # -- reading

    def find(self, variant: str, now: float) -> tuple[list[str], float]:
        """The replicas that serve the model, or the version of it, and may take work; and until when that holds if no
        event comes. Panic is judged by model: if a version has no replica left, another version may take its work.
        """
        serving = [name for name in self._view.by_variant.get(variant, ()) if self._offers(name, model_of(variant))]
        names: list[str] = []
        held_out: list[str] = []
        until = inf
        for name in serving:
            machine = self.health[name]
            health = machine.read(now)
            if health.state in _ABLE:
                names.append(name)
            elif machine.held_out(now):
                held_out.append(name)
            if health.until is not None and (health.forced or health.state not in _ABLE):
                until = min(until, health.until)
        if variant not in self._view.by_model:  # a version, or a name from outside: of those there is no end
            return names, until
        mode = panic(len(names), len(serving), self._config.panic_share)
        self._overlooked.pop(variant, None)
        if held_out and mode is not Mode.NORMAL and self._config.panic_share:
            mode = Mode.PANIC
            self._overlooked[variant] = tuple(held_out)
            in_use = {*names, *held_out}
            names = [name for name in serving if name in in_use]
        self.modes[variant] = mode
        return names, until

    def read(self, name: str, now: float) -> Health:
        """The overall health of a replica of the view: its own health, unless it is leaving or not what it should
        be."""
        replica, health = self._view.replicas[name], self.health[name].read(now)
        if health.state not in _ABLE:
            return health
        if replica.draining:
            return _LEAVING
        if not replica.models:
            return Health(State.DOWN, "its /v1/models has not said what it serves")
        if replica.models <= replica.missing:
            return Health(State.DOWN, "its /v1/models lists none of its models")
        return health

    def _offers(self, name: str, model: str) -> bool:
        replica = self._view.replicas[name]
        return not replica.draining and model not in replica.missing

    def offered(self, name: str, now: float) -> float:
        """The share of its slots that a replica of the view offers: 0 while it is out, unless panic ignores that."""
        in_use = self.health[name].read(now).state in _ABLE or self._is_overlooked(name)
        return self.share(name, now) if in_use else 0.0

    def states(self, now: float) -> dict[str, float]:
        """The number of replicas in each state."""
        states = [health.read(now).state for health in self.health.values()]
        return {state: float(states.count(state)) for state in State}

    def answered_at(self, name: str) -> float:
        """When a replica last gave a good answer (monotonic seconds), -inf if never."""
        health = self.health.get(name)
        return health.answered_at if health is not None else -inf

    # -- what happened. True: the set of able replicas may have changed.

    def probed(self, event: ReplicaProbed, now: float) -> bool:
        """An active probe came back, or something in the replica's hardware is broken."""
        name = event.target
        health = self.health.get(name)
        if health is None:
            return False
        changed = not (health.steady and event.ok and event.ready and not event.fault)
        health.probed(event.ok, now, event.fault, ready=event.ready, strain=event.strain)
        if health.share(now) < 1.0:
            self._touched.add(name)
        if now >= self._compare_at:
            self._compare_at = now + COMPARE_S
            changed |= self._compare(now)
        return changed

    def admit(self, name: str, now: float) -> bool:
        """Whether a request may be dispatched now; a replica on trial takes one."""
        return self.health[name].admit(now, panic=bool(self._overlooked) and self._is_overlooked(name))

    def answered(self, name: str, ok: bool, now: float, sent_at: float = inf, tenant: str = "") -> bool:
        """An answer to a tenant's request sent at `sent_at` began, or failed to by the replica's fault."""
        health = self.health.get(name)
        if health is None or not (ok or health.counts(sent_at)):
            return False
        self.outliers.answered(name, ok, tenant, health.others_at(tenant) if not ok else -inf)
        if ok:
            steady = health.succeeded(now, sent_at, tenant)
            if not steady:
                self._touched.add(name)
            return not steady
        steady = health.steady
        may_eject = health.one_failure_from_ejection and self._may_eject(name, now)
        health.failed(now, may_eject=may_eject, tenant=tenant)
        self._touched.add(name)
        if steady and not health.steady:
            self._ejected(name, "streak")
        return True

    def began(
        self, name: str, elapsed_ms: float, tokens: float, step_ms: float, now: float, *, sure: bool = True
    ) -> bool:
        """A first token came: see Outliers.began. Who is back on trial and slow still need not wait to be compared."""
        self.outliers.began(name, elapsed_ms, tokens, step_ms, now, sure=sure)
        return self.outliers.on_trial(name) and self._compare(now)

    def refused(self, name: str, now: float) -> bool:
        """A connection was refused."""
        health = self.health.get(name)
        if health is not None:
            if health.steady:
                self._ejected(name, "refused")
            health.refused(now)
        return health is not None

    def broke(
        self, name: str, reason: Outcome, now: float, *, began_well: bool, sent_at: float = inf, tenant: str = ""
    ) -> bool:
        """An answer to a tenant's request sent at `sent_at` said that something is broken there. One that began as a
        failure is counted already."""
        health = self.health.get(name)
        if health is None or not health.counts(sent_at):
            return False
        if began_well:
            self.answered(name, False, now, tenant=tenant)
        # Out of memory may be for this request alone, as every later one is answered well. And what is broken stays so:
        # if it did not, an engine may have repeated the tenant's own words.
        only_its = reason is outcome.ENGINE_OUT_OF_MEMORY or self._broken_by.get(name) == tenant
        if reason in BROKEN and not (only_its and health.only_one_tenant_fails(now)):
            self._eject(name, BROKEN[reason], reason.reason, now)
            self._broken_by[name] = tenant
        return True

    def lingers(self, held: Reservation, until: float, now: float) -> None:
        """A request failed that would have been under way at its replica until `until`."""
        replica = self._view.replicas.get(held.target)
        if replica is not None and self._has_peers(replica.name):
            self.black_holes.failed(replica.name, held.kv_tokens, until, now, replica.slots)
            self._touched.add(replica.name)

    # -- how much of its room each may use

    def reduced(self, now: float, only: str = "") -> Iterator[tuple[str, ReducedCapacity | None]]:
        """The replicas whose reduced capacity may have changed since the last call, with that capacity (None: not
        reduced). `only`: just this one, right after an event of its own: of a thousand the others can wait for their
        turn."""
        if not only:
            self.black_holes.expire(now)
        for name in self._touched & {only} if only else tuple(self._touched):
            replica = self._view.replicas.get(name)
            if replica is None:
                self._touched.discard(name)
                continue
            share = self.share(name, now)
            requests, kv_tokens = self.black_holes.load(name)
            if share < 1.0 or requests:
                yield name, ReducedCapacity(max(1, ceil(share * replica.slots)), requests, kv_tokens)
            else:
                self._touched.discard(name)
                yield name, None

    @property
    def reducing(self) -> bool:
        """Whether the capacity of any replica is reduced."""
        return bool(self._touched)

    def share(self, name: str, now: float) -> float:
        """The share of its slots that a replica may use: less during slow start, under strain, or if it fails more than
        its peers."""
        return self.health[name].share(now) * (1.0 - self.outliers.excess(name, now))

    # -- within

    def _is_overlooked(self, name: str) -> bool:
        return any(name in names for names in self._overlooked.values())

    def _has_peers(self, name: str) -> bool:
        replica = self._view.replicas.get(name)
        return replica is not None and any(len(names) > 1 for names in self._view.alike(replica))

    def _may_eject(self, name: str, now: float) -> bool:
        """Whether every model that it serves can spare it. A replica on trial counts as out: it has not come back
        yet."""
        replica = self._view.replicas[name]
        return all(
            may_eject(self._out(model, serving, now), len(serving), self._config.eject_share_max)
            for model, serving in zip(replica.models, self._view.alike(replica), strict=True)
        )

    def _out(self, model: str, names: tuple[str, ...], now: float) -> int:
        """How many of these replicas cannot serve the model now, for whatever reason."""
        return sum(not (self._offers(name, model) and self._in_use(self.health[name], now)) for name in names)

    def _in_use(self, machine: HealthMachine, now: float) -> bool:
        return machine.steady and machine.read(now).state in _ABLE

    def _compare(self, now: float) -> bool:
        """Eject outliers, as far as the limits on ejections allow."""
        changed = False
        for name, why in self.outliers.found(self._view.by_model, now):
            if self.health[name].steady:
                changed |= self._eject(name, why, "outlier", now)
        return changed

    def _eject(self, name: str, why: str, kind: str, now: float) -> bool:
        health = self.health[name]
        steady = health.steady
        if steady and not self._may_eject(name, now):
            return False
        health.eject(why, now)
        if steady and not health.steady:
            self._ejected(name, kind, slow=why == SLOW)
        return True

    def _ejected(self, name: str, kind: str, *, slow: bool = False) -> None:
        self.ejections[kind] = self.ejections.get(kind, 0.0) + 1.0
        self.outliers.forgive(name, slow=slow)
        self._touched.add(name)
