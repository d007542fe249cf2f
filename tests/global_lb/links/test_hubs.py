"""One hub as a global balancer sees it: what stands there, what was not believed, whether it is in contact."""

from __future__ import annotations

from random import Random

import pytest
from regions import Clock, told

from farhop.store.contract import Change, ChangeKind, Entry, report_key
from farhop.store.documents.report import RegionReport, encode
from farhop_lab.memory_store import MemoryStore
from global_lb.links import hubs
from global_lb.links.hubs import Hub

KEY = report_key("tokyo", "r1")


class Ear:
    def __init__(self, answer: str | None = None) -> None:
        self.reports: list[RegionReport] = []
        self.refused: list[str] = []
        self.clock = Clock(10.0)
        self.answer = answer
        self.hub = Hub("a", MemoryStore(Random(1)), self.heard, self.refused.append, self.clock)

    def heard(self, report: RegionReport) -> str | None:
        self.reports.append(report)
        return self.answer


def test_before_it_answers_it_is_not_in_contact_and_a_loss_is_shown_until_it_is_back() -> None:
    ear = Ear()
    assert (ear.hub.status()["in_contact"], ear.hub.status()["age_s"]) == (False, None)
    ear.hub.changed(Change(ChangeKind.SNAPSHOT, 5, entries=(Entry(KEY, encode(told()), 4),)))
    ear.clock.at += 2.0
    seen = ear.hub.status()
    assert (seen["in_contact"], seen["revision"], seen["age_s"], seen["balancers"]) == (True, 5, 2.0, 1)
    ear.hub.changed(Change(ChangeKind.LOST, why="frozen"))
    assert (ear.hub.trouble, ear.hub.status()["in_contact"], ear.hub.listed) == ("frozen", False, {("tokyo", "r1")})
    ear.hub.changed(Change(ChangeKind.SNAPSHOT, 1))
    assert (ear.hub.trouble, ear.hub.status()["outages"], ear.hub.listed) == (None, 1, set())


def test_reports_are_handed_on_and_deletions_only_listed() -> None:
    ear = Ear()
    ear.hub.changed(Change(ChangeKind.PUT, 6, KEY, encode(told(seq=2))))
    ear.hub.changed(Change(ChangeKind.PUT, 7, KEY, encode(told(seq=3))))
    assert [report.seq for report in ear.reports] == [2, 3]
    ear.hub.changed(Change(ChangeKind.DELETE, 8, KEY))
    ear.hub.changed(Change(ChangeKind.DELETE, 9, "/farhop/v1/region/"))
    assert (ear.hub.listed, len(ear.reports), ear.hub.status()["reports"]) == (set(), 2, 2)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (KEY, b"{", "malformed"),
        (KEY, b"", "malformed"),
        (report_key("tokyo", "r2"), encode(told()), "misplaced"),
        (report_key("frankfurt", "r1"), encode(told()), "misplaced"),
    ],
)
def test_what_is_not_believed_is_counted_by_hub_and_by_reason(key: str, value: bytes, why: str) -> None:
    ear = Ear()
    ear.hub.changed(Change(ChangeKind.PUT, 6, key, value))
    ear.hub.changed(Change(ChangeKind.PUT, 7, key, value))
    assert (ear.refused, ear.hub.status()["refused"], ear.reports) == ([why, why], {why: 2}, [])


def test_what_the_watcher_does_not_believe_is_shown_with_its_hub_and_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ear = Ear("unknown_region")
    ear.hub.changed(Change(ChangeKind.PUT, 6, KEY, encode(told())))
    assert (ear.refused, ear.hub.status()["refused"]) == ([], {"unknown_region": 1})  # the watcher counts it itself
    monkeypatch.setattr(hubs, "REASONS_MAX", 1)
    ear.answer = "another"
    ear.hub.changed(Change(ChangeKind.PUT, 6, KEY, encode(told())))
    assert ear.hub.status()["refused"] == {"unknown_region": 1}
