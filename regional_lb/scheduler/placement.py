"""Where a request could be placed in this region now, and what it would meet: its need, the replicas that may take it,
the pick among them, and the wait.

The flow, reports and `explain` all read it here: `consider` gathers what a pick needs and makes it, `serving` says
which replicas may be asked, `wait_ms` how long one more request would wait. Never places one, and never changes
anything: the flow does.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from farhop.balance.prefix import chain
from farhop.balance.session_affinity import SessionAffinity
from regional_lb.fleet.blocks import Path
from regional_lb.fleet.kv_events import TOKEN_BYTES
from regional_lb.fleet.tokenizer_guard import Shape
from regional_lb.fleet.view import model_of, variant_of
from regional_lb.scheduler import admission, pairs
from regional_lb.scheduler.deferred import Deferred
from regional_lb.scheduler.pick import (
    NOTHING,
    expected_wait_ms,
    least_prefill,
    pick,
    prefill_wait_ms,
    uncached_tokens,
    work_tokens,
)
from regional_lb.scheduler.policy import Need

if TYPE_CHECKING:
    from random import Random

    from farhop.balance.machine import Request
    from regional_lb.fleet.blocks import Known
    from regional_lb.fleet.replicas import Replicas
    from regional_lb.fleet.table import Hits, Line, Subset, Table
    from regional_lb.scheduler.pick import Pick, Scored
    from regional_lb.scheduler.policy import Policies
    from regional_lb.scheduler.queue import RequestQueue
    from regional_lb.scheduler.request_state import RequestState
    from regional_lb.scheduler.split import Assigned, Splits

# An answer that is cut off at its deadline was computed for nothing, and in overload those that waited longest are all
# about to be cut off. At 4 times its capacity a simulated region serves 18 % of that capacity in time with a margin of
# 1.0, and 99 % with 1.25.
MARGIN = 1.25
HOPELESS = 2.0  # times as long as it may: the expectation errs
CACHED_SHARE = 0.5  # below it a cached prefix is no reason to go before others


def shape_of(request: Request) -> Shape:
    """What determines how a request's prompt is rendered by the chat template."""
    rendering = request.tokens.shape if request.tokens is not None else ""
    return Shape(request.model, request.key or request.tenant, rendering)


