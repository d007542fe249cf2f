"""The models of an alias: never what law or key forbids, the same for the same request, and always finite."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import REGIONS, capacity, instance, request, seen, worldwide

from farhop.balance import model_steps, outcome
from farhop.balance.machine import (
    Answer,
    AttemptBegan,
    AttemptFailed,
    AttemptRefused,
    Command,
    FallBack,
    Forward,
    LawChanged,
    Request,
    RequestArrived,
)
from farhop.balance.model_steps import ModelStep
from farhop.balance.outcome import Outcome
from global_lb.fleet.view import Instance, RegionReported
from global_lb.routing import admission
from global_lb.routing.cascade import Unresolved
from global_lb.routing.flow import GlobalFlow
from global_lb.routing.policy import RouteConfig
from global_lb.routing.routes import Routes, RoutesChanged
from topology.law import Law, Scope
from topology.model import Residency, Rule, Tenant, Topology

NAMES = ("big", "medium", "small")
RULED = {"big": Rule(allow=("eu",)), "auto": Rule(allow=("world",), deny=("JP",))}


def ruled(epoch: int = 1, /, **models: Rule) -> Law:
    """`anyone` may go anywhere but for these models or names."""
    anyone = Tenant("anyone", residency=Residency(processing=Rule(allow=("world",))), models=models)
    return Law(Topology("test", epoch, REGIONS, {"anyone": anyone}))


def serving(region: str, **slots: int) -> Instance:
    """A region with these models, each with so many slots free."""
    return instance(region, models={name: capacity(model=name, slots_free=free) for name, free in slots.items()})


def auto(*steps: ModelStep | str, tenant: str = "", name: str = "auto") -> Routes:
    models = tuple(ModelStep(model=one) if isinstance(one, str) else one for one in steps)
    return Routes({(tenant, name): RouteConfig(tenant=tenant, model=name, models=models)})


def asked(flow: GlobalFlow, *, allowed: tuple[str, ...] = (), **fields: object) -> Request | Unresolved | None:
    return flow.resolve(request("a", **{"model": "auto", **fields}), allowed, 0.0)  # type: ignore[arg-type]


def test_first_model_with_room_in_any_region_is_chosen_with_reasons() -> None:
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


def test_tools_and_the_maximum_cost_exclude_models() -> None:
    steps = (ModelStep(model="small", tools=False), ModelStep(model="medium", usd_max=0.002), "big")
    flow = worldwide(view=seen(serving("london", big=2, medium=2, small=2)), routes=auto(*steps))
    ask = request("a", model="auto", max_tokens=100, answers=3)
    found = flow.resolve(ask, (), 0.0)
    assert isinstance(found, Request)
    assert (found.model, found.alias_why) == ("small", "")
    costs = {"medium": 1999, "big": 9000}
    seen_costs = list[tuple[str, float]]()

    def micro_usd(one: Request, tokens: float) -> int | None:
        seen_costs.append((one.model, tokens))
        return costs.get(one.model)

    flow.micro_usd = micro_usd
    ask = msgspec.structs.replace(ask, tools=True)
    found = flow.resolve(ask, (), 0.0)
    assert isinstance(found, Request)
    assert (found.model, found.alias_why) == ("medium", "small: for requests without tools")
    assert seen_costs == [("medium", 300.0)], "of each of its answers"
    costs["medium"] = 2001
    found = flow.resolve(ask, (), 0.0)
    assert isinstance(found, Request)
    assert (found.model, found.alias_why) == ("big", "small: for requests without tools; medium: too dear")
    del costs["medium"]
    found = flow.resolve(ask, (), 0.0)
    assert isinstance(found, Request)
    assert "medium: no price" in found.alias_why


def test_weights_draw_the_first_model_and_a_session_keeps_it() -> None:
    steps = (ModelStep(model="big", weight=3), ModelStep(model="medium", weight=1), "small")
    flow = worldwide(view=seen(serving("london", big=2, medium=2, small=2)), routes=auto(*steps))
    drawn = [found.model for _ in range(400) if isinstance(found := asked(flow), Request)]
    assert set(drawn) == {"big", "medium"}
    assert 60 <= drawn.count("medium") <= 140
    sessions = {n: {asked(flow, soft_session=n << 54).model for _ in range(5)} for n in range(1, 1000, 50)}  # type: ignore[union-attr]
    assert {len(models) for models in sessions.values()} == {1}
    assert len(set.union(*sessions.values())) == 2
    full = worldwide(view=seen(serving("london", big=0, medium=2, small=2)), routes=auto(*steps))
    assert {asked(full).model for _ in range(20)} == {"medium"}  # type: ignore[union-attr]


def test_the_narrower_scope_stands_before_and_other_names_are_themselves() -> None:
    ours = RouteConfig(tenant="anyone", model="auto", models=(ModelStep(model="small"),))
    flow = worldwide(view=seen(serving("london", big=4, small=4)), routes=auto("big"))
    flow.handle(RoutesChanged({("anyone", "auto"): ours}), 0.0)
    assert getattr(asked(flow), "model", None) == "small"
    assert getattr(asked(flow, tenant="other"), "model", None) == "big"
    assert asked(flow, model="big") is None
    assert (model_steps.aliases(flow.routes.cascades, "other"), flow.routes.policies()) == (
        {"auto": ("big",)}, {"*/*": "predictive"}
    )  # fmt: skip
    assert {"tenant": "anyone", "model": "auto", "models": [ModelStep(model="small").model_dump()]} in (
        flow.routes.accounts(0.0)
    )
    flow.handle(RoutesChanged({}), 0.0)
    assert getattr(asked(flow), "model", None) == "big"


def test_a_model_may_stand_for_itself_and_a_smaller_one() -> None:
    routes = auto("big", "small", name="big")
    found = asked(worldwide(view=seen(serving("london", big=4, small=4)), routes=routes), model="big")
    assert isinstance(found, Request)
    assert (found.model, found.alias, found.fallbacks) == ("big", "", ("small",))
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


def test_a_tenant_that_may_use_no_model_of_an_alias_is_refused_without_their_names() -> None:
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
def test_a_cascade_never_leads_to_a_model_that_the_tenant_may_not_use(
    steps: list[str], bounds: list[int | None], slots: dict[str, dict[str, int]], rules: dict[str, str],
    allowed: list[str], prompt_bytes: int, seed: int,
) -> None:  # fmt: skip
    cascade = [
        ModelStep(model=m, prompt_bytes_max=b) for m, b in zip(steps, [*bounds, None][-len(steps) :], strict=True)
    ]
    under = ruled(**{name: Rule(allow=(place,)) for name, place in rules.items()})
    view = seen(*(serving(region, **models) for region, models in slots.items()))
    results = [
        asked(
            worldwide(view=view, under=under, routes=auto(*cascade), seed=seed),
            allowed=tuple(allowed), prompt_bytes=prompt_bytes,
        )
        for _ in range(2)
    ]  # fmt: skip
    found = results[0]
    assert found == results[1]
    if isinstance(found, Unresolved):
        return
    assert found is not None
    assert found.lawful is not None
    assert found.model in steps
    assert not allowed or found.model in allowed
    named = under.request_verdict(request("b", model="auto")).lawful
    assert found.lawful == named
    assert under.request_verdict(found).lawful & named
    step = next(one for one in cascade if one.model == found.model)
    assert step.prompt_bytes_max is None or prompt_bytes <= step.prompt_bytes_max


@pytest.mark.parametrize("policy", ["nearest", "least-load"])
def test_models_of_an_alias_use_their_own_routes(policy: str) -> None:
    routes = auto("big")
    routes.override({("", "big"): RouteConfig(model="big", policy=policy)})
    flow = worldwide(view=seen(serving("london", big=4)), routes=routes)
    found = asked(flow)
    assert isinstance(found, Request)
    assert flow.consider(found, 0.0).route.policy.name == policy


# -- instead of a refusal


def arrived(flow: GlobalFlow, **fields: object) -> tuple[Request, list[Command]]:
    """A request for `auto` as the tier has it: resolved, and decided on."""
    found = asked(flow, **fields)  # type: ignore[arg-type]
    assert isinstance(found, Request)
    return found, flow.handle(RequestArrived(found), 0.0)


def test_a_request_that_no_region_takes_goes_on_with_the_next_model_that_has_room() -> None:
    flow = worldwide(view=seen(serving("london", big=4, small=0), serving("tokyo", big=4, tiny=1)),
                     routes=auto("big", "small", "tiny"))  # fmt: skip
    found, commands = arrived(flow)
    assert (found.model, found.fallbacks) == ("big", ("small", "tiny"))
    assert isinstance(commands[-1], Forward)
    again = flow.handle(AttemptRefused("a", 1, outcome.QUEUE_FULL, 800.0), 0.1)
    assert isinstance(again[-1], Forward)  # another region, for the same model
    (instead,) = flow.handle(AttemptRefused("a", 2, outcome.FOREIGN_FULL, 800.0), 0.2)
    assert isinstance(instead, FallBack)
    assert (instead.request.model, instead.request.alias, instead.request.chain) == ("tiny", "auto", ())
    assert instead.request.fallbacks == ("small",)
    assert instead.request.alias_why == "big: no_headroom_for_foreign_work"
    assert (flow.under_way, len(flow.ledger)) == (0, 0)
    commands = flow.handle(RequestArrived(instead.request), 0.2)
    assert isinstance(commands[-1], Forward)
    assert (commands[-1].target, commands[-1].attempt) == ("tokyo", 3)  # no number occurs twice under one decision
    assert commands[-1].reasons.notes[0] == "auto stands for tiny (big: no_headroom_for_foreign_work)"
    (instead,) = flow.handle(AttemptRefused("a", 3, outcome.QUEUE_FULL, 800.0), 0.3)
    assert isinstance(instead, FallBack)  # no region has room: it may wait in line
    assert (instead.request.model, instead.request.fallbacks) == ("small", ())
    flow.handle(RequestArrived(instead.request), 0.3)
    (refused,) = flow.handle(AttemptRefused("a", 4, outcome.QUEUE_FULL, 800.0), 0.4)
    assert isinstance(refused, Answer)
    assert refused.outcome is outcome.NO_REGION
    assert (flow.under_way, len(flow.ledger)) == (0, 0)


@pytest.mark.parametrize("name", ["auto", "big"])
def test_a_law_that_lets_in_more_binds_another_model_by_the_law_that_the_request_came_under(name: str) -> None:
    view = seen(serving("london", big=4), serving("tokyo", small=4))
    flow = worldwide(under=ruled(small=Rule(allow=("uk",))), view=view, routes=auto("big", "small", name=name))
    arrived(flow, model=name)
    flow.handle(LawChanged(ruled(2)), 0.05)
    assert asked(flow, model="small") is None, "it is no name, and lawful in tokyo now"
    assert flow.consider(request("b", model="small"), 0.1).chosen is not None
    (refused,) = flow.handle(AttemptRefused("a", 1, outcome.QUEUE_FULL, 800.0), 0.1)
    assert not isinstance(refused, FallBack)


def test_what_is_learned_of_bases_after_another_law_came_binds_fallbacks_by_the_law_of_arrival() -> None:
    """Where a fallback may go was judged once, by what was known of its bases when the request came."""
    view = seen(serving("london", big=4), serving("tokyo", small=4))
    flow = worldwide(under=ruled(base=Rule(allow=("uk",))), view=view, routes=auto("big", "small"))
    arrived(flow)
    flow.handle(LawChanged(ruled(2)), 0.05)
    adapted = msgspec.structs.replace(serving("tokyo", small=4), lineage={"small": frozenset({"base"})})
    flow.handle(RegionReported("tokyo", known=seen(adapted).view.regions["tokyo"]), 0.06)
    assert flow.consider(request("b", model="small"), 0.1).chosen is not None, "it is lawful in tokyo now"
    (refused,) = flow.handle(AttemptRefused("a", 1, outcome.QUEUE_FULL, 800.0), 0.1)
    assert not isinstance(refused, FallBack)


@pytest.mark.parametrize("reason", [outcome.UNLAWFUL_HERE, outcome.PATH_UNSUPPORTED])
def test_a_refusal_for_another_reason_leads_to_no_other_model(reason: Outcome) -> None:
    flow = worldwide(view=seen(serving("london", big=4, small=4)), routes=auto("big", "small"))
    arrived(flow)
    (refused,) = flow.handle(AttemptRefused("a", 1, reason), 0.1)
    assert isinstance(refused, Answer)


def test_a_stream_that_began_stays_with_its_model() -> None:
    flow = worldwide(view=seen(serving("london", big=4, small=4)), routes=auto("big", "small"))
    arrived(flow)
    flow.handle(AttemptBegan("a", 1, 200), 0.1)
    (refused,) = flow.handle(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, target_lives=True, resumable=True), 0.2)
    assert isinstance(refused, Answer)


@given(
    slots=st.fixed_dictionaries({
        region: st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), min_size=1)
        for region in ("london", "frankfurt", "tokyo")
    }),
    rules=st.dictionaries(st.sampled_from((*NAMES, "auto")), st.sampled_from(("eu", "uk", "JP", "world"))),
    allowed=st.lists(st.sampled_from(NAMES), unique=True),
    reasons=st.lists(
        st.sampled_from((outcome.QUEUE_FULL, outcome.QUEUE_TIMEOUT, outcome.FOREIGN_FULL, outcome.NO_REPLICA)),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
def test_a_cascade_ends_lawfully_and_tries_no_model_twice_under_any_refusals(
    slots: dict[str, dict[str, int]], rules: dict[str, str], allowed: list[str], reasons: list[Outcome]
) -> None:
    under = ruled(**{name: Rule(allow=(place,)) for name, place in rules.items()})
    flow = worldwide(
        view=seen(*(serving(region, **models) for region, models in slots.items())), under=under, routes=auto(*NAMES)
    )
    found = asked(flow, allowed=tuple(allowed))
    if not isinstance(found, Request):
        return
    models, numbers, commands = [found.model], list[int](), flow.handle(RequestArrived(found), 0.0)
    for step in range(200):
        last = commands[-1]
        if isinstance(last, Answer):
            break
        if isinstance(last, FallBack):
            found = last.request
            models.append(found.model)
            commands = flow.handle(RequestArrived(found), 0.1 * step)
            continue
        assert isinstance(last, Forward)
        assert last.target in under.request_verdict(found).lawful
        assert last.target in under.request_verdict(request("b", model="auto")).lawful
        assert found.model in slots[last.target]
        numbers.append(last.attempt)
        commands = flow.handle(AttemptRefused("a", last.attempt, reasons[step % len(reasons)], 10.0), 0.1 * step)
    else:
        raise AssertionError("it never ends")
    assert len(set(models)) == len(models)
    assert not allowed or set(models) <= set(allowed)
    assert numbers == list(range(1, len(numbers) + 1))
    assert (flow.under_way, len(flow.ledger)) == (0, 0)


def test_a_rule_about_a_name_binds_hints_and_records_and_regions_that_know_nothing_of_the_name() -> None:
    law = ruled(auto=Rule(allow=("world",), deny=("JP",)))
    flow = worldwide(under=law, view=seen(serving("london", big=4), serving("tokyo", big=4)), routes=auto("big"))
    found = asked(flow)
    assert isinstance(found, Request)
    for scope in (Scope.PROCESSING, Scope.HINTS, Scope.LOGGING):
        left = law.verdict("anyone", found.model, scope, found.narrow).lawful
        assert left == frozenset(REGIONS) - {"tokyo"}
    assert asked(flow, narrow=found.narrow).narrow == found.narrow  # type: ignore[union-attr]  # said once


def test_a_rule_about_a_name_narrows_nothing_where_there_is_none() -> None:
    under = ruled(big=Rule(allow=("eu",)))
    found = asked(worldwide(under=under, view=seen(serving("london", big=4)), routes=auto("big")))
    assert isinstance(found, Request)
    assert found.narrow == ()


def test_a_later_law_s_rule_on_an_alias_applies_to_requests_that_used_it() -> None:
    flow = worldwide(under=ruled(), view=seen(serving("tokyo", big=4)), routes=auto("big"))
    found = asked(flow)
    assert isinstance(found, Request)
    later = ruled(auto=Rule(allow=("world",), deny=("JP",)))
    verdict = later.request_verdict(found)
    assert verdict.lawful == frozenset(REGIONS) - {"tokyo"}
    assert "model auto" in verdict.excluded["tokyo"]
    assert not admission.hints_allowed(found, "tokyo", later)


def test_the_rule_of_a_model_that_stands_for_itself_binds_those_in_its_place() -> None:
    under = ruled(big=Rule(allow=("world",), deny=("JP",)))
    there = seen(serving("london", big=0), serving("tokyo", small=4))
    flow = worldwide(under=under, view=there, routes=auto("big", "small", name="big"))
    found = flow.resolve(request("a", model="big"), (), 0.0)
    assert isinstance(found, Request)
    assert (found.model, found.fallbacks) == ("big", ("small",))
    instead = model_steps.fallback(found, "small", "no_region_serving", 1)
    assert flow.consider(instead, 0.0).chosen is None
    assert "tokyo" not in under.request_verdict(instead).lawful
