"""A running world's state, second by second: a table on a terminal, otherwise plain lines of what changes.

Reads the balancers' /status and /metrics; a balancer that does not answer is a dash, never an error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Group
from rich.live import Live
from rich.text import Text

from farhop.balance.health.reading import worst_first
from farhop.loose_json import dicts
from farhop_cli import admin, show
from farhop_cli.access import AdminError
from farhop_cli.show import number

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.world.world_file import RegionFile, WorldFile

EVERY_S = 1.0
PLAIN_EVERY = 10  # samples between two plain lines of traffic
# Worst first: an operator must see the one balancer that reports trouble.
_COLUMNS = (
    "region", "state", ">wait ms", ">in flight", ">queue", ">rtt ms", ">in/s", ">served/s",
)  # fmt: skip


class Row(msgspec.Struct, frozen=True):
    """One region at one time. `state` and `why` are the worst that any global balancer reports; None is unknown.

    `rtt_ms` is measured from the first region that answers; rates are requests finished a second, at the region's
    global balancer (entered) and its regional one (served).
    """

    region: str
    state: str = "unknown"
    why: str = ""
    wait_ms: float | None = None
    under_way: int | None = None
    queued: int | None = None
    rtt_ms: float | None = None
    entered_per_s: float | None = None
    served_per_s: float | None = None


class Sampler:
    """Asks a world's balancers. Rates are differences between two samples; a balancer that restarted has none."""

    def __init__(self, world: WorldFile) -> None:
        self._regions = world.regions
        self._counts: dict[str, tuple[float, float]] = {}  # by admin port: requests finished, and the time of reading

    async def sample(self, http: admin.AdminClient, now: float) -> list[Row]:
        """Every region, in the world's order. `now`: monotonic seconds."""
        asked = await asyncio.gather(*(self._ask(http, one, now) for one in self._regions.values()))
        views = [upper for upper, *_ in asked if upper is not None]
        return [
            self._row(name, views, lower, entered, served)
            for name, (_, lower, entered, served) in zip(self._regions, asked, strict=True)
        ]

    async def _ask(self, http: admin.AdminClient, one: RegionFile, now: float) -> tuple[Any, Any, Any, Any]:
        upper, lower = await asyncio.gather(_status(http, one.global_admin), _status(http, one.regional_admin))
        urls = (one.global_admin, one.regional_admin)
        entered, served = await asyncio.gather(*(self._rate(http, url, now) for url in urls))
        return upper, lower, entered, served

    async def _rate(self, http: admin.AdminClient, url: str, now: float) -> float | None:
        try:
            count = finished(await admin.page(http, url, "/metrics"))
        except AdminError:
            self._counts.pop(url, None)
            return None
        before, at = self._counts.get(url, (count, now))
        self._counts[url] = (count, now)
        return (count - before) / (now - at) if count >= before and now > at else None

    def _row(
        self, name: str, views: list[Any], lower: Any, entered: float | None, served: float | None
    ) -> Row:  # fmt: skip
        seen = [found for view in views if (found := _region(view, name))]
        worst = min(seen, key=lambda one: worst_first(one.get("state")), default={})
        lower = lower or {}
        return Row(
            region=name,
            state=str(worst.get("state", "unknown")),
            why=str(worst.get("why", "no global balancer answers")),
            wait_ms=least_wait_ms(seen[0]) if seen else None,
            under_way=lower.get("under_way"),
            queued=lower.get("queued_requests"),
            rtt_ms=seen[0].get("rtt_ms") if seen else None,
            entered_per_s=entered,
            served_per_s=served,
        )


def finished(page: str) -> float:
    """Requests finished, by a balancer's metrics, whatever their outcome."""
    total = 0.0
    for line in page.splitlines():
        if line.startswith("farhop_requests_total"):
            try:
                total += float(line.rpartition(" ")[2])
            except ValueError:
                continue  # not a sample; the next line may be one
    return total


def least_wait_ms(region: dict[str, Any]) -> float | None:
    """The least wait of any instance of a region for any model."""
    offers = [offer for one in dicts(region.get("instances")) for offer in (one.get("models") or {}).values()]
    return min((o["wait_ms"] for o in offers if "wait_ms" in o), default=None)


def _region(view: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((one for one in dicts(view.get("regions")) if one.get("region") == name), None)


async def _status(http: admin.AdminClient, url: str) -> dict[str, Any] | None:
    try:
        return await admin.get(http, url, "/status")
    except AdminError:
        return None


# -- printing


def picture(rows: list[Row]) -> Group:
    """The rows, for a terminal of 80 columns or more; below them why a region is not simply up."""
    reasons = (f" {row.region}: {row.why}" for row in rows if row.state != "up")
    lines = (Text(show.printable(reason), no_wrap=True, overflow="ellipsis") for reason in reasons)
    return Group(show.built(_COLUMNS, [_cells(row) for row in rows]), *lines)


def _cells(row: Row) -> list[str]:
    return [
        row.region,
        row.state,
        number(row.wait_ms),
        number(row.under_way),
        number(row.queued),
        number(row.rtt_ms),
        number(row.entered_per_s),
        number(row.served_per_s),
    ]


class Lines:
    """The same without a terminal: a line when a region's state changes, and from time to time one of the traffic."""

    def __init__(self, show_line: Callable[[str], None]) -> None:
        self._show_line = show_line
        self._states: dict[str, str] = {}
        self._samples = 0

    def update(self, rows: list[Row]) -> None:
        """Print what is new."""
        for row in rows:
            if self._states.get(row.region) != row.state:
                self._states[row.region] = row.state
                self._show_line(f"{row.region}: {row.state}: {row.why}")
        self._samples += 1
        if self._samples % PLAIN_EVERY == 0 and any(row.served_per_s for row in rows):
            served = ", ".join(f"{row.region} {number(row.served_per_s)}" for row in rows)
            self._show_line(f"requests served a second: {served}")


async def follow(world: WorldFile, stop: asyncio.Event) -> None:
    """Sample and print every second, until stopped."""
    sampler, console = Sampler(world), show.console()
    async with admin.AdminClient() as http:
        if not console.is_terminal:
            await _each(sampler, http, stop, Lines(show.line).update)
            return
        with Live(console=console, auto_refresh=False, transient=False) as live:
            await _each(sampler, http, stop, lambda rows: live.update(picture(rows), refresh=True))


async def _each(
    sampler: Sampler, http: admin.AdminClient, stop: asyncio.Event, on_rows: Callable[[list[Row]], None]
) -> None:
    clock = asyncio.get_running_loop().time
    while not stop.is_set():
        on_rows(await sampler.sample(http, clock()))
        try:
            async with asyncio.timeout(EVERY_S):
                await stop.wait()
        except TimeoutError:
            continue
