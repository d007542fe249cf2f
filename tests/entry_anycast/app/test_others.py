"""What an announcer learns from etcd, by steps of a watch: drains of its entry, and the state of other entries."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from entry_anycast.announcing.machine import DrainChanged, Event, OthersChanged
from entry_anycast.app.others import Others
from farhop.store.contract import Change, ChangeKind, KeyValue, announce_key, entry_drain_key
from farhop.store.documents.announce import AnnounceReport
from farhop.store.documents.announce import encode as report_encoded
from farhop.store.documents.overrides import EntryDrainOverride, encode

AT = datetime(2026, 5, 1, tzinfo=UTC)
LOST = Change(ChangeKind.LOST, why="gone")


class Stage:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.refused: list[str] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        later = lambda delay_s, work: self.later.append((delay_s, work))  # noqa: E731
        self.others = Others(
            None, "tokyo", "t1", ("192.0.2.1/32",), self.events.append, self.refused.append, later  # type: ignore[arg-type]
        )  # fmt: skip


def drain(entry: str = "t1", why: str = "new kernel") -> bytes:
    return encode(EntryDrainOverride(region="tokyo", entry=entry, why=why, author="ann", at=AT, for_s=60.0))


def put(key: str, value: bytes, revision: int = 2) -> Change:
    return Change(ChangeKind.PUT, revision, key, value)


def test_a_drain_comes_and_goes_with_its_key_or_its_time() -> None:
    stage, key = Stage(), entry_drain_key("tokyo", "t1")
    stage.others.drains_changed(put(key, drain()))
    assert stage.events == [DrainChanged("new kernel (by ann)")]
    stage.others.drains_changed(Change(ChangeKind.DELETE, 3, key))
    stage.others.drains_changed(put(key, drain(why="again"), 4))
    assert stage.events[1:] == [DrainChanged(None), DrainChanged("again (by ann)")]
    (_, first), (for_s, second) = stage.later
    first()  # from the drain before: it no longer ends anything
    assert (len(stage.events), for_s) == (3, 60.0)
    second()
    assert stage.events[3:] == [DrainChanged(None)]


def test_a_malformed_drain_or_that_of_another_entry_changes_nothing() -> None:
    stage = Stage()
    stage.others.drains_changed(put(entry_drain_key("tokyo", "t1") + "0", drain("t10")))
    stage.others.drains_changed(put(entry_drain_key("tokyo", "t1"), b"{}"))
    stage.others.drains_changed(LOST)
    assert stage.events == []
    assert stage.refused == ["override_malformed"]


def says(entry: str, instance: str = "a", prefix: str = "192.0.2.1/32", healthy: bool = True) -> KeyValue:
    report = AnnounceReport(
        entry=entry, region="tokyo", instance=instance, prefixes=(prefix,), speaker="bird", wanted="announced",
        healthy=healthy,
    )  # fmt: skip
    return KeyValue(announce_key("tokyo", instance), report_encoded(report), 1)


def test_other_entries_count_that_announce_the_same_and_are_healthy() -> None:
    stage = Stage()
    entries = (
        says("t1"),
        says("t2", "b"),
        says("t2", "c"),
        says("t3", "d", "198.51.100.0/24"),
        says("t4", "e", healthy=False),
    )
    stage.others.others_changed(Change(ChangeKind.SNAPSHOT, 1, entries=entries))
    stage.others.others_changed(LOST)
    stage.others.others_changed(put(announce_key("tokyo", "z"), says("t9").value))
    assert stage.events == [OthersChanged(1), OthersChanged(None), OthersChanged(1)]
    assert stage.refused == ["announce_misplaced"]
