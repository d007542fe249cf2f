"""The complete result of a run: what was done and when, what was seen, and the verdict of each hypothesis.

Pure. Invariants: a run is PASS only if every hypothesis is; one that could not be measured is NOT_RUN and never PASS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop_drill.checks import Finding
from farhop_drill.document import MEASURES
from farhop_drill.machine import DrillVerdict
from farhop_drill.measures import Canary, StatusSample, Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop_drill.document import Drill

_WORST_FIRST = (DrillVerdict.FAIL, DrillVerdict.ABORTED, DrillVerdict.NOT_RUN, DrillVerdict.PASS)


class Judged(msgspec.Struct, frozen=True):
    """A hypothesis and its result. `value` None: nothing was measured."""

    hypothesis: str
    measure: str
    unit: str
    verdict: DrillVerdict
    value: float | None
    why: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was done: a check, an injection, the restoration. Seconds from the run's beginning."""

    what: str
    kind: str
    at_s: float
    took_s: float
    ok: bool
    output: str = ""


class Outcome(msgspec.Struct, kw_only=True):
    """A run that is over. `epoch_s` is when it began; `document` the drill as it was run."""

    run: str
    drill: str
    title: str
    author: str
    fleet: str
    epoch_s: float
    verdict: DrillVerdict
    why: str
    document: dict[str, Any]
    values: dict[str, str] = {}
    marks: Timeline = msgspec.field(default_factory=Timeline)
    measures: dict[str, float] = {}
    judged: list[Judged] = []
    findings: list[Finding] = []
    done: list[Done] = []
    canaries: list[Canary] = []
    looks: list[StatusSample] = []
    skipped: int = 0

    @property
    def took_s(self) -> float:
        """From its beginning to its end."""
        return (self.marks.ended_s or 0.0) - self.marks.began_s


def judge(drill: Drill, measures: Mapping[str, float], verdict: DrillVerdict | None, why: str) -> list[Judged]:
    """Each hypothesis by what was measured; `verdict` is set if the run decides it for all of them."""
    judged = []
    for one in drill.hypotheses:
        value, unit = measures.get(one.measure), MEASURES[one.measure].unit
        if verdict in (DrillVerdict.ABORTED, DrillVerdict.NOT_RUN):
            made = Judged(str(one), one.measure, unit, verdict, value, why)
        elif value is None:
            made = Judged(str(one), one.measure, unit, DrillVerdict.NOT_RUN, None, "nothing was measured of it")
        else:
            held = one.holds(value)
            made = Judged(str(one), one.measure, unit, DrillVerdict.PASS if held else DrillVerdict.FAIL, value)
        judged.append(made)
    return judged


def worst(judged: list[Judged], verdict: DrillVerdict | None) -> DrillVerdict:
    """The verdict of the run: its own, or else the worst of its hypotheses."""
    return min((one.verdict for one in judged), key=_WORST_FIRST.index) if verdict is None else verdict
