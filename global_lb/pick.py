"""Which region: gather what is lawful and serving, score it, and choose; near ties are drawn by headroom.

Near is what lies within the doubt about the waits: how old the reports are, and how fast what they say was changing.
Never chooses outside the offers it is given, and gives its reasons with the choice. Offering and picking write nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import choose, outcome
from farhop.balance.drift import DOUBT_MAX_MS, Drift
from farhop.balance.ewma import Mean
from farhop.balance.guard import GuardConfig, HotGuard
from farhop.balance.health import Liveness, State
from farhop.balance.reckoning import Reckoning
from farhop.balance.trie import PrefixTrie
from global_lb.policy import Offer, reckoned_wait_ms
from global_lb.view import View, pooled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from farhop.balance.health import LivenessConfig
    from farhop.balance.machine import Request
    from farhop.balance.outcome import Outcome
    from global_lb.policy import Policy, Scored
    from global_lb.view import Capacity, Instance
    from topology.law import Verdict

TIE_MS = 1.0  # below what a wire time is known to
IDLE_SHARE = 0.5  # a local region used less than this has nothing that a hop would spare
RESIDENCE_MIN = 0.1  # never 0: a region believed to hold nothing would never be asked to prove the opposite
MODELS_MAX = 4096
ORDERS_MAX = 1024


class Spill(msgspec.Struct, frozen=True):
    """When a region counts as hot, and what that costs it in every score."""

    guard: GuardConfig = GuardConfig()
    penalty_ms: float = 300.0


_SPILL = Spill()
_UNHEARD = Liveness()  # down: it never had a report or a channel


class Hits(msgspec.Struct):
    """Prompt tokens of all answers that told: believed to be cached when they were sent, and cached in truth."""

    predicted_tokens: float = 0.0
    actual_tokens: float = 0.0


class Regions:
    """What is known of the regions beyond one view of them: life, cached prefixes, what was sent. Survives swaps.

    `residence` is the share (RESIDENCE_MIN..1) of the believed hits that proved true in a region lately. `guards` are
    by region and model, from when it could first be used; `here` is the region whose own work is not foreign.
    """

    def __init__(self, trie_bytes: int, config: LivenessConfig, spill: Spill = _SPILL, here: str = "") -> None:
        self._trie_bytes, self._config, self._spill, self._here = trie_bytes, config, spill, here
        self.view = View({})
        self._ready: dict[tuple[str, str], list[Instance]] = {}  # of the view: who can be asked, by region and model
        self._pool: dict[tuple[str, str, str], Capacity] = {}  # of regions with several instances: what each can use
        self.trie = PrefixTrie()
        self.liveness: dict[str, Liveness] = {}
        self.residence: dict[str, Mean] = {}
        self.hits: dict[str, Hits] = {}
        self.sent: list[Callable[[str, tuple[int, ...]], None]] = []  # who is told what prefix went where
        self.guards: dict[tuple[str, str], HotGuard] = {}
        self._warm: dict[tuple[str, str], HotGuard] = {}  # of them, those that say something
        self._reckonings: dict[tuple[str, str], Reckoning] = {}
        self._drifts: dict[tuple[str, str, str], Drift] = {}
        self._moving: dict[tuple[str, str, str], Drift] = {}  # of them, those that say something
        self._told: dict[tuple[str, str, str], tuple[float, Capacity]] = {}  # by refusals, since that report
        self._orders: dict[frozenset[str], list[str]] = {}
        self._models: set[str] = set()  # ever offered: a region that is gone takes none out of the catalogue

    def adopt(self, view: View, now: float) -> None:
        """Take a new view: what its reports acknowledge is no longer outstanding; what left is forgotten."""
        self.view = view
        self._pool = {line: c for region in view.regions.values() for line, c in pooled(region).items()}
        self._ready = _ready(view)
        known: dict[tuple[str, str], Reckoning] = {}
        drifts: dict[tuple[str, str, str], Drift] = {}
        told: dict[tuple[str, str, str], tuple[float, Capacity]] = {}
        for name, region in view.regions.items():
            if name not in self.trie:
                self.trie.add(name, self._trie_bytes)
                residence = self.residence[name] = Mean(0.05, RESIDENCE_MIN, 1.0)
                residence.update(1.0)
            for instance in region.instances:
                key = (name, instance.name)
                reckoning = known[key] = self._reckonings.get(key) or Reckoning()
                reckoning.acknowledged(instance.incarnation, instance.accepted)
                if len(self._models) < MODELS_MAX:
                    self._models.update(instance.models)
                for model, capacity in instance.models.items():
                    line = (name, instance.name, model)
                    drift = drifts[line] = self._drifts.get(line) or Drift()
                    slots_free = self._pool.get(line, capacity).slots_free
                    drift.reported(capacity.wait_ms, slots_free, instance.received_at)
                    refused = self._told.get(line)
                    if refused is not None and refused[0] == instance.received_at:
                        told[line] = refused
            self.settle(name, now)
        self._reckonings, self._drifts, self._told = known, drifts, told
        self._moving = {line: drift for line, drift in drifts.items() if not drift.still}

    def settle(self, region: str, now: float) -> None:
        """Tell the guards whether the region can be used, and how much of it is."""
        health = self.liveness.get(region, _UNHEARD).read(now)
        usable = health.state in (State.UP, State.SUSPECT) or health.share > 0.0
        known = self.view.regions.get(region)
        for model in {m for i in known.instances for m in i.models} if known is not None else ():
            able = self._able(region, model) if usable else []
            guard = self.guards.get((region, model))
            if not able:
                if guard is not None:
                    guard.left()
                    self._warm[region, model] = guard
                continue
            if guard is None:
                guard = self.guards[region, model] = HotGuard(self._spill.guard)
            guard.came_back(now)
            # Each speaks of all that it can send to; where nothing is shared, in proportion to what it has.
            slots = sum(i.models[model].slots_total for i in able)
            used = [(i.models[model].used_share, i.models[model].slots_total) for i in able]
            share = sum(u * n for u, n in used) / slots if slots else max(u for u, _ in used)
            guard.used(share, max(i.received_at for i in able))
            if guard.cold_share(now) < 1.0:
                self._warm[region, model] = guard
            else:
                self._warm.pop((region, model), None)

    def cold_share(self, region: str, now: float) -> float:
        """The share of requests that go there gladly, for its most guarded model: below 1 while hot or coming back."""
        shares = (guard.cold_share(now) for (name, _), guard in self._warm.items() if name == region)
        return min(shares, default=1.0)

    def refused(self, instance: Instance, model: str, reason: Outcome, wait_ms: float | None) -> None:
        """What a refusal tells is newer than the instance's report, and holds until the next one."""
        if model not in instance.models or (instance.region, instance.name) not in self._reckonings:
            return
        capacity = self._capacity(instance, model)
        if wait_ms is not None:
            capacity = msgspec.structs.replace(capacity, wait_ms=wait_ms)
        if reason is outcome.FOREIGN_FULL:
            capacity = msgspec.structs.replace(capacity, headroom_foreign_tokens=0.0)
        self._told[instance.region, instance.name, model] = (instance.received_at, capacity)

    def _capacity(self, instance: Instance, model: str) -> Capacity:
        told = self._told.get((instance.region, instance.name, model)) if self._told else None
        if told is not None and told[0] == instance.received_at:
            return told[1]
        known = self._pool.get((instance.region, instance.name, model)) if self._pool else None
        return known or instance.models[model]

    def liveness_of(self, region: str) -> Liveness:
        """The region's liveness, to be told what was heard."""
        known = self.liveness.get(region)
        if known is None:
            known = self.liveness[region] = Liveness(self._config)
        return known

    def reckoning_of(self, instance: Instance) -> Reckoning:
        """The counts towards an instance of this view."""
        return self._reckonings[instance.region, instance.name]

    def may_exist(self, model: str) -> bool:
        """Whether some region offers the model or once did; before any has reported, whatever is asked for."""
        return model in self._models or not self._models or len(self._models) >= MODELS_MAX

    def caches(self, region: str, chain: tuple[int, ...]) -> None:
        """The region holds this prefix now."""
        if region in self.trie:
            self.trie.insert(region, chain)
            for told in self.sent:
                told(region, chain)

    def compare(self, chosen: Scored | None, cached_tokens: int) -> None:
        """What share of a believed hit was true tells how long blocks stay resident in that region."""
        if chosen is not None and chosen.region in self.residence:
            hits = self.hits.setdefault(chosen.region, Hits())
            hits.predicted_tokens += chosen.hit_tokens
            hits.actual_tokens += cached_tokens
        if chosen is not None and chosen.believed_tokens >= 1.0 and chosen.region in self.residence:
            share = cached_tokens / chosen.believed_tokens
            self.residence[chosen.region].update(max(RESIDENCE_MIN, min(1.0, share)))

    def offers(
        self,
        request: Request,
        lawful: frozenset[str],
        now: float,
        without: frozenset[str],
        rng: Random | None = None,
    ) -> tuple[list[Offer], dict[str, str]]:
        """Lawful regions that can be asked, and why the other lawful ones cannot. Suspects only if nobody is better.

        One drained at a pace is asked gladly by a shrinking share of the requests, and one that came back is cold for
        a growing one; `rng` draws them, None: none.
        """
        matches = self.trie.match(request.chain)
        sure: list[Offer] = []
        suspect: list[Offer] = []
        absent: dict[str, str] = {}
        # One draw for all: regions that come back together keep their order among themselves.
        luck = 1.0 if rng is None else rng.random()
        liveness, model = self.liveness, request.model
        for name in self._in_order(lawful):
            if name in without:
                absent[name] = "tried already"
                continue
            health = liveness.get(name, _UNHEARD).read(now)
            instance = self.best_instance(name, model)
            if health.state is State.DOWN or (health.state is State.DRAINING and not health.share):
                absent[name] = f"{health.state}: {health.why}"
            elif instance is None:
                absent[name] = "no ready replica of this model" if name in self.view.regions else "never heard of"
            else:
                offer = self._offer(instance, model, matches.get(name, 0), luck, now)
                gladly = health.state is State.UP or luck < health.share
                (sure if gladly else suspect).append(offer)
                if health.state is not State.UP:
                    absent[name] = f"{health.state}: {health.why}"
        return sure or suspect, absent

    def _in_order(self, regions: frozenset[str]) -> list[str]:
        """Sorted; few different sets are asked for, again and again."""
        order = self._orders.get(regions)
        if order is None:
            if len(self._orders) >= ORDERS_MAX:
                self._orders.clear()
            order = self._orders[regions] = sorted(regions)
        return order

    def best_instance(self, region: str, model: str) -> Instance | None:
        """The region's instance to ask: the least wait, with what was sent to each."""
        able = self._able(region, model)
        if len(able) < 2:
            return able[0] if able else None
        waits = [reckoned_wait_ms(self._capacity(i, model), self.reckoning_of(i).outstanding_bytes) for i in able]
        return able[waits.index(min(waits))]

    def _able(self, region: str, model: str) -> list[Instance]:
        return self._ready.get((region, model), [])

    def _offer(self, instance: Instance, model: str, depth: int, luck: float, now: float) -> Offer:
        name = instance.region
        reckoning, capacity = self.reckoning_of(instance), self._capacity(instance, model)
        foreign = name != self._here
        outstanding_bytes = reckoning.outstanding_bytes
        hot = foreign and capacity.headroom_foreign_tokens <= 0.0
        penalty_ms = self._spill.penalty_ms if hot else 0.0
        guard = self._warm.get((name, model)) if self._warm else None
        if guard is not None:
            hot |= guard.hot
            share = guard.cold_share(now)
            if share < 1.0 and share <= luck:
                penalty_ms = self._spill.penalty_ms
        return Offer(
            name,
            self.view.regions[name].rtt_ms,
            instance,
            capacity,
            outstanding_bytes,
            depth,
            self.residence[name].value or RESIDENCE_MIN,
            reckoning.outstanding_requests if outstanding_bytes else 0.0,
            foreign,
            hot,
            penalty_ms,
            self._moving.get((name, instance.name, model)) if self._moving else None,
        )


