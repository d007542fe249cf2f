"""Refusals set for a region: by steps of a watch."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random

from farhop.balance.machine import Event
from farhop.store.contract import Change, ChangeKind, KeyValue
from farhop.store.documents.overrides import RefuseOverride, encode
from farhop_lab.memory_store import MemoryStore
from regional_lb.app.refusals import RefusalBook
from regional_lb.scheduler.refusals import OrderedRefusal, RefusalsChanged

SAID = {"why": "a drill", "author": "ann", "at": datetime(2026, 11, 26, tzinfo=UTC), "for_s": 6.0}
ALL = RefuseOverride(region="tokyo", **SAID)
HALF = RefuseOverride(region="tokyo", model="meta/llama", share=0.5, **SAID)
ELSEWHERE = RefuseOverride(region="tokyo2", **SAID)


def put(override: RefuseOverride, key: str = "", value: bytes = b"") -> Change:
    return Change(ChangeKind.PUT, 2, key or override.key, value or encode(override))


def test_active_refusals_are_shown_with_their_end_by_our_clock_and_malformed_ones_are_counted() -> None:
    now, found, refused = [100.0], list[Event](), list[str]()
    book = RefusalBook(MemoryStore(Random(1)), "tokyo", found.append, refused.append, lambda: now[0])
    all_, half = OrderedRefusal(1.0, 106.0, "a drill", "ann"), OrderedRefusal(0.5, 107.0, "a drill", "ann")
    book.changed(Change(ChangeKind.SNAPSHOT, 1, entries=()))
    book.changed(put(ALL))
    now[0] = 101.0
    book.changed(put(HALF))
    assert found == [RefusalsChanged({"": all_}), RefusalsChanged({"": all_, "meta/llama": half})]
    assert [(one["model"], one["share"], one["left_s"]) for one in book.status()] == [
        ("", 1.0, 5.0), ("meta/llama", 0.5, 6.0),
    ]  # fmt: skip
    book.changed(put(ELSEWHERE, key=HALF.key))  # under the key of another document
    book.changed(put(ALL, value=b"{}"))
    assert refused == ["refuse_misplaced", "refuse_malformed"]
    assert len(found) == 2
    now[0] = 106.5
    assert [one["model"] for one in book.status()] == ["meta/llama"]
    book.changed(Change(ChangeKind.DELETE, 3, ALL.key))
    book.changed(Change(ChangeKind.LOST, why="gone"))
    book.changed(Change(ChangeKind.SNAPSHOT, 4, entries=(KeyValue(HALF.key, encode(HALF), 2),)))
    assert found[2:] == [RefusalsChanged({"meta/llama": half})]
    book.changed(Change(ChangeKind.SNAPSHOT, 5, entries=()))
    assert found[3:] == [RefusalsChanged({})]
