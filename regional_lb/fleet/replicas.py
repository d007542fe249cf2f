"""What is known about the replicas beyond one view: health, load, speed, cached prefixes. Survives view swaps.

Everything that a pick reads is also in a Table, kept up to date here: a replica's health, load and speed are changed
only through this class. Never chooses.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.balance.estimate.residual import Residual
from farhop.balance.health.reading import State
from farhop.balance.health.replica import Mode
from farhop.balance.ledger import Ledger
from farhop.balance.prefix.chain import marked_depth
from regional_lb.fleet.adapters import Adapters
from regional_lb.fleet.cache_mirror import CacheMirror
from regional_lb.fleet.kv_growth import AnswerLengths, peak_tokens
from regional_lb.fleet.recent import Cached
from regional_lb.fleet.replica_health import REDUCED_CHECK_S, ReplicaHealthTracker
from regional_lb.fleet.shares import PeerLearned, PeerReported, PeersChanged, TurnTimerFired
from regional_lb.fleet.speeds import Speeds
from regional_lb.fleet.table import SAMPLE_FRESH_S, Subset, Table
from regional_lb.fleet.unreported_hits import UnreportedHits
from regional_lb.fleet.view import BlocksChanged, ReplicaProbed, ReplicaSampled, prefill_variant, view_of
from topology.lineage import Lineages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farhop.balance.estimate.estimates import Estimates
    from farhop.balance.health.replica import HealthConfig
    from farhop.balance.ledger import Load, Reservation
    from farhop.balance.machine import EngineLoad, Event
    from farhop.balance.outcome import Outcome
    from regional_lb.fleet.shares import Shares
    from regional_lb.fleet.table import ReducedCapacity
    from regional_lb.fleet.view import Replica, View
    from topology.law import Verdict


class Replicas:
    """See the module's docstring. Every method ignores names of replicas that are not (or no longer) in the view."""

    def __init__(self, config: HealthConfig, estimates: Estimates, shares: Shares | None = None) -> None:
        self.estimates, self.shares = estimates, shares
        self.view: View = view_of([])
        self.health_tracker = ReplicaHealthTracker(config)
        self.health = self.health_tracker.health
        self.speeds = Speeds()
        self.residuals: dict[str, Residual] = {}  # of first tokens, by model
        self.mirror = CacheMirror(estimates)
        self.trie, self.journal, self.blocks = self.mirror.trie, self.mirror.journal, self.mirror.blocks
        self.adapters = Adapters()
        self.unreported_hits = UnreportedHits()
        self.answer_lengths: dict[str, AnswerLengths] = {}  # by replica: each has its own mixture of work
        self.now = 0.0  # set by the owner before each event
        self.lineages = Lineages()
        self.ledger = Ledger(self._loaded, columns=True)
        self.whole = Table(Subset((), np.empty(0, dtype=np.intp)))  # a row for each replica of the view
        # The able replicas by variant; valid until a replica's health changes or a back-off ends.
        self._able: dict[str, Subset] = {}
        self._able_until = inf
        self.silent: list[str] = []  # replicas that probes have just taken down: the flow reads and clears it
        self.least_context_tokens = inf  # the shortest request that somebody cannot hold
        self.contexts_differ = False  # between replicas of some model
        self._context_tokens: dict[str, dict[str, float]] = {}  # how long one may be, by model and replica
        # Set by what observes engines: called with a replica and the outcome when a request found that another process
        # may have taken its place, or that it does not serve the model.
        self.recheck_engine: Callable[[str, Outcome], None] = lambda _name, _reason: None
        self.unchanged = False  # the last event brought nothing new
        self.alive = ""  # the replica whose engine was seen to work by the last event; an answered probe does not count
        self._reduced: dict[str, ReducedCapacity] = {}  # by name, only replicas whose capacity is reduced: rarely any
        self._handlers: dict[type[Event], Callable[[Any, float], str | None]] = {
            ReplicaProbed: self._probed,
            ReplicaSampled: self._sampled,
            BlocksChanged: self._blocks_changed,
        }
        if shares is not None:
            self._handlers |= {
                PeerReported: self._peer_reported,
                PeersChanged: self._peers_changed,
                TurnTimerFired: self._turn_timer_fired,
            }

    @property
    def event_types(self) -> tuple[type[Event], ...]:
        """The events that `handle` takes."""
        return tuple(self._handlers)

    def handle(self, event: Event, now: float) -> str | None:
        """Apply an event about replicas. Returns the only replica whose room it may have changed; None: any; "":
        none.
        """
        self.alive, self.unchanged, self.now = "", False, now
        return self._handlers[type(event)](event, now)

    def adopt(self, view: View) -> View:
        """Take a new view. Replicas that are new start without a state; those that left are forgotten. Returns the view
        as kept here.
        """
        before = self.view.replicas
        self.view = view = view_of([_renewed(replica, before.get(name)) for name, replica in view.replicas.items()])
        for name, replica in view.replicas.items():
            self.mirror.adopt(replica, before.get(name))
        for name in before.keys() - view.replicas.keys():
            self._reduced.pop(name, None)
            self.mirror.drop(name)
            self.unreported_hits.forget(name)
            self.answer_lengths.pop(name, None)
        self.speeds.adopt(view.replicas)
        self.residuals = {model: one for model, one in self.residuals.items() if model in view.by_model}
        self.adapters.adopt({name: replica.adapters for name, replica in view.replicas.items()})
        self.health_tracker.adopt(view)
        self._able.clear()
        self._able_until = -inf  # which replicas have peers, and so may be reduced, has changed
        if self.shares is not None:
            self.shares.adopt(view)
        self.lineages.learn(replica.lineage for replica in view.replicas.values())
        names = tuple(view.replicas)
        former, self.whole = self.whole, Table(Subset(names, np.arange(len(names))), peak=self._peak_tokens)
        table = self.whole
        table.rate(self.speeds)
        for row, (name, replica) in enumerate(view.replicas.items()):
            if name in before:
                table.continues(row, former, former.of.at[name])
            table.describe(row, replica)
            self._write(name)
            table.filled[row] = self.trie.filled(name)
        self._measure_contexts()
        return view

    def _measure_contexts(self) -> None:
        """Find out how long a request may be at each replica, for each model that it serves or prefills for."""
        known: dict[str, dict[str, float]] = {}
        for name, replica in self.view.replicas.items():
            for model in replica.models:
                known.setdefault(model, {})[name] = replica.context_tokens(model)
        self._context_tokens = known
        self.least_context_tokens = min((min(of.values()) for of in known.values()), default=inf)
        self.contexts_differ = any(min(of.values()) < max(of.values()) for of in known.values())

    def age(self, now: float) -> None:
        """Refresh what ages. Call it with the first event after `speeds.due`."""
        self.estimates.now = now
        self.speeds.refresh(now)
        self.whole.rate(self.speeds)

    def on_engine_load(self, name: str, load: EngineLoad, now: float) -> None:
        """A replica reported its load with an answer: newer than its last sample, which stays valid for the other
        figures.
        """
        known = self.view.replicas.get(name)
        if known is None or known.sample is None:
            return
        newer = {of: value for of in load.__struct_fields__ if (value := getattr(load, of)) is not None}
        self._sampled(ReplicaSampled(name, replace(known.sample, at=now, queued=None, lora=None, **newer)), now)

    def _sampled(self, event: ReplicaSampled, now: float) -> str | None:  # noqa: ARG002
        """A replica was scraped: update its entry and its row only."""
        name, sample = event.target, event.sample
        known = self.view.replicas.get(name)
        if known is None:
            return name
        before = known.sample
        if before is None or sample.moved(before):
            self.alive = name
        # What we sent and the engine has not begun is on its way there. It is bounded by tokens (Table.room), and
        # begins within a step, long before the next scrape. If it counted as the engine's queue, the engine would idle
        # until then.
        queued = max(0, sample.waiting - self.ledger.load(name).prefills)
        if queued == 1 and before is not None and sample.at - before.at < SAMPLE_FRESH_S:
            queued = min(1, before.waiting)
        since = None
        if before is not None and sample.at - before.at < SAMPLE_FRESH_S and sample.repeats(before):
            since = before.at if before.since is None else before.since
            if sample.at - since >= SAMPLE_FRESH_S and not self.ledger.load(name).in_flight:
                # The figures of the engine's last step. It writes new ones when it works (vLLM after all its requests
                # were cancelled, SGLang for half a minute): without a request it would say so for ever.
                queued = 0
        if queued != sample.waiting or since is not None:
            sample = replace(sample, queued=queued, since=since)
        self.unchanged = before is not None and sample.same(before) and sample.at - before.at < SAMPLE_FRESH_S
        if before is not None and sample.restarted(before):
            self._forget(name)
        elif before is not None and self.unreported_hits.overrates(name, sample.prefix_hits - before.prefix_hits):
            self.trie.clear(name)
        replica = replace(known, sample=sample, kv_tokens=sample.kv_tokens or known.kv_tokens)
        self.view.replicas[name] = replica
        if sample.lora is not None:
            self.adapters.on_report(name, sample.lora)
        if sample.kv_tokens is not None:
            self.blocks.resize(name, sample.kv_tokens)
        self.mirror.fit(replica)
        row = self.whole.of.at[name]
        self.whole.describe(row, replica)
        if replica.kv_tokens != known.kv_tokens:
            self._write(name)
        if sample.kv_tokens != (before.kv_tokens if before is not None else None):
            self._measure_contexts()
        return name

    def _probed(self, event: ReplicaProbed, now: float) -> str | None:
        """An active probe came back, or something in the replica's hardware is broken."""
        health = None if event.ok and not event.fault else self.health.get(event.target)
        was_down = health is None or health.read(now).state is State.DOWN
        if self.health_tracker.probed(event, now):
            self._able.clear()
        else:
            self.unchanged = True
        if health is not None and not was_down and health.read(now).state is State.DOWN:
            self.silent.append(event.target)
        if self.health_tracker.reducing:
            self._reduce(now, event.target)
        return None

    def _blocks_changed(self, event: BlocksChanged, now: float) -> str | None:  # noqa: ARG002
        if event.target in self.view.replicas:
            self.alive = event.target
            self.mirror.changed(event)
        return ""

    # -- the other balancers of the region

    def learned(self, now: float) -> PeerLearned:
        """What was learned here, for a peer that starts."""
        address = {name: str(replica.address) for name, replica in self.view.replicas.items()}
        measured = self.speeds.measured(now)
        return PeerLearned(self.estimates.learned(), {name: (address[name], one) for name, one in measured.items()})

    def _adopt_learned(self, learned: PeerLearned, now: float) -> None:
        """Start from what another balancer learned, for everything of which nothing was learned here."""
        assert self.shares is not None
        self.estimates.now = now
        self.estimates.adopt(learned.estimates)
        for name, (address, measured) in learned.replicas.items():
            if self.shares.same(name, address):
                self.speeds.begin_with(name, measured, now)

    def _peer_reported(self, event: PeerReported, now: float) -> str | None:
        assert self.shares is not None
        if event.learned is not None:
            self._adopt_learned(event.learned, now)
        changed = self.shares.on_report(event)
        for entry in event.cached:
            if self.journal.epoch not in (None, event.epoch):
                entry = replace(entry, audience=frozenset())  # another law than ours
            if self.shares.serves(event.peer, entry.replica):
                self.journal.insert(entry.replica, entry.chain, entry.audience)
                self.shares.recent.add(entry)
        return self._rewrite_loads(self.view.replicas if changed is None else changed)

    def _peers_changed(self, event: PeersChanged, now: float) -> str | None:  # noqa: ARG002
        assert self.shares is not None
        self.shares.changed(event)
        return self._rewrite_loads(self.view.replicas)

    def _turn_timer_fired(self, event: TurnTimerFired, now: float) -> str | None:  # noqa: ARG002
        shares, at = self.shares, self.whole.of.at
        assert shares is not None
        in_flight = self.whole.in_flight.tolist()
        replicas = self.view.replicas
        return self._rewrite_loads(
            [n for n in replicas if shares.overdue(n, in_flight[at[n]] < replicas[n].slots, now)]
        )

    def _rewrite_loads(self, names: Iterable[str]) -> str | None:
        """Rewrite these replicas' load in the table. Returns the replica if there is one, "" if none, None if there are
        more."""
        written = [name for name in names if name in self.view.replicas]
        for name in written:
            self._write_load(self.whole.of.at[name], self.view.replicas[name], self.ledger.load(name))
        return None if len(written) > 1 else written[0] if written else ""

    def owned(self, some: Subset) -> Subset:
        """The replicas that this balancer reports to the global tier: all of them if no peer shares them."""
        if self.shares is None:
            return some
        return some.without([name for name in some.names if not self.shares.owns(name)])

    # -- reading

    def able(self, variant: str, now: float) -> Subset:
        """The replicas that serve the model, or this version of it (`view.variant_of`), and may take work."""
        if now >= self._able_until:
            self._able.clear()
            self._reduce(now)
        known = self._able.get(variant)
        return known if known is not None and known.names else self._find_able(variant, now)

    def doubtful(self, model: str, now: float) -> tuple[str, ...]:
        """The replicas of a model that are not simply UP: a probe failed, they are ejected, or were never probed."""
        names = self.view.by_model.get(model, ())
        return tuple(n for n in names if n not in self.health or self.health[n].read(now).state is not State.UP)

    def too_short(self, model: str, context_tokens: float) -> tuple[str, ...]:
        """The replicas of a model that cannot hold a request of this many tokens, prompt and answer together."""
        known = self._context_tokens.get(model, {})
        return tuple(name for name, most in known.items() if most < context_tokens)

    def most_context_tokens(self, model: str, names: Iterable[str]) -> float:
        """The longest request (tokens) that one of these replicas of a model can hold; infinite if one does not say, or
        there is none."""
        known = self._context_tokens.get(model, {})
        return max((known.get(name, inf) for name in names), default=inf)

    def holds_longer(self, model: str, name: str) -> bool:
        """Whether another replica of a model can hold longer requests than this one."""
        known = self._context_tokens.get(model, {})
        return max(known.values(), default=0.0) > known.get(name, inf)

    def health_unchanged_until(self, now: float) -> float:
        """Until when the set of able replicas stays the same if no event comes; `now` while the capacity of any is
        reduced."""
        return now if self.health_tracker.reducing else self._able_until

    def mode(self, model: str, now: float) -> Mode:
        """How the replicas of a model may be used: in PANIC ejections are ignored, in ALL_DOWN there is none."""
        self.able(model, now)
        return self.health_tracker.modes.get(model, Mode.EMPTY)

    def able_to_prefill(self, model: str, handover: str, now: float) -> Subset:
        """The replicas that prefill for the model's others in this way and may take work."""
        return self.able(prefill_variant(model, handover), now)

    def table(self, some: Subset) -> Table:
        """The rows of these replicas. Do not keep the result: it may be the table of all, which changes in
        place."""
        return self.whole.only(some)

    def _find_able(self, variant: str, now: float) -> Subset:
        if not self._able:
            self._able_until = now + REDUCED_CHECK_S if self.health_tracker.reducing else inf
        names, until = self.health_tracker.find(variant, now)
        self._able_until = min(self._able_until, until)
        at = self.whole.of.at
        able = Subset(tuple(names), np.array([at[name] for name in names], dtype=np.intp))
        if variant in self.view.by_variant:  # others' names come from outside, without end
            self._able[variant] = able
        return able

    # -- what happened

    def admit(self, name: str, now: float) -> bool:
        """Whether a request may be dispatched now; a replica on trial takes one."""
        health = self.health[name]
        if health.admits_without_trial(now):
            return True
        if not health.steady:
            self._able.clear()
        return self.health_tracker.admit(name, now)

    def answered(self, name: str, status: int, now: float, sent_at: float = inf, tenant: str = "") -> None:
        """An answer to a tenant's request sent at `sent_at` began. A 5xx counts as the replica's failure, except 501; a
        4xx does not."""
        if self.health_tracker.answered(name, status not in outcome.ENGINES_FAULTS, now, sent_at, tenant):
            self._recheck_able(name, now)

    def broke(
        self, name: str, reason: Outcome, now: float, *, began_well: bool, sent_at: float = inf, tenant: str = ""
    ) -> None:
        """An answer reported that something is broken there; `began_well`: it had begun with a good status."""
        if self.health_tracker.broke(name, reason, now, began_well=began_well, sent_at=sent_at, tenant=tenant):
            self._recheck_able(name, now)

    def lingers(self, held: Reservation | None, since: float, now: float, reason: Outcome | None = None) -> None:
        """Keep counting what a request sent at `since` held at its replica when it failed (black_hole); `reason`: the
        outcome, if no answer was completed.

        Nothing is kept if the connection was refused (ejection handles that), nor if one of our own bounds was met.
        """
        mine = reason is None or (outcome.blames_target(reason) and reason is not outcome.CONNECT_FAILED)
        if mine and held is not None and held.target in self.speeds:
            self.health_tracker.lingers(held, since + self.speeds[held.target].service_ms / 1e3, now)
            self._reduce(now, held.target)

    def failed(self, name: str, reason: Outcome, now: float, sent_at: float = inf, tenant: str = "") -> None:
        """An attempt of a tenant's request that was sent at `sent_at` broke."""
        if reason is outcome.CONNECT_FAILED:
            if self.health_tracker.refused(name, now):
                self._recheck_able(name, now)
                self._forget(name)  # connection refused: the process that comes back has an empty cache
            self.recheck_engine(name, reason)
        elif outcome.blames_target(reason):
            self.answered(name, 500, now, sent_at, tenant)
        elif reason in outcome.REFUSALS_OF_THE_WELL:
            self.answered(name, 400, now, sent_at, tenant)
            if reason is outcome.MODEL_NOT_SERVED:
                self.recheck_engine(name, reason)

    def _forget(self, name: str) -> None:
        """The replica is, or will be, another process: forget what was known about the cache and adapters of the last
        one."""
        self.adapters.forget(name)
        self.speeds.restarted(name)
        self.trie.clear(name)
        self.unreported_hits.forget(name)

    def shared_bytes(self, name: str, chain: tuple[int, ...], marks: tuple[int, ...]) -> float:
        """How many bytes of a prompt with these marks another request under way at the replica holds in its KV cache
        anyway."""
        shared = self.ledger.shared(name, marks)
        return self.mirror.partial_blocks.bytes_behind(chain, marked_depth(shared)) if shared else 0.0

    def caches(self, name: str, chain: tuple[int, ...], hints: Verdict | None = None) -> None:
        """The replica holds this prefix now. `hints`: the verdict on where that may be known; None: nowhere."""
        row = self.whole.of.at.get(name)
        if row is None:
            return
        audience: frozenset[str] | None = frozenset()
        if hints is not None:
            if hints.epoch != self.journal.epoch:
                self.journal.under(hints.epoch)
            audience = hints.lawful if hints.excluded else None
        self.journal.insert(name, chain, audience)
        self.whole.filled[row] = self.trie.filled(name)
        if self.shares is not None and chain:
            self.shares.recent.add(Cached(name, chain, audience, own=True))

    def narrowed(self, epoch: int) -> None:
        """Under the law of this epoch fewer regions may know what is cached than before."""
        self.journal.under(epoch, widened=True)
        self.journal.narrowed()
        if self.shares is not None:
            self.shares.recent.narrowed()

    def loaded(self, extra_ms: float, now: float) -> None:
        """A first token came `extra_ms` later than its prefill explains: an adapter had to be loaded first."""
        self.adapters.learn(extra_ms, now)

    def prefilled(self, name: str, elapsed_ms: float, tokens: float, now: float, *, sure: bool = True) -> None:
        """A first token came `elapsed_ms` after dispatch, after `tokens` of uncached prompt (those queued before it and
        its own). Not `sure`: most of the prompt was expected to be cached, so the true number may be a multiple of
        `tokens`."""
        if self.speeds.began(name, elapsed_ms, tokens, now):
            step_ms = self.whole.tpot_ms.item(self.whole.of.at[name])
            if self.health_tracker.began(name, elapsed_ms, tokens, step_ms, now, sure=sure):
                self._recheck_able(name, now)

    def promised(self, model: str, predicted_ms: float, elapsed_ms: float) -> None:
        """A stream's first token came `elapsed_ms` after it was sent to a replica; see Residual.seen."""
        residual = self.residuals.get(model)
        if residual is None:
            if model not in self.view.by_model:
                return
            residual = self.residuals[model] = Residual()
        residual.seen(predicted_ms, elapsed_ms)

    def computed(self, name: str, elapsed_ms: float, tokens: float, now: float) -> None:
        """A prefill for another replica ended `elapsed_ms` after dispatch, after `tokens` (those queued before it and
        its own)."""
        self.speeds.prefilled(name, elapsed_ms, tokens, now)

    def served(
        self,
        name: str,
        decode_ms: float,
        service_ms: float,
        completion_tokens: int,
        load_since: tuple[float, float],
        now: float,
    ) -> None:
        """An answer ended `decode_ms` after its first token and `service_ms` after dispatch. `load_since`:
        RequestState.load_since.

        Its tokens took what they took at the mean load of that time. At the end there may be a multiple of that, or
        nearly none: while load rises, answers that began beside few requests end beside many.
        """
        row = self.whole.of.at.get(name)
        if row is None:
            return
        since, in_flight_s = load_since
        load = (self.whole.in_flight_s.item(row) - in_flight_s) / (now - since) if now > since else 0.0
        if load < 1.0:  # nothing to go by, or the sum began anew: what there is now, and the answer itself
            load = self.whole.in_flight.item(row) + 1.0
        self.speeds.ended(name, decode_ms, service_ms, completion_tokens, load, now)

    # -- within

    def _loaded(self, name: str, load: Load) -> None:
        self.speeds.loaded(name, load, self.now)
        if self.shares is not None and (self.shares.watched or not self.shares.alone):
            self.shares.dispatched(name, load)
        replica = self.view.replicas.get(name)
        if replica is None:
            return
        if self.shares is not None and not self.shares.alone:
            self._write_load(self.whole.of.at[name], replica, load)
        else:
            self.whole.write_load(
                self.whole.of.at[name], replica, load, self.now, self._reduced.get(name) if self._reduced else None
            )

    def _write_load(self, row: int, replica: Replica, load: Load) -> None:
        """Write the load of all balancers at a replica; `load` is ours. Room that is another balancer's turn is not
        ours."""
        shares, name = self.shares, replica.name
        reduced = self._reduced.get(name) if self._reduced else None
        if shares is None or shares.alone:
            self.whole.write_load(row, replica, load, self.now, reduced)
            return
        self.whole.write_load(row, replica, shares.with_others(name, load), self.now, reduced)
        if shares.gives_way(name):
            self.whole.kv_room_tokens[row] = -inf

    def _peak_tokens(self, name: str, load: Load, held_share: float) -> float:
        """See table.Peak. For other balancers' requests only sums are known: half of them are taken to have been
        answered for half the mean time, the other half for one and a half times the mean."""
        prompts, answers, began_at = self.ledger.columns(name)
        now, step_s = self.now, self.whole.tpot_ms.item(self.whole.of.at[name]) / 1e3
        sequences = np.array((held_share * prompts, answers, np.maximum(now - began_at, 0.0) / step_s))
        others = load.in_flight - len(prompts)
        if others > 0:
            own = self.ledger.load(name)
            answer = (load.answer_tokens - own.answer_tokens) / others
            prompt = held_share * ((load.kv_tokens - own.kv_tokens) / others - answer)
            decoding_s = (
                max(0.0, now - load.began_s / load.decoding) * load.decoding / load.in_flight if load.decoding else 0.0
            )
            generated = [0.5 * decoding_s / step_s, 1.5 * decoding_s / step_s]
            sequences = np.concatenate((sequences, [[prompt, prompt], [answer, answer], generated]), axis=1)
        if not sequences.shape[1]:
            return 0.0
        lengths = self.answer_lengths.get(name) or AnswerLengths()
        return peak_tokens(sequences, lengths, max(0.0, others))

    def answer_ended(self, name: str, tokens: int, expected: float) -> None:
        """A replica ended an answer of `tokens` tokens, where `expected` were expected."""
        if tokens > 0 and name in self.view.replicas:
            lengths = self.answer_lengths.get(name)
            if lengths is None:
                lengths = self.answer_lengths[name] = AnswerLengths()
            lengths.learn(tokens, max(expected, 1.0))

    def _write(self, name: str) -> None:
        """Update the part of a replica's row that says what it has room for."""
        row, replica, reduced = self.whole.of.at[name], self.view.replicas[name], self._reduced.get(name)
        self.whole.allow(row, replica.slots if reduced is None else reduced.slots)
        self._write_load(row, replica, self.ledger.load(name))

    def _recheck_able(self, name: str, now: float) -> None:
        """Mark the set of able replicas as stale, and this replica's usable share."""
        self._able.clear()
        self._reduce(now, name)

    def _reduce(self, now: float, only: str = "") -> None:
        """Update the rows of replicas whose usable share of slots has changed."""
        for name, reduced in self.health_tracker.reduced(now, only):
            if reduced is None:
                self._reduced.pop(name, None)
            else:
                self._reduced[name] = reduced
            self._write(name)
        if self.health_tracker.reducing:
            self._able_until = min(self._able_until, now + REDUCED_CHECK_S)


def _renewed(replica: Replica, before: Replica | None) -> Replica:
    """A replica of a new view, with the sample that the same replica last had."""
    if before is None or before.sample is None or replica.sample is not None or before.address != replica.address:
        return replica
    return replace(replica, sample=before.sample, kv_tokens=before.sample.kv_tokens or replica.kv_tokens)
