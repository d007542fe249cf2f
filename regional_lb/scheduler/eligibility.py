"""Which replicas may take a request: of its model and version, healthy, long enough for it, and let in by its gateway.

Nothing is scored here. Never changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regional_lb.fleet.view import model_of, variant_of

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from regional_lb.fleet.replicas import Replicas
    from regional_lb.fleet.table import Subset, Table
    from regional_lb.scheduler.policy import Need
    from regional_lb.scheduler.request_state import RequestState
    from regional_lb.scheduler.split import Splits


class Eligibility:
    """See the module's docstring."""

    def __init__(self, replicas: Replicas, splits: Splits) -> None:
        self._replicas, self._splits = replicas, splits

    def parts(self, model: str) -> list[tuple[float, str]]:
        """The variants that new requests for the model are for, each with its share (the sum is 1). A variant is its
        own only part."""
        split = self._splits.of(model)
        if split is None or not split.shares:
            return [(1.0, model)]
        return [(share, variant_of(model, version)) for version, share in split.shares.items()]

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

    def holding_table(self, need: Need, model: str, variant: str, now: float) -> Table:
        """The replicas of `serving_table` that can hold the request; all of them if none can."""
        if need.context_tokens <= self._replicas.least_context_tokens:
            return self.serving_table(variant, now)
        return self._replicas.table(self.serving(variant, now, self.too_short(need, model, now, ())))

    def too_short(self, need: Need, model: str, now: float, without: tuple[str, ...]) -> tuple[str, ...]:
        """The replicas that cannot hold such a long request, provided that one outside `without` can. If none can, no
        replica is excluded: the length is an estimate, and it is for the engine to refuse."""
        short = self._replicas.too_short(model, need.context_tokens)
        return short if short and self.serving(need.variant, now, (*short, *without)) else ()

    def serving_and_holding(self, state: RequestState, now: float, without: tuple[str, ...]) -> Subset:
        """The replicas that may take a request and can hold it, except `without`."""
        short = self._replicas.too_short(state.request.model, state.need.context_tokens)
        return self.serving(state.variant, now, (*without, *self.excluded_by_gateway(state.request), *short))

    def others(self, state: RequestState, now: float, without: tuple[str, ...]) -> Subset:
        """The replicas that may take a request, except `without`."""
        return self.serving(state.variant, now, (*without, *self.barred(state, now)))

    def barred(self, state: RequestState, now: float) -> tuple[str, ...]:
        """The replicas that a request may not go to: its gateway excludes them, they cannot continue its stream, or
        they cannot hold it."""
        request, barred = state.request, self.excluded_by_gateway(state.request)
        if state.carrier is not None:
            barred = (*barred, *self._replicas.view.unable_to_resume(request.model, state.carrier))
        if state.need.context_tokens > self._replicas.least_context_tokens:
            barred = (*barred, *self.too_short(state.need, request.model, now, barred))
        return barred

    def excluded_by_gateway(self, request: Request) -> tuple[str, ...]:
        """The replicas that the request's gateway excludes."""
        among = request.among
        return () if among is None else tuple(name for name in self._replicas.view.replicas if name not in among)

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
