"""What is known about the regions beyond one view (liveness, caches, what was sent), and which of them may be asked.

Invariants: it survives view swaps; a region that is not lawful, not alive or drained is never a candidate, and a
suspect one only if there is none better; reading changes nothing but caches. Never scores and never chooses.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from pydantic import Field as Bound
from pydantic import model_validator

from farhop.balance import hashing
from farhop.balance.estimate.drift import Drift
from farhop.balance.estimate.ewma import RevertingMean
from farhop.balance.estimate.residual import Residual
from farhop.balance.estimate.unacknowledged import CombinedLoad, UnacknowledgedLoad
from farhop.balance.health.hot_guard import GuardConfig, HotGuard
from farhop.balance.health.reading import State
from farhop.balance.health.region import Liveness
from farhop.balance.prefix.partial_blocks import PartialBlocks
from farhop.balance.prefix.trie import PrefixTrie
from farhop.config import Part
from global_lb.fleet.instances import Instances
from global_lb.fleet.scaling import Scaling
from global_lb.fleet.table import FREE, Candidates, Table, least_token_ms, remaining, row_of
from global_lb.fleet.view import View
from topology.lineage import Lineages, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from random import Random

    from numpy.typing import NDArray

    from farhop.balance.health.pilot_light import PilotConfig
    from farhop.balance.health.region import LivenessConfig
    from farhop.balance.machine import Request, Usage
    from farhop.balance.outcome import Outcome
    from global_lb.fleet.table import Price, Row, Scored
    from global_lb.fleet.view import Instance, Region
    from topology.lineage import Lineage

CALIBRATION_MIN = 0.1  # never 0: a region thought to hold nothing would never get a request that proves the opposite
CALIBRATION_TAU_S = 60.0  # how fast it returns to 1 if no requests are sent there
_CALIBRATION_AGES_S, _BELIEVED = 1.0, 0.999
MODELS_MAX = 4096
OPENS_S = 2.0  # a region that is down is taken back within a probe or two of its return
OPENS_MIN_S, OPENS_MAX_S = 1.0, 300.0  # a drain may be lifted before its end: no Retry-After says days
ELIGIBLE_MAX = 1024
_WORK_LEARN = 0.05  # what each request weighs in how much of a prompt is left to prefill in the mean

_UNKNOWN = Liveness()  # down: it never had a report or a channel


class Spill(Part):
    """When a region is hot (shares in use, seconds), how fast it takes requests again, and what both add to its score
    (ms)."""

    at: Annotated[float, Bound(gt=0, le=10)] = 0.90
    return_at: Annotated[float, Bound(gt=0, le=10)] = 0.75
    hold_s: Annotated[float, Bound(ge=0, le=3600)] = 2.0
    ramp_per_s: Annotated[float, Bound(gt=0, le=1000)] = 0.05
    penalty_ms: Annotated[float, Bound(ge=0, le=60_000)] = 300.0

    @model_validator(mode="after")
    def _apart(self) -> Spill:
        if self.return_at >= self.at:
            raise ValueError(f"return_at {self.return_at} must be below at {self.at}")
        return self

    @property
    def guard(self) -> GuardConfig:
        """The configuration of the hot guard of each region and model."""
        return GuardConfig(spill_at=self.at, return_at=self.return_at, hold_s=self.hold_s, ramp_per_s=self.ramp_per_s)


_SPILL = Spill()


class Hits(msgspec.Struct):
    """Prompt tokens over all answers that reported cached tokens: those predicted to be cached, and those found
    cached."""

    predicted_tokens: float = 0.0
    actual_tokens: float = 0.0


class _Eligible(msgspec.Struct, frozen=True):
    """The regions of a lawful set that may be asked for a model: their places in the table (None: all), and until when
    that holds if no event comes (monotonic seconds).

    `suspect`: there are none better, so some of these may be silent.
    """

    table: Table
    names: tuple[str, ...]
    at: dict[str, int]
    places: NDArray[np.intp] | None
    here: int | None
    suspect: bool
    absent: dict[str, str]
    until: float


def _alike(was: tuple[Instance, ...], are: tuple[Instance, ...]) -> bool:
    """Whether they are the same balancers with the same models on the same bases: nearly always."""
    if len(was) != len(are):
        return False
    for a, b in zip(was, are, strict=True):
        if a.name != b.name or a.models.keys() != b.models.keys() or a.lineage != b.lineage:
            return False
    return True


def _models(region: Region) -> Collection[str]:
    """All models that any balancer of the region reports."""
    instances = region.instances
    return instances[0].models if len(instances) == 1 else {model for one in instances for model in one.models}


class Regions:
    """What is known about the regions beyond one view: liveness, cached prefixes, what was sent. Survives view swaps.

    `cache_hit_calibration` is the share (CALIBRATION_MIN..1) of the predicted hits that proved true in a region lately.
    `guards` are by region and model, from when it could first be used; `here` is the region whose own work is not
    foreign.
    """

    def __init__(
        self,
        trie_bytes: int,
        config: LivenessConfig,
        spill: Spill = _SPILL,
        here: str = "",
        prices: Mapping[str, Price] | None = None,
        pilots: Mapping[str, PilotConfig] | None = None,
    ) -> None:
        self._trie_bytes, self._config, self._spill, self._here = trie_bytes, config, spill, here
        self._guard_config = spill.guard
        self._prices = prices or {}
        self.scaling, self._on_map = Scaling(pilots), frozenset[str]()
        self.view = View({})
        self.instances = Instances()  # of the view
        self.trie = PrefixTrie()
        self.partial_blocks = PartialBlocks()
        self.liveness: dict[str, Liveness] = {}
        self.cache_hit_calibration: dict[str, RevertingMean] = {}
        self._calibration_due = inf  # when the first that is below 1 is brought up to date
        self.hits: dict[str, Hits] = {}
        self.sent: list[Callable[[str, tuple[int, ...]], None]] = []  # called with what prefix went where
        self.guards: dict[tuple[str, str], HotGuard] = {}
        self._warm: dict[tuple[str, str], HotGuard] = {}  # of them, those that admit less than all without a penalty
        self.loads: dict[tuple[str, str], UnacknowledgedLoad] = {}
        self._turn = (
            0  # counts requests sent; an instance's load has the count of its last one: equal instances take turns
        )
        self.drifts: dict[tuple[str, str, str], Drift] = {}
        self._residuals: dict[tuple[str, str], Residual] = {}  # by region and model
        self._tables: dict[str, Table] = {}  # by model: those asked for
        self._stale: dict[str, dict[str, bool]] = {}  # regions whose row there changed: whole, or by what was sent
        self._known_eligible: dict[tuple[frozenset[str], str], _Eligible] = {}
        # By region, what its guards were updated by (its view, whether it was usable) when all of them became calm.
        self._calm: dict[str, tuple[Region | None, bool] | None] = {}
        self._touched: set[str] = set()  # regions whose liveness may have changed
        self.lost: set[str] = set()  # regions whose liveness had a `lost_at` when candidates were looked for last
        self._seen: dict[str, tuple[State, str]] = {}  # what each was when candidates were found
        self.lineages = Lineages()  # what the models are based on, by all reports
        self._lineages: dict[str, Lineage] = {}  # by region
        self._mean_work_bytes: dict[str, float] = {}  # by model: what requests left to prefill (cost.prefill_work)
        self._models: set[str] = set()  # ever offered: they stay when their region is gone

    def reconfigure(
        self, spill: Spill, prices: Mapping[str, Price], pilots: Mapping[str, PilotConfig] | None = None
    ) -> None:
        """Use these bounds from now on. A region that is hot or coming back keeps its state."""
        if (pilots or {}).keys() != self.scaling.pilots.keys():
            for gone in self.scaling.pilots.keys() - (pilots or {}).keys():
                self._uncap(gone)
            self._calm.clear()
            self._known_eligible.clear()
        self.scaling.configure(pilots or {})
        if spill == self._spill and prices == self._prices:
            return
        self._spill, self._guard_config, self._prices = spill, spill.guard, prices
        for guard in self.guards.values():
            guard.configure(self._guard_config)
        self._calm.clear()  # a calm one may not be by these
        self._forget_tables()

    def remap(self, on_map: frozenset[str]) -> None:
        """Use these regions of the map from now on. What a region that left said of models' bases binds no more; one
        that is only silent is still on the map, and binds."""
        self._on_map = on_map
        if gone := self._lineages.keys() - on_map:
            for region in gone:
                del self._lineages[region]
            self.lineages.learn(self._lineages.values())

    def adopt(self, view: View, now: float) -> None:
        """Replace the view: take every new region, and drop those that left."""
        for name in self.view.regions.keys() - view.regions.keys():
            self.take(name, None)
        for name, known in view.regions.items():
            if self.view.regions.get(name) != known:
                self.take(name, known)
            self.update_guards(name, now)

    def take(self, name: str, known: Region | None) -> None:
        """Set the state of one region: what it acknowledges is no longer outstanding, and instances that left are
        forgotten. None: nothing is known of it any more. Call `update_guards` next."""
        before = self.view.regions.get(name)
        self.view = self.view.put(name, known)
        if self.instances.take(name, known) or before is None or known is None:
            self._forget_tables()
        self._moved(name)
        was = before.instances if before is not None else ()
        for instance in known.instances if known is not None else ():
            if instance not in was:  # the same report come again acknowledges nothing again
                self._reported(instance)
        if not _alike(was, known.instances if known is not None else ()):
            self._reshaped(was, known)
        if known is not None and name not in self.trie:
            self.trie.add(name, self._trie_bytes)
            self.cache_hit_calibration[name] = RevertingMean(0.05, 1.0, CALIBRATION_MIN, 1.0, CALIBRATION_TAU_S)

    def _reported(self, instance: Instance) -> None:
        name = instance.region
        load = self.loads.get((name, instance.name))
        if load is None or load.incarnation > instance.incarnation:
            # A clock was set back between two starts: the one before would pass over all it says.
            load = self.loads[name, instance.name] = UnacknowledgedLoad()
        load.acknowledged(instance.incarnation, instance.accepted)
        if len(self._models) < MODELS_MAX:
            self._models.update(instance.models)
        drifts, alone = self.drifts, len(self.view.regions[name].instances) == 1
        for model, capacity in instance.models.items():
            line = (name, instance.name, model)
            drift = drifts.get(line)
            if drift is None:
                drift = drifts[line] = Drift()
            slots_free = (capacity if alone else self.instances.reported(instance, model)).slots_free
            drift.reported(capacity.wait_ms, slots_free, instance.received_at)

    def _reshaped(self, was: tuple[Instance, ...], known: Region | None) -> None:
        """Other instances, models or bases than before: forget what is gone, learn what is new."""
        models = {i.name: i.models.keys() for i in known.instances} if known is not None else {}
        offered = {model for theirs in models.values() for model in theirs}
        for instance in was:
            for model in instance.models.keys() - offered:
                self._residuals.pop((instance.region, model), None)
            if instance.name not in models:
                self.loads.pop((instance.region, instance.name), None)
            for model in instance.models.keys() - models.get(instance.name, ()):
                self.drifts.pop((instance.region, instance.name, model), None)
        if known is not None:
            self._learn(known)

    def _learn(self, region: Region) -> None:
        """Learn the base models of the region's models, if its reports have changed."""
        lineage = merged(instance.lineage for instance in region.instances)
        if self._lineages.get(region.name) != lineage:
            self._lineages[region.name] = lineage
            self.lineages.learn(self._lineages.values())

    def _uncap(self, region: str) -> None:
        for (name, _), guard in self.guards.items():
            if name == region:
                guard.cap = 1.0

    def _usable(self, region: str, now: float) -> bool:
        health = self.liveness.get(region, _UNKNOWN).read(now)
        return health.state in (State.UP, State.SUSPECT) or health.share > 0.0

    def update_guards(self, region: str, now: float) -> None:
        """Inform the guards whether the region can be used, and how much of it is in use."""
        if now >= self.scaling.due:
            for name in self.scaling.look(self.view, lambda name: self._usable(name, now), self._on_map, now):
                self._known_eligible.clear()
                if name != region:
                    self._update_guards_of(name, now)
        self._update_guards_of(region, now)

    def _update_guards_of(self, region: str, now: float) -> None:
        pilots, known = self.scaling.pilots, self.view.regions.get(region)
        asleep = region in pilots and self.scaling.asleep(region)
        usable = not asleep and self._usable(region, now)
        if (was := self._calm.get(region)) and was[0] is known and was[1] == usable:
            return  # nothing has changed since all of the region's guards were calm
        calm, warm, instances = True, self._warm, self.instances
        ready = instances.served(region) if usable else {}
        for model in _models(known) if known is not None else ():
            line = (region, model)
            able, guard = ready.get(model), self.guards.get(line)
            if not able:
                if guard is None and asleep:
                    guard = self.guards[line] = HotGuard(self._guard_config)  # when it wakes, it does so at a pace
                if guard is not None:
                    guard.left()
                    warm[line] = guard
                    calm = False
                continue
            if guard is None:
                guard = self.guards[line] = HotGuard(self._guard_config)
            elif line in warm:
                guard.came_back(now)
            if region in pilots:
                guard.cap = self.scaling.admitted_share(region, model)
            if len(able) == 1:
                guard.used(able[0].models[model].used_share, able[0].received_at)
            else:
                guard.used(instances.used_share(region, model), max([i.received_at for i in able]))
            if guard.admitted_share(now) < 1.0:
                warm[line] = guard
                calm = False
            elif warm:
                warm.pop(line, None)
        self._calm[region] = (known, usable) if calm else None

    def availability(self, region: str, now: float) -> tuple[State, bool, bool, Collection[str]]:
        """What decides whether a held request can go: the region's state, whether it takes requests at all, whether it
        is lost, and which models it serves."""
        liveness = self.liveness.get(region, _UNKNOWN)
        health = liveness.read(now)
        return health.state, health.share > 0.0, liveness.lost_at is not None, self.instances.served(region).keys()

    def admitted_share(self, region: str, now: float) -> float:
        """The share of requests admitted without a penalty, for its most guarded model: 1 unless hot or coming back."""
        return min(
            (guard.admitted_share(now) for (name, _), guard in self._warm.items() if name == region), default=1.0
        )

    def refused(self, instance: Instance, model: str, reason: Outcome, wait_ms: float | None) -> None:
        """A refusal's figures are newer than the instance's report, and count until its next one."""
        if model not in instance.models or (instance.region, instance.name) not in self.loads:
            return
        self.instances.refused(instance, model, reason, wait_ms)
        self._moved(instance.region)

    def liveness_of(self, region: str) -> Liveness:
        """The region's liveness, to be updated by the caller."""
        known = self.liveness.get(region)
        if known is None:
            known = self.liveness[region] = Liveness(self._config)
        self._touched.add(region)
        return known

    def load_of(self, instance: Instance) -> UnacknowledgedLoad:
        """The unacknowledged load of an instance of this view, for the caller to add what it sends. Report later
        changes with `load_changed`."""
        self.load_changed(instance.region)
        load = self.loads[instance.region, instance.name]
        self._turn = load.turn = self._turn + 1
        return load

    def may_exist(self, model: str) -> bool:
        """Whether some region offers the model or once did; True for any name until a region has reported."""
        return model in self._models or not self._models or len(self._models) >= MODELS_MAX

    def offers(self, region: str, model: str) -> bool:
        """Whether some balancer of the region reports the model, able to serve it now or not."""
        known = self.view.regions.get(region)
        return known is not None and any(model in instance.models for instance in known.instances)

    def context_tokens(self, region: str, model: str) -> float:
        """The longest request for the model that the region can hold; infinite where it does not say."""
        able = self.instances.able(region, model)
        return max((self.instances.capacity(one, model).context_tokens or inf for one in able), default=inf)

    def asked(self, model: str, work_bytes: float) -> None:
        """A request for the model was sent, with `work_bytes` of prompt to prefill; updates the model's mean work."""
        means = self._mean_work_bytes
        mean = means.get(model, work_bytes)
        if model not in means and len(means) >= MODELS_MAX:
            del means[next(iter(means))]
        means[model] = mean + _WORK_LEARN * (work_bytes - mean)

    def caches(self, region: str, chain: tuple[int, ...]) -> None:
        """The region now caches this prefix."""
        if region in self.trie.mirrors:
            self.trie.insert(region, chain)
            for on_sent in self.sent:
                on_sent(region, chain)

    def forget_prefixes(self) -> None:
        """Forget all prefixes of all regions, until they are reported or sent again."""
        for region in self.trie.locations:
            self.trie.clear(region)

    def opens_in_s(self, lawful: frozenset[str], waits_ms: Mapping[str, float], now: float) -> float:
        """In how many seconds the first of these regions may serve again, as far as is known: a drain says when it
        ends, a refusal how long the wait would be; a silent region may be back any time.
        """
        soonest = OPENS_MAX_S
        for region in lawful:
            health = self.liveness.get(region, _UNKNOWN).read(now)
            if region in waits_ms:
                opens_s = waits_ms[region] / 1e3
            elif health.state is State.DRAINING:
                opens_s = OPENS_MAX_S if health.until is None else health.until - now
            else:
                opens_s = OPENS_S
            soonest = min(soonest, opens_s)
        return max(OPENS_MIN_S, soonest)

    def began(self, model: str, chosen: Scored, elapsed_ms: float) -> None:
        """Learn from the time between sending a stream's request to the chosen region and its first token. The
        correction is used from the region's next report on."""
        residual = self._residuals.get((chosen.region, model))
        if residual is None:
            if chosen.region not in self.view.regions:
                return
            residual = self._residuals[chosen.region, model] = Residual()
        residual.seen(chosen.ttft_ms - chosen.residual_ms, elapsed_ms)

    def compare(self, request: Request, chosen: Scored | None, usage: Usage, now: float) -> None:
        """Learn from an answer's cached tokens: the share of a predicted hit that was found calibrates later
        predictions there; tokens found beyond it show where prompts with this beginning diverge. Nothing is learned if
        the engine does not report them."""
        cached_tokens = usage.cached_tokens
        if cached_tokens is None:
            return
        if chosen is not None and chosen.predicted_tokens >= 1.0:
            tokens = chosen.hit_tokens + chosen.uncached_tokens
            predicted_bytes = chosen.predicted_tokens / tokens * request.prompt_bytes
            found_bytes = cached_tokens / max(usage.prompt_tokens, 1) * request.prompt_bytes
            self.partial_blocks.learn(request.chain, request.prompt_bytes, predicted_bytes, found_bytes)
        if chosen is not None and chosen.region in self.cache_hit_calibration:
            hits = self.hits.setdefault(chosen.region, Hits())
            hits.predicted_tokens += chosen.hit_tokens
            hits.actual_tokens += cached_tokens
        if chosen is not None and chosen.predicted_tokens >= 1.0 and chosen.region in self.cache_hit_calibration:
            share = cached_tokens / chosen.predicted_tokens
            self.cache_hit_calibration[chosen.region].update(max(CALIBRATION_MIN, min(1.0, share)), now)
            self._calibration_due = min(self._calibration_due, now + _CALIBRATION_AGES_S)
            self.load_changed(chosen.region)

    def _age(self, now: float) -> None:
        """Let the cache-hit calibration return towards 1 with time."""
        self._calibration_due = inf
        for name, cache_hit_calibration in self.cache_hit_calibration.items():
            if name in self.view.regions and cache_hit_calibration.value < _BELIEVED:
                self.load_changed(name)
                if cache_hit_calibration.at(now) < _BELIEVED:
                    self._calibration_due = now + _CALIBRATION_AGES_S

    def candidates(
        self,
        request: Request,
        output_tokens: float,
        lawful: frozenset[str],
        now: float,
        without: frozenset[str] = frozenset(),
        rng: Random | None = None,
    ) -> Candidates:
        """The lawful regions that can be asked, and why the other lawful ones cannot. Suspect ones only if none is
        better.

        A region drained at a pace is used by a shrinking share of the requests, and one that came back is unpenalised
        for a growing one; `rng` draws them, None: none. A session is drawn once: it moves away, and back, as a whole.
        """
        # One draw for all: regions that come back together keep their order among themselves.
        random_draw = 1.0 if rng is None else hashing.fraction(request.session) if request.session else rng.random()
        if now >= self._calibration_due:
            self._age(now)
        eligible = self._eligible(lawful, request.model, now, without, random_draw)
        table, places = eligible.table, eligible.places
        self._write(request.model, table, now)
        block, sent, least_ms = table.block, table.sent, table.token_least_ms
        if places is not None:
            block, sent = block[:, places], sent[:, places]
            least_ms = least_token_ms(block)
        candidates = Candidates(
            request, output_tokens, eligible.names, eligible.at, block, sent, eligible.here, least_ms
        )
        candidates.absent, candidates.spill_ms = eligible.absent, self._spill.penalty_ms
        candidates.mean_work_bytes = self._mean_work_bytes.get(request.model)
        candidates.moving, candidates.any_full = bool(table.moving) or eligible.suspect, bool(table.full)
        candidates.any_wait, candidates.contexts_differ = bool(table.waited), table.contexts_differ
        candidates.hits(self.trie.match(request.chain), self.partial_blocks)
        if table.full or self._warm:
            self._guard(candidates, random_draw, now)
        answer_bytes = (request.max_tokens or output_tokens) * table.bytes_per_token
        all_hold_it = request.prompt_bytes + answer_bytes <= table.context_least_bytes
        return candidates if all_hold_it else candidates.that_hold_it()

    # -- which regions may be asked

    def _eligible(
        self, lawful: frozenset[str], model: str, now: float, without: frozenset[str], random_draw: float
    ) -> _Eligible:
        """The present candidates; the cached ones if nothing has changed since they were computed."""
        for region in self._touched:
            liveness = self.liveness[region]
            health = liveness.read(now)
            if self._seen.get(region) != (health.state, health.why):
                self._known_eligible.clear()
            if liveness.lost_at is not None:
                self.lost.add(region)
            elif self.lost:
                self.lost.discard(region)
        self._touched.clear()
        known = self._known_eligible.get((lawful, model))
        if known is not None and now < known.until and not without:
            return known
        made = self._find_eligible(lawful, model, now, without, random_draw)
        if not without:
            if len(self._known_eligible) >= ELIGIBLE_MAX:
                self._known_eligible.clear()
            self._known_eligible[lawful, model] = made
        return made

    def _find_eligible(
        self, lawful: frozenset[str], model: str, now: float, without: frozenset[str], random_draw: float
    ) -> _Eligible:
        sure: list[str] = []
        asleep: list[str] = []
        suspect: list[str] = []
        absent: dict[str, str] = {}
        until = inf
        for name in sorted(lawful):
            if name in without:
                absent[name] = "tried already"
                continue
            liveness = self.liveness.get(name, _UNKNOWN)
            health = liveness.read(now)
            turns = now if liveness.forced.fading(now) else health.until
            until = until if turns is None else min(until, turns)
            self._seen[name] = health.state, health.why
            if health.state is State.DOWN or (health.state is State.DRAINING and not health.share):
                absent[name] = f"{health.state}: {health.why}"
            elif not self.instances.able(name, model):
                absent[name] = "no ready replica of this model" if name in self.view.regions else "never heard of"
            elif self.scaling.asleep(name) and health.state is State.UP:
                asleep.append(name)  # better than a silent region, and than none
                absent[name] = "pilot-light: asleep"
            else:
                admitted = health.state is State.UP or random_draw < health.share
                (sure if admitted else suspect).append(name)
                if health.state is not State.UP:
                    absent[name] = f"{health.state}: {health.why}"
        table, names = self._table(model), tuple(sure or asleep or suspect)
        if names == table.names:
            return _Eligible(table, names, table.at, None, table.here, not (sure or asleep), absent, until)
        at = {name: place for place, name in enumerate(names)}
        places = np.array([table.at[name] for name in names], dtype=np.intp)
        return _Eligible(table, names, at, places, at.get(self._here), not (sure or asleep), absent, until)

    def _guard(self, candidates: Candidates, random_draw: float, now: float) -> None:
        """Which regions are hot, and which pay a penalty for that or for having been away."""
        penalty_ms, hot = np.zeros(len(candidates)), set(candidates.full())
        penalty_ms[list(hot)] = self._spill.penalty_ms
        model, at = candidates.request.model, candidates.at
        for (name, known), guard in self._warm.items():
            place = at.get(name) if known == model else None
            if place is None:
                continue
            if guard.hot:
                hot.add(place)
            if random_draw >= guard.admitted_share(now) < 1.0:
                penalty_ms[place] = self._spill.penalty_ms
        if penalty_ms.any():
            candidates.penalty_ms = penalty_ms
        candidates.hot = frozenset(hot)

    # -- what they offer

    def load_changed(self, region: str) -> None:
        """The unacknowledged load or the cache-hit calibration of a region changed: the next decision reads them
        again."""
        for model, table in self._tables.items():
            if region in table.at:
                self._stale[model].setdefault(region, False)

    def _moved(self, region: str) -> None:
        """Something else about the region changed: the next decision reads its whole row again."""
        for model, table in self._tables.items():
            if region in table.at:
                self._stale[model][region] = True

    def _forget_tables(self) -> None:
        """Drop cached tables: the set of usable regions has changed."""
        self._tables.clear()
        self._stale.clear()
        self._known_eligible.clear()

    def _table(self, model: str) -> Table:
        table = self._tables.get(model)
        if table is None:
            names = self.instances.serving(model)
            table = Table(names, self._here)
            if names:  # no table is kept for a model that no region serves: clients may ask for any name
                self._tables[model] = table
                self._stale[model] = dict.fromkeys(names, True)
        return table

    def _write(self, model: str, table: Table, now: float) -> None:
        stale = self._stale.get(model)
        if not stale:
            return
        rows: list[tuple[str, Row]] = []
        sent: list[tuple[str, float, float, float]] = []
        for name, whole in stale.items():
            instances = self.view.regions[name].instances
            if whole or len(instances) > 1:  # another instance may be the better one now
                rows.append((name, self._row(name, model, now)))
            else:
                capacity, load = self.instances.capacity(instances[0], model), self.loads[name, instances[0].name]
                wait_ms, left = remaining(capacity, load, foreign=name != self._here)
                sent.append((name, wait_ms, left, self.cache_hit_calibration[name].at(now)))
        table.write(rows, sent)
        stale.clear()

    def _row(self, name: str, model: str, now: float) -> Row:
        instance = self.best_instance(name, model)
        assert instance is not None  # else it had no row
        drift, region = self.drifts.get((name, instance.name, model)), self.view.regions[name]
        residual = self._residuals.get((name, model))
        return row_of(
            self.instances.capacity(instance, model),
            # Several send to the same replicas: what one of them was sent takes slots that all of them count.
            CombinedLoad(self.loads[name, i.name] for i in region.instances)
            if len(region.instances) > 1
            else self.loads[name, instance.name],
            rtt_ms=region.rtt_ms,
            cache_hit_calibration=self.cache_hit_calibration[name].at(now),
            rates=drift.rates if drift is not None else (0.0, 0.0, 0.0),
            price=self._prices.get(name, FREE),
            price_here=self._prices.get(self._here, FREE) if name != self._here else None,
            residual_ms=residual.value_ms if residual is not None else 0.0,
        )

    def best_instance(self, region: str, model: str) -> Instance | None:
        """The region's instance to ask: the one with the least wait, counting what was sent to each. Of equals the one
        with the most slots left, then each in turn, so that one process does not carry all of the region's load."""
        able = self.instances.able(region, model)
        if len(able) < 2:
            return able[0] if able else None
        best, least = able[0], (inf, inf, inf)
        for instance in able:
            load = self.loads[region, instance.name]
            wait_ms, left = remaining(self.instances.capacity(instance, model), load, foreign=region != self._here)
            key = wait_ms, -left, load.turn
            if key < least:
                best, least = instance, key
        return best
