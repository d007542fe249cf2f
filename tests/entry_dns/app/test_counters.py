from __future__ import annotations

from entry_dns.answers.responder import COUNTERS
from entry_dns.app.counters import Counters


def test_rows_of_several_workers_are_summed(tmp_path) -> None:
    mine = Counters.make(tmp_path / "counters", 2)
    theirs = Counters(tmp_path / "counters")
    counts, led = [0] * len(COUNTERS), [0, 0]
    counts[0], led[1] = 5, 3
    theirs.add(1, counts, led)
    assert (counts[0], led[1]) == (0, 0)
    mine.add(0, [2] + [0] * (len(COUNTERS) - 1), [1, 0])
    theirs.fault(0)
    faults, sums = mine.total(2)
    assert (faults, sums["queries"]) == (1, 7)
    assert mine.led(2, ["a", "b"]) == {"a": 1, "b": 3}


def test_a_view_in_force_is_seen_by_others(tmp_path) -> None:
    mine = Counters.make(tmp_path / "counters", 1)
    theirs = Counters(tmp_path / "counters").version
    before = theirs[0]
    mine.raise_version()
    assert theirs[0] == before + 1
