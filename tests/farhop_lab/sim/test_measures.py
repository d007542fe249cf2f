from __future__ import annotations

from typing import Any

import pytest

from farhop.balance import machine, outcome
from farhop_lab.sim.measures import Journal, Measures, OpenRequest, RequestRecord, Use, quantile, use_of
from farhop_lab.sim.timeline import Timeline


def measures() -> Measures:
    return Measures(Journal(Timeline(), keep=True))


def record(request_id: str, **fields: Any) -> RequestRecord:
    return RequestRecord(
        **{
            "id": request_id,
            "tenant": "t",
            "entry": "a",
            "region": "a",
            "outcome": "served",
            "arrived_at": 1.0,
            "ended_at": 2.0,
            "ttft_ms": 30.0,
            "attempts": 1,
            **fields,
        }
    )


def test_an_arrival_is_concluded_once() -> None:
    seen = measures()
    seen.add_arrival("r1")
    seen.add_arrival("r2")
    seen.add_record(record("r1"))
    assert (seen.arrived, seen.concluded, seen.open, seen.violations) == (2, 1, 1, 0)
    seen.add_record(record("r1"))
    seen.add_record(record("r9"))
    assert (seen.concluded, seen.violations) == (1, 2)
    assert "r1 was concluded twice" in seen.journal.first_violations[0]


def test_outcomes_of_requests_are_counted() -> None:
    seen = measures()
    records = [
        record("r1"),
        record("r2", region="b", ttft_ms=90.0),
        record("r3", region="", ttft_ms=None, outcome="no_region_serving"),
        record("r4", region="b", tenant="u", arrived_at=5.0, ttft_ms=60.0),
    ]
    for one in records:
        seen.add_arrival(one.id)
        seen.add_record(one)
    assert seen.outcomes == {"served": 3, "no_region_serving": 1}
    assert seen.served == {("a", "a"): 1, ("a", "b"): 2}
    assert seen.ttft_ms() == [30.0, 60.0, 90.0]
    assert seen.ttft_ms("t") == [30.0, 90.0]
    assert seen.ttft_ms(since=2.0) == [60.0]


def test_only_counts_continue_beyond_the_sample_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhop_lab.sim.measures.RECORDS_MAX", 1)
    seen = measures()
    for name in ("r1", "r2"):
        seen.add_arrival(name)
        seen.add_record(record(name))
    assert (seen.concluded, len(seen.records)) == (2, 1)


def test_a_refusal_by_a_region_is_one_a_clients_fault_is_not() -> None:
    seen = measures()
    seen.refused("b", outcome.QUEUE_FULL)
    seen.refused("b", outcome.HOP_EXPIRED)
    assert seen.refusals == {("b", "queue_full"): 1}


def test_peak_utilisation_is_given_by_region_and_since_a_time() -> None:
    seen = measures()
    seen.use["a"] = [Use(1.0, 2.0, 3.0), Use(2.0, 0.5, 0.8), Use(3.0, 0.7, 0.9)]
    seen.use["b"] = [Use(3.0, 1.0, 1.1)]
    assert seen.peak("a", since=1.0) == 0.9
    assert seen.peak() == 3.0
    assert seen.peak(since=1.0) == 1.1
    assert seen.peak("b", since=9.0) == 0.0


def test_the_digest_depends_on_every_field() -> None:
    def digest_of(event: machine.Event, *commands: machine.Command) -> str:
        journal = Journal(Timeline())
        journal.note("global a", event, commands)
        return journal.digest

    left = machine.ClientLeft("r1")
    cancel = machine.Cancel("r1", 1)
    digests = {
        digest_of(left),
        digest_of(machine.ClientLeft("r2")),
        digest_of(left, cancel),
        digest_of(left, machine.SetTimer("r1", 1.0)),
        digest_of(left, machine.SetTimer("r1", 2.0)),
        digest_of(left, machine.Answer("r1", outcome.NO_REGION, "")),
        digest_of(machine.AttemptFailed("r1", 1, outcome.CONNECT_FAILED)),
        digest_of(machine.AttemptFailed("r1", 1, outcome.CONNECT_TIMEOUT)),
    }
    assert len(digests) == 8
    assert digest_of(left, cancel) == digest_of(left, cancel)


def test_lines_are_kept_only_if_requested() -> None:
    kept, dropped = Journal(Timeline(), keep=True), Journal(Timeline())
    for journal in (kept, dropped):
        journal.note("global a", machine.ClientLeft("r1"), [])
    assert kept.lines == ["0.000000000 global a ClientLeft r1"]
    assert dropped.lines is None
    assert kept.digest == dropped.digest


def test_quantiles_by_nearest_rank() -> None:
    values = [float(n) for n in range(1, 11)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.9, 0.91, 1.0)] == [1.0, 5.0, 9.0, 10.0, 10.0]
    with pytest.raises(ValueError, match="nothing"):
        quantile([], 0.5)


def test_unfinished_returns_the_open_requests() -> None:
    seen = measures()
    seen.add_arrival("r1", "t", "a", 3.0)
    seen.add_arrival("r2", "u", "b", 4.0)
    seen.add_record(record("r1"))
    assert seen.unfinished() == [OpenRequest("u", "b", 4.0, id="r2")]


def test_a_record_gives_the_time_per_output_token() -> None:
    found = record("r1", answer_tokens=11, ttft_ms=300.0)  # 1 s in all: 700 ms for ten tokens more
    assert found.tpot_ms == pytest.approx(70.0)
    assert record("r1", answer_tokens=1).tpot_ms is None
    assert record("r1", answer_tokens=11, outcome="died_mid_stream").tpot_ms is None


def test_a_regions_use_sums_up_its_engines() -> None:
    assert use_of(2.0, 0.5, 0.75, [(3, 4, 0.9), (0, 2, 0.3), (0, 0, 0.0)]) == Use(
        2.0, 0.5, 0.75, waiting=3, running=6, busy=pytest.approx(2 / 3), kv=pytest.approx(0.4)
    )
    assert use_of(2.0, 0.5, 0.75, []) == Use(2.0, 0.5, 0.75)


def test_a_journal_set_to_violations_only_records_nothing_else() -> None:
    journal = Journal(Timeline(), keep=True)
    journal.note("m", machine.TimerFired("r1"), [])
    before = journal.digest
    journal.violations_only()
    journal.note("m", machine.TimerFired("r2"), [])
    journal.violated("that")
    assert journal.digest == before
    assert len(journal.lines or ()) == 1
    assert journal.violations == 1
