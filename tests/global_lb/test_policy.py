"""The predictive score of a region, term by term."""

from __future__ import annotations

import pytest
from worlds import capacity, instance, request

from global_lb.policy import BETA, Offer, Predictive, reckoned_wait_ms


def offer(region: str = "london", **fields) -> Offer:
    known = {"rtt_ms": 10.0, "outstanding_bytes": 0.0, "depth": 0, "residence": 1.0, "capacity": capacity(), **fields}
    return Offer(region=region, instance=instance(region), **known)


def score(*offers: Offer, **fields):
    return Predictive().score(request("a", **fields), 100.0, offers)


def test_the_wire_the_wait_and_the_prefill() -> None:
    (one,) = score(offer())
    assert (one.rtt_ms, one.upload_ms, one.wait_ms, one.prefill_ms) == (10.0, 0.0, 5.0, pytest.approx(25.6))
    assert one.ttft_ms == one.score_ms == pytest.approx(40.6)


def test_a_large_body_pays_for_its_upload() -> None:
    (one,) = score(offer(), body_bytes=200_000)
    assert one.upload_ms == 30.0  # three more round trips


def test_a_hit_is_discounted_by_residence_and_never_more_than_the_prompt() -> None:
    full, half, beyond = score(offer(depth=2), offer(depth=2, residence=0.5), offer(depth=16, residence=0.5))
    assert (full.believed_tokens, full.hit_tokens, full.uncached_tokens) == (128.0, 128.0, 128.0)
    assert (half.believed_tokens, half.hit_tokens, half.uncached_tokens) == (128.0, 64.0, 192.0)
    assert (beyond.believed_tokens, beyond.hit_tokens) == (256.0, 128.0)


def test_slow_decode_costs_in_proportion_to_the_answer() -> None:
    quick, slow = score(offer("london"), offer("tokyo", capacity=capacity(tpot_ms=30.0)))
    assert slow.score_ms - quick.score_ms == pytest.approx(BETA * 100 * 10.0)
    assert slow.ttft_ms == quick.ttft_ms


def test_what_was_sent_since_the_report_is_shared_by_the_replicas() -> None:
    assert reckoned_wait_ms(capacity(), 0.0) == 5.0
    assert reckoned_wait_ms(capacity(replicas_ready=2), 4096.0) == pytest.approx(5.0 + 1024 * 0.1 / 2)
    assert reckoned_wait_ms(capacity(replicas_ready=0), 4096.0) == pytest.approx(5.0 + 1024 * 0.1)


def test_each_region_counts_tokens_by_its_own_measure() -> None:
    (one,) = score(offer(capacity=capacity(bytes_per_token=2.0)))
    assert one.uncached_tokens == 512.0
