"""What a world does, second by second: samples of real ports, rates between two of them, and how they are told."""

import asyncio
import io

import pytest
from rich.console import Console

from farhop_cli import admin, live
from farhop_cli.live import Lines, Row, Sampler

REGIONS = ("virginia", "frankfurt", "tokyo")


def page(*counts: float) -> str:
    lines = [f'farhop_requests_total{{code="{n}xx"}} {count}' for n, count in enumerate(counts)]
    return "\n".join(["# HELP farhop_requests_total x", *lines, "farhop_requests_created 9", ""])


@pytest.fixture
def busy(world, made):
    for name in REGIONS:
        world.status[name, "global_admin"] = made.global_status(**dict.fromkeys(REGIONS, "up"))
        world.status[name, "regional_admin"] = made.regional_status(f"{name}-0")
        world.pages[name, "global_admin"] = page(10.0, 5.0)
        world.pages[name, "regional_admin"] = page(100.0)
    return world


async def samples(world, *times):
    """Rows at these times; between them 8 requests enter, and 4 are served, in every region."""
    sampler, taken = Sampler(world.file), []
    async with admin.AdminClient() as http:
        for now in times:
            taken.append(await sampler.sample(http, now))
            for name in REGIONS:
                world.pages[name, "global_admin"] = page(12.0, 11.0)
                world.pages[name, "regional_admin"] = page(104.0)
    return taken


async def test_the_live_view_has_a_row_for_each_region_with_rates_between_two_samples(busy):
    first, second = await samples(busy, 100.0, 102.0)
    assert [row.region for row in first] == list(REGIONS)
    assert first[0] == Row("virginia", "up", "why up", 1.5, 5, 2, 9.25, None, None)
    assert (second[2].entered_per_s, second[2].served_per_s) == (4.0, 2.0)


async def test_the_worst_reported_state_is_shown(busy, made):
    busy.status["tokyo", "global_admin"] = made.global_status(virginia="suspect", frankfurt="down", tokyo="draining")
    ((*rows,),) = await samples(busy, 1.0)
    assert [row.state for row in rows] == ["suspect", "down", "draining"]


async def test_a_silent_balancer_is_a_dash_and_its_rate_starts_again(busy):
    busy.silent |= {("virginia", "global_admin"), ("tokyo", "regional_admin")}
    first, second = await samples(busy, 1.0, 2.0)
    assert first[0].state == "up"
    assert second[0].entered_per_s is None
    assert second[0].served_per_s == 4.0
    assert (second[2].under_way, second[2].queued, second[2].served_per_s) == (None, None, None)


async def test_a_balancer_that_restarted_has_no_rate(busy):
    for name in REGIONS:
        busy.pages[name, "global_admin"] = page(1e6)
    _, second = await samples(busy, 1.0, 2.0)
    assert second[0].entered_per_s is None


async def test_state_is_unknown_if_no_balancer_answers(busy):
    busy.silent |= {(name, role) for name in REGIONS for role in ("global_admin", "regional_admin")}
    ((*rows,),) = await samples(busy, 1.0)
    assert rows[1] == Row("frankfurt", why="no global balancer answers")


def test_nonsense_in_metrics_counts_for_nothing():
    assert live.finished("farhop_requests_total{} many\nfarhop_requests_total 2\nfarhop_requests_totally 1 x") == 2.0


def test_only_changes_are_shown_without_a_terminal():
    seen = []
    lines = Lines(seen.append)
    up, down = Row("tokyo", "up", "well"), Row("tokyo", "down", "no recent report")
    for row in (up, up, down, down, up):
        lines.update([row])
    assert seen == ["tokyo: up: well", "tokyo: down: no recent report", "tokyo: up: well"]
    for _ in range(live.PLAIN_EVERY):
        lines.update([Row("tokyo", "up", served_per_s=2.5)])
    assert seen[3:] == ["requests served a second: tokyo 2.5"]


async def test_command_follows_until_stopped(busy, capsys):
    stop = asyncio.Event()
    following = asyncio.create_task(live.follow(busy.file, stop))
    found = ""
    async with asyncio.timeout(60.0):
        while "tokyo: up" not in found:
            found += capsys.readouterr().out
            await asyncio.sleep(0.01)
    stop.set()
    async with asyncio.timeout(60.0):
        await following


def test_a_picture_for_a_terminal_of_80_columns():
    rows = [Row("frankfurt", "draining", "new racks" + "!" * 100, 12345.6, 1, 2, 230.0, 1.0, 1234.5)]
    rows.append(Row("london", "up", "all is well"))
    console = Console(width=80, file=io.StringIO())
    console.print(live.picture(rows))
    found = console.file.getvalue()
    assert max(map(len, found.splitlines())) <= 80
    for word in ("frankfurt", "draining", "12,345.6", "1,234.5", "served/s", " frankfurt: new racks!"):
        assert word in found
    assert "all is well" not in found
