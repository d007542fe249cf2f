"""Whether a request may enter this region at all: the law once more, the model, the bound on what waits.

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


def lawful_here(request: Request, region: str, law: Law) -> Refusal | None:
    """None if both the token and this region's own law allow the request to be processed here."""
    if request.lawful is not None and region not in request.lawful:
        return Refusal(outcome.UNLAWFUL_HERE, f"the hop token does not allow region {region}")
    clause = law.verdict(request.tenant, request.model, narrow=request.narrow, key=request.key).why_not(region)
    return None if clause is None else Refusal(outcome.UNLAWFUL_HERE, f"region {region}: {clause}")


def served_here(request: Request, region: str, view: View) -> Refusal | None:
    """None if some replica of this region, whatever its health, serves the model."""
    if request.model in view.by_model:
        return None
    return Refusal(outcome.MODEL_NOT_HERE, f"no replica in region {region} serves this model")
