"""`farhop bench routing`: Farhop beside every published router on the same work; tables, markdown, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.sim import pictures, shown, simulated
from farhop_lab.studies import aims, routers, routing, tables
from farhop_lab.studies.ablations import ABLATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop_lab.scenarios.load import Scenario
    from farhop_lab.studies.cell import Result
    from farhop_lab.studies.results_page import Table

COLUMNS = (
    ("requests/s", "requests_per_s", 2, 1.0),
    ("good/s", "good_per_s", 2, 1.0),
    ("TTFT p50 ms", "ttft_p50_ms", 0, 1.0),
    ("TTFT p90 ms", "ttft_p90_ms", 0, 1.0),
    ("TTFT p95 ms", "ttft_p95_ms", 0, 1.0),
    ("E2E p95 s", "e2e_p95_ms", 2, 1e-3),
    ("hit %", "hit", 1, 100.0),
    ("abroad %", "spill", 1, 100.0),
)


def run(only: str, quick: bool, seeds: int | None, out: Path | None, markdown_file: Path | None, as_json: bool) -> int:
    """Run the comparison; the exit code, 1 if something happened that must never happen."""
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    for name in names:
        if name not in routing.SCENARIOS:
            fail(f"--only: {name!r} is none of {', '.join(routing.SCENARIOS)}")
    plan = routing.Plan(quick=quick, seeds=seeds, only=names)
    results = simulated(routing.jobs(plan), out, None, "routing")
    if as_json:
        show.json(document(plan, results))
    else:
        for title, columns, lines in built(results):
            show.table(title, columns, lines)
        show.line(footing(plan))
        for path in pictures(_compared(plan, results), "routing", built(results), out) if out else ():
            show.line(f"written: {path}")
    if markdown_file is not None:
        _write(markdown_file, plan, results)
    return NEGATIVE if any(result.score.violations or result.score.unlawful for result in results) else 0


def _compared(plan: routing.Plan, results: Sequence[Result]) -> list[tuple[Scenario, list[Result]]]:
    """Each scenario that several routers were run in, with its results; without Farhop's ablations."""
    return [
        (
            scenario,
            [one for one in results if one.key.scenario == scenario.doc.name and one.key.router not in ABLATIONS],
        )
        for scenario, names in routing.scenarios(plan)
        if len(names) > 1
    ]


def _write(path: Path, plan: routing.Plan, results: Sequence[Result]) -> None:
    parts = [f"{footing(plan)}\n"]
    parts += [markdown(title, columns, lines) for title, columns, lines in built(results)]
    try:
        path.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        fail(f"--markdown: {path}: {error.strerror or error}; give a file that can be written")


def footing(plan: routing.Plan) -> str:
    """The conditions of the figures."""
    rough = f" Quick: {plan.quick_s:g} s of most scenarios, too little to settle what is close." * plan.quick
    return (
        "Simulated; ± is the 95 % interval of the mean over seeds (Student's t), a ratio is taken seed by seed on the "
        f"same work; a failed request counts with what its client waited, its patience at least.{rough}"
    )


def markdown(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    head = "| " + " | ".join(column.lstrip(">") for column in columns) + " |"
    rule = "|" + "|".join(" ---: " if column.startswith(">") else " --- " for column in columns) + "|"
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([f"### {title}", "", head, rule, *rows, ""])


def built(results: Sequence[Result]) -> list[Table]:
    """All tables: verdicts, a region's loss, the fleet of a day, each scenario, what each part earns."""
    rows = tables.rows(results)
    made = [_verdicts(results), _loss(rows), _fleet(results), *_scenarios(rows), _ablations(rows)]
    return [(title, columns, lines) for title, columns, lines in made if lines]


def _verdicts(results: Sequence[Result]) -> Table:
    lines = [
        [v.scenario, f"{v.load:g}", v.asked, v.against, shown(v.ratio, 3), v.verdict] for v in aims.judged(results)
    ]
    return "Goals", ["scenario", ">load", "goal", "against", ">ratio", "verdict"], lines


def _loss(rows: dict[tables.Row, list[Result]]) -> Table:
    lines = []
    top, lost_at, back_at = routing.loss()
    for (scenario, router, _), those in rows.items():
        for result in those if scenario == "loss" else ():
            it = aims.recovery(result, top, lost_at, back_at)
            after = "never" if it.recovered_s is None else f"{it.recovered_s}"
            steady = "yes" if it.steady else "no"
            lines.append([router, str(it.seed), after, f"{100 * it.lowest:.0f}", f"{100 * it.mean:.0f}", steady])
    title = f"Loss of a region: good answers against {top:g} per second, which is what is left can carry"
    columns = ["router", ">seed", f">at {aims.OPEN_SHARE:.0%} after s", ">lowest % from then", ">mean %", "steady"]
    return title, columns, lines


def _fleet(results: Sequence[Result]) -> Table:
    least, shares = routing.needed(results)
    lines = [[str(replicas), f"{share:.3f}", "least" * (replicas == least)] for replicas, share in shares.items()]
    return "Diurnal: good answers per second over region-local's with 12", ["replicas", ">ratio", ""], lines


def _scenarios(rows: dict[tables.Row, list[Result]]) -> list[Table]:
    found: list[Table] = []
    for scenario, load in dict.fromkeys((scenario, load) for scenario, _, load in rows):
        if "-" in scenario and scenario.rpartition("-")[2].isdigit() and scenario.startswith("diurnal"):
            continue
        oracle = rows.get((scenario, aims.ORACLE, load))
        lines = []
        for (name, router, at), those in rows.items():
            if (name, at) == (scenario, load) and router not in ABLATIONS:
                cells = [shown(tables.figure(those, figure), digits, by) for _, figure, digits, by in COLUMNS]
                share = tables.ratio(those, oracle, "requests_per_s") if oracle is not None else None
                lines.append([router, *cells, shown(share, 1, 100.0)])
        columns = ["router", *(f">{column}" for column, *_ in COLUMNS), ">% of greedy oracle"]
        found.append((f"{scenario}, load {load:g}", columns, lines))
    return found


def _ablations(rows: dict[tables.Row, list[Result]]) -> Table:
    lines = []
    for (scenario, router, load), those in rows.items():
        whole = rows.get((scenario, routers.FARHOP, load))
        if router in ABLATIONS and whole is not None:
            figures = ("requests_per_s", "ttft_p50_ms", "ttft_p90_ms", "e2e_p95_ms", "hit")
            ratios = [shown(tables.ratio(those, whole, figure), 3) for figure in figures]
            lines.append([scenario, f"{load:g}", router.removeprefix("farhop-"), *ratios])
    columns = ["scenario", ">load", "without", ">requests/s", ">TTFT p50", ">TTFT p90", ">E2E p95", ">hit"]
    return "What each part earns: Farhop without it over Farhop", columns, lines


def document(plan: routing.Plan, results: Sequence[Result]) -> dict[str, Any]:
    """All of it."""
    least, shares = routing.needed(results)
    return {
        "bench": "routing",
        "quick": plan.quick,
        "verdicts": [msgspec.to_builtins(verdict) for verdict in aims.judged(results)],
        "diurnal": {"least": least, "ratios": shares},
        "rows": [
            {
                "scenario": scenario,
                "router": router,
                "load": load,
                "figures": {figure: tables.figure(those, figure) for figure in those[0].figures()},
            }
            for (scenario, router, load), those in tables.rows(results).items()
        ],
    }
