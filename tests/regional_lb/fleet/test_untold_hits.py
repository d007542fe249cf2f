"""What counters tell of caches whose engines say nothing with their answers."""

from __future__ import annotations

from regional_lb.fleet.untold_hits import UntoldHits


def test_a_cache_that_was_emptied_shows_in_the_counters() -> None:
    hits = UntoldHits()
    assert hits.tells("r1") is None
    for _ in range(4):
        hits.answered("r1", 1000.0, told=False)
        assert not hits.overrates("r1", 900.0)
    hits.answered("r1", 1000.0, told=False)
    assert not hits.overrates("r1", 900.0)  # 5,000 believed in, 4,500 found
    for _ in range(4):
        hits.answered("r1", 1000.0, told=False)
        assert not hits.overrates("r1", 0.0)
    hits.answered("r1", 1000.0, told=False)
    assert hits.overrates("r1", 10.0)
    assert not hits.overrates("r1", 0.0)  # begun anew
    assert hits.tells("r1") is False


def test_who_tells_with_each_answer_is_not_judged_by_counters() -> None:
    hits = UntoldHits()
    for _ in range(99):
        hits.answered("r1", 1000.0, told=True)
        assert not hits.overrates("r1", 0.0)
    assert hits.tells("r1") is True
    hits.answered("r1", 1000.0, told=False)  # another configuration under the same name
    assert hits.tells("r1") is False
    hits.forget("r1")
    assert hits.tells("r1") is None
