"""`farhop drain` and `undrain` against a real etcd: what is written, what is refused, what is told."""

import asyncio
from datetime import UTC, datetime

import pytest

from farhop.store.contract import override_key
from farhop.store.documents import overrides as documents
from farhop_cli.drain import bereft, serving
from farhop_cli.fleet import Fleet
from topology.model import Key, Region, Residency, Rule, Tenant, Topology


def drained(stands, region="virginia"):
    """What stands there, decoded."""
    value = stands.get(override_key(region))
    return documents.decode_drain(value) if value is not None else None


def test_a_drain_stands_under_a_lease_of_its_length(cli, stands):
    before = datetime.now(UTC)
    result = cli.run("drain", "set", "virginia", "--for", "30m", "--why", "kernel update", "--by", "ann@ops")
    assert (result.exit_code, result.stderr) == (0, "")
    one = drained(stands)
    assert (one.region, one.why, one.author) == ("virginia", "kernel update", "ann@ops")
    assert (one.for_s, one.over_s) == (1800.0, 10.0)
    assert before <= one.at <= datetime.now(UTC)
    for said in ("drained, over 10s", ", until 20", "farhop drain unset virginia", "3 of 3 balancers"):
        assert said in result.stdout


def test_it_goes_with_its_lease(cli, stands):
    assert cli.run("drain", "set", "virginia", "--for", "1s", "--why", "x", "--over", "0s").exit_code == 0
    assert drained(stands).over_s == 0.0

    async def gone(store):
        async with asyncio.timeout(10.0):
            while await store.get(override_key("virginia")) is not None:
                await asyncio.sleep(0.02)

    stands.do(gone)


def test_undrain_is_short_for_drain_unset(cli, stands):
    cli.run("drain", "set", "virginia", "--why", "new racks", "--by", "ann")
    result = cli.run("undrain", "virginia")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "by ann at " in result.stdout
    assert "virginia takes new requests again" in result.stdout
    assert drained(stands) is None
    assert "no drain stands there; nothing was changed" in cli.failed(cli.run("undrain", "virginia"), 1)
    assert 'did you mean "tokyo"?' in cli.failed(cli.run("undrain", "tokio"), 2)


def test_the_last_region_of_a_tenant_is_kept_unless_forced(cli, stands):
    for more in ((), ("--dry-run",)):
        said = cli.failed(cli.run("drain", "set", "tokyo", "--why", "x", *more), 1)
        assert "last region serving japan-only (m)" in said
        assert "--force" in said
    assert drained(stands, "tokyo") is None
    assert cli.run("drain", "set", "tokyo", "--why", "x", "--force").exit_code == 0
    assert drained(stands, "tokyo") is not None


def test_the_state_of_the_others_counts(cli, stands):
    stands.states["frankfurt"] = stands.states["tokyo"] = "down"
    assert "anywhere (m)" in cli.failed(cli.run("drain", "set", "virginia", "--why", "x"), 1)


def test_where_nobody_answers_nobody_can_tell(cli, stands, monkeypatch):
    async def nobody():
        return []

    monkeypatch.setattr(Fleet, "statuses", lambda _self: nobody())
    assert "nobody can tell" in cli.failed(cli.run("drain", "set", "virginia", "--why", "x"), 1)
    result = cli.run("drain", "set", "virginia", "--why", "x", "--force")
    assert result.exit_code == 0
    assert "0 of 3 balancers follow it by now" in result.stderr


def test_an_etcd_alone_cannot_tell_the_last_nor_a_region_that_does_not_report(cli, stands):
    stands.put("/farhop/v1/region/virginia/lb/a", b"{}")
    arguments = ("--why", "x", "--etcd", stands.endpoint)
    assert "give --config" in cli.failed(cli.run("drain", "set", "virginia", *arguments), 1)
    assert "no region of those that report" in cli.failed(cli.run("drain", "set", "tokyo", *arguments, "--force"), 2)
    assert cli.run("drain", "set", "virginia", *arguments, "--force").exit_code == 0
    assert drained(stands) is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--for", "8d"), "--for: give 1s to 7d"),
        (("--for", "0s"), "--for"),
        (("--for", "soon"), "no duration"),
        (("--over", "2h"), "--over: give 0s to 1h"),
    ],
)
def test_lengths_have_bounds(cli, stands, arguments, said):
    assert said in cli.failed(cli.run("drain", "set", "virginia", "--why", "x", *arguments), 2)
    assert drained(stands) is None


# -- the last region of a tenant

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
