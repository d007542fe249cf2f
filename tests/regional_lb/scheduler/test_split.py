"""Which version a request is for: order of pins, rules and weights; shares kept, moves that are as few as can be."""

from __future__ import annotations

from math import sqrt
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from worlds import MODEL, request

from farhop.balance.machine import HeaderMatch
from regional_lb.fleet.view import variant_of
from regional_lb.scheduler.split import Assigned, Split, SplitConfig, Splits

RUN = settings(max_examples=40, deadline=None, derandomize=True)
CANARY, COOKIE = HeaderMatch("header", "x-canary", "yes"), HeaderMatch("cookie", "ab", "b")
CANARY_RULE = {"version": "v2", "header": {"name": "x-canary", "value": "yes"}}
COOKIE_RULE = {"version": "v3", "cookie": {"name": "ab", "value": "b"}}
SERVED = {variant_of(MODEL, version) for version in ("v1", "v2", "v3")}
WEIGHTS = st.dictionaries(
    st.sampled_from(("v1", "v2", "v3", "v4")), st.floats(0.0, 100.0), min_size=2, max_size=4
).filter(lambda weights: sum(weights.values()) > 1e-3)
MANY = [draw(64) for draw in [Random(5).getrandbits] * 4000]


def split(**terms) -> Split:
    return Split(MODEL, SplitConfig(**terms))


def assign(one: Split, keeps: str = "", **fields) -> Assigned | None:
    return one.assign(request("a", **fields), SERVED, lambda _request: keeps)


def why(one: Split, keeps: str = "", **fields) -> tuple[str, str]:
    assigned = assign(one, keeps, **fields)
    assert assigned is not None
    assert assigned.variant == f"{MODEL} {assigned.version}"
    return assigned.version, assigned.why


def test_a_pin_goes_before_rules_and_rules_go_before_weights_in_their_order() -> None:
    one = split(
        rules=[CANARY_RULE, COOKIE_RULE, {"version": "v1", "tenant": "acme"}], weights={"v1": 0.0, "v2": 1.0},
        pinning=True,
    )  # fmt: skip
    assert why(one, version="v3", header_matches=(CANARY,)) == ("v3", "pinned")
    assert why(one, version="v9", header_matches=(COOKIE, CANARY)) == ("v2", "rule 1")  # no replica has v9
    assert why(one, header_matches=(COOKIE,), tenant="acme") == ("v3", "rule 2")
    assert why(one, tenant="acme") == ("v1", "rule 3")
    assert why(one) == ("v2", "request")
    assert why(split(weights={"v1": 1.0}), version="v2") == ("v1", "request")  # pins are not for all tenants


def test_without_weights_a_request_that_meets_no_rule_may_use_any_version() -> None:
    one = split(rules=[CANARY_RULE])
    assert assign(one) is None
    assert why(one, header_matches=(CANARY,)) == ("v2", "rule 1")


def test_a_version_is_drawn_by_session_tenant_or_request() -> None:
    weights = {"v1": 1.0, "v2": 1.0}
    assert why(split(weights=weights), session=7)[1] == "session"
    assert why(split(weights=weights, sticky="tenant"), session=7)[1] == "tenant"
    assert why(split(weights=weights, sticky="none"), "v2", session=7)[1] == "request"
    assert why(split(weights=weights), "v2") == ("v2", "kept")
    # No session stays with a version that is to get no requests, and a session keeps its version whatever is cached.
    assert why(split(weights={"v1": 1.0, "v2": 0.0}), "v2") == ("v1", "request")
    assert {why(split(weights=weights), "v2", session=s)[0] for s in range(20)} == {"v1", "v2"}


def test_one_session_and_one_tenant_have_one_version_each() -> None:
    one, by_tenant = split(weights={"v1": 1.0, "v2": 1.0}), split(weights={"v1": 1.0, "v2": 1.0}, sticky="tenant")
    for n in range(20):
        drawn = {one.assign(request(f"{n}-{i}", session=n + 1), SERVED, lambda _r: "") for i in range(5)}
        assert len(drawn) == 1
    assert len({by_tenant.assign(request(f"q{i}"), SERVED, lambda _r: "") for i in range(20)}) == 1


@given(WEIGHTS)
@RUN
def test_each_version_gets_its_share(weights: dict[str, float]) -> None:
    drawn = list(map(split(weights=weights).draw, MANY))
    total, n = sum(weights.values()), len(MANY)
    for version, weight in weights.items():
        share = weight / total
        # Five standard deviations of a binomial count, plus one for cases that are all but impossible.
        assert abs(drawn.count(version) - n * share) <= 5.0 * sqrt(n * share * (1.0 - share)) + 1.0
        assert weight > 0.0 or version not in drawn


@given(WEIGHTS, st.sampled_from(("v1", "v2", "v3", "v4")), st.floats(0.01, 100.0))
@RUN
def test_a_growing_weight_takes_sessions_from_the_others_and_moves_no_other(
    weights: dict[str, float], version: str, more: float
) -> None:
    before, after = split(weights=weights), split(weights={**weights, version: weights.get(version, 0.0) + more})
    moved = [(a, b) for a, b in ((before.draw(who), after.draw(who)) for who in MANY[:1000]) if a != b]
    assert {b for _, b in moved} <= {version}


@given(WEIGHTS, st.randoms(use_true_random=False))
@RUN
def test_neither_the_order_nor_the_unit_of_weights_matters(weights: dict[str, float], rng: Random) -> None:
    items = list(weights.items())
    rng.shuffle(items)
    one, other = split(weights=weights), split(weights={version: weight * 4.0 for version, weight in items})
    assert [one.draw(who) for who in MANY[:200]] == [other.draw(who) for who in MANY[:200]]


