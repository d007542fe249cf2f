"""Whether a request may enter this region at all: the law once more, the model, the time left.

The law is this region's own copy; with the hop token's set the intersection holds. Never weighs one against another,
and never fails open: what is unknown is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from farhop.balance.outcome import Outcome
    from regional_lb.view import View
    from topology.law import Law


class Refusal(msgspec.Struct, frozen=True):
    """Why a request does not enter."""

    outcome: Outcome
    detail: str


def refusal(request: Request, region: str, law: Law, view: View, now: float) -> Refusal | None:
    """Why the request may not enter, or not stay; None if it may. Asked at arrival and before every attempt."""
    if request.lawful is not None and region not in request.lawful:
        return Refusal(outcome.UNLAWFUL_HERE, f"the hop token does not allow region {region}")
    clause = law.verdict(request.tenant, request.model, narrow=request.narrow, key=request.key).why_not(region)
    if clause is not None:
        return Refusal(outcome.UNLAWFUL_HERE, f"region {region}: {clause}")
    if request.model not in view.by_model:
        return Refusal(outcome.MODEL_NOT_HERE, f"no replica in region {region} serves this model")
    if now >= request.deadline:
        return Refusal(outcome.DEADLINE, "the request's deadline passed")
    return None
