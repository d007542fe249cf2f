"""`farhop bench chaos`: random faults over both tiers, in virtual time or on real processes, and their lasting effects.

Exit code 1 if any effect lasts. Never decides what is right: see `farhop_lab.chaos.properties`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_cli import show
from farhop_cli.exits import fail
from farhop_cli.sim import progress
from farhop_lab.chaos import hunt
from farhop_lab.chaos import live as lives
from farhop_lab.chaos import schedule as schedules
from farhop_lab.chaos.schedule import Schedule, ScheduleError
from farhop_lab.world.world import WorldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop_lab.chaos.hunt import HuntResult
    from farhop_lab.chaos.properties import Finding
    from farhop_lab.chaos.trial import Outcome

SHOWN_MAX = 20


def hunted(seeds: int, first: int, workers: int | None, out: Path | None, as_json: bool) -> int:
    """Run many schedules in virtual time; the exit code."""
    played = range(first, first + seeds)
    with progress(f"{len(played)} schedules", len(played)) as moved:
        return _print(hunt.hunt(played, workers=workers, done=lambda count: moved(float(count))), out, as_json)


def replayed(path: Path, out: Path | None, as_json: bool) -> int:
    """Run one schedule again; the exit code."""
    return _print(hunt.replayed(_read(path)), out, as_json)


def _read(path: Path) -> Schedule:
    try:
        return schedules.decode(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        fail(f"--replay: {path} cannot be read: {why}; give a schedule, such as --out keeps")
    except ScheduleError as error:
        fail(f"--replay: {error}")


def _print(hunted: HuntResult, out: Path | None, as_json: bool) -> int:
    if out is not None:
        try:
            hunt.save(hunted.shortest, out)
        except OSError as error:
            fail(f"--out: {out}: {error.strerror or error}; give a folder that can be written to")
    if as_json:
        show.json({"bench": "chaos", **msgspec.to_builtins(hunted)})
        return 1 if hunted.failed else 0
    if hunted.failed:
        _table("what does not hold", hunted)
    for outcome in hunted.shortest or hunted.failures[:SHOWN_MAX]:
        _schedule(outcome)
    per_seed_s = hunted.cpu_s / max(1, hunted.seeds)
    show.line(
        f"{hunted.failed} of {hunted.seeds:,} schedules leave something behind "
        f"({hunted.answers:,} answers, {per_seed_s:.2f} CPU-s each)",
        "bold",
    )
    return 1 if hunted.failed else 0


def _table(title: str, hunted: HuntResult) -> None:
    show.table(title, ("property", ">schedules"), [[name, str(n)] for name, n in hunted.by_property.items()])
    rows = [[what, f"{bad} of {of_all}"] for what, (of_all, bad) in hunted.by_kind.items() if bad]
    show.table("faults in schedules that fail", ("fault", ">failed"), rows)


def _schedule(outcome: Outcome) -> None:
    show.line("")
    show.line(schedules.encode(outcome.schedule).rstrip())
    _findings(outcome.findings)


def _findings(findings: Sequence[Finding]) -> None:
    for finding in findings[:SHOWN_MAX]:
        show.line(f"# {finding.property}: {finding.subject}: {finding.what}")
    if len(findings) > SHOWN_MAX:
        show.line(f"# and {len(findings) - SHOWN_MAX} more")


def live(seed: int, for_s: float, as_json: bool) -> int:
    """Inject faults into a world of real processes for a time; the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="farhop-chaos-"))
    try:
        with show.progress("live chaos") as progress:
            result = asyncio.run(lives.run(folder, seed, for_s, progress))
    except (WorldError, lives.LiveError) as error:
        fail(f"chaos: {error}; logs are in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        show.json({"bench": "chaos --live", **_builtins(result)})
    else:
        show.table(
            "live: answers of each replica after the quiet",
            ("replica", ">answers", ">fair"),
            [[name, str(count), show.number(fair)] for name, (count, fair) in result.shares.items()],
        )
        _findings(result.findings)
        show.line(
            f"{result.faults} faults on {result.answers:,} answers ({result.failed:,} failed while things were "
            f"broken); {len(result.findings)} findings after the quiet",
            "bold",
        )
    return 1 if result.findings else 0


def _builtins(result: lives.LiveResult) -> dict[str, Any]:
    return dict(msgspec.to_builtins(result))
