"""Which requests are deferred, and to which full replica."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from regional_lb.scheduler.deferred import Deferral, Deferred

REPLICAS, REQUESTS, VARIANTS = ("r1", "r2", "r3"), ("a", "b", "c", "d"), ("m", "m@v2")
DEFERRALS = st.builds(
    Deferral, st.sampled_from(VARIANTS), st.sampled_from(REPLICAS), st.floats(0.0, 1e5), st.integers(0, 2)
)


@given(st.lists(st.tuples(st.sampled_from(REQUESTS), st.none() | DEFERRALS)))
def test_sums_are_those_of_the_deferred_requests(moves: list[tuple[str, Deferral | None]]) -> None:
    deferred, known = Deferred(), dict[str, Deferral]()
    for one, wait in moves:
        deferred.remove(one)
        known.pop(one, None)
        if wait is not None:
            deferred.add(one, wait)
            known[one] = wait
        assert deferred.by_request == known
        assert known or not (deferred.tokens or deferred.by_variant or deferred.alike)
        for variant in VARIANTS:
            assert deferred.by_variant.get(variant, 0) == sum(w.variant == variant for w in known.values())
        for replica in REPLICAS:
            tokens = sum(w.work_tokens for w in known.values() if w.replica == replica)
            assert abs(deferred.tokens.get(replica, 0.0) - tokens) <= 1e-3
            assert deferred.tokens.get(replica, 0.0) >= 0.0
            for node in (1, 2):
                alike = sum((w.replica, w.node) == (replica, node) for w in known.values())
                assert deferred.alike.get((replica, node), 0) == alike
        assert all(node for _, node in deferred.alike)  # what shares no prefix is not alike
