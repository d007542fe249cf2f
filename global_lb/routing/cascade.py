"""Names that stand for other models: the cascade of a route, and which of its models a request is for.

Invariants: a model that the law or the API key does not let the request use is never chosen, and neither is a name that
the law keeps it from; resolving ends, since a model of a cascade never stands for others in turn. Decided once, when
the request comes: after that its model stays. Never sends, and reserves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from farhop.balance import outcome
from global_lb.routing import admission

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farhop.balance.machine import Request
    from farhop.balance.outcome import Outcome
    from global_lb.routing.pick import Decision
    from global_lb.routing.policy import ModelStep
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
) -> Request | Unresolved:
    """The request for the model that it gets: the first with room in a region where it may go; while none has any, the
    first that is served there; where none is, the first that it may use, of those `known` if there is one. `allowed`
    are the models of its API key, empty for any. Its `lawful` then holds what the law says of the name asked for, too.
    Its chain is still the name's."""
    by_name = admission.processing(request, law).lawful
    by_name = admission.both(by_name, request.lawful)
    passed: list[str] = []
    lawless = False
    served: tuple[Request, list[str]] | None = None
    firsts: list[Request] = []
    for step in steps:
        if step.prompt_bytes_max is not None and request.prompt_bytes > step.prompt_bytes_max:
            passed.append(f"{step.model}: the prompt is too long")
            continue
        if allowed and step.model not in allowed:
            passed.append(f"{step.model}: not for this key")
            continue
        one = replace(request, model=step.model, alias=request.model, lawful=by_name)
        if not admission.processing(one, law).lawful & by_name:
            lawless = True
            passed.append(f"{step.model}: unlawful")
            continue
        decision = consider(one)
        if decision.chosen is not None and any(scored.headroom >= LEAST_ROOM for scored in decision.scored):
            return _told(one, passed)
        if decision.chosen is not None:
            served = served or (one, list(passed))
        firsts.append(one)
        passed.append(f"{step.model}: {'no room' if decision.chosen is not None else 'not served'}")
    if served is not None:
        return _told(*served, "; no other has room")
    if firsts:
        return _told(next((one for one in firsts if known(one.model)), firsts[0]), [], "; none is served")
    if lawless or not by_name:
        return Unresolved(outcome.UNLAWFUL, f"no region may process this request for what `{request.model[:128]}` is")
    return Unresolved(outcome.KEY_SCOPE, f"this API key is for none of the models that `{request.model[:128]}` is")


def _told(request: Request, passed: Sequence[str], end: str = "") -> Request:
    return replace(request, alias_why="; ".join(passed) + end if passed else end.removeprefix("; "))
