"""What a name stands for: never what the law or the key forbids, always the same of the same, and always an end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import REGIONS, capacity, instance, request, seen, worldwide

from farhop.balance import outcome
from farhop.balance.machine import Answer, Forward, Request, RequestArrived
from global_lb.fleet.view import Instance
from global_lb.routing import admission
from global_lb.routing.cascade import Unresolved
from global_lb.routing.flow import GlobalFlow
from global_lb.routing.policy import ModelStep, RouteConfig
from global_lb.routing.routes import Routes, RoutesChanged
from topology.law import Law
from topology.model import Residency, Rule, Tenant, Topology

NAMES = ("big", "medium", "small")
RULED = {"big": Rule(allow=("eu",)), "auto": Rule(allow=("world",), deny=("JP",))}


def ruled(**models: Rule) -> Law:
    """`anyone` may go anywhere but for these models or names."""
    anyone = Tenant("anyone", residency=Residency(processing=Rule(allow=("world",))), models=models)
    return Law(Topology("test", 1, REGIONS, {"anyone": anyone}))


def serving(region: str, **slots: int) -> Instance:
    """A region with these models, each with so many slots free."""
    return instance(region, models={name: capacity(model=name, slots_free=free) for name, free in slots.items()})


def auto(*steps: ModelStep | str, tenant: str = "", name: str = "auto") -> Routes:
    models = tuple(ModelStep(model=one) if isinstance(one, str) else one for one in steps)
    return Routes({(tenant, name): RouteConfig(tenant=tenant, model=name, models=models)})


def asked(flow: GlobalFlow, *, allowed: tuple[str, ...] = (), **fields: object) -> Request | Unresolved | None:
    return flow.resolve(request("a", **{"model": "auto", **fields}), allowed, 0.0)  # type: ignore[arg-type]


def test_the_first_with_room_in_any_region_is_chosen_and_says_what_it_passed_over() -> None:
    busy, idle = serving("london", big=0, small=4), serving("tokyo", big=2)
    found = asked(worldwide(view=seen(busy, idle), routes=auto("big", "small")))
    assert isinstance(found, Request)
    assert (found.model, found.alias, found.alias_why) == ("big", "auto", "")
    found = asked(worldwide(view=seen(busy), routes=auto("huge", "big", "small")))
    assert isinstance(found, Request)
    assert (found.model, found.alias_why) == ("small", "huge: not served; big: no room")


def test_where_none_has_room_it_waits_for_the_first_that_is_served() -> None:
    found = asked(worldwide(view=seen(serving("london", big=0, small=0)), routes=auto("huge", "big", "small")))
    assert isinstance(found, Request)
    assert (found.model, found.alias_why) == ("big", "huge: not served; no other has room")
    found = asked(worldwide(view=seen(serving("london", other=1)), routes=auto("big", "small")))
    assert isinstance(found, Request)
    assert (found.model, found.alias_why) == ("big", "none is served")


def test_long_prompts_pass_over_what_is_for_short_ones() -> None:
    routes = auto(ModelStep(model="small", prompt_bytes_max=1000), "big")
    flow = worldwide(view=seen(serving("london", big=4, small=4)), routes=routes)
    models = [getattr(asked(flow, prompt_bytes=size), "model", None) for size in (1000, 1001)]
    assert models == ["small", "big"]


def test_the_narrower_scope_stands_before_and_other_names_are_themselves() -> None:
    ours = RouteConfig(tenant="anyone", model="auto", models=(ModelStep(model="small"),))
    flow = worldwide(view=seen(serving("london", big=4, small=4)), routes=auto("big"))
    flow.handle(RoutesChanged({("anyone", "auto"): ours}), 0.0)
    assert getattr(asked(flow), "model", None) == "small"
    assert getattr(asked(flow, tenant="other"), "model", None) == "big"
    assert asked(flow, model="big") is None
    assert (flow.routes.aliases("other").keys(), flow.routes.policies()) == ({"auto"}, {"*/*": "predictive"})
    assert {"tenant": "anyone", "model": "auto", "models": [{"model": "small", "prompt_bytes_max": None}]} in (
        flow.routes.accounts(0.0)
    )
    flow.handle(RoutesChanged({}), 0.0)
    assert getattr(asked(flow), "model", None) == "big"


def test_a_model_may_stand_for_itself_and_a_smaller_one() -> None:
    routes = auto("big", "small", name="big")
    assert asked(worldwide(view=seen(serving("london", big=4, small=4)), routes=routes), model="big") is None
    found = asked(worldwide(view=seen(serving("london", big=0, small=4)), routes=routes), model="big")
    assert isinstance(found, Request)
    assert (found.model, found.alias) == ("small", "big")


def test_the_law_of_the_name_and_of_the_model_both_hold() -> None:
    everybody = [serving(region, big=4, small=4) for region in ("london", "frankfurt", "tokyo")]
    flow = worldwide(view=seen(*everybody), under=ruled(**RULED), routes=auto("big", "small"))
    found = asked(flow)
    assert isinstance(found, Request)
    assert found.lawful is not None
    assert (found.model, "tokyo" in found.lawful) == ("big", False)
    (command,) = [one for one in flow.handle(RequestArrived(found), 0.0) if isinstance(one, Forward)]
    assert (command.target, command.lawful) == ("frankfurt", frozenset({"frankfurt"}))
    assert command.reasons.notes[0] == "auto stands for big"
    only_tokyo = worldwide(view=seen(serving("tokyo", small=4)), under=ruled(**RULED), routes=auto("small"))
    found = asked(only_tokyo)
    assert isinstance(found, Request)
    (refused,) = only_tokyo.handle(RequestArrived(found), 0.0)
    assert isinstance(refused, Answer)
    assert refused.outcome is outcome.NO_REGION


def test_who_may_use_none_of_them_is_told_so_without_their_names() -> None:
    flow = worldwide(view=seen(serving("london", big=4)), routes=auto("big"))
    refused = asked(flow, allowed=("auto",))
    assert isinstance(refused, Unresolved)
    assert (refused.outcome, "big" in refused.detail) == (outcome.KEY_SCOPE, False)
    refused = asked(flow, tenant="lost")
    assert isinstance(refused, Unresolved)
    assert (refused.outcome, "big" in refused.detail) == (outcome.UNLAWFUL, False)


@given(
    steps=st.permutations(NAMES).flatmap(lambda names: st.integers(1, 3).map(lambda n: names[:n])),
    bounds=st.lists(st.none() | st.integers(1, 4096), min_size=2, max_size=2),
    slots=st.fixed_dictionaries({
        region: st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), min_size=1)
        for region in ("london", "frankfurt", "tokyo")
    }),
    rules=st.dictionaries(st.sampled_from((*NAMES, "auto")), st.sampled_from(("eu", "uk", "JP", "atlantis"))),
    allowed=st.lists(st.sampled_from(NAMES), unique=True),
    prompt_bytes=st.integers(1, 5000),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_it_never_leads_to_what_may_not_be_used(
    steps: list[str], bounds: list[int | None], slots: dict[str, dict[str, int]], rules: dict[str, str],
    allowed: list[str], prompt_bytes: int, seed: int,
) -> None:  # fmt: skip
    cascade = [
        ModelStep(model=m, prompt_bytes_max=b) for m, b in zip(steps, [*bounds, None][-len(steps) :], strict=True)
    ]
    under = ruled(**{name: Rule(allow=(where,)) for name, where in rules.items()})
    view = seen(*(serving(region, **models) for region, models in slots.items()))
    told = [
        asked(
            worldwide(view=view, under=under, routes=auto(*cascade), seed=seed),
            allowed=tuple(allowed), prompt_bytes=prompt_bytes,
        )
        for _ in range(2)
    ]  # fmt: skip
    found = told[0]
    assert found == told[1]
    if isinstance(found, Unresolved):
        return
    assert found is not None
    assert found.lawful is not None
    assert found.model in steps
    assert not allowed or found.model in allowed
    named = admission.processing(request("b", model="auto"), under).lawful
    assert found.lawful == named
    assert admission.processing(found, under).lawful & named
    step = next(one for one in cascade if one.model == found.model)
    assert step.prompt_bytes_max is None or prompt_bytes <= step.prompt_bytes_max


@pytest.mark.parametrize("policy", ["nearest", "least-load"])
def test_its_models_go_by_routes_of_their_own(policy: str) -> None:
    routes = auto("big")
    routes.override({("", "big"): RouteConfig(model="big", policy=policy)})
    flow = worldwide(view=seen(serving("london", big=4)), routes=routes)
    found = asked(flow)
    assert isinstance(found, Request)
    assert flow.consider(found, 0.0).route.policy.name == policy
