"""Runs many seeds in parallel, and shrinks failing ones to their shortest schedule.

Invariants: neither order nor number of processes changes any result, which come in the order of the seeds; when this
ends, however it does, no process of it is left. A process runs many trials: starting one takes longer than a trial.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from farhop_lab.chaos import schedule as schedules
from farhop_lab.chaos import trial
from farhop_lab.chaos.properties import PROPERTIES
from farhop_lab.chaos.schedule import Schedule
from farhop_lab.chaos.shrink import shrunk
from farhop_lab.chaos.trial import Outcome
from farhop_lab.sim import faults
from farhop_lab.world.child import bound_to_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

SHRINKS_MAX = 10  # the most failures that are shrunk: each costs up to 80 trials, and most have one cause
BATCH = 4


class HuntResult(msgspec.Struct, frozen=True):
    """The result of some seeds: how many were run and failed, by property and by kind of fault in the schedule (of all
    and of those that failed); every failure; and the shortest schedules of the first of them.
    """

    seeds: int
    failed: int
    answers: int
    cpu_s: float
    by_property: dict[str, int]
    by_kind: dict[str, tuple[int, int]]
    failures: tuple[Outcome, ...]
    shortest: tuple[Outcome, ...]


def hunt(
    seeds: Sequence[int],
    *,
    workers: int | None = None,
    shrinks_max: int = SHRINKS_MAX,
    done: Callable[[int], None] | None = None,
) -> HuntResult:
    """Run all of them. `done` is called with the number finished."""
    batches = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
    outcomes: list[Outcome] = []
    if len(batches) == 1 or workers == 1:
        for batch in batches:
            outcomes += _play(batch)
            if done is not None:
                done(len(outcomes))
        shortest = [shortest_of(one) for one in _to_shrink(outcomes, shrinks_max)]
        return _summed(outcomes, shortest)
    context = multiprocessing.get_context("spawn")
    count = min(workers or os.cpu_count() or 1, len(batches))
    bound = bound_to_parent()
    with ProcessPoolExecutor(count, mp_context=context, initializer=_undisturbed, initargs=(bound,)) as pool:
        try:
            for part in pool.map(_play, batches):
                outcomes += part
                if done is not None:
                    done(len(outcomes))
            shortest = list(pool.map(shortest_of, _to_shrink(outcomes, shrinks_max)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return _summed(outcomes, shortest)


def _undisturbed(bound: Callable[[], None] | None) -> None:
    """Ctrl-C is for the parent, which ends this process; if the parent is killed, this one dies with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if bound is not None:
        bound()


def _play(seeds: Sequence[int]) -> list[Outcome]:
    return [trial.run(schedules.drawn(seed)) for seed in seeds]


def _to_shrink(outcomes: list[Outcome], most: int) -> list[Outcome]:
    """The first few failures of each set of properties."""
    taken: list[Outcome] = []
    seen: Counter[tuple[str, ...]] = Counter()
    failures = sorted((one for one in outcomes if one.failed), key=lambda one: len(one.schedule.faults))
    for outcome in failures:
        seen[outcome.failures] += 1
        if seen[outcome.failures] <= max(1, most // 3) and len(taken) < most:
            taken.append(outcome)
    return taken


def shortest_of(outcome: Outcome) -> Outcome:
    """The result of the shortest schedule that fails the first property that this one fails."""
    first = outcome.failures[0]
    short = shrunk(outcome.schedule, lambda candidate: first in trial.run(candidate).failures)
    return trial.run(short)


def _summed(outcomes: list[Outcome], shortest: list[Outcome]) -> HuntResult:
    failures = tuple(one for one in outcomes if one.failed)
    by_property = Counter(name for one in failures for name in one.failures)
    of_all = Counter(what for one in outcomes for what in {fault.what for fault in one.schedule.faults})
    of_failed = Counter(what for one in failures for what in {fault.what for fault in one.schedule.faults})
    return HuntResult(
        seeds=len(outcomes),
        failed=len(failures),
        answers=sum(one.answers for one in outcomes),
        cpu_s=round(sum(one.cpu_s for one in outcomes), 3),
        by_property={name: by_property[name] for name in PROPERTIES if by_property[name]},
        by_kind={what: (of_all[what], of_failed[what]) for what in faults.KINDS if of_all[what]},
        failures=failures,
        shortest=_distinct(shortest),
    )


def _distinct(outcomes: list[Outcome]) -> tuple[Outcome, ...]:
    """One of each shape: the same faults at the same kinds of places fail in the same way."""
    shapes: dict[tuple[object, ...], Outcome] = {}
    for one in outcomes:
        shape = (one.failures, tuple(sorted(fault.what for fault in one.schedule.faults)))
        shapes.setdefault(shape, one)
    return tuple(shapes.values())


def save(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write the schedules to files for `--replay` and the tests; returns the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for one in outcomes:
        kinds = "-".join(dict.fromkeys(fault.what for fault in one.schedule.faults)) or "nothing"
        path = folder / f"{kinds}-{one.schedule.seed}.yaml"
        about = "; ".join(f"{finding.subject}: {finding.what}" for finding in one.findings[:3])
        path.write_text(schedules.encode(msgspec.structs.replace(one.schedule, about=about)))
        paths.append(path)
    return paths


def replayed(schedule: Schedule) -> HuntResult:
    """Run one schedule as it is."""
    outcome = trial.run(schedule)
    return _summed([outcome], [])
