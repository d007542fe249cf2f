"""A drill is read whole, with every error at once, or not at all."""

from __future__ import annotations

import pytest
import yaml
from drill_documents import NAMES, made, raw
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_cli.drill_fleet import shipped
from farhop_drill.document import FAULTS, MEASURES, TRAFFIC, Drill, DrillError, Hypothesis, Names, read

ALL = {"lose-a-region", "lose-a-regions-engines", "freeze-a-link", "lose-an-etcd-hub", "lose-etcd", "drain-and-return",
       "kill-a-global-balancer", "law-change", "dns-entry-lost", "slow-region", "n-1-at-peak",
       "region-refuses", "wake-a-pilot-light"}  # fmt: skip


def problems(document: object, names: Names | None = NAMES, **sets: str) -> list[str]:
    with pytest.raises(DrillError) as error:
        read(yaml.safe_dump(document).encode(), "test", names, sets)
    return list(error.value.problems)


def test_every_required_drill_is_shipped_and_valid_and_is_named_after_its_file() -> None:
    assert set(shipped()) == ALL
    for name, found in shipped().items():
        drill = read(found.text, name, NAMES)
        assert drill.drill == name
        assert any(one.measure == "residency_violations" and one.at_most == 0 for one in drill.hypotheses), name


def test_a_refusal_stays_within_the_blast_radius() -> None:
    radius = {"regions": ["virginia"], "share": 0.5}
    refuse = {"do": "refuse", "region": "virginia", "share": 0.5, "model": "meta/llama"}
    drill = made(blast_radius=radius, steps=[{"name": "x", "soak_s": 1, "inject": [refuse]}])
    assert (drill.share_lost("virginia"), drill.lost()) == (0.5, frozenset({"virginia"}))
    wrong = [{**refuse, "share": 0.75}, {**refuse, "region": "tokyo"}, {"do": "refuse"}, {**refuse, "ms": 5}]
    found = problems(raw(blast_radius=radius, steps=[{"name": "x", "soak_s": 1, "inject": wrong}]))
    assert found == [
        "steps[0].inject[0].share: 0.75 is more than blast_radius.share 0.5",
        "steps[0].inject[1].region: 'tokyo' is outside blast_radius.regions",
        "steps[0].inject[2].region: missing; refuse needs it",
        "steps[0].inject[2].share: 1.0 is more than blast_radius.share 0.5",
        "steps[0].inject[3].ms: refuse does not take it",
    ]


def test_traffic_at_the_peak_moves_in_three_steps_with_a_soak_each() -> None:
    drill = read(shipped()["n-1-at-peak"].text, "n-1-at-peak", NAMES)
    assert [one.share for step in drill.steps for one in step.inject] == [0.05, 0.25, 1.0]
    assert all(step.soak_s == 60 for step in drill.steps)
    assert len({one.target for step in drill.steps for one in step.inject}) == 1


def test_every_error_is_reported_at_once() -> None:
    document = raw(
        kind="fault",
        blast_radius={"regions": ["atlantis"], "tenants": ["nobody"]},
        steps=[{"name": "x", "inject": [{"do": "kill-region", "region": "tokio"}, {"do": "explode"}], "soak_s": 1}],
        hypotheses=[{"measure": "happiness", "at_most": 1}, {"measure": "rto_s"}],
        windows=["someday"],
        colour="red",
    )
    del document["aborts"], document["duration_max_s"]
    found = "\n".join(problems(document))
    for part in (
        "'atlantis' is no region of this fleet", "'nobody' is no tenant", "'tokio' is no region of this fleet; did you "
        "mean 'tokyo'?", "'tokio' is outside blast_radius.regions", "'explode' cannot be done", "'happiness' cannot be "
        "measured", "hypotheses[1]: give `at_most` or `at_least`", "aborts: missing", "duration_max_s: missing; a "
        "drill must be bounded", "windows[0]: 'someday' is no window", "colour: is no field of a drill",
    ):  # fmt: skip
        assert part in found, (part, found)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"duration_max_s": 2}, "less than its phases take"),
        ({"duration_max_s": 1e6}, "duration_max_s"),
        ({"duration_max_s": float("nan")}, "duration_max_s"),
        ({"aborts": []}, "aborts"),
        ({"aborts": [{"measure": "failback_s", "above": 1}]}, "is not measured each second"),
        ({"kind": "fault"}, "it is not for a fault drill"),
        ({"blast_radius": {"regions": ["virginia"], "share": 0.5}}, "is more than blast_radius.share 0.5"),
        ({"blast_radius": {"regions": ["virginia"], "tenants": ["eu-only"]}}, "touches every tenant"),
        ({"drill": "Not A Name"}, "drill: give a name"),
        ({"canaries": {"rate_per_s": 1e9}}, "canaries.rate_per_s"),
        ({"steps": []}, "steps"),
        ({"steps": [{"name": "x", "soak_s": 1, "inject": [{"do": "bias", "region": "virginia"}]}]}, "bias needs it"),
        ({"steps": [{"name": "x", "soak_s": 1, "inject": [{"do": "drain", "region": "virginia", "ms": 1}]}]},
         "drain does not take it"),
        ({"title": "of {nothing}"}, "{nothing} is no parameter"),
    ],
)  # fmt: skip
def test_a_fault_is_reported_with_its_path(changed: dict[str, object], message: str) -> None:
    assert any(message in one for one in problems(raw(**changed)))


def test_parameters_are_filled_in_and_keep_their_kind() -> None:
    document = raw(parameters={"where": "virginia", "soak": 2})
    document["steps"] = [
        {"name": "all of {where}", "inject": [{"do": "drain", "region": "{where}"}], "soak_s": "{soak}"}
    ]
    text = yaml.safe_dump(document).encode()
    assert read(text, "test", NAMES).steps[0].name == "all of virginia"
    changed = read(text, "test", NAMES, {"soak": "3.5"})
    assert (changed.steps[0].soak_s, changed.planned_s) == (3.5, 5.5)
    assert "no such parameter" in problems(document, soke="1")[0]


def test_the_capacity_that_a_region_loses_is_the_most_of_any_step() -> None:
    drill = made()
    assert drill.lost() == {"virginia"}
    assert (drill.share_lost("virginia"), drill.share_lost("tokyo")) == (1.0, 0.0)


def test_a_hypothesis_holds_within_its_bounds_and_never_for_what_is_no_number() -> None:
    bounds = Hypothesis(measure="rto_s", at_least=1, at_most=2)
    assert [bounds.holds(value) for value in (0.9, 1.0, 2.0, 2.1, float("nan"))] == [False, True, True, False, False]
    assert str(bounds) == "rto_s <= 2 and >= 1"


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*TRAFFIC, *FAULTS, *MEASURES]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*Drill.model_fields, "do", "measure", "region", "inject", "soak_s"]), inner, max_size=5
            )
        ),
        max_leaves=12,
    )
)
def test_any_document_is_a_drill_or_an_error_with_lines(part: object) -> None:
    for document in (raw(steps=part, aborts=part), raw(blast_radius=part, hypotheses=part, canaries=part)):
        found: tuple[str, ...] = ()
        try:
            read(yaml.safe_dump(document).encode(), "test", NAMES)
        except DrillError as error:
            found = error.problems
            assert found
        assert all(one and "\n" not in one for one in found)
