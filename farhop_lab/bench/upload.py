"""How many round trips a large prompt takes over a long link, by its connection's past and by TCP's settings.

The shipped pool at one end of a long emulated link, an engine that answers at once at the other. One round trip is the
minimum: the body there, the answer back. For comparison: what the cost model charges (balance.estimate.cost.upload_ms).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from farhop.balance.estimate import cost
from farhop_lab.bench import upload_client, upstream
from farhop_lab.bench.harness import BenchError, module, output
from farhop_lab.bench.upload_client import BESIDE, COOL, KEPT, NEW, RESTED
from farhop_lab.wan.long_wire import FAR, HOSTS, NEAR, LongWire, WireError, lacking
from farhop_lab.world.child import Child, ChildError

RTT_MS, BODY_BYTES, IDLE_S = 150.0, 200_000, 3.0
KINDS = (NEW, COOL, KEPT, BESIDE, RESTED)
WARM_TRIPS_MAX = 1.3
_PORT = 9000  # in a namespace of its own
_LIMIT_S = 120.0
_CONGESTION, _SLOW_START = "net.ipv4.tcp_congestion_control", "net.ipv4.tcp_slow_start_after_idle"


class Row(msgspec.Struct, frozen=True):
    """A setting of TCP, and round trips by kind of connection, medians."""

    congestion: str
    slow_start_after_idle: bool
    trips: dict[str, float]


def missing() -> str:
    """Why nothing can be measured here; "" if it can."""
    return lacking()


def controls() -> tuple[str, ...]:
    """The congestion control algorithms that a namespace may use here; reno if cubic is not allowed: they begin
    alike.
    """
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    return tuple(one for one in ("cubic" if "cubic" in allowed else "reno", "bbr") if one in allowed)


def charged_trips(body_bytes: int) -> float:
    """What the cost model charges for it."""
    return 1.0 + cost.upload_ms(body_bytes, 1.0)


def is_warm(row: Row) -> bool:
    """Whether a warm connection is as good as one round trip. BBR paces its sending by its own estimate: the rule does
    not apply to it.
    """
    return row.congestion == "bbr" or max(row.trips[KEPT], row.trips[BESIDE]) <= WARM_TRIPS_MAX


async def measure(
    repeats: int,
    body_bytes: int = BODY_BYTES,
    rtt_ms: float = RTT_MS,
    idle_s: float = IDLE_S,
    congestions: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> list[Row]:
    """A row for each setting. Raises BenchError."""
    rows = []
    for congestion in controls() if congestions is None else congestions:
        for slow_start in (True, False):
            progress(f"{congestion}, tcp_slow_start_after_idle={slow_start:d}")
            job = upload_client.Job(HOSTS[FAR], _PORT, body_bytes, repeats, idle_s)
            ms = await _measured(job, rtt_ms, {_CONGESTION: congestion, _SLOW_START: f"{slow_start:d}"})
            rows.append(Row(congestion, slow_start, {kind: median(ms[kind]) / rtt_ms for kind in KINDS}))
    return rows


async def _measured(job: upload_client.Job, rtt_ms: float, settings: dict[str, str]) -> dict[str, list[float]]:
    # Otherwise a new connection would inherit what the kernel remembers of earlier ones to the same host.
    settings = {**settings, "net.ipv4.tcp_no_metrics_save": "1"}
    with tempfile.TemporaryDirectory(prefix="farhop-upload-") as folder:
        try:
            async with LongWire(rtt_ms, settings) as wire:
                program, arguments = module("upstream", upstream.Job(job.port, [job.host]))
                log = Path(folder) / "upstream.log"
                engine = Child("the benchmark's upstream", arguments, log, {}, wire.command(FAR, program))
                try:
                    await engine.start()
                    program, arguments = module("upload_client", job)
                    printed = await output([*wire.command(NEAR, program), *arguments], _LIMIT_S)
                finally:
                    await engine.stop(2.0)
        except (WireError, ChildError) as error:
            raise BenchError(str(error)) from None
    return msgspec.json.decode(printed, type=dict[str, list[float]])
