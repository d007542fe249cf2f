"""What a name of a model may stand for: ordered steps, which of them a request fits, which is tried first.

The same in both tiers, so that a name means one thing at an entry and at a region's own port. Never decides where a
request goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from msgspec.structs import replace
from pydantic import Field, model_validator

from farhop.config import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from random import Random

    from farhop.balance.machine import Request
    from topology.law import Law

MODELS_MAX = 16  # that one name stands for: each is asked for at most once a request
_DRAWS = 1 << 64  # of a session's hash
_MICRO = 1e6  # of a USD

Scope: TypeAlias = tuple[str, str]  # a tenant and a name; "" is any tenant
Name = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]


class ModelStep(Part):
    """A model that a name may stand for. It is for prompts of at most `prompt_bytes_max`, requests with `tools` or
    without, those that cost `usd_max` at most; None for any. `weight`: its share of those drawn to be tried first."""

    model: Name
    prompt_bytes_max: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    tools: bool | None = None
    usd_max: Annotated[float, Field(gt=0, le=1e6)] | None = None
    weight: Annotated[float, Field(gt=0, le=1e6)] | None = None

    @property
    def for_any(self) -> bool:
        """Whether the step accepts every request."""
        return self.prompt_bytes_max is None and self.tools is None and self.usd_max is None


Steps = Annotated[tuple[ModelStep, ...], Field(max_length=MODELS_MAX)]


class NameRoute(Part):
    """The models that a `model` name stands for if `tenant` uses it; tenant "": if any tenant does."""

    tenant: Name | Literal[""] = ""
    model: Name
    models: Annotated[Steps, Field(min_length=1)]

    @model_validator(mode="after")
    def _sound(self) -> NameRoute:
        check(self.models)
        return self


def names_of(listed: Sequence[NameRoute]) -> dict[Scope, tuple[ModelStep, ...]]:
    """By scope, the models that each name stands for. Raises ValueError, with the route and the remedy, if routes
    contradict each other.
    """
    names: dict[Scope, tuple[ModelStep, ...]] = {}
    for n, one in enumerate(listed):
        if names.setdefault((one.tenant, one.model), one.models) is not one.models:
            raise ValueError(f"routes.{n}: a second one for tenant {one.tenant!r}, model {one.model!r}; keep one")
    check_ends((one.model, one.models) for one in listed)
    return names


def alias_note(request: Request) -> str:
    """Which model a request got for the name that it came by, and why not those before, for people."""
    why = f" ({request.alias_why})" if request.alias_why else ""
    return f"{request.alias} stands for {request.model}{why}"


def narrowed_by_name(request: Request, law: Law) -> tuple[tuple[str, ...], ...]:
    """The places that a request stays within once its name was replaced by a model, or was before. So the law's rule
    about the name also binds its records and hints, even in regions that do not know the name."""
    left = law.left_by_rules(request.tenant, request.alias or request.model)
    return request.narrow if left is None or left in request.narrow else (*request.narrow, left)


def with_fallbacks_narrowed(request: Request, law: Law) -> Request:
    """The request with each of its fallbacks where this law, too, lets it."""
    if not request.fallbacks:
        return request
    known = request.fallbacks_lawful or (request.lawful,) * len(request.fallbacks)
    models = zip(request.fallbacks, known, strict=True)
    verdicts = ((lawful, law.request_verdict(replace(request, model=model)).lawful) for model, lawful in models)
    return replace(request, fallbacks_lawful=tuple(may if of is None else of & may for of, may in verdicts))


def fallback(request: Request, model: str, refused: str, attempts: int) -> Request:
    """The request for another of its `fallbacks`, after this many attempts for the first model; `refused`: how the last
    one ended. Its chain has to be computed again, and its tokens are unknown: both depend on the model."""
    at, others, lawful = request.fallbacks.index(model), request.fallbacks, request.fallbacks_lawful
    why = f"{request.alias_why}; {request.model}: {refused}".removeprefix("; ")
    name = request.alias or request.model
    return replace(
        request, model=model, alias=name, alias_why=why, lawful=lawful[at] if lawful else request.lawful,
        fallbacks=others[:at] + others[at + 1 :], fallbacks_lawful=lawful[:at] + lawful[at + 1 :], attempted=attempts,
        chain=(), tokens=None,
    )  # fmt: skip


def check_ends(listed: Iterable[tuple[str, Sequence[ModelStep]]]) -> None:
    """Raise ValueError if a name stands for another name that stands for further models."""
    routes = list(listed)
    stand_for_others = {name for name, steps in routes if steps}
    for n, (name, steps) in enumerate(routes):
        for step in steps:
            if step.model in stand_for_others and step.model != name:
                raise ValueError(f"routes.{n}.models: {step.model!r} stands for others itself; name those in its place")


def of(names: Mapping[Scope, tuple[ModelStep, ...]], tenant: str, model: str) -> tuple[ModelStep, ...]:
    """What a name stands for if this tenant uses it, the narrower scope first; empty if it is only a model. A name
    among its models is never resolved in turn."""
    return names.get((tenant, model)) or names.get(("", model)) or () if names else ()


def aliases(names: Mapping[Scope, tuple[ModelStep, ...]], tenant: str) -> dict[str, tuple[str, ...]]:
    """All names that stand for other models for this tenant, and these models."""
    mine = sorted({model for whose, model in names if whose in ("", tenant)})
    return {name: tuple(step.model for step in of(names, tenant, name)) for name in mine}


def check(steps: Sequence[ModelStep]) -> None:
    """Raise ValueError, which names the remedy, if a name cannot stand for these."""
    names = [step.model for step in steps]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"models: {name!r} is given twice; name each once")
    if not any(step.for_any for step in steps):
        raise ValueError(
            "models: some requests would have none; leave `prompt_bytes_max`, `tools` and `usd_max` out of one"
        )


def ordered(steps: Sequence[ModelStep], draw: float) -> Sequence[ModelStep]:
    """The steps as they are tried: one of those with a weight is drawn (`draw` from 0 to 1) and comes first, the others
    stay in their order."""
    weighted = [step for step in steps if step.weight is not None]
    if not weighted:
        return steps
    left = draw * sum(step.weight or 0.0 for step in weighted)
    first = weighted[-1]
    for step in weighted:
        left -= step.weight or 0.0
        if left < 0.0:
            first = step
            break
    return [first, *(step for step in steps if step is not first)]


def drawn(request: Request, rng: Random) -> float:
    """What is drawn for a request, from 0 to 1. A session stays with what was drawn for it: its cache is there."""
    return request.soft_session % _DRAWS / _DRAWS if request.soft_session else rng.random()


def unfit(
    steps: Sequence[ModelStep],
    request: Request,
    allowed: Sequence[str],
    micro_usd: Callable[[Request], int | None],
) -> dict[str, str]:
    """Why a request may not have a step's model, by that; "" where it may. `allowed` are the models of its API key,
    empty for any; `micro_usd`: what it may cost at most, None where that has no price."""
    found = {step.model: _unfit(step, request, micro_usd) for step in steps}
    for model in found if allowed else ():
        if model not in allowed:
            found[model] = found[model] or "not for this key"
    return found


def _unfit(step: ModelStep, request: Request, micro_usd: Callable[[Request], int | None]) -> str:
    if step.prompt_bytes_max is not None and request.prompt_bytes > step.prompt_bytes_max:
        return "the prompt is too long"
    if step.tools is not None and step.tools != request.tools:
        return "for requests with tools" if step.tools else "for requests without tools"
    if step.usd_max is not None:
        cost = micro_usd(replace(request, model=step.model))
        if cost is None or cost > step.usd_max * _MICRO:
            return "no price" if cost is None else "too dear"
    return ""
