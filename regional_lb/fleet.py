"""What is known of the replicas beyond one view of them: health, load, speed, cached prefixes. Survives swaps.

Everything a pick reads of it stands in a Table as well, kept in step here: whoever changes a replica's health, load or
speed does so through the fleet. Never chooses.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.balance.estimate import Speed
from farhop.balance.health import HealthMachine, State, may_eject
from farhop.balance.journal import Journal
from farhop.balance.ledger import Ledger
from farhop.balance.outcome import Source
from farhop.balance.trie import PrefixTrie
from regional_lb.table import Subset, Table
from regional_lb.view import ReplicaProbed, ReplicaSampled, view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.estimate import Estimates
    from farhop.balance.health import HealthConfig
    from farhop.balance.ledger import Load
    from farhop.balance.machine import Event
    from farhop.balance.outcome import Outcome
    from regional_lb.view import Replica, View
    from topology.law import Verdict

_ABLE = (State.UP, State.SUSPECT)


class Fleet:
    """See the module's head. Names of replicas that are not (or no more) in the view are no news to any call."""

    def __init__(self, config: HealthConfig, estimates: Estimates) -> None:
        self._config, self.estimates = config, estimates
        self.view: View = view_of([])
        self.health: dict[str, HealthMachine] = {}
        self.speeds: dict[str, Speed] = {}
        self.trie = PrefixTrie()
        self.journal = Journal(self.trie)
        self.ledger = Ledger(self._loaded)
        self.whole = Table(Subset((), np.empty(0, dtype=np.intp)))  # a row for each replica of the view
        # Who is able, by model, as long as nothing happens to anybody's health and no back-off ends.
        self._able: dict[str | tuple[str], Subset] = {}  # (model,): who prefills for it
        self._able_until = inf
        self.silent: list[str] = []  # whom probes have just given up: for the flow to take note of, and to clear
        self._ears: dict[type[Event], Callable[[Any, float], str | None]] = {
            ReplicaProbed: self._probed,
            ReplicaSampled: self._sampled,
        }

    @property
    def hears(self) -> tuple[type[Event], ...]:
        """The events that `hear` knows."""
        return tuple(self._ears)

    def hear(self, event: Event, now: float) -> str | None:
        """Take what the world said of replicas. The one replica whose room it may have changed, None: any."""
        return self._ears[type(event)](event, now)

    def adopt(self, view: View) -> View:
        """Take a new view: what came is not heard of yet, what left is forgotten. The view as it is kept here."""
        before = self.view.replicas
        self.view = view = view_of([_renewed(replica, before.get(name)) for name, replica in view.replicas.items()])
        for name, replica in view.replicas.items():
            capacity_bytes = _capacity_bytes(replica, self.estimates)
            if name not in before:
                self.health[name] = HealthMachine(self._config)
                self.speeds[name] = Speed(replica.prefill_ms_per_token, replica.tpot_ms)
                self.trie.add(name, capacity_bytes)
                continue
            self.trie.set_capacity(name, capacity_bytes)
            if before[name].address != replica.address:
                self.trie.clear(name)  # another process under the same name
        for name in before.keys() - view.replicas.keys():
            del self.health[name], self.speeds[name]
            self.trie.drop(name)
        self._able.clear()
        names = tuple(view.replicas)
        self.whole = table = Table(Subset(names, np.arange(len(names))))
        for row, (name, replica) in enumerate(view.replicas.items()):
            table.describe(row, replica)
            table.burden(row, replica, self.ledger.load(name))
            table.rate(row, self.speeds[name])
        return view

    def _sampled(self, event: ReplicaSampled, now: float) -> str | None:  # noqa: ARG002
        """A replica said how it is doing: its entry and its row are renewed, whoever else there is."""
        name, sample = event.target, event.sample
        known = self.view.replicas.get(name)
        if known is None:
            return name
        replica = replace(known, sample=sample, kv_tokens=sample.kv_tokens or known.kv_tokens)
        self.view.replicas[name] = replica
        self.trie.set_capacity(name, _capacity_bytes(replica, self.estimates))
        row = self.whole.of.at[name]
        self.whole.describe(row, replica)
        if replica.kv_tokens != known.kv_tokens:
            self.whole.burden(row, replica, self.ledger.load(name))
        return name

    def _probed(self, event: ReplicaProbed, now: float) -> str | None:
        """An active probe came back, or something in the replica's hardware is broken."""
        health = self.health.get(event.target)
        if health is not None:
            self._unless(event.ok and not event.fault and health.steady)
            was_up = health.probed_up
            health.probed(event.ok, now, event.fault)
            if was_up and not health.probed_up:
                self.silent.append(event.target)
        return None

    # -- reading

    def able(self, model: str, now: float) -> Subset:
        """The replicas that serve the model and may take work."""
        if now >= self._able_until:
            self._able.clear()
        return self._able.get(model) or self._find_able(model, self.view.by_model.get(model, ()), now)

    def able_to_prefill(self, model: str, now: float) -> Subset:
        """The replicas that prefill for the model's others and may take work."""
        if now >= self._able_until:
            self._able.clear()
        return self._able.get((model,)) or self._find_able((model,), self.view.prefillers.get(model, ()), now)

    def table(self, some: Subset) -> Table:
        """The rows of these replicas. Not to be kept: it may be the fleet's own, which goes on changing."""
        return self.whole.only(some)

    def _find_able(self, key: str | tuple[str], serving: tuple[str, ...], now: float) -> Subset:
        if not self._able:
            self._able_until = inf
        names: list[str] = []
        for name in serving:
            health = self.health[name].read(now)
            if health.state in _ABLE:
                names.append(name)
            if health.until is not None and (health.forced or health.state not in _ABLE):
                self._able_until = min(self._able_until, health.until)
        at = self.whole.of.at
        able = Subset(tuple(names), np.array([at[name] for name in names], dtype=np.intp))
        if serving:  # others' names come from outside, without end
            self._able[key] = able
        return able

    # -- what happened

    def admit(self, name: str, now: float) -> bool:
        """Whether a request may be dispatched now; a replica on trial takes one."""
        health = self.health[name]
        self._unless(health.steady)
        return health.admit(now)

    def answered(self, name: str, status: int, now: float) -> None:
        """An answer began. A 5xx is the replica's fault, a 4xx is not."""
        health = self.health.get(name)
        if health is None:
            return
        if status >= 500:
            self._failed(health, now)
        else:
            self._unless(health.steady)
            health.succeeded(now)

    def failed(self, name: str, reason: Outcome, now: float) -> None:
        """An attempt broke."""
        health = self.health.get(name)
        if health is None:
            return
        if reason is outcome.CONNECT_FAILED:
            self._able.clear()
            health.refused(now)
            self.trie.clear(name)  # nobody at home: whoever comes back comes back with an empty cache
        elif reason.source is Source.TRANSPORT:  # else it was our own bound, and says nothing about the replica
            self._failed(health, now)

    def caches(self, name: str, chain: tuple[int, ...], hints: Verdict | None = None) -> None:
        """The replica holds this prefix now. `hints` says where that may be known: without, nowhere."""
        if name not in self.trie:
            return
        if hints is None:
            self.journal.insert(name, chain, frozenset())
        else:
            self.journal.under(hints.epoch)
            self.journal.insert(name, chain, hints.lawful if hints.excluded else None)

    def prefilled(self, name: str, elapsed_ms: float, tokens: float) -> None:
        """A first token came `elapsed_ms` after dispatch, behind and with `tokens` of uncached prompt."""
        speed = self.speeds.get(name)
        if speed is not None:
            speed.began(elapsed_ms, tokens)
            self.whole.rate(self.whole.of.at[name], speed)

    def computed(self, name: str, elapsed_ms: float, tokens: float) -> None:
        """A prefill for another replica ended `elapsed_ms` after dispatch, behind and with `tokens` of its own."""
        speed = self.speeds.get(name)
        if speed is not None:
            speed.prefilled(elapsed_ms, tokens)
            self.whole.rate(self.whole.of.at[name], speed)

    def served(self, name: str, decode_ms: float, service_ms: float, completion_tokens: int) -> None:
        """An answer ended `decode_ms` after its first token and `service_ms` after dispatch."""
        speed = self.speeds.get(name)
        if speed is not None:
            speed.ended(decode_ms, service_ms, completion_tokens)
            self.whole.rate(self.whole.of.at[name], speed)

    # -- within

    def _loaded(self, name: str, load: Load) -> None:
        replica = self.view.replicas.get(name)
        if replica is not None:
            self.whole.burden(self.whole.of.at[name], replica, load)

    def _unless(self, steady: bool) -> None:
        """Who is able must be found out anew, unless nothing changed that."""
        if not steady:
            self._able.clear()

    def _failed(self, health: HealthMachine, now: float) -> None:
        self._able.clear()
        down = sum(other.read(now).state is State.DOWN for other in self.health.values())
        health.failed(now, may_eject=may_eject(down, len(self.health)))


def _renewed(replica: Replica, before: Replica | None) -> Replica:
    """A replica of a new view, with what was heard of the same one before."""
    if before is None or before.sample is None or replica.sample is not None or before.address != replica.address:
        return replica
    return replace(replica, sample=before.sample, kv_tokens=before.sample.kv_tokens or replica.kv_tokens)


def _capacity_bytes(replica: Replica, estimates: Estimates) -> int:
    """What its KV cache holds, in bytes of prompt."""
    return int(replica.kv_tokens * max(map(estimates.bytes_per_token, replica.models), default=0.0))
