"""`farhop bench worlds`: Farhop beside the best rival in worlds drawn at random; the worst of them by number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail, warn
from farhop_cli.sim import progress, shown
from farhop_lab.studies import pool, routers
from farhop_lab.studies import random_worlds as drawn
from farhop_lab.workloads.load import TraceError
from farhop_lab.workloads.program import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from farhop_lab.studies.cell import Result

FINALISTS = 4
"""Of all rivals, those that are run on more than the first screening seed."""
WORST = 20


def run(
    numbers: range,
    seed: int,
    seeds: int,
    window_s: float,
    traces: Path | None,
    workers: int | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Run and judge them; the exit code."""
    verdicts: list[drawn.Verdict] = []
    names = drawn.rivals()
    half = seeds // 2
    cells = len(names) + (half - 1) * FINALISTS + 2 * (seeds - half)
    try:
        folder = pool.opened(out) if out is not None else None
        found = drawn.traces(traces) if traces is not None else []
        with progress("worlds", len(numbers)) as moved:
            for done, number in enumerate(numbers):
                world = drawn.drawn(number, seed, window_s, found)

                def ran(jobs: Sequence[pool.Job], before: int, done: int = done) -> list[Result]:
                    on_share: Callable[[float], None] = lambda share: moved(done + (before + share) / cells)  # noqa: E731
                    return pool.run(jobs, out=folder, workers=workers, moved=on_share)

                first = ran(drawn.jobs(world, names, [1]), 0)
                finalists = drawn.best(first, names, FINALISTS)
                more = ran(drawn.jobs(world, finalists, range(2, half + 1)), len(names)) if half > 1 else []
                seen = [one for one in [*first, *more] if one.key.router in finalists]
                rival = drawn.chosen(seen, finalists)
                judging = drawn.jobs(world, [routers.FARHOP, rival], range(half + 1, seeds + 1))
                verdicts.append(drawn.judged(world, ran(judging, cells - len(judging)), rival))
    except (pool.CellError, TraceError, WorkloadError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        warn(f"interrupted; {'what is finished is kept' if out else 'nothing is kept without --out'}")
        if not verdicts:
            raise
    return printed(verdicts, as_json)


def printed(verdicts: Sequence[drawn.Verdict], as_json: bool) -> int:
    """Print them; the exit code."""
    found = drawn.summary(verdicts)
    if as_json:
        show.json({"bench": "worlds", "summary": found, "worlds": [msgspec.to_builtins(one) for one in verdicts]})
    else:
        order = sorted(verdicts, key=lambda one: one.good.mean if one.good is not None else 1.0)
        lines = [
            [
                str(one.number), one.kind, f"{one.load:g}", one.rival, shown(one.good, 3), shown(one.ttft_p90, 3),
                f"{100 * one.of_bound:.0f}", f"{100 * one.refused:.1f}",
                " ".join(word for word, is_so in (("lost", one.lost), ("slower", one.slower)) if is_so), one.about,
            ]
            for one in order[:WORST]
        ]  # fmt: skip
        columns = [
            ">world", "kind", ">load", "rival", ">good ratio", ">TTFT p90 ratio", ">% of bound", ">failed %", "",
            "what",
        ]  # fmt: skip
        show.table("The worst worlds: Farhop over the rival of each", columns, lines)
        for name, value in found.items():
            show.line(f"{name}: {value}")
    share = found["without_loss"]
    return NEGATIVE if isinstance(share, float) and share < 0.95 else 0