def _ready(view: View) -> dict[tuple[str, str], list[Instance]]:
    ready: dict[tuple[str, str], list[Instance]] = {}
    for name, region in view.regions.items():
        for instance in region.instances:
            for model, capacity in instance.models.items():
                # It may send to what others report. That a replica changes hands must not hide it for a moment.
                if (capacity.replicas_ready or capacity.usable_share) and not instance.draining:
                    ready.setdefault((name, model), []).append(instance)
    return ready


class Decision(msgspec.Struct, frozen=True):
    """The choice and why: the law's verdict, who was not serving and why, and who was scored, in no order.

    `ties`: the doubt in ms about the wait of each that it was drawn from, if there was more than one.
    """

    verdict: Verdict
    absent: Mapping[str, str]
    scored: Sequence[Scored]
    chosen: Scored | None
    ties: Mapping[str, float] = {}

    @property
    def field(self) -> tuple[Scored, ...]:
        """Those scored, best first; sorted when asked for, since hardly any decision is looked at."""
        return tuple(sorted(self.scored, key=lambda s: s.score_ms))

    @property
    def spilled_from(self) -> str | None:
        """The region that would have been best, had it not been penalised; None if it was chosen, penalty or not."""
        if self.chosen is None or not any(s.penalty_ms for s in self.scored):
            return None
        best = min(self.scored, key=lambda s: s.score_ms - s.penalty_ms)
        return best.region if best.penalty_ms and best.region != self.chosen.region else None


