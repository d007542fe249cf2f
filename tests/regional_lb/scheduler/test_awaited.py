"""Who waits by choice for which full replica."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from regional_lb.scheduler.awaited import Awaited, Wait

REPLICAS, REQUESTS, VARIANTS = ("r1", "r2", "r3"), ("a", "b", "c", "d"), ("m", "m@v2")
WAITS = st.builds(Wait, st.sampled_from(VARIANTS), st.sampled_from(REPLICAS), st.floats(0.0, 1e5))


@given(st.lists(st.tuples(st.sampled_from(REQUESTS), st.none() | WAITS)))
def test_the_sums_are_of_those_who_wait(moves: list[tuple[str, Wait | None]]) -> None:
    awaited, known = Awaited(), dict[str, Wait]()
    for one, wait in moves:
        awaited.leave(one)
        known.pop(one, None)
        if wait is not None:
            awaited.wait(one, wait)
            known[one] = wait
        assert awaited.by_request == known
        assert known or not (awaited.tokens or awaited.by_variant)
        for variant in VARIANTS:
            assert awaited.by_variant.get(variant, 0) == sum(w.variant == variant for w in known.values())
        for replica in REPLICAS:
            tokens = sum(w.work_tokens for w in known.values() if w.replica == replica)
            assert abs(awaited.tokens.get(replica, 0.0) - tokens) <= 1e-3
            assert awaited.tokens.get(replica, 0.0) >= 0.0
