"""Scheduled drills: missed runs are reported and kept, unreadable ones are not run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from farhop_cli import drill_schedule
from farhop_cli.drill_fleet import DrillOptions
from farhop_cli.drill_schedule import MISSED, _run_due
from farhop_cli.exits import fail
from farhop_drill.document import Names
from farhop_drill.machine import DrillVerdict
from farhop_drill.records import Records
from farhop_drill.windows import Planned
from farhop_lab.memory_store import MemoryStore

HERE: Any = SimpleNamespace(names=Names(frozenset({"virginia"}), frozenset({"acme"})))
WHERE: Any = SimpleNamespace(as_json=True)
DAY_S = 86_400.0


def planned(drill: str, window: str, **more: Any) -> Planned:
    fields = {"every_s": DAY_S, "since_s": time.time() - 2 * DAY_S, "values": {}, "author": "ann", **more}
    return Planned(drill=drill, windows=(window,), **fields)


def closed() -> str:
    """A window that is not open now, nor within the next hours."""
    hour = (time.gmtime().tm_hour + 12) % 24
    return f"mon-sun {hour:02d}:00-{hour:02d}:30"


async def test_a_run_that_was_missed_is_kept_as_not_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = MemoryStore(Random(1))
    await store.open()
    records = Records(store)
    await records.plan(planned("law-change", closed()))
    for _ in range(2):
        await _run_due(store, HERE, DrillOptions("", out=tmp_path), WHERE, asyncio.Event())
    past = await records.history()
    assert past
    assert {(one.drill, one.verdict, one.why, one.author) for one in past} == {
        ("law-change", DrillVerdict.NOT_RUN, MISSED, "ann")
    }
    assert capsys.readouterr().err.count(MISSED) == len(past)
    await store.close()


async def test_unreadable_schedule_is_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drill_schedule, "AGREED_S", 0.0)
    store = MemoryStore(Random(1))
    await store.open()
    records = Records(store)
    await records.plan(planned("law-change", "mon-sun 00:00-24:00", values={"region": "mars"}, since_s=time.time()))
    await _run_due(store, HERE, DrillOptions("", out=tmp_path), WHERE, asyncio.Event())
    (one,) = await records.history()
    assert (one.verdict, one.drill) == (DrillVerdict.NOT_RUN, "law-change")
    assert "cannot be read any more" in one.why
    assert "mars" in capsys.readouterr().err
    await store.close()


async def test_a_run_that_cannot_begin_leaves_the_watcher_and_the_other_drills_their_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drill_schedule, "AGREED_S", 0.0)
    monkeypatch.setattr(drill_schedule, "read_document", lambda found, *_: found)
    monkeypatch.setattr(drill_schedule, "find", lambda asked, _: asked.name)
    begun = []

    async def carried_out(name: str, *_: object) -> None:
        begun.append(name)
        fail("nobody answers")

    monkeypatch.setattr(drill_schedule.drill, "carried_out", carried_out)
    store = MemoryStore(Random(1))
    await store.open()
    for name in ("drain-and-return", "law-change"):
        await Records(store).plan(planned(name, "mon-sun 00:00-24:00", since_s=time.time()))
    for _ in range(2):
        await _run_due(store, HERE, DrillOptions("", out=tmp_path), WHERE, asyncio.Event())
    assert begun == ["drain-and-return", "law-change"] * 2
    await store.close()