def pick(
    request: Request,
    output_tokens: float,
    offers: Sequence[Offer],
    verdict: Verdict,
    absent: Mapping[str, str],
    policy: Policy,
    rng: Random,
    now: float,
) -> Decision:
    """Choose among `offers`, all of them lawful and serving the model."""
    if not offers:
        return Decision(verdict, absent, (), None)
    scored = policy.score(request, output_tokens, offers)
    ties = _near_ties(offers, scored, output_tokens, now)
    if len(ties) == 1:
        return Decision(verdict, absent, scored, scored[next(iter(ties))])
    chosen = _drawn(offers, scored, list(ties), rng)
    return Decision(verdict, absent, scored, scored[chosen], {scored[i].region: d for i, d in ties.items()})


def _near_ties(offers: Sequence[Offer], scored: Sequence[Scored], output_tokens: float, now: float) -> dict[int, float]:
    """Who may be the best within what the waits are known to: index and doubt in ms. Of these, the cold if any is."""
    scores = [s.score_ms for s in scored]
    best = scores.index(min(scores))
    doubt_best_ms = _doubt_ms(offers[best], scored[best], output_tokens, now)
    ties: dict[int, float] = {}
    for i in choose.near_ties(scores, TIE_MS + doubt_best_ms + DOUBT_MAX_MS):
        doubt_ms = _doubt_ms(offers[i], scored[i], output_tokens, now) if offers[i].drift is not None else 0.0
        if scores[i] - doubt_ms <= scores[best] + TIE_MS + doubt_best_ms:
            ties[i] = doubt_ms
    if len(ties) == 1:
        return ties
    cold = {i: doubt_ms for i, doubt_ms in ties.items() if not scored[i].penalty_ms}
    return cold or ties


def _doubt_ms(offer: Offer, scored: Scored, output_tokens: float, now: float) -> float:
    if offer.drift is None:
        return 0.0
    # By Little's law, one of so many slots frees every service time / slots.
    slot_ms = output_tokens * scored.tpot_ms / max(1, offer.capacity.slots_total)
    return offer.drift.doubt_ms(now, scored.headroom, slot_ms)


def _drawn(offers: Sequence[Offer], scored: Sequence[Scored], ties: Sequence[int], rng: Random) -> int:
    """One of the ties in proportion to headroom; the local region if that is idle: nobody is drawn away from it."""
    for i in ties:
        if not offers[i].foreign and not scored[i].penalty_ms and _idle(offers[i], scored[i]):
            return i
    return ties[choose.draw([scored[i].headroom for i in ties], rng)]


def _idle(offer: Offer, scored: Scored) -> bool:
    sent = offer.outstanding_requests / max(1, offer.capacity.slots_total)
    return scored.headroom >= 1.0 and offer.capacity.used_share + sent < IDLE_SHARE
