"""Scoring regions for one request: `predictive`, in milliseconds, lower is better.

    ttft_ms(r)  = rtt_ms(r) + upload_ms(r, bytes) + wait_ms(r) + (n - hit(r)) * prefill_ms_per_token(r)
    score_ms(r) = ttft_ms(r) + beta * m * (tpot_ms(r) - min tpot) + penalty_ms(r)

The penalty is that of a region that is hot, full for foreign work, or not fully returned to (global_lb.pick).
Scoring never writes and never filters: law and liveness have spoken before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from farhop.balance import chain, cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.balance.drift import Drift
    from farhop.balance.machine import Request
    from global_lb.view import Capacity, Instance

BETA = 0.25  # how much of a later token counts against the first (DESIGN: TTFT alone sends all to the nearest region)


class Offer(msgspec.Struct, frozen=True):
    """One region that may be chosen: its instance to ask, what it offers, and what the flow knows of it.

    `outstanding_bytes` were sent there and not acknowledged yet, and are about `outstanding_requests`; `depth` is the
    matched depth of the prefix chain and `residence` (0..1) the share of such hits that proved true there lately;
    `hot`: above its threshold, or full for work from here.
    """

    region: str
    rtt_ms: float
    instance: Instance
    capacity: Capacity
    outstanding_bytes: float
    depth: int
    residence: float
    outstanding_requests: float = 0.0
    foreign: bool = False
    hot: bool = False
    penalty_ms: float = 0.0
    drift: Drift | None = None


class Scored(msgspec.Struct, frozen=True):
    """A region's score and what it is made of. `believed_tokens` are the hit before it was discounted by residence.

    `headroom` is in slots: those free, less what was sent there and is not acknowledged, and no more than it takes from
    other regions.
    """

    region: str
    score_ms: float
    ttft_ms: float
    rtt_ms: float
    upload_ms: float
    wait_ms: float
    believed_tokens: float
    hit_tokens: float
    uncached_tokens: float
    prefill_ms: float
    tpot_ms: float
    slots_free: int
    headroom: float = 0.0
    penalty_ms: float = 0.0
    hot: bool = False


class Policy(Protocol):
    """How a region is preferred."""

    def score(self, request: Request, output_tokens: float, offers: Sequence[Offer]) -> list[Scored]:
        """One Scored per offer, in the same order."""
        ...


class Predictive:
    """The default: see the module's head."""

    def score(self, request: Request, output_tokens: float, offers: Sequence[Offer]) -> list[Scored]:
        """See the module's head. Prompt tokens are counted by each region's own learned bytes per token."""
        tpot_best_ms = min((o.capacity.tpot_ms for o in offers), default=0.0)
        return [_score(request, output_tokens, offer, tpot_best_ms) for offer in offers]


def reckoned_wait_ms(capacity: Capacity, outstanding_bytes: float) -> float:
    """The wait an instance published, and what was sent there since: shared by as many replicas as are ready."""
    if outstanding_bytes <= 0.0:
        return capacity.wait_ms
    ms_per_token = capacity.prefill_ms_per_token / max(1, capacity.replicas_ready)
    return cost.reckoned_wait_ms(capacity.wait_ms, outstanding_bytes / capacity.bytes_per_token, 0.0, ms_per_token)


def _score(request: Request, output_tokens: float, offer: Offer, tpot_best_ms: float) -> Scored:
    """By farhop.balance.cost; what is nothing is not asked for, and fields are given in order: this runs per region."""
    capacity, rtt_ms, penalty_ms = offer.capacity, offer.rtt_ms, offer.penalty_ms
    n = request.prompt_bytes / capacity.bytes_per_token
    believed = min(chain.bytes_at(offer.depth) / capacity.bytes_per_token, n) if offer.depth else 0.0
    hit = believed * offer.residence
    uncached = n - hit
    wait_ms = reckoned_wait_ms(capacity, offer.outstanding_bytes)
    body_bytes = request.body_bytes
    upload_ms = cost.upload_ms(body_bytes, rtt_ms) if body_bytes > cost.INIT_WINDOW_BYTES else 0.0
    prefill_ms, tpot_ms = uncached * capacity.prefill_ms_per_token, capacity.tpot_ms
    ttft_ms = rtt_ms + upload_ms + wait_ms + prefill_ms
    score_ms = ttft_ms + BETA * output_tokens * (tpot_ms - tpot_best_ms) + penalty_ms
    slots_free, most = capacity.slots_free, capacity.headroom_foreign_tokens
    left = slots_free - offer.outstanding_requests
    if offer.foreign and left * uncached > most:
        left = most / uncached
    return Scored(
        offer.region, score_ms, ttft_ms, rtt_ms, upload_ms, wait_ms, believed, hit, uncached, prefill_ms, tpot_ms,
        slots_free, left, penalty_ms, offer.hot,
    )  # fmt: skip
