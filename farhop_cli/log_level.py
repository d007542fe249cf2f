"""`farhop log-level`: set how much balancers log, until their next start. Changes nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from farhop_cli import admin, fleet, show
from farhop_cli.access import AdminError
from farhop_cli.exits import PARTIAL, fail, warn
from farhop_cli.fleet import StatusReply
from topology.problems import quoted

if TYPE_CHECKING:
    from farhop_cli.fleet import Balancer, Fleet
    from farhop_cli.options import FleetOptions

LEVELS = ("debug", "info", "warning", "error", "critical")  # farhop.telemetry.logs is heavy


def run(level: str, region: str, fleet_options: FleetOptions) -> int:
    """Set it, or report where it would be set; the exit code."""
    if level not in LEVELS:
        fail(f"LEVEL: {quoted(level)} is unknown; give one of {', '.join(LEVELS)}")
    here = fleet_options.fleet(region)
    asked = [one for one in here.balancers if region in ("", one.region)]
    done = asyncio.run(here.seen(region=region) if fleet_options.dry_run else _set(here, asked, level))
    fleet.unreachable(here, done)
    named = [str(one.balancer) for one in done if one.status is not None]
    if fleet_options.as_json:
        unreachable = [one.error for one in done if one.error]
        show.json({"level": level, "set": named, "dry_run": fleet_options.dry_run, "unreachable": unreachable})
    else:
        show.line(f"{show.DRY if fleet_options.dry_run else ''}{', '.join(named)}: {level} until the next start")
    partial = fleet.partial(here, done)
    if partial:
        warn(partial)
        return PARTIAL
    return 0


async def _set(here: Fleet, asked: list[Balancer], level: str) -> list[StatusReply]:
    async with admin.AdminClient(here.access) as http:

        async def one(balancer: Balancer) -> StatusReply:
            try:
                return StatusReply(balancer, await admin.act(http, balancer.at, "/log-level", {"level": level}))
            except AdminError as error:
                return StatusReply(balancer, None, str(error))

        return list(await asyncio.gather(*map(one, asked)))