class Placement:
    """See the module's docstring. `foreign` are the terms for work from other regions."""

    def __init__(
        self,
        region: str,
        foreign: admission.ForeignConfig,
        replicas: Replicas,
        queue: RequestQueue,
        policies: Policies,
        splits: Splits,
        rng: Random,
    ) -> None:
        self._region, self._foreign, self._splits = region, foreign, splits
        self._replicas, self._queue, self._policies, self._rng = replicas, queue, policies, rng
        self.deferred = Deferred()  # the flow reports the requests that wait
        self.affinity = SessionAffinity()  # of sessions without configured affinity; the flow reports where they went

    def foreign_by(self, foreign: admission.ForeignConfig) -> None:
        """Work from other regions is let in on these terms from now on."""
        self._foreign = foreign

    def need_of(self, request: Request) -> Need:
        """What the request needs, in its model's tokens: counted if they are known, else estimated."""
        estimates, path = self._replicas.estimates, self.path_of(request) if request.tokens is not None else None
        if path is not None and request.tokens is not None and request.tokens.whole:
            prompt_tokens = float(path.tokens)
            bytes_per_token = request.prompt_bytes / prompt_tokens
        else:
            bytes_per_token = estimates.bytes_per_token(request.model)
            prompt_tokens = request.prompt_bytes / bytes_per_token
        output_tokens = estimates.output_tokens(request.tenant, request.model, request.max_tokens)
        return Need(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            bytes_per_token=bytes_per_token,
            chain=request.chain,
            session=request.session,
            tenant=request.tenant,
            path=path,
            deadline=request.deadline,
            variant=request.model,
            recomputed=request.recomputed,
            # An engine holds all that may come to be the answer, and refuses what does not fit.
            context_tokens=prompt_tokens + (request.max_tokens or output_tokens),
        )

    def goes_by_tokens(self, request: Request) -> bool:
        """Whether a decision depends on the prompt's tokens, or on more of them than are known: there is a choice of
        replicas, and one that publishes KV events may have cached more than the known tokens."""
        names = self._replicas.view.by_model.get(request.model, ())
        if len(names) < 2 or request.recomputed or not any(map(self._replicas.blocks.reports, names)):
            return False
        if request.tokens is None:
            return True
        path = None if request.tokens.whole else self.path_of(request)
        return path is not None and not self._replicas.blocks.ends_within(path)

    def path_of(self, request: Request) -> Path | None:
        """The prompt's tokens as a path of block nodes; None if tokens are unknown or not trusted."""
        tokens = request.tokens
        if (
            tokens is None
            or len(tokens.ids) < TOKEN_BYTES
            or not self._replicas.mirror.guard.believes(shape_of(request))
        ):
            return None
        adapter = request.model if request.model in self._replicas.adapters.names else ""
        return Path(tokens.ids, adapter, tokens.cache_salt)

    def hits(self, need: Need, some: Subset) -> tuple[Hits, Known]:
        """How many bytes of the prompt each of these replicas is estimated to hold, and what its events say in tokens.
        If a replica's events are complete, they count; if they are partial, the larger of events and mirror counts.
        """
        if need.recomputed:
            return (), NOTHING
        hits = self._replicas.mirror.hits(need.chain, some)
        return hits, NOTHING if need.path is None else self._replicas.blocks.known(need.path)

    def assign(self, request: Request) -> Assigned | None:
        """The version that the split in force assigns to the request; None without a split, or if any version will
        do."""
        split = self._splits.of(request.model)
        return None if split is None else split.assign(request, self._replicas.view.by_variant, self._version_caching)

    def consider(
        self,
        request: Request,
        need: Need,
        now: float,
        without: tuple[str, ...] = (),
        aside: tuple[str, ...] = (),
        assigned: Assigned | None = None,
        *,
        whole: bool = False,
        waited_s: float = 0.0,
        line: Line | None = None,
    ) -> Pick | None:
        """Score the healthy replicas for a request; None if there are none. `whole`: do not divide it into a prefill
        and a decode half. `without`: replicas that failed it before; even those of another version are preferred to
        them. `aside`: replicas to keep free. `assigned`: the result of `assign`, if the caller has it. `waited_s`,
        `line`: see pick.
        """
        if assigned is None and self._splits.by_model:
            assigned = self.assign(request)
        if assigned is not None and need.variant != assigned.variant:
            need = replace(need, variant=assigned.variant)
        able, half, view = self._replicas.able(need.variant, now), None, self._replicas.view
        if need.context_tokens > self._replicas.least_context_tokens:
            without = (*without, *self._too_short(need, request.model, now, without))
        if without or not able.names:
            able = self.serving(need.variant, now, without)
        if aside:
            able = able.without(aside)
        if view.decode_only:
            half = self._half(request, need, now, without) if request.divisible and not whole else None
            able = able if half is not None else able.without(view.decode_only)
        if not able.names:
            return None
        if need.recomputed or need.path is not None:
            hits, known = self.hits(need, able)
        else:
            hits, known = self._replicas.mirror.hits(need.chain, able), NOTHING
        all_rows = self._replicas.whole
        table = all_rows if len(able.names) == len(all_rows.of.names) else all_rows.only(able)
        adapters, session = self._replicas.adapters, request.soft_session
        delay_ms = adapters.delay_ms(request.model, table, now) if adapters.names else None
        policy = self._policies.of(request.model)
        home = self.affinity.near(session, request.parent_session, request.model) if session else ""
        choice = pick(
            need, table, hits, policy, now, self._rng, known, delay_ms,
            waited_s=waited_s, home=home, line=line, deferred=self.deferred,
        )  # fmt: skip
        choice.assigned = assigned
        chosen = choice.chosen
        if chosen is not None:
            replica = view.replicas[chosen.replica]
            choice.version = replica.version
            residual = self._replicas.residuals.get(request.model)
            choice.residual_ms = residual.value_ms if residual is not None else 0.0
            if chosen.replica in view.decode_only:
                choice.prefill = half
            elif view.prefillers and replica.handover == "vllm" and request.divisible and not whole:
                choice.prefill = self._prefiller(request, need, chosen, now, without)
        return choice

    def excluded_by_gateway(self, request: Request) -> tuple[str, ...]:
        """The replicas that the request's gateway excludes."""
        among = request.among
        return () if among is None else tuple(name for name in self._replicas.view.replicas if name not in among)

    def _too_short(self, need: Need, model: str, now: float, without: tuple[str, ...]) -> tuple[str, ...]:
        """The replicas that cannot hold such a long request, provided that one outside `without` can. If none can, no
        replica is excluded: the length is an estimate, and it is for the engine to refuse."""
        short = self._replicas.too_short(model, need.context_tokens)
        return short if short and self.serving(need.variant, now, (*short, *without)) else ()

    def barred(self, state: RequestState, now: float) -> tuple[str, ...]:
        """The replicas that a request may not go to: its gateway excludes them, they cannot continue its stream, or
        they cannot hold it."""
        request, barred = state.request, self.excluded_by_gateway(state.request)
        if state.carrier is not None:
            barred = (*barred, *self._replicas.view.unable_to_resume(request.model, state.carrier))
        if state.need.context_tokens > self._replicas.least_context_tokens:
            barred = (*barred, *self._too_short(state.need, request.model, now, barred))
        return barred

    def serving_and_holding(self, state: RequestState, now: float, without: tuple[str, ...]) -> Subset:
        """The replicas that may take a request and can hold it, except `without`."""
        short = self._replicas.too_short(state.request.model, state.need.context_tokens)
        return self.serving(state.variant, now, (*without, *self.excluded_by_gateway(state.request), *short))

    def others(self, state: RequestState, now: float, without: tuple[str, ...]) -> Subset:
        """The replicas that may take a request, except `without`."""
        return self.serving(state.variant, now, (*without, *self.barred(state, now)))

    def _half(self, request: Request, need: Need, now: float, without: tuple[str, ...]) -> Scored | None:
        """The replica that would prefill for one that only decodes; None if none has room. One that failed the request
        before is better than none."""
        able = self._replicas.able_to_prefill(request.model, "sglang", now)
        others = able.without(without) or able
        return pairs.soonest(need, self._replicas.table(others), *self.hits(need, others), now)

    def _prefiller(
        self, request: Request, need: Need, chosen: Scored, now: float, without: tuple[str, ...]
    ) -> Scored | None:
        """The replica that prefills for the chosen one; None if the chosen one does that itself."""
        able = self._replicas.able_to_prefill(request.model, "vllm", now).without(without)
        return pairs.prefiller(need, chosen, self._replicas.table(able), *self.hits(need, able), now)

    def none_able(self, state: RequestState, now: float) -> bool:
        """Whether no able replica serves the request's variant, or only decode replicas that cannot take it now."""
        request, decode_only = state.request, self._replicas.view.decode_only
        able = self.serving(state.variant, now, self.excluded_by_gateway(request))
        if decode_only and not (
            request.divisible and not state.whole and self._replicas.able_to_prefill(request.model, "sglang", now)
        ):
            able = able.without(decode_only)
        return not able

    def why_none_able(self, state: RequestState, now: float) -> str:
        """Why a request is refused when no replica is able to serve it."""
        which = f"version {state.assigned.version} of this model" if state.assigned is not None else "this model"
        if not self.serving(state.variant, now):
            return f"no replica of {which} is healthy"
        if not self.serving(state.variant, now, self.excluded_by_gateway(state.request)):
            return f"none of the endpoints that the gateway lets this request go to is a healthy replica of {which}"
        if state.whole:
            return f"the replica that prefills for those of {which} refused it"
        if state.request.divisible:
            return f"no replica that prefills for those of {which} is healthy"
        return f"no replica of {which} takes one with several prompts or answers, or that asks what its prompt was"

    def turned_away(self, request: Request, need: Need, now: float, variant: str = "") -> admission.Refusal | None:
        """Why a foreign request that other regions could take may not enter; None if it may, if it is not foreign, or
        if no other region would take it. If no replica is healthy, the queue says so."""
        promised_ms = request.promised_ttft_ms
        if promised_ms is None or not admission.is_foreign(request, self._region):
            return None
        variant = variant or request.model
        table = self._holding_table(need, request.model, variant, now)
        if not len(table):
            return None
        left = admission.headroom(table, self._foreign.reserve_share)
        uncached, prefill_ms = least_prefill(need, table, *self.hits(need, table.of))
        wait_ms = self.wait_ms(variant, now)
        if prefill_ms + wait_ms > promised_ms:
            queued = self.in_line(variant)
            queued += self.queued_elsewhere(model_of(variant), queued + 1)
            wait_ms = min(wait_ms, prefill_wait_ms(table, need, queued, now, self._queue.line_of(variant)))
        expected_ms = wait_ms + prefill_ms
        return admission.foreign_refusal(promised_ms, uncached + need.output_tokens, left, expected_ms, self._foreign)

    def left_for_foreign(self, variant: str, now: float) -> admission.Headroom:
        """What requests under way leave for foreign requests that wait here or that no other region would take."""
        return admission.last_resort_headroom(self.serving_table(variant, now), self._foreign.last_resort_reserve_share)

    def fits_foreign(self, state: RequestState, now: float) -> bool:
        """Whether such a foreign request fits beside the reserve now."""
        table = self._holding_table(state.need, state.request.model, state.variant, now)
        if not len(table):
            return False
        left = admission.last_resort_headroom(table, self._foreign.last_resort_reserve_share)
        uncached, _ = least_prefill(state.need, table, *self.hits(state.need, table.of))
        return left.takes(uncached + state.need.output_tokens)

    def parts(self, model: str) -> list[tuple[float, str]]:
        """The variants that new requests for the model are for, each with its share (the sum is 1). A variant is its
        own only part."""
        split = self._splits.of(model)
        if split is None or not split.shares:
            return [(1.0, model)]
        return [(share, variant_of(model, version)) for version, share in split.shares.items()]

    def wait_ms(self, model: str, now: float) -> float:
        """How long one more request for the model, or variant, would wait before its prefill begins, in ms, averaged
        over its parts; 0 if no replica serves it."""
        parts = self.parts(model)
        if len(parts) == 1:  # nearly always, and 20 times a second
            return self._wait_ms(parts[0][1], self.in_line(parts[0][1]), now)
        return sum(share * self._wait_ms(variant, self.in_line(variant), now) for share, variant in parts)

    def foreign_wait_ms(self, model: str, now: float) -> float:
        """How long one more request from another region that no other would take would wait, at least, in ms: as long
        as the first of those in the queue has waited, which is the best guess if it is unknown how many go before them
        (the delay of the head of the line: R. Ibrahim, W. Whitt, "Real-time delay estimation based on delay history",
        M&SOM 11, 2009). The region's own requests do, however many arrive. Requests that wait by choice leave the room
        to others."""
        queue, by_choice = self._queue, self.deferred.by_request
        return 1e3 * sum(share * queue.foreign_waits_s(variant, now, by_choice) for share, variant in self.parts(model))

    def in_line(self, variant: str) -> int:
        """How many requests wait because no replica has room for them, and have not stepped back: those that wait by
        choice leave the room to others."""
        waiting = self._queue.on_time(variant)
        return max(0, waiting - self.deferred.by_variant.get(variant, 0)) if waiting else 0

    def _wait_ms(self, variant: str, queued: int, now: float) -> float:
        # Of the requests waiting at another balancer of the region, as many are served before ours as are ahead of it
        # here.
        return expected_wait_ms(
            self.serving_table(variant, now), queued, now, self.queued_elsewhere(model_of(variant), queued + 1)
        )

    def queued_elsewhere(self, model: str, most: float = inf) -> int:
        """Requests for the model that wait at other balancers of the region, counting at most `most` of each
        balancer's."""
        shares = self._replicas.shares
        return shares.queued(model, most) if shares is not None else 0

    def used_share(self, model: str, now: float) -> float:
        """The share of slots or of KV cache, whichever is larger, that is in use or waited for, averaged over the
        model's parts."""
        parts = self.parts(model)
        if len(parts) == 1:
            return self._used(parts[0][1], now)
        return sum(share * self._used(variant, now) for share, variant in parts)

    def _used(self, variant: str, now: float) -> float:
        able = self.serving_table(variant, now)
        if not len(able):
            return 0.0
        sums = able.sums()
        wanted = sums.in_flight + self._queue.waiting(variant) + self.queued_elsewhere(model_of(variant))
        return max(wanted / sums.slots, sums.kv_taken_tokens / sums.kv_tokens)

    def queued(self, model: str) -> int:
        """How many requests wait for the model, whichever version of it."""
        if self._splits.of(model) is None:
            return self._queue.waiting(model)
        return sum(self._queue.waiting(variant) for variant in self._queue.models() if model_of(variant) == model)

    def open_share(self, model: str, now: float) -> float:
        """The share of new requests for the model that would find a slot beside the reserve among their variant's."""
        parts, kept = self.parts(model), self._foreign.reserve_share
        if len(parts) == 1:
            return 1.0  # the headroom of the whole says it
        return sum(
            share for share, variant in parts if admission.headroom(self.serving_table(variant, now), kept).slots
        )

    def offered(self, model: str, now: float) -> Table:
        """The able replicas that new requests for the model may go to, without those of versions of weight 0. Do not
        keep the result: it changes in place.
        """
        (_, first), *others = self.parts(model)
        if not others:
            return self.serving_table(first, now)
        wanted = {*self.serving(first, now).names}.union(*(self.serving(variant, now).names for _, variant in others))
        able = self._replicas.able(model, now)
        return self._replicas.table(able.without(frozenset(able.names) - wanted))

    def owned(self, model: str, now: float) -> Table:
        """Those of `offered` that this balancer owns, and so reports to the global tier. Do not keep the result."""
        offered = self.offered(model, now)
        return offered if self._replicas.shares is None else self._replicas.table(self._replicas.owned(offered.of))

    def serving(self, variant: str, now: float, without: tuple[str, ...] = ()) -> Subset:
        """The replicas that may take requests waiting for a variant: those of its version or, if none is able and the
        split allows a fallback, those of any version."""
        able = self._replicas.able(variant, now)
        if without:
            able = able.without(without)
        if able.names:
            return able
        model = model_of(variant)
        if model == variant:
            return able
        split = self._splits.of(model)
        return self._replicas.able(model, now).without(without) if split is None or split.config.fallback else able

    def serving_table(self, variant: str, now: float) -> Table:
        """As `serving`, as a table. Do not keep the result: it changes in place."""
        return self._replicas.table(self.serving(variant, now))

    def _holding_table(self, need: Need, model: str, variant: str, now: float) -> Table:
        """The replicas of `serving_table` that can hold the request; all of them if none can."""
        if need.context_tokens <= self._replicas.least_context_tokens:
            return self.serving_table(variant, now)
        return self._replicas.table(self.serving(variant, now, self._too_short(need, model, now, ())))

    def _version_caching(self, request: Request) -> str:
        """The version that holds the earlier turns of the request's conversation; "" if none or several do.

        At least half of the prompt must be cached with that version only, and the cached path must end where this
        prompt continues. A beginning that others continued, too, is shared by many conversations: it would tie all of
        them to one version.
        """
        hits = self._replicas.trie.match(request.chain)
        deep = {name for name, depth in hits.items() if 2 * chain.bytes_at(depth) >= request.prompt_bytes}
        if not deep:
            return ""
        depth = max(hits.values())
        if depth == len(request.chain) or self._replicas.trie.has_children(request.chain[depth - 1]):
            return ""
        replicas = self._replicas.view.replicas
        versions = {replicas[name].version for name in deep}
        return versions.pop() if len(versions) == 1 else ""

    def hopeless(self, state: RequestState, weight: float, most_s: float, now: float) -> bool:
        """Whether the request would wait far longer than it may (at most `most_s`), behind those due before it.

        Never true for the next in turn, since its waiting costs nothing. Some replica must be able to serve it.
        `weight` is its tenant's.
        """
        ahead = self._queue.ahead(state.variant, state.request.priority, state.request.tenant, weight)
        ahead = min(ahead, self.in_line(state.variant))
        if not ahead:
            return False
        able = self.serving_table(state.variant, now)
        patience_ms = _patience_ms(state.request, self._service_ms(state.request, state.need, able), most_s, now)
        return self._wait_ms(state.variant, ahead, now) > HOPELESS * patience_ms

    def too_late(self, request: Request, need: Need, table: Table, now: float) -> bool:
        """Whether the request could hardly be served by its deadline if it were sent now. `table` has at least one
        row."""
        return (request.deadline - now) * 1e3 < self._service_ms(request, need, table)

    def prefill_s(self, state: RequestState, now: float) -> float:
        """Seconds to prefill its whole prompt at the fastest able replica; 0 if there is none."""
        per_token_ms = self.serving_table(state.variant, now).prefill_ms_per_token
        return state.need.prompt_tokens * per_token_ms.item(per_token_ms.argmin()) / 1e3 if len(per_token_ms) else 0.0

    def _service_ms(self, request: Request, need: Need, table: Table) -> float:
        """As the function of this name, except for tenants that never got an answer: a guessed answer length must not
        be a reason to refuse, since a refused tenant gets no answer, and the guess would never be corrected."""
        known = self._replicas.estimates.knows_output(request.tenant, request.model)
        return _service_ms(need.prompt_tokens, need.output_tokens if known else 1.0, table)

    def in_turn(self, first: list[RequestState], table: Table, now: float, line: Line | None) -> list[RequestState]:
        """The first in the queue, in the order in which they are offered free room at the healthy replicas of `table`.

        By priority band, those that stepped back last. Within a band: first a request that would miss its deadline if
        all others went before it; then the one with most of its prompt cached where there is room; then in turn.
        """
        if len(first) < 2:
            return first
        turns_ms = expected_wait_ms(table, len(first), now)
        room = table.room(0.0, 0.0, now, line)

        def turn(state: RequestState) -> tuple[bool, int, bool, float]:
            need = state.need
            service_ms = _service_ms(need.prompt_tokens, need.output_tokens, table)
            pressed = _patience_ms(state.request, service_ms, inf, now) < turns_ms
            uncached = uncached_tokens(need, table, *self.hits(need, table.of))[room]
            share = 1.0 - float(uncached.min()) / need.prompt_tokens if need.prompt_tokens and len(uncached) else 0.0
            return state.late, -state.request.priority, not pressed, -share if share >= CACHED_SHARE else 0.0

        return sorted(first, key=turn)


def _patience_ms(request: Request, service_ms: float, most_s: float, now: float) -> float:
    """How long a request with this service time may wait (at most `most_s`) and still be served by its deadline, in
    ms."""
    return max(0.0, min((request.deadline - now) * 1e3 - service_ms, most_s * 1e3))


def _service_ms(prompt_tokens: float, output_tokens: float, table: Table) -> float:
    """Milliseconds to serve a request at the fastest replica under its present load, with nothing cached, plus a
    margin. At least one row."""
    prefill_ms, tpot_ms = table.prefill_ms_per_token, table.tpot_ms
    fastest_prefill_ms, fastest_tpot_ms = prefill_ms.item(prefill_ms.argmin()), tpot_ms.item(tpot_ms.argmin())
    return MARGIN * (work_tokens(prompt_tokens, prompt_tokens) * fastest_prefill_ms + output_tokens * fastest_tpot_ms)
