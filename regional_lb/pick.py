"""Which replica: filter (health, room), score, and choose among near ties by the power of two.

Room is what makes late binding work: a replica has none while its own queue is not empty, its slots are taken, its KV
cache would not hold the request, or a step's worth of prefill is already on its way to it. Then the request waits here,
where it can still go to whichever replica frees first. Never reserves: the flow does, in the same breath.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from farhop.balance import chain, choose, outcome
from farhop.balance.estimate import Speed
from farhop.balance.health import HealthMachine, State, may_eject
from farhop.balance.journal import Journal
from farhop.balance.trie import PrefixTrie
from regional_lb.policy import Need, Scored
from regional_lb.view import view_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from farhop.balance.estimate import Estimates
    from farhop.balance.health import HealthConfig
    from farhop.balance.ledger import Ledger, Load
    from farhop.balance.outcome import Outcome
    from regional_lb.policy import Policy
    from regional_lb.view import Replica, Sample, View
    from topology.law import Verdict

SAMPLE_FRESH_S = 3.0  # an older scrape says nothing about the queue of now
TIE_SHARE = 0.05  # scores this close are equal within what prefill speed is known to
TIE_FLOOR_MS = 1.0
KV_SHARE_MAX = 0.95  # the rest is for answers longer than expected: preemption costs a whole recompute


_NOTHING = Need(0.0, 0.0, 1.0)

_ABLE = (State.UP, State.SUSPECT)


class Fleet:
    """What is known of the replicas beyond one view of them: health, speed, cached prefixes. Survives swaps."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self.view: View = view_of([])
        self.health: dict[str, HealthMachine] = {}
        self.speeds: dict[str, Speed] = {}
        self.trie = PrefixTrie()
        self.journal = Journal(self.trie)

    def adopt(self, view: View, estimates: Estimates) -> None:
        """Take a new view: what came is not heard of yet, what left is forgotten."""
        before, self.view = self.view.replicas, view
        for name, replica in view.replicas.items():
            bytes_per_token = max((estimates.bytes_per_token(model) for model in replica.models), default=0.0)
            capacity_bytes = int(replica.kv_tokens * bytes_per_token)
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

    def healthy(self, model: str, now: float, without: tuple[str, ...] = ()) -> list[Replica]:
        """The replicas that serve the model and may take work."""
        health = self.health
        serving = self.view.by_model.get(model, ())
        return [r for r in serving if r.name not in without and health[r.name].read(now).state in _ABLE]

    def answered(self, name: str, status: int, now: float) -> None:
        """An answer began. A 5xx is the replica's fault, a 4xx is not."""
        health = self.health.get(name)
        if health is None:
            return
        if status >= 500:
            health.failed(now, may_eject=self._may_eject(now))
        else:
            health.succeeded(now)

    def failed(self, name: str, reason: Outcome, now: float) -> None:
        """An attempt broke."""
        health = self.health.get(name)
        if health is None:
            return
        if reason is outcome.CONNECT_FAILED:
            health.refused(now)
            self.trie.clear(name)  # nobody at home: whoever comes back comes back with an empty cache
        else:
            health.failed(now, may_eject=self._may_eject(now))

    def caches(self, name: str, chain: tuple[int, ...], hints: Verdict | None = None) -> None:
        """The replica holds this prefix now. `hints` says where that may be known: without, nowhere."""
        if name not in self.trie:
            return
        if hints is None:
            self.journal.insert(name, chain, frozenset())
        else:
            self.journal.under(hints.epoch)
            self.journal.insert(name, chain, hints.lawful if hints.excluded else None)

    def _may_eject(self, now: float) -> bool:
        down = sum(health.read(now).state is State.DOWN for health in self.health.values())
        return may_eject(down, len(self.health))


class Pick(msgspec.Struct, frozen=True):
    """The choice and the whole field it was made from, best first. `chosen` None: nobody has room."""

    chosen: Scored | None
    field: tuple[Scored, ...]
    full: tuple[str, ...]  # healthy replicas without room


def fresh(sample: Sample | None, now: float) -> Sample | None:
    """The sample, if it is not too old to speak of now."""
    return sample if sample is not None and now - sample.at < SAMPLE_FRESH_S else None


