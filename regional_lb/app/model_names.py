"""Names that stand for models, at a region's own client port: as its entry resolves them, among the region's own
models.

The names in etcd (`farhop route`: routes with `models`) override the configured ones. Invariants: an invalid document
changes nothing and is counted; losing etcd changes nothing; a model that the law or the API key forbids is never
chosen, and neither is a name that the law keeps from this region. A model is chosen when the request arrives; the flow
falls back to another only instead of a refusal. Never sends, and reserves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from pydantic import TypeAdapter

from farhop.balance import model_steps, outcome
from farhop.balance.model_steps import NameRoute
from farhop.relay.formats.prompt import BodyError
from farhop.store.contract import route_key
from farhop.store.documents.authored import split_routes_authorship
from farhop.store.follow import Documents, follow
from regional_lb.scheduler import admission

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from farhop.accounts.prices import Prices
    from farhop.balance.machine import Request
    from farhop.balance.model_steps import ModelStep, Scope
    from farhop.service.process.clock import Clock
    from farhop.store.contract import Change, Store
    from regional_lb.scheduler.flow import RegionalFlow

DOCUMENT_LIMIT_BYTES = 256 * 1024
_routes = TypeAdapter(list[dict[str, Any]])


class ModelNames:
    """See farhop.service.admission.request_reader.ModelNames. `prices` is the price book in force, if there is one;
    `changed` is called when other names are."""

    what = "model names"

    def __init__(
        self, store: Store, flow: RegionalFlow, configured: Sequence[NameRoute], clock: Clock, rng: Random,
        refused: Callable[[str], None], changed: Callable[[ModelNames], None],
    ) -> None:  # fmt: skip
        self._store, self._flow, self._clock, self._rng, self._changed = store, flow, clock, rng, changed
        self._key = route_key(flow.config.region)
        self.documents: Documents[dict[Scope, tuple[ModelStep, ...]]] = Documents(
            _read, refused, "routes", self._key
        )  # fmt: skip
        self.prices: Callable[[], Prices | None] = lambda: None
        self.configure(configured)

    def configure(self, configured: Sequence[NameRoute]) -> None:
        """Replace the configured names."""
        self._configured = model_steps.names_of(configured)
        self._put()

    async def follow(self) -> None:
        """Follow the documents in etcd until cancelled, or until the store is closed."""
        await follow(self._store, self._key, self.changed)

    def changed(self, change: Change) -> None:
        """Apply one change from the etcd watch."""
        if self.documents.take(change):
            self._put()

    def _put(self) -> None:
        chosen = {**self._configured, **(self.documents.get(self._key) or {})}
        self.in_force: Mapping[Scope, tuple[ModelStep, ...]] = {of: steps for of, steps in chosen.items() if steps}
        self._changed(self)

    def status(self) -> list[dict[str, Any]]:
        """For operators: the models behind each name, by tenant and name."""
        return [
            {"tenant": tenant, "model": name, "models": [step.model_dump() for step in steps]}
            for (tenant, name), steps in sorted(self.in_force.items())
        ]

    def listed(self, tenant: str) -> dict[str, tuple[str, ...]]:
        """The names that stand for other models for this tenant, and for which."""
        return model_steps.aliases(self.in_force, tenant)

    def resolved(self, request: Request, allowed: tuple[str, ...]) -> Request | None:
        """The request for the model that it gets: the first with room here; if none has room, the first that is served;
        if none is, the first that it may use. The others that it may use are its `fallbacks`. None if its name is a
        model's own and stands for no other. Raises BodyError."""
        steps = model_steps.of(self.in_force, request.tenant, request.model)
        if not steps:
            return None
        flow, name = self._flow, request.model
        region = flow.config.region
        if (barred := admission.unlawful(request, region, flow.law)) is not None:
            raise BodyError(barred.outcome, barred.detail, "model")
        steps = tuple(model_steps.ordered(steps, model_steps.drawn(request, self._rng)))
        unfit = model_steps.unfit(steps, request, allowed, self._micro_usd)
        narrow = model_steps.narrowed_by_name(request, flow.law)
        # What a later law lets in it does not let in who came before.
        lawful = {one.model for one in steps if not self._unlawful(replace(request, model=one.model, narrow=narrow))}
        fitting = tuple(model for model, why in unfit.items() if not why and model in lawful)
        passed: list[str] = []
        served: list[tuple[Request, int]] = []  # and how many were passed over before it
        usable: list[Request] = []
        for step in steps:
            others = tuple(model for model in fitting if model != step.model)
            one = replace(request, model=step.model, alias=name, fallbacks=others, narrow=narrow)
            why = unfit[step.model] or ("" if step.model in lawful else "unlawful")
            if not why:
                usable.append(one)
                if (has_room := self._has_room(one)) is None:
                    why = "not served"
                elif has_room:
                    return self._named(one, passed)
                else:
                    served.append((one, len(passed)))
                    why = "no room"
            passed.append(f"{step.model}: {why}")
        if served:
            one, before = served[0]
            return self._named(one, [*passed[:before], "no other has room"])
        if usable:
            return self._named(usable[0], ["none is served"])
        if any(why.endswith("unlawful") for why in passed):
            detail = f"region {region} may process this request for none of what `{name[:128]}` is"
            raise BodyError(outcome.UNLAWFUL_HERE, detail, "model")
        detail = f"this API key is for none of the models that `{name[:128]}` is"
        raise BodyError(outcome.KEY_SCOPE, detail, "model")

    def _named(self, one: Request, passed: Sequence[str]) -> Request | None:
        if one.model == one.alias:
            return replace(one, alias="") if one.fallbacks else None
        return replace(one, alias_why="; ".join(passed))

    def _unlawful(self, one: Request) -> bool:
        return admission.unlawful(one, self._flow.config.region, self._flow.law) is not None

    def _has_room(self, one: Request) -> bool | None:
        """Whether a replica could take it now; None where none serves its model."""
        flow = self._flow
        if one.model not in flow.replicas.view.by_model:
            return None
        choice = flow.selector.consider(one, flow.selector.need_of(one), self._clock.now())
        return choice is not None and choice.chosen is not None

    def _micro_usd(self, one: Request) -> int | None:
        prices, at_s = self.prices(), self._clock.wall_s(self._clock.now())
        rates = None if prices is None else prices.rates(one.model, at_s)
        if rates is None:
            return None
        need = self._flow.selector.need_of(one)
        output = need.output_tokens if one.max_tokens is None else one.max_tokens
        return rates.at_most(int(need.prompt_tokens), int(output * one.answers))


def _read(_key: str, document: bytes) -> dict[Scope, tuple[ModelStep, ...]]:
    """What names stand for, from routes as `farhop route` writes them. A scope whose route does anything else has
    nothing, which overrides the configured name, too. ValueError for what the entry would refuse."""
    listed, _ = split_routes_authorship(document, DOCUMENT_LIMIT_BYTES)
    routes = _routes.validate_json(listed or b"[]")
    plain = {(str(one.get("tenant", "")), str(one.get("model", ""))): () for one in routes if not one.get("models")}
    return plain | model_steps.names_of([NameRoute.model_validate(one) for one in routes if one.get("models")])
