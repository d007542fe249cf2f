"""Models behind an alias: nonsense is refused, weights depend on the caller, a session keeps its draw."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from farhop.balance import model_steps
from farhop.balance.machine import Request
from farhop.balance.model_steps import ModelStep, NameRoute, names_of
from farhop.config import problems_of


def request(**more: Any) -> Request:
    given = {"id": "a", "tenant": "t", "model": "auto", "prompt_bytes": 1000, "body_bytes": 1000, "chain": (),
             "deadline": 9e9, "max_tokens": 10}  # fmt: skip
    return Request(**(given | more))


def route(name: str, *models: str, tenant: str = "") -> NameRoute:
    return NameRoute.model_validate({"tenant": tenant, "model": name, "models": [{"model": one} for one in models]})


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ({"model": "auto", "models": []}, "models: Tuple should have at least 1"),
        ({"model": "auto", "models": [{"model": "a"}, {"model": "a"}]}, "is given twice; name each once"),
        ({"model": "auto", "models": [{"model": "a", "tools": True}]}, "some requests would have none"),
        ({"model": "auto", "models": [{"model": "a"}], "policy": "nearest"}, "policy: "),
        ({"models": [{"model": "a"}]}, "model: "),
    ],
)
def test_steps_that_make_no_sense_are_refused(expected: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        NameRoute.model_validate(expected)
    assert any(problem in line for line in problems_of(caught.value)), problems_of(caught.value)


def test_routes_that_cannot_stand_together_name_the_one_that_is_too_much() -> None:
    with pytest.raises(ValueError, match=r"routes\.1: a second one for tenant '', model 'auto'"):
        names_of([route("auto", "a"), route("auto", "b")])
    with pytest.raises(ValueError, match=r"routes\.0\.models: 'b' stands for others itself"):
        names_of([route("auto", "b"), route("b", "a")])
    assert names_of([route("b", "b", "a")]), "a model may stand for itself and a smaller one"


def test_the_narrower_scope_counts_and_each_gets_its_own() -> None:
    names = names_of([route("auto", "a", "b"), route("auto", "c", tenant="acme"), route("ours", "a", tenant="acme")])
    assert [step.model for step in model_steps.of(names, "acme", "auto")] == ["c"]
    assert [step.model for step in model_steps.of(names, "other", "auto")] == ["a", "b"]
    assert model_steps.of(names, "other", "ours") == ()
    assert model_steps.aliases(names, "acme") == {"auto": ("c",), "ours": ("a",)}
    assert model_steps.aliases(names, "other") == {"auto": ("a", "b")}


def test_why_a_request_may_not_have_a_model() -> None:
    steps = [
        ModelStep(model="short", prompt_bytes_max=999), ModelStep(model="tools", tools=True),
        ModelStep(model="cheap", usd_max=0.001), ModelStep(model="unpriced", usd_max=1), ModelStep(model="big"),
    ]  # fmt: skip
    costs = {"cheap": 1001}
    found = model_steps.unfit(steps, request(), ("big", "short"), lambda one: costs.get(one.model))
    assert found == {
        "short": "the prompt is too long", "tools": "for requests with tools", "cheap": "too dear",
        "unpriced": "no price", "big": "",
    }  # fmt: skip
    costs["cheap"] = 1000
    found = model_steps.unfit(steps, request(tools=True), ("big",), lambda one: costs.get(one.model))
    assert found["cheap"] == found["tools"] == "not for this key"


def test_a_session_stays_with_what_was_drawn_for_it() -> None:
    rng = Random(1)
    assert len({model_steps.drawn(request(soft_session=7 << 60), rng) for _ in range(9)}) == 1
    assert len({model_steps.drawn(request(), rng) for _ in range(9)}) == 9
    steps = [ModelStep(model="a"), ModelStep(model="b", weight=1), ModelStep(model="c", weight=3)]
    assert [one.model for one in model_steps.ordered(steps, 0.2)] == ["b", "a", "c"]
    assert [one.model for one in model_steps.ordered(steps, 0.9)] == ["c", "a", "b"]
