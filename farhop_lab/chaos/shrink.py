"""The shortest schedule that still fails in the same way, found by trying: fewer faults, shorter, milder, fewer GPUs.

Pure and deterministic: equal schedules shrink to the same one. Invariant: the returned schedule fails (it was tried),
and is no longer than the given one. Bounded by TRIALS_MAX trials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop_lab.chaos.schedule import WARM_S, Schedule, ScheduleError, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farhop_lab.sim.faults import Fault

TRIALS_MAX = 80
_LENGTHS_S = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
_FACTORS = (1.5, 2.0, 4.0, 8.0)
_WORLDS = ((2, 2), (2, 3), (3, 2))


def shrunk(schedule: Schedule, fails: Callable[[Schedule], bool], trials_max: int = TRIALS_MAX) -> Schedule:
    """The shortest schedule found for which `fails` is still true, as it is for this one."""
    tried = {msgspec.json.encode(schedule)}
    while True:
        for candidate in _smaller(schedule):
            key = msgspec.json.encode(candidate)
            if key in tried or not _sound(candidate):
                continue
            if len(tried) > trials_max:
                return schedule
            tried.add(key)
            if fails(candidate):
                schedule = candidate
                break  # begin again with what is left
        else:
            return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Simpler ones, those first that remove the most."""
    replace, faults = msgspec.structs.replace, schedule.faults
    if len(faults) > 2:
        for fault in faults:  # most failures have one cause
            yield replace(schedule, faults=(fault,))
    for place in range(len(faults)):
        yield replace(schedule, faults=(*faults[:place], *faults[place + 1 :]))
    for regions, replicas in _WORLDS:
        if regions * replicas < schedule.regions * schedule.replicas:
            yield replace(schedule, regions=regions, replicas=replicas)
    for place, fault in enumerate(faults):
        for changed in _milder(fault):
            yield replace(schedule, faults=(*faults[:place], changed, *faults[place + 1 :]))
    first_s = min((fault.at_s for fault in faults), default=WARM_S)
    if first_s > WARM_S:  # all of them earlier, with the same distances
        moved = [replace(fault, at_s=round(fault.at_s - first_s + WARM_S, 1)) for fault in faults]
        yield replace(schedule, faults=tuple(moved))


def _milder(fault: Fault) -> Iterator[Fault]:
    replace = msgspec.structs.replace
    yield from (replace(fault, for_s=length_s) for length_s in _LENGTHS_S if length_s < fault.for_s)
    if fault.what == "slow":
        yield from (replace(fault, factor=factor) for factor in _FACTORS if factor < fault.factor)


def _sound(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True
