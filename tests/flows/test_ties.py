"""A conversation cached nowhere goes, of two idle replicas, to the one where it evicts no other."""

from __future__ import annotations

from collections import Counter

import pytest
from worlds import regional, replica, request

from farhop.balance.machine import AttemptBegan, AttemptEnded, Forward, RequestArrived

TALKS, ROUNDS, SEEDS = 9, 6, 12


def _cached_share(seed: int) -> tuple[float, list[int]]:
    """Nine talks in turns at three idle replicas whose caches hold three each: what share of later turns is found
    cached, and how many talks are at home where."""
    flow = regional(*(replica(f"r{n}", slots=8, prefill_tokens_max=50_000) for n in range(3)), seed=seed)
    now, hit_tokens, tokens = 1.0, 0.0, 0.0
    home: dict[int, str] = {}
    for turn in range(ROUNDS):
        for talk in range(TALKS):
            size = 10_000 + 200 * turn  # 2,500 tokens of the 10,000, and growing
            asked = request(f"q{turn}-{talk}", size, prefix=f"talk{talk}", deadline=now + 100)
            (sent,) = (c for c in flow.handle(RequestArrived(asked), now) if isinstance(c, Forward))
            found = sent.reasons.chosen
            if turn:
                hit_tokens, tokens = hit_tokens + found.hit_tokens, tokens + size / 4
            began = now + found.uncached_tokens * 1e-4 + 0.02  # as fast as estimated
            flow.handle(AttemptBegan(asked.id, 1, 200), began)
            flow.handle(AttemptEnded(asked.id, 1, 200, None), began + 0.2)
            home[talk] = sent.target
            now += 1.0
    return hit_tokens / tokens, sorted(Counter(home.values()).values())


def test_talks_spread_over_caches_as_far_as_these_hold_them() -> None:
    found = [_cached_share(seed) for seed in range(SEEDS)]
    shares = [share for share, _ in found]
    assert min(shares) > 0.8  # by chance alone some settle 1/4/4, and find 0.73
    assert sum(shares) / SEEDS > 0.86
    assert all(most - least <= 2 for _, (least, _, most) in found)


@pytest.mark.parametrize("busy", [True, False])
def test_the_less_busy_replica_comes_before_an_eviction_tie(busy: bool) -> None:
    flow = regional(replica("r0", slots=8), replica("r1", slots=8))
    flow.replicas.caches("r0", request("old", 30_000).chain)
    flow.replicas.whole.in_flight[1] = 1.0 if busy else 0.0
    (sent,) = (c for c in flow.handle(RequestArrived(request("new", 400)), 0.0) if isinstance(c, Forward))
    assert sent.target == ("r0" if busy else "r1")
