"""Whether a request may enter this region at all: the law once more, the model, the time left.

The law is this region's own copy, intersected with the lawful set of the hop token. Foreign requests (from other
regions) are only served beside a reserve for this region's own clients. One that was sent with a promise could go
elsewhere: it enters only if it fits beside the whole reserve and the promise can be kept. One without a promise has
nowhere else to go: it may wait, and only the smaller, last-resort reserve is kept from it. Never fails open: whatever
is unknown is refused.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
import numpy as np
from pydantic import Field, model_validator

from farhop.balance import outcome
from farhop.config import Part, Share
from regional_lb.fleet.table import TOTAL

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from farhop.balance.outcome import Outcome
    from regional_lb.fleet.table import Sums, Table
    from regional_lb.fleet.view import View
    from topology.law import Law


class ForeignConfig(Part):
    """Terms for foreign requests. `reserve_share` of slots and KV tokens is kept for own work from requests that other
    regions could take, and at most `last_resort_reserve_share` from those that wait here or that no other region would
    take (`last_resort_headroom`). A promised time to the first token is broken beyond factor * promise + slack (ms)."""

    reserve_share: Share = 0.1
    last_resort_reserve_share: Share = 0.05
    promise_factor: Annotated[float, Field(ge=1, le=1000)] = 2.0
    promise_slack_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 500.0

    @model_validator(mode="after")
    def _last_resort_is_a_part(self) -> Self:
        if self.last_resort_reserve_share > self.reserve_share:
            raise ValueError(
                f"last_resort_reserve_share {self.last_resort_reserve_share:g} is above reserve_share "
                f"{self.reserve_share:g}: set it to that or less, 0 to keep nothing from the last resort"
            )
        return self


class Headroom(msgspec.Struct, frozen=True):
    """What replicas have left beside the reserve, and whether any of them is idle; `slots_free` includes the
    reserve."""

    slots: int
    kv_tokens: float
    idle: bool
    slots_free: int = 0

    def takes(self, kv_tokens: float) -> bool:
        """Whether a foreign request that needs this much of the cache fits beside the reserve. An idle engine takes
        anything, as with own work: what it can never hold it refuses itself."""
        return self.slots >= 1 and (kv_tokens <= self.kv_tokens or self.idle)


class Refusal(msgspec.Struct, frozen=True):
    """Why a request does not enter."""

    outcome: Outcome
    detail: str


def unlawful(request: Request, region: str, law: Law) -> Refusal | None:
    """Why the law keeps the request out of this region; None if it does not. The token's lawful set and our own law can
    each do so."""
    if request.lawful is not None and region not in request.lawful:
        return Refusal(outcome.UNLAWFUL_HERE, f"the hop token, or the law that came before, does not allow {region}")
    verdict = law.request_verdict(request)
    if region in verdict.lawful:
        return None
    return Refusal(outcome.UNLAWFUL_HERE, f"region {region}: {verdict.why_not(region)}")


def refusal(request: Request, region: str, law: Law, view: View, now: float) -> Refusal | None:
    """Why the request may not enter, or not stay; None if it may. Asked at arrival and before every attempt."""
    verdict = law.request_verdict(request)
    if region not in verdict.lawful or (request.lawful is not None and region not in request.lawful):
        return unlawful(request, region, law)
    if request.model not in view.by_model:
        return Refusal(outcome.MODEL_NOT_HERE, f"no replica in region {region} serves this model")
    if now >= request.deadline:
        return Refusal(outcome.DEADLINE, "the request's deadline passed")
    return None


def headroom(table: Table, reserve_share: float, sums: Sums | None = None) -> Headroom:
    """What these healthy replicas have left for work from other regions. Of few slots, less than one is reserved.
    `sums` are the table's, where they are known."""
    in_flight, sums = table.in_flight, sums or table.sums()
    free = int(TOTAL(np.maximum(table.slots - in_flight, 0.0)))
    kv_taken = float(TOTAL(np.minimum(table.kv_taken_tokens, table.kv_tokens)))
    kv_left = (1.0 - reserve_share) * sums.kv_tokens - kv_taken
    slots = max(0, free - int(reserve_share * sums.slots))
    return Headroom(slots, max(0.0, kv_left), not np.logical_and.reduce(in_flight), free)


def last_resort_headroom(table: Table, reserve_share: float) -> Headroom:
    """The same for foreign requests with nowhere else to go: of n requests under way at most what log2 n of them take
    is reserved.

    While those are kept out, any room that becomes free goes to own work. So each reserved place multiplies the chance
    that own work finds none by its share of the load (trunk reservation: F. P. Kelly, "Loss networks", Annals of
    Applied Probability 1, 1991): a reserve of the order of log n is enough, and a larger one would be idle while they
    wait.
    """
    sums = table.sums()
    under_way = max(2.0, sums.in_flight)
    return headroom(table, min(reserve_share, log2(under_way) / under_way), sums)


def is_foreign(request: Request, region: str) -> bool:
    """Whether it comes from another region."""
    return request.entry_region not in ("", region)


def foreign_refusal(
    promised_ms: float, kv_tokens: float, left: Headroom, expected_ttft_ms: float, terms: ForeignConfig
) -> Refusal | None:
    """Why a foreign request that other regions could take may not enter; None if it may. `kv_tokens`: the KV cache that
    it would take.

    A queue here is no reason to refuse: the global tier counted it when it chose this region.
    """
    if not left.takes(kv_tokens):
        return Refusal(outcome.FOREIGN_FULL, "what is free is kept for this region's own requests")
    if expected_ttft_ms > terms.promise_factor * promised_ms + terms.promise_slack_ms:
        detail = f"its first token would take {expected_ttft_ms:.0f} ms, and {promised_ms:.0f} ms were promised"
        return Refusal(outcome.BROKEN_PROMISE, detail)
    return None
