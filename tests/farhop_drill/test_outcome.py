"""Verdicts."""

from __future__ import annotations

from drill_documents import made
from hypothesis import given
from hypothesis import strategies as st

from farhop_drill.machine import DrillVerdict
from farhop_drill.outcome import judge, worst


def test_each_hypothesis_has_its_own_verdict_and_the_run_the_worst() -> None:
    judged = judge(made(), {"residency_violations": 0.0, "rto_s": 3.0}, None, "")
    assert [one.verdict for one in judged] == [DrillVerdict.PASS, DrillVerdict.FAIL]
    assert worst(judged, None) is DrillVerdict.FAIL
    assert worst(judge(made(), {"residency_violations": 0.0, "rto_s": 1.0}, None, ""), None) is DrillVerdict.PASS


def test_a_hypothesis_without_measurements_does_not_pass() -> None:
    judged = judge(made(), {"rto_s": 0.5}, None, "")
    assert worst(judged, None) is DrillVerdict.NOT_RUN


@given(st.sampled_from([DrillVerdict.ABORTED, DrillVerdict.NOT_RUN]), st.dictionaries(
    st.sampled_from(["residency_violations", "rto_s"]), st.floats(0, 2)
))  # fmt: skip
def test_a_run_that_ended_early_never_passes(verdict: DrillVerdict, measured: dict[str, float]) -> None:
    judged = judge(made(), measured, verdict, "why")
    assert {one.verdict for one in judged} == {verdict}
    assert worst(judged, verdict) is verdict
