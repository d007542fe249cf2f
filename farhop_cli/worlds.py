"""`farhop bench worlds`: Farhop against the best rival in worlds drawn at random, as tables or as a part of a page.

By simulation alone; never contacts a balancer.
"""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING

import msgspec

from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.routing import markdown
from farhop_cli.sim import interrupted, progress, shown
from farhop_lab.sim.stats import interval
from farhop_lab.studies import pool, routers
from farhop_lab.studies import random_worlds as drawn
from farhop_lab.studies import verdicts as judge
from farhop_lab.workloads.load import TraceError
from farhop_lab.workloads.program import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from farhop_lab.sim.stats import Interval
    from farhop_lab.studies.cell import Result
    from farhop_lab.studies.results_page import Table

FINALISTS = 4
"""Of all rivals, the number that runs on more than the first screening seed."""
WORST = 20
COMMANDS = {"usual": "farhop bench worlds", "special": "farhop bench worlds --kinds special"}
"""By family of kinds, the command whose tables are in a page between `<!-- COMMAND: begin -->` and its `end`."""
NO_LOSS, IN_TIME = 0.95, 0.9
"""The goals: shares of worlds without a loss, and with the first token within the limit."""


def run(
    kinds: str,
    numbers: range,
    seed: int,
    seeds: int,
    window_s: float,
    traces: Path | None,
    workers: int | None,
    out: Path | None,
    page: Path | None,
    as_json: bool,
) -> int:
    """Run and judge worlds of a family of kinds; the exit code."""
    if page is not None:
        parts_of(page, kinds)  # before an hour's work
    if kinds == "special" and traces is not None:
        fail("--traces: worlds of special kinds are not drawn from traces; leave it out")
    verdicts: list[judge.Verdict] = []
    names = judge.rivals()
    half = seeds // 2
    all_names = [routers.FARHOP, *names]
    cells = len(all_names) + (half - 1) * FINALISTS + 2 * (seeds - half)
    try:
        folder = pool.opened(out) if out is not None else None
        found = drawn.traces(traces) if traces is not None else []
        with progress("worlds", len(numbers)) as moved:
            for done, number in enumerate(numbers):
                if kinds == "special":
                    world = drawn.special(number, seed, window_s)
                else:
                    world = drawn.drawn(number, seed, window_s, found)

                def ran(jobs: Sequence[pool.Job], before: int, done: int = done) -> list[Result]:
                    on_share: Callable[[float], None] = lambda share: moved(done + (before + share) / cells)  # noqa: E731
                    return pool.run(jobs, out=folder, workers=workers, moved=on_share)

                first = ran(drawn.jobs(world, all_names, [1]), 0)
                finalists = judge.best(first, names, FINALISTS, world.judged)
                more = ran(drawn.jobs(world, finalists, range(2, half + 1)), len(all_names)) if half > 1 else []
                seen = [one for one in [*first, *more] if one.key.router in finalists]
                rival = judge.chosen(seen, finalists, world.judged)
                judging = drawn.jobs(world, [routers.FARHOP, rival], range(half + 1, seeds + 1))
                verdicts.append(judge.judged(world, ran(judging, cells - len(judging)), rival, first))
                if page is not None:
                    write_verdicts(page, kinds, verdicts, f"seed {seed}, {seeds - half} seeds, {window_s:g} s")
    except (pool.CellError, TraceError, WorkloadError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        interrupted(out)
        if not verdicts:
            raise
    return printed(verdicts, as_json)


def printed(verdicts: Sequence[judge.Verdict], as_json: bool) -> int:
    """Print them, the worst worlds first; the exit code."""
    found = judge.summary(verdicts)
    if as_json:
        beside = [msgspec.to_builtins(one) for one in judge.rival_comparisons(verdicts)]
        worlds = [msgspec.to_builtins(one) for one in verdicts]
        goals = {name: msgspec.to_builtins(one) for name, one in sorted(judge.goal_counts(verdicts).items())}
        show.json({"bench": "worlds", "summary": found, "rivals": beside, "standings": goals, "worlds": worlds})
    else:
        order = sorted(verdicts, key=lambda one: one.good.mean if one.good is not None else 1.0)[:WORST]
        show.table(*_worlds("The worst worlds: Farhop over the rival of each", order))
        for title, columns, lines in (_goals(verdicts), _rivals(verdicts)):
            show.table(title, columns, lines)
    share = found["without_loss"]
    return NEGATIVE if isinstance(share, float) and share < NO_LOSS else 0


# -- tables


def _goals(verdicts: Sequence[judge.Verdict]) -> Table:
    n = len(verdicts)
    kept, soon = sum(not one.lost for one in verdicts), sum(not one.slower for one in verdicts)
    failed = judge.refused_below_capacity(verdicts)
    ours, theirs = [one.ours for one in verdicts], [one.theirs for one in verdicts]
    ratios = interval([one.good.mean for one in verdicts if one.good is not None] or [1.0])
    answers = interval([one.answer.mean for one in verdicts if one.answer is not None] or [1.0])
    lines = [
        ["worlds without a loss", f"{NO_LOSS:.0%}", f"{kept} of {n}", _met(kept >= NO_LOSS * n)],
        ["TTFT p90 at most 1.05 of the rival's", f"{IN_TIME:.0%}", f"{soon} of {n}", _met(soon >= IN_TIME * n)],
        ["of the others, those whose rival failed at least 1 % more of the requests", "",
         f"{sum(one.theirs.failed >= one.ours.failed + 0.01 for one in verdicts if one.slower)} of {n - soon}", ""],
        ["worlds below 0.95 of capacity, floods apart, in which some were refused that an engine could hold", "0",
         f"{len(failed)}", _met(not failed)],
        ["worlds in which answers were cut with a balancer, Farhop's and the rival's", "",
         " and ".join(f"{sum(had.cut > 0.0 for had in side)}" for side in (ours, theirs)), ""],
        ["TTFT p90 over each world's own rival's, the geometric mean", "", _geometric(verdicts), ""],
        ["good answers over each world's own rival's", "", shown(ratios, 3), ""],
        ["time to the end of an answer, the mean, over each world's own rival's", "", shown(answers, 3), ""],
    ]  # fmt: skip
    best = next(iter(judge.rival_comparisons(verdicts)), None)
    if best is not None and best.good:
        goal = f"good answers over the best single rival's ({best.rival}), first seed"
        verdict = _met(best.over.mean >= 0.0, sure=not best.over.low < 0.0 < best.over.high)
        lines.insert(1, [goal, f"{judge.GAIN:g}", f"{best.ours / best.good:.3f}", verdict])
    return "Goals", ["what", ">goal", ">seen", "verdict"], lines


def _geometric(verdicts: Sequence[judge.Verdict]) -> str:
    """The mean of the ratios' logarithms and its 95 % interval, as ratios."""
    logs = [log(one.ttft_p90.mean) for one in verdicts if one.ttft_p90 is not None and one.ttft_p90.mean > 0.0]
    found = interval(logs or [0.0])
    return f"{exp(found.mean):.3f}" + (f" ({exp(found.low):.3f} to {exp(found.high):.3f})" if found.half else "")


def _met(is_met: bool, *, sure: bool = True) -> str:
    return ("" if sure else "open, ") + ("met" if is_met else "missed")


def _worlds(title: str, verdicts: Sequence[judge.Verdict], *, marked: bool = False) -> Table:
    lines = [
        [
            str(one.number), f"{one.kind}, {one.load:g}", f"{one.asked:.0f}", one.rival,
            f"{_percent(one.ours.good)} / {_percent(one.theirs.good)}", _apart(one.good, marked),
            f"{one.ours.ttft_p90_ms:,.0f} / {one.theirs.ttft_p90_ms:,.0f}", _apart(one.ttft_p90, marked),
            _apart(one.answer, marked),
            f"{_percent(one.ours.failed)} / {_percent(one.theirs.failed)}",
            " ".join(word for word, is_so in (("lost", one.lost), ("slower", one.slower)) if is_so),
        ]
        for one in verdicts
    ]  # fmt: skip
    columns = [
        ">world", "kind, load", ">asked", "rival", ">good % F / R", ">ratio", ">TTFT p90 ms F / R", ">ratio",
        ">whole answer", ">failed % F / R", "",
    ]  # fmt: skip
    return title, columns, lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _apart(ratio: Interval | None, marked: bool) -> str:
    """A ratio; `marked`: bold if its whole interval lies on one side of 1."""
    is_apart = marked and ratio is not None and ratio.half and not ratio.low <= 1.0 <= ratio.high
    return f"**{shown(ratio, 3)}**" if is_apart else shown(ratio, 3)


def _rivals(verdicts: Sequence[judge.Verdict]) -> Table:
    comparisons, goals = judge.rival_comparisons(verdicts), judge.goal_counts(verdicts)

    def held(router: str) -> list[str]:
        return [str(goals[router].level), str(goals[router].soon)]

    lines = [
        [one.rival, _percent(one.good), shown(one.more, 1, 100.0), shown(one.ttft_p90, 2), *held(one.rival)]
        for one in comparisons
    ]
    if comparisons:
        lines.insert(0, [routers.FARHOP, _percent(comparisons[0].ours), "", "", *held(routers.FARHOP)])
    columns = [
        "router", ">good %", ">Farhop's less that, points", ">TTFT p90, Farhop's over its",
        ">worlds: good within 0.99 of the best other's", ">its TTFT p90 within 1.05 of that one's",
    ]  # fmt: skip
    return "Farhop beside each rival: the first seed of every world", columns, lines


def _about(verdicts: Sequence[judge.Verdict]) -> Table:
    lines = [[str(one.number), one.about] for one in verdicts]
    return "What the worlds are", [">world", "sites; balancers, faults, confined tenants; figures"], lines


# -- a page


def report(verdicts: Sequence[judge.Verdict], of: str, kinds: str = "usual") -> str:
    """The tables as Markdown; `of`: the run's seed and length, in words."""
    special = kinds == "special"
    behind = ", special kinds" if special else ""  # headings of one page differ
    beside = "Of *batch* the interactive requests alone are judged. " if special else ""
    parts = [
        f"{len(verdicts)} worlds of {of} of each{behind}. {beside}Simulated; ± is the 95 % interval (Student's t): of "
        "a ratio that of the ratios seed by seed on the same work, over worlds that of the worlds. Bold where it lies "
        "wholly on one side of 1. F: Farhop, R: the rival. *Good* is of what was asked in the window; a failed request "
        "counts with what its client waited, at least its patience. *lost*: the whole interval of good answers lies "
        "below 0.99; *slower*: TTFT p90 above 1.05 in the mean. *whole answer*: the mean time to the end of one, "
        "Farhop's over the rival's. Clients ask again up to twice where no answer had begun, as OpenAI's SDKs do; who "
        "had begun and was cut is not asked for again, and is no refusal.\n",
        *(
            markdown(f"{title}{behind}", columns, lines)
            for title, columns, lines in (
                _goals(verdicts), _worlds("Worlds", verdicts, marked=True), _rivals(verdicts), _about(verdicts)
            )
        ),
    ]  # fmt: skip
    return "\n".join(parts)


def _marks(kinds: str) -> tuple[str, str]:
    return f"<!-- {COMMANDS[kinds]}: begin -->", f"<!-- {COMMANDS[kinds]}: end -->"


def parts_of(page: Path, kinds: str) -> tuple[str, str]:
    """The parts of a page before and behind its tables; empty if there is no such page."""
    first, last = _marks(kinds)
    try:
        text = page.read_text(encoding="utf-8") if page.exists() else f"{first}\n{last}\n"
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--markdown: {page}: {error}; give a text file")
    before, begin, rest = text.partition(first)
    _, end, behind = rest.partition(last)
    if not begin or not end:
        fail(f"--markdown: {page}: it lacks the lines {first} and {last}; add them, or name a new file")
    return before, behind


def write_verdicts(page: Path, kinds: str, verdicts: Sequence[judge.Verdict], of: str) -> None:
    before, behind = parts_of(page, kinds)
    first, last = _marks(kinds)
    try:
        text = f"{before}{first}\n\n{report(verdicts, of, kinds)}\n{last}{behind}"
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--markdown: {page}: {error.strerror or error}; give a file that can be written")
