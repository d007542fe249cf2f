"""Selects a replica for a request: gathers what a pick needs (its need, its version, the eligible replicas, what each
has cached) and makes it (regional_lb.scheduler.pick).

The flow and `explain` both ask here. Never changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from farhop.balance.prefix import chain
from farhop.balance.session_affinity import SessionAffinity
from regional_lb.fleet.blocks import Path
from regional_lb.fleet.kv_events import TOKEN_BYTES
from regional_lb.fleet.tokenizer_guard import Shape
from regional_lb.scheduler import pairs
from regional_lb.scheduler.pick import NOTHING, pick
from regional_lb.scheduler.policy import Need

if TYPE_CHECKING:
    from random import Random

    from farhop.balance.machine import Request
    from regional_lb.fleet.blocks import Known
    from regional_lb.fleet.replicas import Replicas
    from regional_lb.fleet.table import Hits, Line, Subset
    from regional_lb.scheduler.deferred import Deferred
    from regional_lb.scheduler.eligibility import Eligibility
    from regional_lb.scheduler.pick import Pick, Scored
    from regional_lb.scheduler.policy import Policies
    from regional_lb.scheduler.split import Assigned, Splits


def shape_of(request: Request) -> Shape:
    """What determines how a request's prompt is rendered by the chat template."""
    rendering = request.tokens.shape if request.tokens is not None else ""
    return Shape(request.model, request.key or request.tenant, rendering)


class ReplicaSelector:
    """See the module's docstring. `deferred`: the requests that wait by choice."""

    def __init__(
        self,
        replicas: Replicas,
        eligibility: Eligibility,
        policies: Policies,
        splits: Splits,
        deferred: Deferred,
        rng: Random,
    ) -> None:
        self._replicas, self._eligibility, self._policies = replicas, eligibility, policies
        self._splits, self._deferred, self._rng = splits, deferred, rng
        self.affinity = SessionAffinity()  # of sessions without configured affinity; the flow reports where they went

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
            without = (*without, *self._eligibility.too_short(need, request.model, now, without))
        if without or not able.names:
            able = self._eligibility.serving(need.variant, now, without)
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
            waited_s=waited_s, home=home, line=line, deferred=self._deferred,
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
