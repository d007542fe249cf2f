"""A run's report for other tools: a journal as Chaos Toolkit writes it, and JUnit.

Pure: text from an Outcome. The journal has Chaos Toolkit's own fields (`status`, `deviated`, `steady_states`, `run`,
`rollbacks`), so that its readers accept it; Farhop's own results are under `farhop`. Never says `completed` of a drill
that did not run, nor `deviated: false` of one that did not pass.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

import msgspec

from farhop_drill.experiment import experiment
from farhop_drill.machine import DrillVerdict

if TYPE_CHECKING:
    from farhop_drill.outcome import Done, Outcome

# Chaos Toolkit's own: completed, failed (an activity failed), aborted, interrupted. It has no word for "not run".
_STATUS = {
    DrillVerdict.PASS: "completed",
    DrillVerdict.FAIL: "completed",
    DrillVerdict.ABORTED: "aborted",
    DrillVerdict.NOT_RUN: "failed",
}
CANARIES_MAX = 20_000  # kept in the journal, the newest


def journal(outcome: Outcome, version: str, node: str) -> dict[str, Any]:
    """The journal as a mapping. `version` is Farhop's, `node` the host that ran it."""
    described = experiment(outcome.document, outcome.values)
    checks = [one for one in outcome.done if one.kind == "check"]
    passed = outcome.verdict is DrillVerdict.PASS
    return {
        "chaoslib-version": f"farhop {version}",
        "platform": "farhop",
        "node": node,
        "experiment": described,
        "start": _at(outcome, 0.0),
        "status": _STATUS[outcome.verdict],
        "deviated": not passed,
        "steady_states": {
            "before": {
                "steady_state_met": not any(not one.ok for one in checks),
                "probes": [_activity(outcome, one, "probe") for one in checks],
            },
            "after": {"steady_state_met": passed, "probes": [_judged(outcome, one) for one in outcome.judged]},
            "during": [],
        },
        "run": [_activity(outcome, one, "action") for one in outcome.done if one.kind == "inject"],
        "rollbacks": [_activity(outcome, one, "action") for one in outcome.done if one.kind == "restore"],
        "end": _at(outcome, outcome.marks.ended_s or 0.0),
        "duration": outcome.took_s,
        "farhop": {
            "run": outcome.run,
            "drill": outcome.drill,
            "author": outcome.author,
            "fleet": outcome.fleet,
            "verdict": outcome.verdict,
            "why": outcome.why,
            "measures": outcome.measures,
            "hypotheses": msgspec.to_builtins(outcome.judged),
            "checks": msgspec.to_builtins(outcome.findings),
            "marks": msgspec.to_builtins(outcome.marks),
            "looks": msgspec.to_builtins(outcome.looks),
            "canaries": [_canary(one) for one in outcome.canaries[-CANARIES_MAX:]],
            "canaries_not_sent": outcome.skipped,
        },
    }


def _canary(one: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(one)
    return {name: value for name, value in fields.items() if name not in ("text", "prompt") and value != ""}


def _activity(outcome: Outcome, one: Done, kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "activity": {"type": kind, "name": one.what, "provider": {"type": "process", "path": "farhop"}},
        "output": one.output or None,
        "status": "succeeded" if one.ok else "failed",
        "start": _at(outcome, one.at_s),
        "end": _at(outcome, one.at_s + one.took_s),
        "duration": one.took_s,
    }
    if kind == "probe":
        made["tolerance_met"] = one.ok
    if not one.ok:
        made["exception"] = [one.output]
    return made


def _judged(outcome: Outcome, one: Any) -> dict[str, Any]:
    at = _at(outcome, outcome.marks.ended_s or 0.0)
    activity = {"type": "probe", "name": one.hypothesis, "tolerance": True,
                "provider": {"type": "process", "path": "farhop"}}  # fmt: skip
    status = "succeeded" if one.value is not None else "failed"
    return {"activity": activity, "output": one.value, "status": status, "start": at, "end": at, "duration": 0.0,
            "tolerance_met": one.verdict is DrillVerdict.PASS}  # fmt: skip


def _at(outcome: Outcome, at_s: float) -> str:
    return datetime.fromtimestamp(outcome.epoch_s + at_s, UTC).replace(tzinfo=None).isoformat()


# -- JUnit


def junit(outcome: Outcome) -> str:
    """A test suite with a case per hypothesis: FAIL is a failure, ABORTED an error, NOT_RUN is skipped and an error of
    the suite, since a drill that did not run must not look green."""
    cases = [_case(outcome, one) for one in outcome.judged]
    count = {verdict: sum(one.verdict is verdict for one in outcome.judged) for verdict in DrillVerdict}
    errors = count[DrillVerdict.ABORTED] + count[DrillVerdict.NOT_RUN]
    head = (
        f"<testsuite name={quoteattr(f'farhop drill {outcome.drill}')} tests='{len(outcome.judged)}' "
        f"failures='{count[DrillVerdict.FAIL]}' errors='{errors}' time='{outcome.took_s:.3f}' "
        f"timestamp={quoteattr(_at(outcome, 0.0))}>"
    )
    return "\n".join(["<?xml version='1.0' encoding='utf-8'?>", head, *cases, "</testsuite>", ""])


def _case(outcome: Outcome, one: Any) -> str:
    name = f"classname={quoteattr(f'farhop.drill.{outcome.drill}')} name={quoteattr(one.hypothesis)}"
    value = "nothing measured" if one.value is None else f"{one.value:.6g} {one.unit}"
    if one.verdict is DrillVerdict.PASS:
        return f"  <testcase {name}><system-out>{escape(value)}</system-out></testcase>"
    kind = "failure" if one.verdict is DrillVerdict.FAIL else "error"
    why = quoteattr(f"{one.verdict}: {one.why or value}")
    return f"  <testcase {name}><{kind} type={quoteattr(one.verdict)} message={why}/></testcase>"
