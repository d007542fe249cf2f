"""Names that stand for other models: the cascade of a route, and which of its models a request is for.

Invariants: a model that the law or the API key does not let the request use is never chosen, and neither is a name that
the law keeps it from; resolving ends, since a model of a cascade never stands for others in turn, and no model is
fallen back to twice. Decided when the request comes, and again only if it would be refused for lack of room before any
part of an answer exists. Never sends, and reserves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from farhop.balance import model_steps, outcome
from global_lb.routing import admission

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farhop.balance.machine import Request
    from farhop.balance.model_steps import ModelStep
    from farhop.balance.outcome import Outcome
    from global_lb.routing.pick import Decision
    from topology.law import Law

LEAST_ROOM = 1.0  # slots


class Unresolved(msgspec.Struct, frozen=True):
    """Why the request may have none of the models; `detail` is for the client and names none of them."""

    outcome: Outcome
    detail: str


def resolve(
    request: Request,
    steps: Sequence[ModelStep],
    allowed: Sequence[str],
    law: Law,
    consider: Callable[[Request], Decision],
    known: Callable[[str], bool],
    *,
    micro_usd: Callable[[Request], int | None] = lambda _: None,
) -> Request | Unresolved:
    """The request for the model that it gets: the first with room in a region where it may go; if none has room, the
    first that is served there; if none is, the first that it may use, preferably of those `known`. `allowed` are the
    models of its API key, empty for any; `micro_usd`: what a request may cost at most, None where that has no price.
    Its `lawful` then holds what the law says of the name asked for, too. Its `fallbacks` are the others that it may
    use, each where this law lets it, and it stays within what a rule about the name leaves. Its chain is still the
    name's."""
    by_name = law.request_verdict(request).lawful
    by_name = admission.both(by_name, request.lawful)
    narrow = model_steps.narrowed_by_name(request, law)
    passed: list[str] = []
    lawless = False
    served: tuple[Request, list[str]] | None = None
    firsts: list[Request] = []
    unfit = model_steps.unfit(steps, request, allowed, micro_usd)
    fitting = tuple(model for model, why in unfit.items() if not why)
    may = {model: law.verdict(request.tenant, model, narrow=narrow, key=request.key).lawful for model in fitting}
    may = {model: admission.both(lawful, by_name) for model, lawful in may.items()}
    for step in steps:
        if unfit[step.model]:
            passed.append(f"{step.model}: {unfit[step.model]}")
            continue
        others = tuple(model for model in fitting if model != step.model)
        one = replace(
            request, model=step.model, alias=request.model, lawful=by_name, fallbacks=others,
            fallbacks_lawful=tuple(may[model] for model in others), narrow=narrow,
        )  # fmt: skip
        if not may[step.model]:
            lawless = True
            passed.append(f"{step.model}: unlawful")
            continue
        decision = consider(one)
        if decision.chosen is not None and any(scored.headroom >= LEAST_ROOM for scored in decision.scored):
            return _explained(one, passed)
        if decision.chosen is not None:
            served = served or (one, list(passed))
        firsts.append(one)
        passed.append(f"{step.model}: {'no room' if decision.chosen is not None else 'not served'}")
    if served is not None:
        return _explained(*served, "; no other has room")
    if firsts:
        return _explained(next((one for one in firsts if known(one.model)), firsts[0]), [], "; none is served")
    if lawless or not by_name:
        return Unresolved(outcome.UNLAWFUL, f"no region may process this request for what `{request.model[:128]}` is")
    return Unresolved(outcome.KEY_SCOPE, f"this API key is for none of the models that `{request.model[:128]}` is")


def fall_back(
    request: Request, refused: str, attempts: int, consider: Callable[[Request], Decision], *, room: bool
) -> Request | None:
    """The request for another of the models that its name stands for, after `attempts` for this one, which ended with
    `refused`: the first with room where it may go; if none has room and `room` is not required, the first that is
    served there. None: there is none."""
    served: Request | None = None
    for model in request.fallbacks:
        one = model_steps.fallback(request, model, refused, attempts)
        decision = consider(one)
        if decision.chosen is None:
            continue
        if any(scored.headroom >= LEAST_ROOM for scored in decision.scored):
            return one
        served = served or one
    return None if room else served


def _explained(request: Request, passed: Sequence[str], end: str = "") -> Request:
    return replace(request, alias_why="; ".join(passed) + end if passed else end.removeprefix("; "))
