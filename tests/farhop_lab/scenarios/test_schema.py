"""The shape of a scenario: what it takes, and how it says what it does not."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from farhop_lab.scenarios.schema import KINDS, ScenarioDoc, WorkDoc
from topology.schema import problems_of

LEAST = {"name": "x", "sites": {"tokyo": {"gpu": "l4", "replicas": 1}}, "work": [{"kind": "chat"}]}


def test_a_scenario_needs_a_name_sites_and_work() -> None:
    doc = ScenarioDoc.model_validate(LEAST)
    assert doc.seeds == 3
    assert doc.routers == ["farhop"]
    assert doc.loads == [1.0]


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"sites": {}}, "sites", "map regions to replicas"),
        ({"work": [{"kind": "chess"}]}, "work[0].kind", "say one of chat, trees"),
        ({"sites": {"tokyo": {"gpu": "l4", "replicas": 0}}}, "sites.tokyo.replicas", "1 to 10000"),
        ({"durations": 3}, "durations", "duration_s"),
        ({"faults": [{"at_s": 3, "what": "explode", "region": "tokyo"}]}, "faults[0].what", "say kill, revive"),
        ({"duration_s": float("inf")}, "duration_s", "seconds above 0"),
    ],
)
def test_error_is_named_with_its_remedy(change: dict[str, object], path: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ScenarioDoc.model_validate({**LEAST, **change})
    (problem,) = problems_of(caught.value, ScenarioDoc)
    assert problem.path == path
    assert words in problem.remedy


def test_every_kind_of_work_is_accepted() -> None:
    for kind in KINDS:
        assert WorkDoc.model_validate({"kind": kind}).kind == kind
