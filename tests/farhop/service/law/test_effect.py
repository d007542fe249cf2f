"""The effect of a law or an override before it is set: stranded tenants, moved traffic."""

from __future__ import annotations

from dataclasses import replace

from farhop.service.law import effect
from farhop.service.law.effect import serving, stranded_by
from topology.model import Key, Region, Residency, Rule, Tenant, Topology

REGIONS = {
    "paris": Region("paris", "Paris", "fr", frozenset({"eu"}), 0.0, 0.0),
    "milan": Region("milan", "Milan", "it", frozenset({"eu"}), 0.0, 0.0),
    "osaka": Region("osaka", "Osaka", "jp", frozenset(), 0.0, 0.0),
}


def topology() -> Topology:
    def tenant(name: str, *allow: str, **fields: object) -> Tenant:
        return Tenant(name, (), Residency(Rule(allow)), **fields)

    keys = (Key("wide", "a" * 64), Key("home", "b" * 64, within=("jp",)))
    tenants = {
        "all": tenant("all", "world"),
        "eu": tenant("eu", "eu"),
        "jp": tenant("jp", "jp"),
        "keyed": Tenant("keyed", keys, Residency(Rule(("world",)))),
        "lawless": Tenant("lawless"),
        "picky": tenant("picky", "world", models={"big": Rule(("it",))}),
    }
    return Topology("t", 1, REGIONS, tenants)


def status(*models: str, ready: int = 2, draining: bool = False, **states: str) -> dict:
    offers = {model: {"replicas_ready": ready} for model in models or ("small",)}
    instance = {"draining": draining, "models": offers}
    return {"regions": [{"region": name, "state": state, "instances": [instance]} for name, state in states.items()]}


UP = {"paris": "up", "milan": "up", "osaka": "up"}


def test_tenants_and_keys_that_have_no_other_region():
    assert stranded_by(topology(), [status(**UP)], "osaka") == ["jp (small)", "keyed (small, key home)"]
    assert stranded_by(topology(), [status(**UP)], "milan") == []
    assert stranded_by(topology(), [status("big", **UP)], "milan") == ["picky (big)"]


def test_a_region_that_does_not_surely_serve_is_nobodys_refuge():
    for state in ("suspect", "down", "draining"):
        assert stranded_by(topology(), [status(**{**UP, "paris": state})], "milan") == ["eu (small)"]


def test_a_region_that_one_balancer_sees_down_is_no_refuge():
    fearful = status(**{**UP, "paris": "down"})
    assert stranded_by(topology(), [status(**UP), fearful], "milan") == ["eu (small)"]


def test_effect_lists_models_that_no_region_serves():
    one = status("small", **UP) | {"routes": [{"model": "auto", "models": [{"model": "small"}]}, {"model": "later"}]}
    assert effect.unserved([one], ["small", "auto"]) == []
    assert effect.unserved([status(**{**UP, "paris": "down"}), one], ["big", "later"]) == [
        'no region serves "big" now; there is auto, small',
        'no region serves "later" now; there is auto, small',
    ]
    assert effect.unserved([], ["big"]) == [], "nobody answers: nobody knows"


def test_a_region_that_serves_no_tenant_can_be_drained():
    for dead in (status(**{**UP, "osaka": "down"}), status(ready=0, **UP), status(draining=True, **UP)):
        assert stranded_by(topology(), [dead], "osaka") == []
    assert stranded_by(topology(), [], "osaka") == []


def test_a_suspect_region_still_serves_its_tenants():
    assert stranded_by(topology(), [status(**{**UP, "osaka": "suspect"})], "osaka")


def test_a_malformed_status_lists_no_serving_region():
    for nonsense in ({}, {"regions": 5}, {"regions": [5, {"state": "up", "instances": [{"models": {"m": 5}}, 7]}]}):
        assert serving(nonsense) == {}


# -- laws


def under(**rules: Rule) -> Topology:
    """The same world with other rules for some tenants."""
    world = topology()
    tenants = {name: replace(one, residency=Residency(rules[name])) if name in rules else one
               for name, one in world.tenants.items()}  # fmt: skip
    return replace(world, epoch=2, tenants=tenants)


