"""`farhop top`: the console in a terminal, also over SSH: regions, replicas, decisions, law, keys to drain and undrain.

Shows the same snapshots as the page, and acts as the page does: the dry run first, then the name as confirmation. Names
from balancers are text, never markup or terminal commands. Needs textual (`pip install farhop[top]`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Label, Static, TabbedContent, TabPane

from farhop.service.admin.console import snapshot as snapshots
from farhop.service.admin.console.acts import Act, ActError
from farhop.service.process.clock import wall
from farhop_cli import admin, console, setting, show
from farhop_cli.exits import fail
from farhop_cli.show import number

if TYPE_CHECKING:
    from farhop.service.admin.console.server import Source
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions

EVERY_S = 1.0
_SIGNS = {"up": "●", "suspect": "◐", "draining": "▽", "down": "✕", "cut off": "✕", "late": "◐", "fresh": "●"}
_COLOURS = {"up": "green", "fresh": "green", "suspect": "yellow", "late": "yellow", "draining": "cyan"}
_TABLES = {
    "regions": ("region", "state", "used", "busy", "queue", "wait ms", "in/s", "last seen", "why"),
    "replicas": ("region", "replica", "state", "busy", "slots", "running", "waiting", "KV", "share", "why"),
    "decisions": ("at", "decision", "tenant", "from", "to", "outcome", "first token ms"),
    "law": ("balancer", "last seen", "epoch", "source", "by", "why"),
}


def text(value: object, style: str = "") -> Text:
    """A name as plain text."""
    return Text(show.printable(str(value)), style=style)


def sign(state: object, more: str = "") -> Text:
    """A state: its sign, its text, its colour."""
    name = str(state)
    return text(f"{_SIGNS.get(name, '?')} {name}{more}", _COLOURS.get(name, "red"))


def age(picture: dict[str, Any], received_ms: object) -> str:
    """The age of a snapshot."""
    if not isinstance(received_ms, int):
        return "never"
    seconds = max(0, round((picture["at"] - received_ms) / 1e3))
    return "now" if seconds < 2 else f"{seconds} s ago"


def rows(picture: dict[str, Any]) -> dict[str, dict[str, list[Text]]]:
    """The rows of each table, by key."""
    balancers = picture["balancers"]
    into: dict[str, float] = {}
    for key, flows in picture["arcs"].items():
        to = key.partition(">")[2]
        into[to] = into.get(to, 0.0) + sum(n for how, n in flows.items() if how != "spilled")
    regions = {
        name: [
            text(name), sign(one["state"], " (silent)" if one.get("cut_off") else ""),
            text(_percent(one.get("used"))),
            text(f"{one['busy']}/{one['slots']}" if "busy" in one else "-"), text(number(one.get("queued"))),
            text(number(one.get("wait_ms"))), text(number(into.get(name))), text(age(picture, one.get("seen_at"))),
            text(one.get("why", "")),
        ]
        for name, one in picture["regions"].items()
    }  # fmt: skip
    replicas = {
        f"{key} {name}": [
            text(balancers[key].get("region", "")), text(name), sign(one.get("state", "unknown")),
            text(number(one.get("in_flight"))), text(number(one.get("slots"))), text(number(one.get("running"))),
            text(number(one.get("waiting"))), text(_percent(one.get("kv"))), text(_percent(one.get("share", 1.0))),
            text("; ".join(str(one[field]) for field in ("why", "slow") if one.get(field))),
        ]
        for key, those in picture["replicas"].items()
        for name, one in those.items()
    }  # fmt: skip
    decisions = {
        key: [
            text(_clock(one.get("at"))), text(key), text(one.get("tenant", "-")), text(one.get("from", "-")),
            text(one.get("to", "-")), text(one.get("outcome", "-"), "" if one.get("outcome") == "served" else "red"),
            text(number(one.get("ttft_ms"))),
        ]
        for key, one in picture["decisions"].items()
    }  # fmt: skip
    law = {
        name: [
            text(name), sign(one["fresh"], f", {age(picture, one.get('seen_at'))}"), text(one.get("epoch", "-")),
            *(text(one.get("law", {}).get(field, "-")) for field in ("source", "author", "why")),
        ]
        for name, one in balancers.items()
    }  # fmt: skip
    return {"regions": regions, "replicas": replicas, "decisions": decisions, "law": law}


def _percent(share: object) -> str:
    return f"{share:.0%}" if isinstance(share, int | float) else "-"


def _clock(ms: object) -> str:
    return datetime.fromtimestamp(ms / 1e3, UTC).astimezone().strftime("%H:%M:%S") if isinstance(ms, int) else "-"


class ActDialog(ModalScreen[None]):
    """An act: the reason; then the dry run; then the target's name. Escape cancels."""

    BINDINGS: ClassVar[list[Any]] = [Binding("escape", "dismiss", "Leave it")]

    def __init__(self, source: Source, author: str, do: Literal["drain", "undrain"], region: str) -> None:
        super().__init__()
        self._source, self._author, self._do, self._region = source, author, do, region
        self._why, self._revision = "", -1

    def compose(self) -> ComposeResult:
        """See textual."""
        with Vertical():
            yield Label(text(f"{self._do} {self._region}, as {self._author}"))
            yield Static("", id="result")
            yield Input(placeholder="why", id="answer")

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """The reason or the name was entered."""
        acts, field = self._source.acts(), self.query_one("#answer", Input)
        result = self.query_one("#result", Static)
        if acts is None:
            result.update(text("nothing can be done from here", "red"))
            return
        shown = bool(self._why)
        why = self._why or event.value
        act = Act(
            self._do,
            self._region,
            why,
            dry_run=not shown,
            revision=self._revision,
            confirm=event.value if shown else "",
        )
        try:
            answer = await acts.perform(act, self._author)
        except ActError as error:
            result.update(text(error, "red"))
            return
        if shown:
            self.dismiss()
            return
        self._why, self._revision = why, answer["revision"]
        stands = answer["stands"]
        was = f"now: {stands.get('author')}: {stands.get('why')}" if stands else "nothing is set now"
        result.update(text("\n".join(["dry run, nothing is written yet", was, *answer["effects"]])))
        field.value, field.placeholder = "", f"type {self._region} to confirm"


