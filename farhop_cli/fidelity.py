"""`farhop bench fidelity`: a small scenario live and simulated, compared."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.sim import found, shortened
from farhop_lab.studies import cell, fidelity, pool, routers

SEED = 1
QUICK_S = 60.0


def run(name: str, speedup: float, quick: bool, as_json: bool) -> int:
    """Run both and print; the exit code, 1 if they differ by more than is allowed."""
    scenario = shortened(found(name), QUICK_S if quick else None)
    seed, doc = SEED, scenario.doc
    try:
        with show.progress("fidelity") as progress, tempfile.TemporaryDirectory(prefix="farhop-") as folder:
            progress(f"live, {doc.duration_s / speedup:.0f} s")
            seen, failed = asyncio.run(fidelity.live(scenario, speedup, seed, Path(folder)))
            progress("simulated")
            (job,) = pool.jobs(scenario, [routers.FARHOP], [seed])
            simulated = cell.run(job.document, Path(job.folder), job.key, job.recipe)
        rows, promised = fidelity.compared(seen, failed, simulated), fidelity.promise_errors(seen)
    except (fidelity.FidelityError, fidelity.WorldError) as error:
        fail(f"bench: {error}")
    if as_json:
        head = {"bench": "fidelity", "speedup": speedup, "answers": len(seen), "failed": failed}
        show.json(
            {
                **head,
                "rows": [
                    {"figure": r.figure, "live": r.live, "simulated": r.simulated, "apart": r.apart} for r in rows
                ],
                "promised": promised,
            }
        )
    else:
        title = (
            f"{doc.name}: live at {speedup:g} x speed ({len(seen)} answers, {failed} failed) and simulated "
            f"({simulated.score.whole.served} answers, {simulated.score.whole.failed} failed), seed {seed}"
        )
        lines = [
            [r.figure, f"{r.live:,.3f}", f"{r.simulated:,.3f}", f"{100 * r.apart:+.1f}", "yes" if r.holds else "no"]
            for r in rows
        ]
        show.table(title, ["figure", ">live", ">simulated", ">apart %", f"within {fidelity.WITHIN:.0%}"], lines)
        figures = [
            [
                p.tier, str(p.answers), f"{p.promised_p50_ms:,.1f}", f"{p.seen_p50_ms:,.1f}", f"{100 * p.off_p50:.1f}",
                f"{100 * p.off_p90:.1f}", "yes" if p.holds else "no",
            ]
            for p in promised
        ]  # fmt: skip
        columns = ["tier", ">answers", ">promised p50 ms", ">seen p50 ms", ">off p50 %", ">off p90 %",
                   f"p50 within {fidelity.PROMISE_WITHIN:.0%}"]  # fmt: skip
        show.table("Promised times to first token, live", columns, figures)
    return 0 if all(r.holds for r in rows) and all(p.holds for p in promised) else NEGATIVE