def test_from_5_to_10_percent_moves_5_percent() -> None:
    before, after = split(weights={"v1": 95.0, "v2": 5.0}), split(weights={"v1": 90.0, "v2": 10.0})
    moved = [(a, b) for a, b in ((before.draw(who), after.draw(who)) for who in MANY) if a != b]
    assert set(moved) == {("v1", "v2")}
    assert abs(len(moved) / len(MANY) - 0.05) < 0.015


def test_two_models_and_two_names_are_two_experiments() -> None:
    half = {"v1": 1.0, "v2": 1.0}
    one, named, other = (
        split(weights=half),
        split(weights=half, name="again"),
        Split("other", SplitConfig(weights=half)),
    )
    for two in (named, other):
        equal = sum(one.draw(who) == two.draw(who) for who in MANY)
        assert abs(equal / len(MANY) - 0.5) < 0.05


def test_a_draw_is_the_same_on_every_machine() -> None:
    """Several balancers of one region must agree, and so must two builds of one fleet."""
    one = split(weights={"v1": 60.0, "v2": 40.0})
    assert [one.draw(who) for who in range(12)] == DRAWN


DRAWN = ["v2", "v1", "v1", "v2", *["v1"] * 8]


# -- those in force


def split_config(**fields) -> SplitConfig:
    return SplitConfig.model_validate(fields)


def test_an_override_goes_before_the_configuration_and_the_rest_stays() -> None:
    rules = [{"tenant": "acme", "version": "v1"}, {"header": {"name": "X-Canary", "value": "yes"}, "version": "v2"}]
    splits = Splits({MODEL: split_config(rules=rules, weights={"v1": 1}, sticky="tenant")})
    configured = splits.of(MODEL)
    assert configured is not None
    assert splits.override({MODEL: split_config(weights={"v2": 1})}) == {MODEL}
    config = splits.of(MODEL).config
    assert (config.weights, config.sticky, config.rules) == ({"v2": 1.0}, "tenant", configured.config.rules)
    assert [(rule.version, rule.tenant, rule.header_match) for rule in config.rules] == [
        ("v1", "acme", None),
        ("v2", "", CANARY),
    ]
    assert splits.override({MODEL: split_config(weights={"v2": 1}), "other": split_config(pinning=True)}) == {"other"}
    assert splits.override({}) == {MODEL, "other"}
    assert splits.of(MODEL).config == configured.config
    assert splits.of("other") is None


def test_only_splits_in_force_need_headers_pins_and_sessions() -> None:
    splits = Splits()
    assert splits.of(MODEL) is None
    assert (splits.header_matches(MODEL), splits.may_pin(MODEL), splits.wants_session) == ((), False, False)
    splits.override({MODEL: split_config(rules=[{"cookie": {"name": "ab", "value": "b"}, "version": "v2"}])})
    assert (splits.header_matches(MODEL), splits.may_pin(MODEL), splits.wants_session) == ((COOKIE,), False, False)
    assert splits.header_matches("other") == ()
    splits.override({MODEL: split_config(weights={"v1": 1}, pinning=True)})
    assert (splits.header_matches(MODEL), splits.may_pin(MODEL), splits.wants_session) == ((), True, True)
    splits.override({MODEL: split_config(weights={"v1": 1}, sticky="none")})
    assert not splits.wants_session


@pytest.mark.parametrize("served", [SERVED, set()])
def test_the_split_in_force_is_shown_to_operators(served: set[str]) -> None:
    splits = Splits({MODEL: split_config(rules=[{"tenant": "acme", "version": "v1"}], weights={"v2": 3})})
    found = splits.status(served)[MODEL]
    assert (found["rules"], found["weights"], found["sticky"]) == (["tenant acme: v1"], {"v2": 3.0}, "session")
    assert found["unserved"] == ([] if served else ["v1", "v2"])


# -- as they are written


WRITTEN = {
    "rules": [
        {"header": {"name": "X-Canary", "value": "yes"}, "version": "v2"},
        {"cookie": {"name": "ab", "value": "b"}, "version": "v2"},
        {"tenant": "acme", "version": "v1"},
    ],
    "weights": {"v1": 95, "v2": 5},
}


def test_a_rule_looks_at_one_thing() -> None:
    config = SplitConfig.model_validate(WRITTEN)
    marks = [rule.header_match for rule in config.rules]
    assert marks == [HeaderMatch("header", "x-canary", "yes"), HeaderMatch("cookie", "ab", "b"), None]
    assert (config.sticky, config.fallback, config.pinning, config.versions) == ("session", True, False, {"v1", "v2"})


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"rules": [{"version": "v2"}]}, "a rule looks at one thing"),
        ({"rules": [{"version": "v2", "tenant": "a", "cookie": {"name": "a", "value": "b"}}]}, "one thing"),
        ({"rules": [{"tenant": "a"}]}, "version"),
        ({"rules": [{"version": "v2", "header": {"name": "x-farhop-canary", "value": "b"}}]}, "is not passed on"),
        ({"rules": [{"version": "v2", "header": {"name": "Authorization", "value": "b"}}]}, "is not passed on"),
        ({"rules": [{"version": "v2", "header": {"name": "x-canary", "value": " b"}}]}, "pattern"),
        ({"weights": {"v1": -1}}, "greater than or equal to 0"),
        ({"weights": {"v1": float("nan")}}, "less than or equal to"),
        ({"weights": {"v1": 0, "v2": 0}}, "all are 0"),
        ({"weights": {"v 1": 1}}, "pattern"),
        ({"weights": {f"v{n}": 1 for n in range(17)}}, "at most 16"),
        ({"sticky": "user"}, "'session', 'tenant' or 'none'"),
        ({"wieghts": {}}, "Extra inputs"),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(written: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SplitConfig.model_validate(written)
