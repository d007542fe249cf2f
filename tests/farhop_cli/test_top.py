"""`farhop top` by its pilot: tables of what is heard, names as text, a drain shown first and confirmed by name."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from farhop.identity.operators import Operator
from farhop.service.admin.console.acts import Acts
from farhop.service.admin.console.snapshot import LastSnapshot
from farhop.service.process.clock import wall
from farhop.store.contract import override_key
from farhop.store.documents.overrides import decode_drain
from farhop_lab.memory_store import MemoryStore
from topology.law import Law
from topology.load import load, shipped

if TYPE_CHECKING:
    from farhop_cli.top import Top

LAW = Law(load(shipped("three-regions")))
HOSTILE = "[red]x[/] \x1b[2J"


class Source:
    """A fleet that says the same until a test changes it."""

    name = "a source"

    def __init__(self) -> None:
        self.store, self.state = MemoryStore(Random(1)), "up"

    async def snapshots(self) -> Mapping[str, LastSnapshot]:
        now = int(wall().timestamp() * 1e3)
        offer = {"models": {"m": {"replicas_ready": 1}}}
        self.status = {"regions": [{"region": n, "state": "up", "instances": [offer]} for n in LAW.topology.regions]}
        regions = {name: {"state": self.state, "why": "as told"} for name in LAW.topology.regions}
        decisions = {"d1": {"at": now, "tenant": HOSTILE, "to": "tokyo", "outcome": "served", "ttft_ms": 9}}
        upper = {"tier": "global", "region": "tokyo", "epoch": 1, "regions": regions, "decisions": decisions}
        rows = {"r1": {"state": "up", "in_flight": 3, "slots": 4, "share": 0.5, "why": "proven"}}
        lower = {"tier": "regional", "region": "tokyo", "epoch": 1, "replicas": rows}
        return {"global tokyo": LastSnapshot(upper, now), "regional tokyo": LastSnapshot(lower, now)}

    def law(self) -> Law:
        return LAW

    def acts(self) -> Acts:
        async def statuses() -> tuple[dict[str, Any], ...]:
            return (self.status,)

        return Acts(self.store, self.law, statuses, wall)

    async def decision(self, _decision_id: str) -> dict[str, dict[str, Any]]:
        return {}

    async def explain(self, _question: bytes) -> dict[str, Any]:
        return {}

    def author(self, operator: Operator) -> str:
        return operator.name


def _top(source: Source) -> Top:
    """With Textual, which is imported where a test shows something: every worker reads this file."""
    from farhop_cli.top import Top

    return Top(source, "ann")


def _cells(app: Top, name: str) -> list[list[str]]:
    table: Any = app.query_one(f"#table-{name}")
    return [[str(cell) for cell in table.get_row(key)] for key in table.rows]


async def test_top_shows_reports_and_drains_by_name() -> None:
    source = Source()
    app = _top(source)
    async with app.run_test(size=(140, 40)) as pilot:
        regions = {row[0]: row for row in _cells(app, "regions")}
        assert regions["tokyo"][1:4] == ["● up", "75%", "3/4"]
        assert regions["virginia"][3] == "-"
        assert _cells(app, "replicas")[0][:5] == ["tokyo", "r1", "● up", "3", "4"]
        (decision,) = _cells(app, "decisions")
        assert decision[2].startswith("[red]x[/]")  # no markup
        assert "\x1b" not in decision[2]
        source.state = "down"
        await app.look()
        assert "✕ tokyo: down: as told" in str(app.query_one("#wrong").content)
        await pilot.press("p")
        source.state = "up"
        await app.look()
        assert "down" in _cells(app, "regions")[0][1]  # paused
        await pilot.press("p", "4")
        await app.look()
        assert _cells(app, "law")[0][2] == "1"

        await pilot.press("1", "down", "down")
        await _drain(app, pilot, source)
        (name,) = [key for key in LAW.topology.regions if await source.store.get(override_key(key)) is not None]
        assert name == "virginia"  # the third, and not the last of any balancer


async def test_poll_during_shutdown_causes_no_error() -> None:
    app = _top(Source())
    async with app.run_test():
        await app.query_one("#wrong").remove()
        await app.look()


async def _drain(app: Top, pilot: Any, source: Source) -> None:
    """The region under the cursor: why, the dry run, a wrong name, the right one."""
    from farhop_cli.top import ActDialog

    await pilot.press("d")
    ask = app.screen
    assert isinstance(ask, ActDialog)

    async def answer(typed: str) -> str:
        ask.query_one("#answer").value = typed
        await pilot.press("enter")
        await pilot.pause()
        return str(ask.query_one("#result").content) if app.screen is ask else ""

    assert "dry run" in await answer("patching")
    assert await source.store.get(override_key("virginia")) is None
    assert "confirm: repeat the name" in await answer("elsewhere")
    assert await answer("virginia") == ""
    entry = await source.store.get(override_key("virginia"))
    assert entry is not None
    drain = decode_drain(entry.value)
    assert (drain.author, drain.why) == ("ann", "patching")


def test_top_without_a_terminal_names_an_alternative(cli) -> None:  # type: ignore[no-untyped-def]
    """Into a pipe it wrote a terminal's commands, and went on when nobody read them."""
    assert "`farhop status --watch`" in cli.failed(cli.run("top", "--admin", "http://127.0.0.1:1"), 2)