class Top(App[None]):
    """The tables, redrawn every second."""

    TITLE = "farhop top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #wrong { height: auto; max-height: 8; padding: 0 1; }
    ActDialog { align: center middle; } ActDialog > Vertical { width: 76; height: auto; max-height: 24; border: round $primary; padding: 1 2; background: $surface; }
    """  # noqa: E501
    BINDINGS: ClassVar[list[Any]] = [
        Binding("1", "show('regions')", "Regions"), Binding("2", "show('replicas')", "Replicas"),
        Binding("3", "show('decisions')", "Decisions"), Binding("4", "show('law')", "Law"),
        Binding("d", "ask('drain')", "Drain"), Binding("u", "ask('undrain')", "Undrain"),
        Binding("p", "pause", "Pause"), Binding("q", "quit", "Quit"),
    ]  # fmt: skip

    def __init__(self, source: Source, author: str) -> None:
        super().__init__()
        self._source, self._author, self._paused = source, author, False
        self.picture: dict[str, Any] = {}

    def compose(self) -> ComposeResult:
        """See textual."""
        yield Static("", id="wrong")
        with TabbedContent(initial="regions"):
            for name in _TABLES:
                with TabPane(name.capitalize(), id=name):
                    yield DataTable(id=f"table-{name}", cursor_type="row", zebra_stripes=True)
        yield Footer()

    async def on_mount(self) -> None:
        """Start following the fleet."""
        for name, columns in _TABLES.items():
            table: DataTable[Text] = self.query_one(f"#table-{name}", DataTable)
            for column in columns:
                table.add_column(column, key=column)
        await self.look()
        self.set_interval(EVERY_S, self.look)

    async def look(self) -> None:
        """Show the present state."""
        if self._paused:
            return
        taken = await self._source.snapshots()
        steps = snapshots.picture(taken, self._source.law(), int(wall().timestamp() * 1e3))
        self.picture = picture = snapshots.whole(steps)
        wrong = [f"{_SIGNS.get(one['state'], '?')} {one['subject']}: {one['what']}" for one in picture["wrong"]]
        fine = f"● nothing is wrong: {len(picture['regions'])} regions, {len(taken)} balancers seen"
        with contextlib.suppress(LookupError, NoMatches):  # it ends: its screen is gone, or has nothing left
            self.screen_stack[0].query_one("#wrong", Static).update(text("\n".join(wrong) or fine))
            for name, wanted in rows(picture).items():
                self._fill(self.screen_stack[0].query_one(f"#table-{name}", DataTable), name, wanted)

    def _fill(self, table: DataTable[Text], name: str, wanted: dict[str, list[Text]]) -> None:
        """Rows that stay are updated in place, so that the cursor stays, too."""
        have = [str(key.value) for key in table.rows]
        if have == list(wanted):
            for key, cells in wanted.items():
                for column, cell in zip(_TABLES[name], cells, strict=True):
                    if table.get_cell(key, column) != cell:
                        table.update_cell(key, column, cell, update_width=True)
            return
        at = table.cursor_row
        table.clear()
        for key, cells in wanted.items():
            table.add_row(*cells, key=key)
        table.move_cursor(row=min(at, max(0, len(wanted) - 1)))

    def action_show(self, name: str) -> None:
        """Show another table."""
        self.query_one(TabbedContent).active = name
        self.query_one(f"#table-{name}", DataTable).focus()

    def action_pause(self) -> None:
        """Pause, or continue."""
        self._paused = not self._paused
        self.sub_title = "paused" if self._paused else ""

    def action_ask(self, do: Literal["drain", "undrain"]) -> None:
        """Drain the region under the cursor, or end its drain."""
        names = list(self.picture.get("regions", {}))
        row = self.query_one("#table-regions", DataTable).cursor_row
        if 0 <= row < len(names):
            self.push_screen(ActDialog(self._source, self._author, do, names[row]))


def run(by: str | None, fleet_options: FleetOptions, *, read_only: bool) -> int:
    """Show it until `q`; the exit code."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("top: needs a terminal; `farhop status --watch` goes through pipes")
    here = fleet_options.fleet()
    if not here.balancers:
        fail(f"{here.name}: no balancer is known; give its admin port by --admin")
    asyncio.run(_show(here, by or setting.author_here(), read_only=read_only))
    return 0


async def _show(here: Fleet, author: str, *, read_only: bool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(admin.AdminClient(here.access))
        store = None if read_only else await console.store_of_fleet(here, stack)
        source = console.FleetSource(here, http, store, author)
        stack.push_async_callback(source.close)
        await Top(source, author).run_async()
