"""One region for one model in numbers: from what it reported, what was sent there since, and what it costs.

Never decides, and reads nothing but what it is given.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from farhop.balance import cost

if TYPE_CHECKING:
    from farhop.balance.reckoning import Outstanding
    from global_lb.view import Capacity


class Price(msgspec.Struct, frozen=True):
    """What a region costs, by the topology: an hour of one GPU, and a GB that leaves it."""

    usd_per_gpu_hour: float = 0.0
    egress_usd_per_gb: float = 0.0


FREE = Price()


class Row(msgspec.Struct, frozen=True, gc=False):
    """One region for one model. The first four, and the four of price, are multiplied by what a request brings.

    Milliseconds, tokens, slots, shares and USD. `token_ms`: cost.token_ms of its replicas, who have `batch` requests
    each; one alone would have a token every `alone_ms`, and a prefill that takes longer stalls the others. `left`:
    slots free, less what was sent there and is not acknowledged. `foreign_tokens`: what it takes from here, infinite if
    it is here. `full`: 1 if that is nothing. `drift_...`: how fast its wait (ms a second) and its use (slots a second)
    change, and since when that is known.
    """

    rtt_ms: float
    wait_ms: float
    prefill_ms_per_byte: float
    token_ms: float
    usd_per_prompt_byte: float
    usd_per_output_token: float
    usd_per_body_byte: float
    usd_per_answer_byte: float
    bytes_per_token: float
    residence: float
    slots_free: float
    slots_total: float
    left: float
    foreign_tokens: float
    used_share: float
    full: float
    tpot_ms: float
    batch: float
    alone_ms: float
    drift_at: float = 0.0
    drift_wait: float = 0.0
    drift_use: float = 0.0


class Hits(msgspec.Struct):
    """Prompt tokens of all answers that told: believed to be cached when they were sent, and cached in truth."""

    predicted_tokens: float = 0.0
    actual_tokens: float = 0.0


def reckoned_wait_ms(capacity: Capacity, uncached_bytes: float) -> float:
    """The wait an instance published, and what was sent there since: shared by as many replicas as are ready."""
    if uncached_bytes <= 0.0:
        return capacity.wait_ms
    ms_per_token = capacity.prefill_ms_per_token / max(1, capacity.replicas_ready)
    return cost.reckoned_wait_ms(capacity.wait_ms, uncached_bytes / capacity.bytes_per_token, 0.0, ms_per_token)


def sent_of(capacity: Capacity, reckoning: Outstanding) -> tuple[float, float]:
    """An instance's wait in ms and its slots left, with what was sent since it reported to all who share them."""
    if not reckoning.outstanding_bytes:
        return capacity.wait_ms, float(capacity.slots_free)
    wait_ms = reckoned_wait_ms(capacity, reckoning.outstanding_uncached_bytes)
    return wait_ms, capacity.slots_free - reckoning.outstanding_requests


def row_of(
    capacity: Capacity,
    reckoning: Outstanding,
    *,
    rtt_ms: float,
    residence: float,
    rates: tuple[float, float, float],
    price: Price,
    price_here: Price | None,
) -> Row:
    """A region by what it reported and what was sent there. `price_here`: that of here, None if it is here itself.

    Hardware by the hour, of which a request takes its prefill and, per token of its answer, a slot's share of a step
    (farhop.balance.cost.gpu_usd). Egress on both ways.
    """
    wait_ms, left = sent_of(capacity, reckoning)
    headroom = capacity.headroom_foreign_tokens if price_here is not None else inf
    usd_per_ms = price.usd_per_gpu_hour / 3.6e6
    prefill_ms_per_byte = capacity.prefill_ms_per_token / capacity.bytes_per_token
    batch = max(0, capacity.slots_total - capacity.slots_free) / max(1, capacity.replicas_ready)
    step_ms = capacity.tpot_ms * capacity.replicas_ready / max(1, capacity.slots_total)
    return Row(
        rtt_ms,
        wait_ms,
        prefill_ms_per_byte,
        cost.token_ms(capacity.tpot_ms, capacity.crowd_ms, batch),
        usd_per_ms * prefill_ms_per_byte,
        usd_per_ms * step_ms,
        price_here.egress_usd_per_gb / 1e9 if price_here is not None else 0.0,
        price.egress_usd_per_gb / 1e9 if price_here is not None else 0.0,
        capacity.bytes_per_token,
        residence,
        capacity.slots_free,
        capacity.slots_total,
        left,
        headroom,
        capacity.used_share,
        float(headroom <= 0.0),
        capacity.tpot_ms,
        batch,
        max(0.0, capacity.tpot_ms - capacity.crowd_ms * batch),
        *rates,
    )
