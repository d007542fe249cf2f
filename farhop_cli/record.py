"""`farhop record`: a trace of what a fleet serves, for `farhop sim` and `farhop plan`; no text, no tenant, no key.

Records from every balancer with clients for a time. The output is a `log` trace; nothing is overwritten, an interrupted
recording is kept, and one without a request is not. Times are the fleet's own: of a world that runs faster than real
GPUs, those that real ones would have taken.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from farhop_cli import admin, show
from farhop_cli.access import Access, AdminError
from farhop_cli.exits import NEGATIVE, PARTIAL, fail, warn

if TYPE_CHECKING:
    from farhop_cli.fleet import Balancer
    from farhop_cli.options import FleetOptions

GRACE_S = 10.0  # beyond its time, until a balancer has sent its last line
SALT_BYTES = 16


class _End(msgspec.Struct, frozen=True):
    recorded: int
    lost: int
    unmeasured: int


class _Line(msgspec.Struct, frozen=True):
    end: _End | None = None


@dataclass
class _Received:
    """What was received so far."""

    balancers: int = 0
    requests: int = 0
    lost: int = 0
    unmeasured: int = 0
    errors: list[str] = field(default_factory=list)


def run(out: str, for_s: float, region: str, fleet_options: FleetOptions) -> int:
    """Record; the exit code: 1 if nothing came, 3 if not every balancer was recorded to the end."""
    path = Path(out)
    here = fleet_options.fleet(region)
    balancers = [one for one in here.balancers if one.url and region in ("", one.region)]
    if not balancers:
        fail(f"{here.name}: no balancer's admin port is known; give one by --admin")
    received = _Received()
    try:
        with path.open("xb") as file:
            try:
                asyncio.run(_all(balancers, Trace(file, here.speedup), for_s, received, here.access))
            except KeyboardInterrupt:
                received.errors.append("stopped by hand: the rows received so far are kept")
    except FileExistsError:
        fail(f"--out: {path} is there already, and is not written over; give another name")
    except OSError as error:
        fail(f"--out: {path}: {error.strerror}; give a place that can be written to")
    if not received.requests:  # an empty file would be in the way of the next try
        path.unlink(missing_ok=True)
    return _print(path, received, fleet_options.as_json)


class Trace:
    """Takes the lines, and scales the times of what ran `speedup` times too fast."""

    def __init__(self, file: IO[bytes], speedup: float) -> None:
        self._file, self._speedup = file, speedup
        self._since: float | None = None

    def write(self, line: bytes) -> None:
        """Write a balancer's line."""
        if self._speedup != 1.0:
            row = msgspec.json.decode(line, type=dict[str, Any])
            since = self._since = row["at_s"] if self._since is None else self._since
            row["at_s"] = round(since + (row["at_s"] - since) * self._speedup, 4)
            if "pause_s" in row:
                row["pause_s"] = round(row["pause_s"] * self._speedup, 4)
            line = msgspec.json.encode(row)
        self._file.write(line + b"\n")


async def _all(balancers: list[Balancer], trace: Trace, for_s: float, received: _Received, access: Access) -> None:
    # One salt for all, so that common beginnings are recognised across balancers; it is not kept.
    path = f"/record?for_s={for_s:g}&salt={secrets.token_hex(SALT_BYTES)}"
    async with admin.AdminClient(access) as http:
        await asyncio.gather(*(_one(http, one, path, for_s, trace, received) for one in balancers))


async def _one(
    http: admin.AdminClient, one: Balancer, path: str, for_s: float, trace: Trace, received: _Received
) -> None:
    ended = False
    try:
        async for line in admin.lines(http, one.at, path, for_s + GRACE_S):
            end = msgspec.json.decode(line, type=_Line).end
            if end is None:
                trace.write(line)
                received.requests += 1
            else:
                ended = True
                received.lost += end.lost
                received.unmeasured += end.unmeasured
    except (AdminError, msgspec.MsgspecError) as error:
        received.errors.append(str(error))
        return
    if ended:
        received.balancers += 1
    else:
        received.errors.append(f"{one} ended before its time")


def _print(path: Path, received: _Received, as_json: bool) -> int:
    for error in received.errors:
        warn(error)
    facts = {
        "trace": str(path) if received.requests else None,
        "requests": received.requests,
        "balancers": received.balancers,
        "lost": received.lost,
        "unmeasured": received.unmeasured,
    }
    if as_json:
        show.json(facts)
    else:
        show.line(f"{path}: {received.requests} requests; {received.balancers} balancers to the end", "bold")
        if received.lost or received.unmeasured:
            show.line(f"left out: {received.lost} that came too fast, {received.unmeasured} without usage")
        if received.requests:
            show.line(f"Play it: farhop sim import {shlex.quote(str(path))} --out mine.yaml")
        elif not received.errors:
            show.line("no request was recorded; record while clients ask, and for longer than an answer takes")
    if received.errors:
        return PARTIAL
    return 0 if received.requests else NEGATIVE
