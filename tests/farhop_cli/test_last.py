"""Whether a region is the last that somebody has."""

from farhop_cli.last import bereft, serving
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
    assert bereft(topology(), [status(**UP)], "osaka") == ["jp (small)", "keyed (small, key home)"]
    assert bereft(topology(), [status(**UP)], "milan") == []
    assert bereft(topology(), [status("big", **UP)], "milan") == ["picky (big)"]


def test_a_region_that_does_not_surely_serve_is_nobodys_refuge():
    for state in ("suspect", "down", "draining"):
        assert bereft(topology(), [status(**{**UP, "paris": state})], "milan") == ["eu (small)"]


def test_one_balancers_fear_is_enough():
    fearful = status(**{**UP, "paris": "down"})
    assert bereft(topology(), [status(**UP), fearful], "milan") == ["eu (small)"]


def test_a_region_that_serves_nobody_can_be_drained():
    for dead in (status(**{**UP, "osaka": "down"}), status(ready=0, **UP), status(draining=True, **UP)):
        assert bereft(topology(), [dead], "osaka") == []
    assert bereft(topology(), [], "osaka") == []


def test_a_suspect_one_still_serves_somebody():
    assert bereft(topology(), [status(**{**UP, "osaka": "suspect"})], "osaka")


def test_nonsense_serves_nothing():
    for nonsense in ({}, {"regions": 5}, {"regions": [5, {"state": "up", "instances": [{"models": {"m": 5}}, 7]}]}):
        assert serving(nonsense) == {}
