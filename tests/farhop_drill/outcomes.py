"""A run that is over, with hostile words in it."""

from __future__ import annotations

from drill_documents import made

from farhop_drill.checks import Finding
from farhop_drill.machine import DrillVerdict
from farhop_drill.measures import Canary, StatusSample, Timeline
from farhop_drill.outcome import Done, Outcome, judge, worst

EVIL = "</script><script src='//x'>alert(1)</script>&\"'"


def outcome(verdict: DrillVerdict | None = None, why: str = "", rto_s: float = 0.4) -> Outcome:
    drill = made(title=f"A drill {EVIL}")
    measures = {"residency_violations": 0.0, "rto_s": rto_s}
    judged = judge(drill, measures, verdict, why)
    canaries = [
        Canary(entry="virginia", tenant=EVIL, model="m", began_s=n / 10, first_s=n / 10 + 0.02, ended_s=n / 10 + 0.05,
               region="virginia", code="" if n % 9 else EVIL)
        for n in range(60)
    ]  # fmt: skip
    return Outcome(
        run="a-drill-1", drill="a-drill", title=drill.title, author="me", fleet="here", epoch_s=1.6e9,
        verdict=worst(judged, verdict), why=why, document=drill.model_dump(mode="json"), values={"region": "virginia"},
        marks=Timeline(0.0, 2.0, 4.0, 4.5, 6.0, 0, [("a part", 2.0), ("all", 3.0)]), measures=measures, judged=judged,
        findings=[Finding("n-1", True, "0.2"), Finding("lever", False, EVIL)],
        done=[Done(what="safety checks", kind="check", at_s=0.0, took_s=0.1, ok=True),
              Done(what=EVIL, kind="inject", at_s=2.0, took_s=0.1, ok=False, output="no"),
              Done(what="restore", kind="restore", at_s=4.0, took_s=0.5, ok=True)],
        canaries=canaries,
        looks=[StatusSample(at_s=n / 2, states={"virginia": "up"}, used={"virginia": 0.5}) for n in range(12)],
    )  # fmt: skip
