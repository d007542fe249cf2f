"""Cache counters of engines that report no cached tokens with their answers."""

from __future__ import annotations

from regional_lb.fleet.unreported_hits import UnreportedHits


def test_a_cache_that_was_emptied_shows_in_the_counters() -> None:
    hits = UnreportedHits()
    assert hits.reported("r1") is None
    for _ in range(4):
        hits.answered("r1", 1000.0, reported=False)
        assert not hits.overrates("r1", 900.0)
    hits.answered("r1", 1000.0, reported=False)
    assert not hits.overrates("r1", 900.0)  # 5,000 expected, 4,500 found
    for _ in range(4):
        hits.answered("r1", 1000.0, reported=False)
        assert not hits.overrates("r1", 0.0)
    hits.answered("r1", 1000.0, reported=False)
    assert hits.overrates("r1", 10.0)
    assert not hits.overrates("r1", 0.0)  # started again
    assert hits.reported("r1") is False


def test_a_replica_that_reports_cached_tokens_per_answer_is_not_judged_by_its_counters() -> None:
    hits = UnreportedHits()
    for _ in range(99):
        hits.answered("r1", 1000.0, reported=True)
        assert not hits.overrates("r1", 0.0)
    assert hits.reported("r1") is True
    hits.answered("r1", 1000.0, reported=False)  # another configuration under the same name
    assert hits.reported("r1") is False
    hits.forget("r1")
    assert hits.reported("r1") is None
