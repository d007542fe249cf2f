"""The journal has every field that Chaos Toolkit's readers look for, and JUnit is read as XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import datetime

import msgspec
import pytest
from outcomes import EVIL, outcome

from farhop_drill.machine import DrillVerdict
from farhop_drill.report import journal, junit

FIELDS = {"chaoslib-version", "platform", "node", "experiment", "start", "end", "duration", "status", "deviated",
          "steady_states", "run", "rollbacks"}  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "status", "deviated"),
    [(None, "completed", False), (DrillVerdict.FAIL, "completed", True), (DrillVerdict.ABORTED, "aborted", True),
     (DrillVerdict.NOT_RUN, "failed", True)],
)  # fmt: skip
def test_journal_has_the_outcome_of_the_run(verdict: DrillVerdict | None, status: str, deviated: bool) -> None:
    found = outcome(verdict, "because", 9.0 if verdict is DrillVerdict.FAIL else 0.4)
    document = msgspec.json.decode(msgspec.json.encode(journal(found, "0.1", "host")))
    assert set(document) >= FIELDS
    assert (document["status"], document["deviated"]) == (status, deviated)
    assert document["steady_states"]["after"]["steady_state_met"] is not deviated
    for item in (*document["run"], *document["rollbacks"], *document["steady_states"]["before"]["probes"]):
        assert set(item) >= {"activity", "status", "start", "end", "duration", "output"}
        assert datetime.fromisoformat(item["start"]) <= datetime.fromisoformat(item["end"])
        assert ("exception" in item) == (item["status"] == "failed")
    assert all("tolerance_met" in one for one in document["steady_states"]["after"]["probes"])
    assert len(document["farhop"]["canaries"]) == len(found.canaries)


def test_junit_has_a_case_for_each_hypothesis_and_nothing_green_that_did_not_pass() -> None:
    for verdict, failures, errors in ((None, 0, 0), (DrillVerdict.ABORTED, 0, 2), (DrillVerdict.NOT_RUN, 0, 2)):
        suite = ET.fromstring(junit(outcome(verdict, EVIL)))
        assert (suite.tag, suite.get("tests")) == ("testsuite", "2")
        assert (suite.get("failures"), suite.get("errors")) == (str(failures), str(errors))
        assert len(suite.findall("testcase/error")) == errors
    failing = ET.fromstring(junit(outcome(None, "", 9.0)))
    assert (failing.get("failures"), len(failing.findall("testcase/failure"))) == ("1", 1)
