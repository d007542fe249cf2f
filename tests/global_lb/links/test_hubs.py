"""One hub as a global balancer sees it: its documents, refused ones, whether it is connected."""

from __future__ import annotations

from random import Random

import pytest
from regions import Clock, a_report

from farhop.store.contract import Change, ChangeKind, KeyValue, report_key
from farhop.store.documents.report import RegionReport, encode
from farhop_lab.memory_store import MemoryStore
from global_lb.links import hubs
from global_lb.links.hubs import Hub

KEY = report_key("tokyo", "r1")


class Recorder:
    def __init__(self, answer: str | None = None) -> None:
        self.reports: list[RegionReport] = []
        self.refused: list[str] = []
        self.clock = Clock(10.0)
        self.answer = answer
        self.hub = Hub("a", MemoryStore(Random(1)), self.on_report, self.refused.append, self.clock)

    def on_report(self, report: RegionReport) -> str | None:
        self.reports.append(report)
        return self.answer


def test_before_it_answers_it_is_not_in_contact_and_a_loss_is_shown_until_it_is_back() -> None:
    recorder = Recorder()
    assert (recorder.hub.status()["in_contact"], recorder.hub.status()["age_s"]) == (False, None)
    assert not recorder.hub.is_read
    recorder.hub.changed(Change(ChangeKind.SNAPSHOT, 5, entries=(KeyValue(KEY, encode(a_report()), 4),)))
    recorder.clock.at += 2.0
    seen = recorder.hub.status()
    assert (seen["in_contact"], seen["revision"], seen["age_s"], seen["balancers"]) == (True, 5, 2.0, 1)
    assert recorder.hub.is_read
    recorder.hub.changed(Change(ChangeKind.LOST, why="frozen"))
    assert (recorder.hub.trouble, recorder.hub.status()["in_contact"], recorder.hub.listed) == (
        "frozen",
        False,
        {("tokyo", "r1")},
    )
    recorder.hub.changed(Change(ChangeKind.SNAPSHOT, 1))
    assert (recorder.hub.trouble, recorder.hub.status()["outages"], recorder.hub.listed) == (None, 1, set())


def test_a_hub_without_contact_from_the_start_is_not_waited_for() -> None:
    recorder = Recorder()
    recorder.hub.changed(Change(ChangeKind.LOST, why="refused"))
    assert recorder.hub.is_read


def test_reports_are_handed_on_and_deletions_only_listed() -> None:
    recorder = Recorder()
    recorder.hub.changed(Change(ChangeKind.PUT, 6, KEY, encode(a_report(seq=2))))
    recorder.hub.changed(Change(ChangeKind.PUT, 7, KEY, encode(a_report(seq=3))))
    assert [report.seq for report in recorder.reports] == [2, 3]
    recorder.hub.changed(Change(ChangeKind.DELETE, 8, KEY))
    recorder.hub.changed(Change(ChangeKind.DELETE, 9, "/farhop/v1/region/"))
    assert (recorder.hub.listed, len(recorder.reports), recorder.hub.status()["reports"]) == (set(), 2, 2)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (KEY, b"{", "malformed"),
        (KEY, b"", "malformed"),
        (report_key("tokyo", "r2"), encode(a_report()), "misplaced"),
        (report_key("frankfurt", "r1"), encode(a_report()), "misplaced"),
    ],
)
def test_refused_documents_are_counted_by_hub_and_by_reason(key: str, value: bytes, why: str) -> None:
    recorder = Recorder()
    recorder.hub.changed(Change(ChangeKind.PUT, 6, key, value))
    recorder.hub.changed(Change(ChangeKind.PUT, 7, key, value))
    assert (recorder.refused, recorder.hub.status()["refused"], recorder.reports) == ([why, why], {why: 2}, [])


def test_a_report_that_the_watcher_rejects_is_shown_with_its_hub_and_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder("unknown_region")
    recorder.hub.changed(Change(ChangeKind.PUT, 6, KEY, encode(a_report())))
    assert (recorder.refused, recorder.hub.status()["refused"]) == (
        [],
        {"unknown_region": 1},
    )  # the watcher counts it itself
    monkeypatch.setattr(hubs, "REASONS_MAX", 1)
    recorder.answer = "another"
    recorder.hub.changed(Change(ChangeKind.PUT, 6, KEY, encode(a_report())))
    assert recorder.hub.status()["refused"] == {"unknown_region": 1}