def has_room(replica: Replica, load: Load, need: Need, uncached_tokens: float, now: float) -> bool:
    """Whether the replica would start on the request at once."""
    sample = fresh(replica.sample, now)
    if sample is not None and sample.waiting > 0:
        return False
    if load.in_flight == 0:
        return True  # an idle engine takes anything; what it can never hold it refuses itself
    if load.in_flight >= replica.slots:
        return False
    if load.prefill_tokens > 0 and load.prefill_tokens + uncached_tokens > replica.prefill_tokens_max:
        return False
    kv_tokens = load.kv_tokens + uncached_tokens + need.output_tokens
    return kv_tokens <= KV_SHARE_MAX * replica.kv_tokens


def pick(
    need: Need,
    replicas: Sequence[Replica],
    hits: Mapping[str, int],
    ledger: Ledger,
    speeds: Mapping[str, Speed],
    policy: Policy,
    now: float,
    rng: Random,
) -> Pick:
    """Choose among `replicas`, all of them healthy and serving the model."""
    field = policy.score(need, replicas, hits, ledger, speeds)
    ready: list[Scored] = []
    full: list[str] = []
    for replica, scored in zip(replicas, field, strict=True):
        if has_room(replica, ledger.load(replica.name), need, scored.uncached_tokens, now):
            ready.append(scored)
        else:
            full.append(replica.name)
    ordered = tuple(sorted(field, key=lambda s: s.score_ms))
    if not ready:
        return Pick(None, ordered, tuple(full))
    scores = [s.score_ms for s in ready]
    margin_ms = max(TIE_FLOOR_MS, TIE_SHARE * min(scores))
    ties = choose.near_ties(scores, margin_ms)
    index = ties[0] if len(ties) == 1 else ties[choose.pick_two([_in_flight(ledger, ready[i]) for i in ties], rng)]
    return Pick(ready[index], ordered, tuple(full))


def any_room(replicas: Sequence[Replica], ledger: Ledger, now: float) -> bool:
    """Whether some replica has room for the smallest request there is: if not, there is no point in scoring."""
    return any(has_room(replica, ledger.load(replica.name), _NOTHING, 0.0, now) for replica in replicas)


def least_prefill(
    need: Need, replicas: Sequence[Replica], hits: Mapping[str, int], speeds: Mapping[str, Speed]
) -> tuple[float, float]:
    """Uncached tokens and prefill in ms at the replica where that is shortest, were it idle. At least one replica."""
    shortest = (need.prompt_tokens, inf)
    for replica in replicas:
        uncached = max(0.0, need.prompt_tokens - chain.bytes_at(hits.get(replica.name, 0)) / need.bytes_per_token)
        prefill_ms = uncached * speeds[replica.name].prefill_ms_per_token
        if prefill_ms < shortest[1]:
            shortest = (uncached, prefill_ms)
    return shortest


def expected_wait_ms(
    replicas: Sequence[Replica], ledger: Ledger, speeds: Mapping[str, Speed], queued: int, now: float
) -> float:
    """What one more request would wait before its prefill begins, at the healthy `replicas`; 0 if there are none.

    With room: the prefill backlog of the least burdened replica with room. Without: by Little's law one request leaves
    a replica every service_ms / in_flight, and all who are queued, here or in an engine, go first.
    """
    waits: list[float] = []
    leaving_per_ms = 0.0
    ahead = queued
    for replica in replicas:
        load, speed = ledger.load(replica.name), speeds[replica.name]
        sample = fresh(replica.sample, now)
        # Others may use the engine, too: what it says it runs counts if that is more than ours.
        running = max(load.in_flight, 1) if sample is None else max(load.in_flight, sample.running, 1)
        leaving_per_ms += running / speed.service_ms
        ahead += sample.waiting if sample is not None else 0
        if has_room(replica, load, _NOTHING, 0.0, now):
            waits.append(load.prefill_tokens * speed.prefill_ms_per_token)
    if waits and queued == 0:
        return min(waits)
    return (ahead + 1) / leaving_per_ms if leaving_per_ms > 0.0 else 0.0


def _in_flight(ledger: Ledger, scored: Scored) -> float:
    return float(ledger.load(scored.replica).in_flight)
