"""Drills of the console: what is offered, what is shown before, one run at a time, which ends with the console."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from farhop.service.admin.console.acts import ActError
from farhop_cli import drill as drills
from farhop_cli.drill_control import DrillControl
from farhop_cli.drill_fleet import DrillOptions, shipped
from farhop_drill.document import Names
from farhop_drill.records import Records
from farhop_lab.memory_store import MemoryStore

REGIONS = frozenset({"virginia", "frankfurt", "tokyo"})
NAME, VALUES = "drain-and-return", {"region": "tokyo", "soak_s": "1"}


def _here(world: Any = None) -> Any:
    names = Names(REGIONS, frozenset({"anywhere"}), frozenset(), frozenset({"etcd"}))
    control = ("", "") if world is None else (world.control, world.control_token)
    return SimpleNamespace(names=names, world=world, control=control)


def _source(out: Path, world: Any = None, store: MemoryStore | None = None) -> DrillControl:
    return DrillControl(_here(world), store or MemoryStore(Random(1)), DrillOptions("", out=out))


async def test_only_what_this_fleet_can_have_is_offered(tmp_path: Path) -> None:
    kinds = {one["drill"]: one["kind"] for one in await _source(tmp_path).offered()}
    assert kinds["drain-and-return"] == "traffic"
    assert "lose-a-region" not in kinds
    world = SimpleNamespace(control="http://127.0.0.1:1", control_token="x")
    offered = {one["drill"]: one for one in await _source(tmp_path, world).offered()}
    assert offered["lose-a-region"]["kind"] == "fault"
    assert offered["drain-and-return"]["parameters"] == {"region": "virginia", "soak_s": "8"}


async def test_impossible_drill_is_refused_before_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def looked(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(drills, "looked", looked)
    store = MemoryStore(Random(1))
    source = _source(tmp_path, store=store)
    for name, values, text in (
        ("none", {}, "no drill 'none' is known"),
        (NAME, {"region": "mars"}, "mars"),
        (NAME, {"regoin": "tokyo"}, "regoin: no such parameter"),
        (NAME, {"region": "["}, "no value as YAML has it"),
        (NAME, {"region": "x" * 300}, "at most 256 characters"),
        ("lose-a-region", {}, "a fault drill needs a world"),
    ):
        with pytest.raises(ActError, match=text.replace("[", r"\[")):
            await source.plan(name, values)
    found = await source.plan(NAME, VALUES)
    assert "1. tokyo is drained: drain tokyo, for 1 s" in found["plan"]
    for revision, values in ((found["revision"] + 1, VALUES), (found["revision"], {"region": "virginia"})):
        with pytest.raises(ActError, match="drill was changed"):
            await source.begin(NAME, values, revision, "x", "ann")
    # The document of this name in etcd has changed since it was shown.
    await Records(store).keep(NAME, shipped()[NAME].text.replace(b"before_s: 5", b"before_s: 6"))
    with pytest.raises(ActError, match="drill was changed"):
        await source.begin(NAME, VALUES, found["revision"], "x", "ann")
    assert source.going() is None


@pytest.fixture
def soaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drill passes its checks, and soaks until it is stopped."""
    stopped, asked_for = asyncio.Event(), []

    def stop(why: str) -> None:
        asked_for.append(why)
        stopped.set()

    async def looked(*_: Any) -> list[Any]:
        return []

    async def carried_out(_drill: Any, _here: Any, _store: Any, asked: DrillOptions, progress: Any, begun: Any) -> Any:
        verdict, phase = SimpleNamespace(value="ABORTED"), SimpleNamespace(value="soaking")
        outcome = SimpleNamespace(run="run-1", canaries=[], findings=[], verdict=verdict, why="")
        progress(f"{asked.why} by {asked.by}, {asked.values}")
        begun(SimpleNamespace(outcome=outcome, stop=stop, live={}, run_=SimpleNamespace(phase=phase)))
        await stopped.wait()
        outcome.why = asked_for[0]
        return outcome

    async def save_outcome(outcome: Any, *_: Any) -> None:
        (tmp_path / outcome.run).mkdir()
        (tmp_path / outcome.run / "report.html").touch()

    for name, made in (("looked", looked), ("carried_out", carried_out), ("save_outcome", save_outcome)):
        monkeypatch.setattr(drills, name, made)


@pytest.mark.usefixtures("soaks")
async def test_one_at_a_time_and_it_ends_with_the_console(tmp_path: Path) -> None:
    source = _source(tmp_path)
    revision = (await source.plan(NAME, VALUES))["revision"]
    assert await source.begin(NAME, VALUES, revision, "a reason", "ann") == "run-1"
    going = source.going()
    assert going is not None
    assert (going["phase"], going["verdict"], going["author"]) == ("soaking", "", "ann")
    assert going["lines"][0][1] == "a reason by ann, {'region': 'tokyo', 'soak_s': '1'}"
    with pytest.raises(ActError, match="still runs"):
        await source.begin(NAME, VALUES, revision, "a reason", "ann")
    began_ms = int(going["began_s"] * 1e3)
    since: list[int] = []

    def past(from_ms: int) -> bytes:
        since.append(from_ms)
        return b"pictures"

    await source.keep_past(past)
    assert (since, await source.past("run-1")) == ([], None)  # it still runs
    await source.close()
    going = source.going()
    assert going is not None
    assert (going["verdict"], going["ended"]) == ("ABORTED", "the console that ran it was ended")
    for _ in range(2):  # once
        await source.keep_past(past)
    assert since == [began_ms]
    assert await source.reported() == {"run-1": True}
    assert await source.past("run-1") == b"pictures"
    for run in ("..", "none", "", "run-1\0"):
        assert await source.past(run) is None
    (tmp_path / "run-1" / "past.json.z").write_bytes(b"no packed file")
    assert await source.past("run-1") is None
    await source.close()


async def test_drill_that_cannot_begin_is_recorded_as_not_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def looked(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(drills, "looked", looked)
    source = _source(tmp_path)  # of a fleet without balancers that can be asked
    revision = (await source.plan(NAME, VALUES))["revision"]
    with pytest.raises(ActError, match="could not begin, and nothing was touched"):
        await source.begin(NAME, VALUES, revision, "x", "ann")
    going = source.going()
    assert going is not None
    assert going["verdict"] == "NOT_RUN"
    assert going["ended"]


async def test_reports_of_this_folder_and_of_none_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "run-1").mkdir(parents=True)
    (out / "run-1" / "report.html").write_bytes(b"<p>whole</p>")
    (out / "half").mkdir()
    (tmp_path / "report.html").write_bytes(b"secret")
    source = _source(out)
    assert await source.reported() == {"run-1": False}
    assert await source.report("run-1") == b"<p>whole</p>"
    for run in ("..", "../out/run-1", "half", "none", "", ".", "a/b", "run-1\0"):
        assert await source.report(run) is None
    assert await _source(tmp_path / "nowhere").reported() == {}