def test_effect_of_a_law_lists_regions_gained_and_lost_by_tenant_model_and_key():
    moves = [str(one) for one in effect.moved(topology(), under(eu=Rule(("fr", "jp"))))]
    assert moves == ["eu: processing, logging, hints gains osaka and loses milan"]  # everybody may still read it
    gone = replace(topology(), tenants={name: one for name, one in topology().tenants.items() if name != "jp"})
    assert "jp: entry loses milan, osaka, paris" in [str(one) for one in effect.moved(topology(), gone)]
    models = replace(topology(), models={"small": Rule(("world",), ("jp",))})
    assert "keyed, key home: processing loses osaka" not in [str(one) for one in effect.moved(topology(), models)]
    assert "all, model small: processing loses osaka" in [str(one) for one in effect.moved(topology(), models)]
    assert effect.moved(topology(), topology()) == []


def test_a_law_strands_tenants_that_no_region_serves_any_more():
    narrower = under(eu=Rule(("it",)))
    assert effect.stranded(topology(), narrower, [status(paris="up", osaka="up")]) == ["eu (small), served in paris"]
    assert effect.stranded(topology(), narrower, [status(**UP)]) == []
    lines = effect.of_law(topology(), narrower, [status(paris="up")])
    assert lines[0].startswith("strands: eu (small)")
    assert "moves: eu: processing, logging, hints loses paris" in lines


# -- overrides


def test_a_drain_moves_each_to_where_else_it_is_served_lawfully():
    lines = effect.drained(topology(), [status(**UP)], "milan")
    assert "moves: small of eu: to paris" in lines
    assert "moves: small of all, keyed, picky: to osaka, paris" in lines
    assert effect.drained(topology(), [status(**UP)], "osaka")[0] == "strands: jp (small)"


def test_a_pin_moves_the_lawful_and_a_strict_one_strands_where_it_is_not_served():
    world, now = topology(), [status(**UP)]
    assert effect.pinned(world, now, "milan", "eu", "", strict=False) == ["moves: small of eu: to milan, from paris"]
    lines = effect.pinned(world, now, "osaka", "", "small", strict=True)
    assert any(line.startswith("stays as it is: small of eu: ") for line in lines)
    elsewhere = [status(paris="up")]
    assert effect.pinned(world, elsewhere, "milan", "eu", "", strict=True) == [
        "strands: small of eu: milan does not serve it"
    ]
    assert effect.pinned(world, elsewhere, "milan", "eu", "", strict=False)[0].startswith("stays as it is")


def test_a_bias_affects_tenants_that_have_another_region():
    lines = effect.biased(topology(), [status(**UP)], "osaka")
    assert "may move: small of all, keyed, picky: or to milan, paris" in lines
    assert "stays as it is: small of jp: nowhere else" in lines
    assert effect.biased(topology(), [status(paris="up")], "osaka") == ["moves nothing: osaka serves no tenant now"]


def test_a_route_leads_to_the_first_lawful_region_that_serves_and_a_quota_may_strand():
    failover = {"policy": "failover", "regions": ["osaka", "milan"]}
    lines = effect.routed(topology(), [status(**UP)], "paris", "", "small", failover)
    assert "decides: small of all, jp, keyed, picky: to osaka" in lines
    assert "decides: small of eu: to milan" in lines
    quota = {"policy": "nearest", "foreign_quota": 0.2}
    assert effect.routed(topology(), [status(osaka="up")], "paris", "all", "", quota) == [
        "strands: small of all once the quota is used up: paris does not serve it",
        "decides: small of all: as it ranks those that are lawful and serve",
    ]
    assert effect.routed(topology(), [], "paris", "", "", {})[0].startswith("moves nothing")


def test_the_models_of_an_alias_are_shown_one_by_one():
    stands = {"models": [{"model": "small"}, {"model": "huge"}]}
    assert effect.routed(topology(), [status(paris="up")], "paris", "jp", "auto", stands) == [
        "stands for: small, served in paris; the law keeps it from jp",
        "unknown: huge is served nowhere now; it is passed over until it is",
    ]
