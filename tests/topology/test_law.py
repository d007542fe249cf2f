from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology import law as law_module
from topology.law import NARROWINGS_MAX, PLACES_MAX, Law, Narrow, Scope, narrowing
from topology.lineage import NO_LINEAGE, Lineage
from topology.model import WORLD, Key, Place, Region, Residency, Rule, Tenant, Topology


def _region(name: str, country: str, *jurisdictions: str) -> Region:
    return Region(name, name, country, frozenset(jurisdictions), 0.0, 0.0)


REGIONS = {
    "virginia": _region("virginia", "us"),
    "frankfurt": _region("frankfurt", "de", "eu", "eea"),
    "tokyo": _region("tokyo", "jp"),
}


def _law(residency: Residency | None, *, world: dict[str, Rule] | None = None, **tenant: object) -> Law:
    who = Tenant("acme", residency=residency, **tenant)  # type: ignore[arg-type]
    places = {"cn": Place("cn", "country")}
    return Law(Topology("w", 7, REGIONS, {"acme": who}, world or {}, places=places))


def test_the_places_of_a_region_stay_when_others_come_and_change_with_its_own() -> None:
    law = _law(Residency(Rule((WORLD,))))

    def mapped(**regions: Region) -> Law:
        return Law(replace(law.topology, regions={**REGIONS, **regions}))

    at = law.places_of("tokyo")
    assert at == mapped(seoul=_region("seoul", "kr")).places_of("tokyo")
    others = (_region("tokyo", "kr"), _region("tokyo", "jp", "eu"))
    assert len({at, *(mapped(tokyo=other).places_of("tokyo") for other in others)}) == 3
    assert 0 not in {at, law.places_of("nowhere")}
    assert max(at, law.places_of("nowhere"), law.fingerprint) < 1 << 64  # as they travel


def test_a_rule_allows_by_region_country_jurisdiction_or_world() -> None:
    for place, lawful in [
        ("frankfurt", {"frankfurt"}),
        ("de", {"frankfurt"}),
        ("eea", {"frankfurt"}),
        ("jp", {"tokyo"}),
        ("cn", set()),
        (WORLD, set(REGIONS)),
    ]:
        assert _law(Residency(Rule((place,)))).verdict("acme", "m").lawful == lawful


@pytest.mark.parametrize(
    ("model", "alias", "lawful"),
    [
        ("americas-asia", "americas-europe", {"virginia"}),  # neither holds the other
        ("americas", "americas-europe", {"virginia"}),
        ("americas-europe", "americas", {"virginia"}),
        ("europe", "americas", set()),
        ("americas-europe", "free", {"virginia", "frankfurt"}),
        ("free", "europe", {"frankfurt"}),
        ("free", "", set(REGIONS)),
    ],
)
def test_a_request_by_a_name_is_bound_by_the_rules_of_the_name_and_of_its_model(
    model: str, alias: str, lawful: set[str]
) -> None:
    rules = {
        "americas": Rule(("us",)), "europe": Rule(("eu",)), "americas-europe": Rule(("us", "eu")),
        "americas-asia": Rule(("us", "jp")),
    }  # fmt: skip
    law = _law(Residency(Rule((WORLD,))), world=rules)
    asked = SimpleNamespace(tenant="acme", model=model, alias=alias, narrow=(), key="")
    for _ in range(2):  # decided, and remembered
        verdict = law.request_verdict(asked)
        assert (verdict.lawful, verdict.epoch) == (lawful, 7)
        assert verdict.excluded.keys() == REGIONS.keys() - lawful
        for region in verdict.excluded:
            assert verdict.why_not(region) in (law.verdict("acme", name).why_not(region) for name in (model, alias))
    narrowed = law.request_verdict(SimpleNamespace(**{**vars(asked), "narrow": (("jp",),)}))
    assert narrowed.lawful == lawful & {"tokyo"}


def test_a_fingerprint_names_the_map_and_the_bases_that_rules_bind() -> None:
    anywhere, rules = Residency(Rule((WORLD,))), {"base": Rule(("eu",))}
    law = _law(anywhere, world=rules)
    topology = law.topology
    regions = {**REGIONS, "tokyo": _region("tokyo", "jp", "eu")}
    others = [
        Law(replace(topology, regions=regions)),
        Law(replace(topology, places={})),
        law.knowing({"sql": frozenset({"base"})}),
        law.knowing({"sql": None}),
    ]
    assert len({one.fingerprint for one in (law, *others)}) == 1 + len(others)
    same = replace(topology, regions=dict(reversed(REGIONS.items())), local_rtt_ms=2.0)
    assert Law(same, {"llama": frozenset({"unruled"})}).fingerprint == law.fingerprint
    assert _law(anywhere).knowing({"sql": None}).fingerprint == _law(anywhere).fingerprint  # where no model has a rule


def test_deny_wins_over_a_closer_allow() -> None:
    verdict = _law(Residency(Rule(("frankfurt", "world"), ("eu",)))).verdict("acme", "m")
    assert verdict.lawful == {"virginia", "tokyo"}
    assert verdict.excluded == {"frankfurt": "tenant acme: processing denies eu"}


def test_each_level_narrows_and_is_named() -> None:
    law = _law(
        Residency(Rule((WORLD,), ("us",))),
        world={"m": Rule((WORLD,), ("jp",)), "n": Rule(("us",))},
        models={"m": Rule(("eu", "jp", "us"))},
        keys=(Key("ci", "a" * 64, ("jp",)),),
    )
    assert law.verdict("acme", "m").excluded == {
        "virginia": "tenant acme: processing denies us",
        "tokyo": "model m: processing denies jp",
    }
    assert law.verdict("acme", "n").excluded["tokyo"] == "model n: processing allows only us"
    keyed = law.verdict("acme", "m", key="ci")
    assert keyed.lawful == frozenset()
    assert keyed.excluded["frankfurt"] == "key ci of tenant acme stays within jp"
    asked = law.verdict("acme", "other", narrow=(("us", "jp"),))
    assert asked.lawful == {"tokyo"}
    assert asked.excluded["frankfurt"] == "request asked to stay within us, jp"


def test_the_order_of_a_tenants_keys_does_not_matter() -> None:
    keys = Key("ci", "a" * 64, ("jp",)), Key("web", "b" * 64, ("eu",))
    before, after = (_law(Residency(Rule((WORLD,))), keys=order) for order in (keys, keys[::-1]))
    assert after.keeps(before, Scope.HINTS, frozenset(REGIONS))


def test_a_models_rule_takes_nothing_from_entry_and_a_base_that_is_not_known_any_more_takes_every_region() -> None:
    everywhere, rules = frozenset(REGIONS), {"base": Rule((WORLD,))}
    before = _law(Residency(Rule((WORLD,))), world=rules)
    narrower = _law(Residency(Rule((WORLD,))), world={"base": Rule(("jp",))})
    assert narrower.keeps(before, Scope.ENTRY, everywhere)
    assert not narrower.keeps(before, Scope.PROCESSING, everywhere)
    known = before.knowing({"tune": frozenset({"base"}), "base": frozenset()})
    orphaned = before.knowing({"tune": None, "base": frozenset()})
    for region in REGIONS:
        assert not orphaned.keeps(known, Scope.PROCESSING, frozenset({region}))


def test_a_key_that_is_narrowed_or_gone_takes_its_hints_along_and_one_that_is_renewed_does_not() -> None:
    def law(*keys: Key) -> Law:
        return _law(Residency(Rule((WORLD,))), keys=keys)

    everywhere, free = frozenset(REGIONS), Key("ci", "a" * 64)
    assert not law(Key("ci", "a" * 64, ("jp",))).widens(law(free), Scope.HINTS, everywhere)
    assert not law().widens(law(free), Scope.HINTS, everywhere)
    assert law(Key("ci", "b" * 64), Key("new", "c" * 64, ("jp",))).widens(law(free), Scope.HINTS, everywhere)
    assert law(free).widens(law(Key("ci", "a" * 64, ("jp",))), Scope.HINTS, everywhere)


def test_a_rule_for_a_base_holds_for_its_adapters_by_whatever_name_they_go() -> None:
    everybody, mine = {"base-70b": Rule((WORLD,), ("jp",))}, {"base-70b": Rule((WORLD,), ("de",))}
    lineage: Lineage = {
        "sql": frozenset({"base"}), "base": frozenset({"base-70b"}), "plain": frozenset(), "stray": None,
    }  # fmt: skip
    law = _law(Residency(Rule((WORLD,))), world=everybody, models=mine).knowing(lineage)
    assert law.verdict("acme", "sql").excluded == {
        "frankfurt": "tenant acme, model base-70b, the base of sql: processing denies de",
        "tokyo": "model base-70b, the base of sql: processing denies jp",
    }
    assert law.verdict("acme", "base").lawful == {"virginia"}
    assert law.verdict("acme", "plain").lawful == set(REGIONS)
    why = "models have rules, and nobody knows the base of adapter stray"
    assert law.verdict("acme", "stray").excluded == dict.fromkeys(REGIONS, why)
    assert law.verdict("acme", "stray", Scope.ENTRY).lawful == set(REGIONS)
    assert law.knowing(dict(lineage)) is law
    unruled = _law(Residency(Rule((WORLD,)))).knowing(lineage)
    assert unruled.verdict("acme", "stray").lawful == set(REGIONS)


def test_what_rules_about_a_model_leave_names_no_region_that_is_nothing_to_the_tenant() -> None:
    elsewhere = Residency(Rule(("eu",)), logging=Rule(("us",)))
    law = _law(elsewhere, world={"m": Rule((WORLD,), ("de",)), "n": Rule((WORLD,), ("jp",))})
    assert law.left_by_rules("acme", "m") == ("virginia",)
    assert [law.left_by_rules(*who) for who in (("acme", "n"), ("acme", "other"), ("nobody", "m"))] == [None] * 3


def test_the_tenants_own_model_rule_is_named_as_such() -> None:
    law = _law(Residency(Rule((WORLD,))), models={"m": Rule((WORLD,), ("us",))})
    assert law.verdict("acme", "m").excluded == {"virginia": "tenant acme, model m: processing denies us"}


def test_unknown_tenants_keys_and_places_are_never_lawful() -> None:
    law = _law(Residency(Rule((WORLD,))))
    stranger = law.verdict("nobody", "m", Scope.ENTRY)
    assert stranger.lawful == frozenset()
    assert stranger.why_not("tokyo") == "tenant nobody is not in the topology"
    assert law.verdict("acme", "m", key="lost").why_not("tokyo") == "tenant acme has no key lost"
    assert law.verdict("acme", "m", narrow=(("atlantis",),)).lawful == frozenset()
    assert law.verdict("acme", "m").why_not("atlantis") == "region atlantis is not in the topology"
    assert law.verdict("acme", "m").why_not("tokyo") is None


def test_a_tenant_without_residency_may_go_nowhere_in_any_scope() -> None:
    for scope in Scope:
        verdict = _law(None).verdict("acme", "m", scope)
        assert verdict.lawful == frozenset()
        assert verdict.why_not("tokyo") == "tenant acme has no residency policy"


def test_denying_an_unknown_place_fails_closed() -> None:
    verdict = _law(Residency(Rule((WORLD,), ("atlantis",)))).verdict("acme", "m")
    assert verdict.lawful == frozenset()
    assert verdict.why_not("tokyo") == "tenant acme: processing denies atlantis, which is not in the topology"


def test_denying_a_known_place_without_regions_denies_nothing() -> None:
    assert _law(Residency(Rule((WORLD,), ("cn",)))).verdict("acme", "m").lawful == set(REGIONS)


def test_an_empty_allow_allows_nothing() -> None:
    verdict = _law(Residency(Rule(()))).verdict("acme", "m")
    assert verdict.why_not("tokyo") == "tenant acme: processing allows only nothing"


def test_scopes_left_out_entry_is_open_and_the_rest_follow_processing() -> None:
    law = _law(Residency(Rule(("eu",))))
    assert law.verdict("acme", "m", Scope.ENTRY).lawful == set(REGIONS)
    for scope in (Scope.PROCESSING, Scope.LOGGING, Scope.HINTS):
        verdict = law.verdict("acme", "m", scope)
        assert verdict.lawful == {"frankfurt"}
        assert verdict.why_not("tokyo") == "tenant acme: processing allows only eu"


def test_entry_logging_and_hints_may_have_their_own_rules() -> None:
    law = _law(Residency(Rule(("eu",)), entry=Rule(("eu", "us")), logging=Rule(("us",)), hints=Rule((), ())))
    assert law.verdict("acme", "m", Scope.ENTRY).lawful == {"frankfurt", "virginia"}
    assert law.verdict("acme", "m", Scope.LOGGING).lawful == {"virginia"}
    assert law.verdict("acme", "m", Scope.HINTS).lawful == frozenset()
    assert law.verdict("acme", "m", Scope.ENTRY).why_not("tokyo") == "tenant acme: entry allows only eu, us"


def test_model_rules_and_a_keys_places_do_not_bind_entry_but_an_explicit_narrowing_does() -> None:
    keys = (Key("ci", "a" * 64, ("jp",)),)
    law = _law(Residency(Rule((WORLD,))), world={"m": Rule(("eu",))}, keys=keys)
    assert law.verdict("acme", "m", Scope.ENTRY, key="ci").lawful == set(REGIONS)
    assert law.verdict("acme", "m", Scope.ENTRY, narrow=(("jp",),)).lawful == {"tokyo"}


def test_narrowings_intersect_and_an_empty_one_holds_nothing() -> None:
    law = _law(Residency(Rule((WORLD,))))
    assert law.verdict("acme", "m", narrow=(("jp", "eu"), ("eu", "us"))).lawful == {"frankfurt"}
    assert law.verdict("acme", "m", narrow=((),)).lawful == frozenset()
    assert narrowing((), ("jp",), ()) == (("jp",),)


def test_too_long_a_narrowing_is_refused() -> None:
    law = _law(Residency(Rule((WORLD,))))
    assert law.verdict("acme", "m", narrow=(("jp",),) * NARROWINGS_MAX).lawful == {"tokyo"}
    for narrow in ((("jp",),) * (NARROWINGS_MAX + 1), (("jp",) * (PLACES_MAX + 1),)):
        verdict = law.verdict("acme", "m", narrow=narrow)
        assert verdict.lawful == frozenset()
        assert "more than" in verdict.excluded["tokyo"]


def test_a_request_may_name_eight_lists_of_1024_places() -> None:
    """In figures: clients and both tiers must agree on them, whatever the constants are called."""
    law = _law(Residency(Rule((WORLD,))))
    for narrow, lawful in (
        ((("jp",),) * 8, {"tokyo"}),
        ((("jp",),) * 9, set()),
        ((("jp",) * 1024,), {"tokyo"}),
        ((("jp",) * 1025,), set()),
    ):
        assert law.verdict("acme", "m", narrow=narrow).lawful == lawful


@pytest.mark.parametrize("name", ["x" * 64, "x" * 65, "a b", "\x7f"])
def test_a_name_of_up_to_64_plain_characters_is_shown_as_it_is(name: str) -> None:
    reason = _law(Residency(Rule((WORLD,)))).verdict("acme", "m", narrow=((name,),)).excluded["tokyo"]
    shown = name if name.isprintable() and len(name) <= 64 else ascii(name[:64])
    assert reason == f"request asked to stay within {shown}"


@pytest.mark.parametrize(("places", "more"), [(8, ""), (9, " and 1 more"), (10, " and 2 more")])
def test_eight_places_are_named_and_the_rest_counted(places: int, more: str) -> None:
    names = tuple(f"p{n}" for n in range(places))
    reason = _law(Residency(Rule((WORLD,)))).verdict("acme", "m", narrow=(names,)).excluded["tokyo"]
    assert reason == f"request asked to stay within {', '.join(names[:8])}{more}"


def test_the_widest_narrowing_that_is_remembered() -> None:
    for places, remembered in ((64, 1), (65, 0)):
        law = _law(Residency(Rule((WORLD,))))
        law.verdict("acme", "m", narrow=(("jp",) * places,))
        assert _remembered(law) == remembered
    law = _law(Residency(Rule((WORLD,))))
    law.verdict("acme", "m", narrow=(("jp",),) * 8)
    assert _remembered(law) == 1


def _of_epoch(epoch: int, *tenants: str) -> Law:
    return Law(Topology("w", epoch, REGIONS, {name: Tenant(name) for name in tenants}))


def test_a_law_supersedes_what_is_older_or_only_kept_its_place() -> None:
    held, place = _of_epoch(7, "acme"), _of_epoch(7)
    assert (held.held_epoch, place.held_epoch) == (7, 6)
    assert held.supersedes(_of_epoch(6, "acme")) is True
    assert held.supersedes(place) is True
    assert held.supersedes(_of_epoch(7, "acme")) is False
    assert held.supersedes(_of_epoch(8)) is False
    assert place.supersedes(held) is False


def test_tenants_patience_is_set_by_its_residency() -> None:
    def patience_s(residency: Residency | None) -> float:
        return _law(residency).patience_s("acme")

    rule = Rule((WORLD,))
    assert patience_s(Residency(rule, on_exhausted="wait", wait_max_s=4.0)) == 4.0
    assert patience_s(Residency(rule, on_exhausted="refuse", wait_max_s=4.0)) == 0.0
    assert patience_s(None) == 0.0
    assert _law(Residency(rule)).patience_s("stranger") == 0.0


def test_residency_values_are_places_and_anywhere() -> None:
    law = _law(Residency(Rule((WORLD,))))
    assert law.residencies() == sorted({"cn", "global", "world"})
    assert [law.within(word) for word in ("eu", "frankfurt", "cn")] == [("eu",), ("frankfurt",), ("cn",)]
    assert [law.within(word) for word in ("global", "world")] == [(), ()]
    assert law.within("atlantis") is None


def test_reasons_are_short_and_printable_whatever_a_client_sends() -> None:
    law = _law(Residency(Rule((WORLD,))))
    for place in ("x" * 100_000, "a\r\nset-cookie: b", "\x1b[31m", "日本"):
        reason = law.verdict("acme", "m", narrow=((place,),)).excluded["tokyo"]
        assert len(reason) < 600
        assert reason.isascii()
        assert reason.isprintable()
    many = law.verdict("acme", "m", narrow=(tuple(f"p{n}" for n in range(100)),)).excluded["tokyo"]
    assert many == "request asked to stay within p0, p1, p2, p3, p4, p5, p6, p7 and 92 more"


def test_a_verdict_is_remembered_and_names_its_epoch() -> None:
    law = _law(Residency(Rule((WORLD,))))
    first = law.verdict("acme", "m", narrow=(("jp",),))
    assert law.verdict("acme", "another model", narrow=(("jp",),)) is first
    assert first.epoch == law.epoch == 7


def _remembered(law: Law) -> int:
    return len(law.fresh) + len(law.stale)


def test_remembered_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law_module, "_MEMO_MAX", 5)
    law = _law(Residency(Rule((WORLD,))), world={f"m{n}": Rule((WORLD,)) for n in range(50)})
    for n in range(50):
        assert law.verdict("acme", f"m{n}").lawful == set(REGIONS)
        assert _remembered(law) <= 10


@pytest.mark.parametrize(
    "asked",
    [
        {"tenant": "stranger"},
        {"narrow": (("atlantis",),)},
        {"narrow": (("jp", "x" * 100_000),)},
        {"narrow": (("jp",) * 65,)},
        {"narrow": (("jp",),) * (NARROWINGS_MAX + 1)},
        {"key": "lost"},
    ],
)
def test_verdicts_on_unknown_tenants_keys_and_places_are_not_remembered(asked: dict[str, Any]) -> None:
    law = _law(Residency(Rule((WORLD,))))
    law.verdict(**{"tenant": "acme", "model": "m", **asked})
    assert _remembered(law) == 0


def test_models_without_a_rule_share_one_memory() -> None:
    law = _law(Residency(Rule((WORLD,))))
    for n in range(50):
        law.verdict("acme", f"unknown {n}")
    assert _remembered(law) == 1


def test_the_first_level_that_excludes_is_the_one_named() -> None:
    law = _law(Residency(Rule(("jp",), ("us",))), world={"m": Rule((WORLD,), (WORLD,))})
    assert law.verdict("acme", "m", narrow=(("cn",),)).excluded == {
        "virginia": "tenant acme: processing denies us",
        "frankfurt": "tenant acme: processing allows only jp",
        "tokyo": "model m: processing denies world",
    }


def test_a_verdict_in_use_stays_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law_module, "_MEMO_MAX", 3)
    law = _law(Residency(Rule((WORLD,))), world={f"m{n}": Rule((WORLD,)) for n in range(20)})
    kept = law.verdict("acme", "m0")
    for n in range(1, 20):
        law.verdict("acme", f"m{n}")
        assert law.verdict("acme", "m0") is kept


# Random worlds, against the law written as plainly as possible.

_NAMES = st.sampled_from(["world", "j0", "j1", "c0", "c1", "c2", "empty", "r0", "r1", "r2", "r3", "atlantis"])
_PLACES = st.lists(_NAMES, max_size=3).map(tuple)
_RULES = st.builds(Rule, _PLACES, _PLACES)
_NARROWS = st.lists(_PLACES, max_size=2).map(tuple)
_REGION = st.tuples(st.sampled_from(["c0", "c1", "c2"]), st.frozensets(st.sampled_from(["j0", "j1"])))


_BASES = st.none() | st.frozensets(st.sampled_from(["m", "n", "b", "elsewhere"]), max_size=2)
_OPTIONAL = st.none() | _RULES
_RULED = st.dictionaries(st.sampled_from(["m", "n"]), _RULES)
_EMPTY = {"empty": Place("empty", "jurisdiction")}
_SITES = st.lists(_REGION, min_size=1, max_size=4).map(
    lambda sites: {f"r{n}": _region(f"r{n}", country, *inside) for n, (country, inside) in enumerate(sites)}
)


@st.composite
def _tenants(draw: st.DrawFn, name: str, names: tuple[str, ...] = ("k",)) -> Tenant:
    """Whose every clause is there or not."""
    residency = draw(st.none() | st.builds(Residency, _RULES, _OPTIONAL, _OPTIONAL, _OPTIONAL))
    keys = tuple(Key(key, f"{name}{key}" * 32, draw(_PLACES)) for key in names)
    return Tenant(name, keys=keys, residency=residency, models=draw(_RULED))


@st.composite
def _worlds(draw: st.DrawFn) -> Topology:
    return Topology("w", 1, draw(_SITES), {"t": draw(_tenants("t"))}, draw(_RULED), places=_EMPTY)


@st.composite
def _successions(draw: st.DrawFn) -> tuple[Law, Law]:
    """Two laws of one map. Every clause may appear, vanish or change from one to the other: tenants and keys, too, and
    what is known of the models."""
    regions, both = draw(_SITES), []
    mostly = st.booleans() | st.just(value=True)
    for epoch in (1, 2):
        keys = tuple(key for key in "kl" if draw(mostly))
        kept = both[0].topology.tenants if both else {}
        tenants = {
            name: kept[name] if name in kept and draw(st.booleans()) else draw(_tenants(name, keys))
            for name in ("t", "u")
            if draw(mostly)
        }
        if not draw(mostly):
            tenants = dict(kept) or tenants
        rules = both[0].topology.models if both and draw(st.booleans()) else draw(_RULED)
        lineage = draw(st.fixed_dictionaries({}, optional={
            "a": _BASES, "b": _BASES, "m": st.just(frozenset[str]()) | st.just(frozenset({"n"})),
        }))  # fmt: skip
        both.append(Law(Topology("w", epoch, regions, tenants, rules, places=_EMPTY), lineage))
    return both[0], both[1]


def _passes(world: Topology, region: str, rule: Rule | None) -> bool:
    if rule is None:
        return True
    known = set(world.places).union(*(world.ancestors(name) for name in world.regions))
    around = world.ancestors(region)
    denied = any(place in around or place not in known for place in rule.deny)
    return not denied and any(place in around for place in rule.allow)


def _bases(lineage: Lineage, model: str, seen: tuple[str, ...] = ()) -> set[str | None]:
    """The model and all it is based on; None among them where nobody knows."""
    if model in seen:
        return set()
    answer = lineage.get(model, frozenset())
    more = [{None}] if answer is None else [_bases(lineage, base, (*seen, model)) for base in answer]
    return {model}.union(*more)


def _naive(
    world: Topology, region: str, model: str, scope: Scope, narrow: Narrow, key: str, lineage: Lineage = NO_LINEAGE,
    name: str = "t",
) -> bool:  # fmt: skip
    tenant = world.tenants.get(name)
    if tenant is None or tenant.residency is None or key not in {"", *(one.name for one in tenant.keys)}:
        return False
    own = getattr(tenant.residency, scope)
    within = next((one.within for one in tenant.keys if one.name == key), ())
    if scope is Scope.ENTRY:
        levels = [own]
        bounds = list(narrow)
    else:
        bases = _bases(lineage, model)
        if None in bases and (tenant.models or world.models):
            return False
        levels = [own or tenant.residency.processing]
        levels += [rules.get(base) for rules in (tenant.models, world.models) for base in bases]
        bounds = list(narrow) + ([within] if within else [])
    around = world.ancestors(region)
    return all(_passes(world, region, rule) for rule in levels) and all(around & set(bound) for bound in bounds)


_SCOPES = st.sampled_from(list(Scope))
_MODELS = st.sampled_from(["m", "n", "unruled"])
_KEYS = st.sampled_from(["", "k", "lost"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_successions(), st.frozensets(st.sampled_from(["r0", "r1", "r2", "r3"]), min_size=1))
def test_a_law_widens_if_it_takes_nothing_away_from_any_tenant(laws: tuple[Law, Law], inside: frozenset[str]) -> None:
    before, after = laws
    served = {"", "m", "n", "unruled", *(before.lineage.keys() & after.lineage.keys())}
    for scope in (Scope.HINTS, Scope.PROCESSING):
        lost = [
            (name, model, key, region)
            for name, tenant in before.topology.tenants.items()
            for model in served
            for key in ("", *(one.name for one in tenant.keys))
            for region in sorted(inside & before.topology.regions.keys())
            if _naive(before.topology, region, model, scope, (), key, before.lineage, name)
            and not _naive(after.topology, region, model, scope, (), key, after.lineage, name)
        ]
        assert after.widens(before, scope, inside) is (not lost), lost


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_successions(), _MODELS | st.sampled_from(["a", "b"]), _SCOPES)
def test_an_adapter_is_bound_as_its_base_is(laws: tuple[Law, Law], model: str, scope: Scope) -> None:
    law = laws[0]
    world, lineage = law.topology, law.lineage
    for name in world.tenants:
        lawful = {region for region in world.regions if _naive(world, region, model, scope, (), "", lineage, name)}
        assert law.verdict(name, model, scope).lawful == lawful


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_worlds(), st.lists(st.tuples(_MODELS, _SCOPES, _NARROWS, _KEYS), min_size=1, max_size=4))
def test_verdicts_agree_with_a_naive_evaluation(
    world: Topology, questions: list[tuple[str, Scope, Narrow, str]]
) -> None:
    law = Law(world)
    for model, scope, narrow, key in questions * 2:
        verdict = law.verdict("t", model, scope, narrow, key)
        assert verdict.lawful == {name for name in world.regions if _naive(world, name, model, scope, narrow, key)}
        assert verdict.lawful | set(verdict.excluded) == set(world.regions)
        assert not verdict.lawful & set(verdict.excluded)
        assert all(verdict.excluded.values())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_worlds(), _MODELS, _SCOPES, _NARROWS, _PLACES, _KEYS)
def test_narrowing_a_request_never_adds_lawful_regions(
    world: Topology, model: str, scope: Scope, narrow: Narrow, further: tuple[str, ...], key: str
) -> None:
    law = Law(world)
    wide = law.verdict("t", model, scope, narrow)
    assert law.verdict("t", model, scope, (*narrow, further)).lawful <= wide.lawful
    assert law.verdict("t", model, scope, narrow, key).lawful <= wide.lawful


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_worlds(), _MODELS, _NAMES)
def test_allowing_more_at_one_level_never_passes_another(world: Topology, model: str, place: str) -> None:
    tenant = world.tenants["t"]
    if tenant.residency is None:
        return
    rule = tenant.residency.processing
    wider = Tenant("t", residency=Residency(Rule((*rule.allow, place), rule.deny)), models=tenant.models)
    widened = Law(Topology("w", 2, world.regions, {"t": wider}, world.models, places=world.places)).verdict("t", model)
    for region in widened.lawful:
        for level in (tenant.models.get(model), world.models.get(model), Rule((WORLD,), rule.deny)):
            assert _passes(world, region, level)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_worlds(), _MODELS, _NAMES, st.booleans())
def test_deny_wins_at_every_level(world: Topology, model: str, place: str, worldwide: bool) -> None:
    denial = Rule((WORLD, place), (place,))
    tenant = Tenant("t", residency=Residency(Rule((WORLD,)) if worldwide else denial))
    models = {model: denial} if worldwide else {}
    verdict = Law(Topology("w", 1, world.regions, {"t": tenant}, models, places=world.places)).verdict("t", model)
    assert not any(place in world.ancestors(region) for region in verdict.lawful)


def _world_of(epoch: int = 1, **residency: Residency) -> Law:
    keys = (Key("k", "0" * 64), Key("home", "1" * 64, within=("us",)))
    tenants = {
        name: Tenant(name, keys=keys if name == "acme" else (), residency=one) for name, one in residency.items()
    }
    return Law(Topology("w", epoch, REGIONS, tenants))


@pytest.mark.parametrize(
    ("after", "widens"),
    [
        ({"acme": Residency(Rule(("world",)))}, True),
        ({"acme": Residency(Rule(("eu",)))}, True),
        ({"acme": Residency(Rule(("world",), ("de",)))}, False),
        ({"acme": Residency(Rule(("eu",)), hints=Rule((), ()))}, False),
        ({"acme": Residency(Rule(("eu",))), "more": Residency(Rule(("us",)))}, True),
        ({"more": Residency(Rule(("eu",)))}, False),
        ({"acme": Residency(Rule(("us",)), hints=Rule(("world",)))}, True),
    ],
)
def test_whether_a_law_takes_nothing_away(after: dict[str, Residency], widens: bool) -> None:
    before = _world_of(acme=Residency(Rule(("eu",))))
    everywhere = frozenset(REGIONS)
    assert _world_of(2, **after).widens(before, Scope.HINTS, everywhere) is widens
    assert _world_of(2, **after).widens(before, Scope.HINTS, frozenset())


@st.composite
def _epochs(draw: st.DrawFn) -> tuple[Law, Law]:
    """Two laws, in which tenants, keys and every clause may appear, vanish or change; half of the time of one map, else
    regions may have moved or gone."""
    sites = draw(st.lists(_REGION, min_size=1, max_size=4))
    moved = draw(st.just(sites) | st.lists(_REGION, min_size=1, max_size=4))
    maps = [
        {f"r{n}": _region(f"r{n}", country, *inside) for n, (country, inside) in enumerate(one)}
        for one in (sites, moved)
    ]
    models = st.dictionaries(st.sampled_from(["m", "n"]), _RULES, max_size=2)
    places = {"empty": Place("empty", "jurisdiction")}
    optional = st.none() | _RULES
    residency = st.none() | st.builds(Residency, _RULES, optional, optional, optional)

    def tenant(name: str) -> Tenant:
        keys = tuple(Key(k, f"{name}{k}", draw(_PLACES)) for k in draw(st.sets(st.sampled_from("kl"))))
        return Tenant(name, keys=keys, residency=draw(residency), models=draw(models))

    before = {name: tenant(name) for name in "tu"}
    after = {name: draw(st.just(one) | st.builds(lambda n=name: tenant(n))) for name, one in before.items()}
    after = {name: one for name, one in after.items() if draw(st.integers(0, 4))}
    world, other = draw(models), draw(st.none() | models)
    worlds = ((1, before, world), (2, after, world if other is None else other))
    return tuple(
        Law(Topology("w", n, regions, who, rules, places=places))
        for (n, who, rules), regions in zip(worlds, maps, strict=True)
    )  # type: ignore[return-value]


def _plainly_keeps(after: Law, before: Law, scope: Scope, regions: frozenset[str]) -> bool:
    """As it is defined: verdict by verdict."""
    return not any(
        before.verdict(name, model, scope, key=key).lawful & regions - after.verdict(name, model, scope, key=key).lawful
        for name, tenant in before.topology.tenants.items()
        for model in ("", "m", "n")
        for key in ("", *(one.name for one in tenant.keys))
    )


def _where(law: Law, region: str) -> set[str]:
    world = law.topology
    return set(world.ancestors(region)) if region in world.regions else set()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(_epochs(), _SCOPES, st.frozensets(st.sampled_from(["r0", "r1", "r2", "r3", "r9"]), min_size=1))
def test_comparing_laws_clause_by_clause_equals_comparing_all_verdicts(
    epochs: tuple[Law, Law], scope: Scope, regions: frozenset[str]
) -> None:
    before, after = epochs
    keeps = _plainly_keeps(after, before, scope, regions)
    assert after.keeps(before, scope, regions) is keeps
    stays = all(_where(before, region) <= _where(after, region) for region in regions)
    assert after.widens(before, scope, regions) is (keeps and stays), "a request may ask to stay within any place"
    assert before.widens(before, scope, regions)


_ANYWHERE = Residency(Rule((WORLD,)))
_EU_ALONE = {"m": Rule(("eu",))}
_KEYS_OF_TWO = (Key("k", "0" * 64), Key("home", "1" * 64, within=("de",)))


def _of_one(
    epoch: int, who: Tenant, models: dict[str, Rule] | None = None, lineage: Lineage = NO_LINEAGE, at: str = "de"
) -> Law:
    """A law for one tenant; Frankfurt lies in the country `at`."""
    regions = {**REGIONS, "frankfurt": _region("frankfurt", at, "eu", "eea")}
    places = {"de": Place("de", "country")}
    return Law(Topology("w", epoch, regions, {who.name: who}, models or {}, places=places), lineage)


_ACME = Tenant("acme", keys=_KEYS_OF_TWO, residency=_ANYWHERE)
_ACME_RULED = Tenant("acme", keys=_KEYS_OF_TWO, residency=_ANYWHERE, models=_EU_ALONE)
_BOUND, _ORPHAN = {"tuned": frozenset({"m"})}, {"tuned": None}


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        (_of_one(1, _ACME), _of_one(2, _ACME), False),
        (_of_one(1, _ACME), _of_one(2, _ACME, _EU_ALONE), True),
        (_of_one(1, _ACME, _EU_ALONE), _of_one(2, _ACME), False),
        (_of_one(1, _ACME), _of_one(2, _ACME_RULED), True),
        (_of_one(1, _ACME_RULED), _of_one(2, _ACME), False),
        (_of_one(1, _ACME_RULED, {"m": Rule(("de",))}), _of_one(2, _ACME_RULED, _EU_ALONE), False),
        # The tenant and its rules are the same, and so is the map: but a served model has another base.
        (_of_one(1, _ACME, _EU_ALONE, {"tuned": frozenset()}), _of_one(2, _ACME, _EU_ALONE, _BOUND), True),
        (_of_one(1, _ACME, _EU_ALONE, {"tuned": frozenset()}), _of_one(2, _ACME, _EU_ALONE, _ORPHAN), True),
        (_of_one(1, _ACME_RULED, {}, {"tuned": frozenset()}), _of_one(2, _ACME_RULED, {}, _BOUND), True),
        (_of_one(1, _ACME, _EU_ALONE, _ORPHAN), _of_one(2, _ACME, _EU_ALONE, _BOUND), False),
        # Only the map: the tenant may still go anywhere, the key that is confined to a country may not.
        (_of_one(1, _ACME), _of_one(2, _ACME, at="fr"), True),
        (_of_one(1, _ACME, at="fr"), _of_one(2, _ACME), False),
    ],
)
def test_what_a_single_clause_takes_away_is_noticed(before: Law, after: Law, lost: bool) -> None:
    everywhere = frozenset(REGIONS)
    assert after.keeps(before, Scope.PROCESSING, everywhere) is (not lost)
    assert after.keeps(before, Scope.PROCESSING, frozenset({"nowhere"})) is True


def test_an_unknown_key_is_not_remembered() -> None:
    law = _of_one(1, _ACME)
    law.verdict("acme", "m", key="guessed")
    assert _remembered(law) == 0
    law.verdict("acme", "m", key="home")
    assert _remembered(law) == 1


@pytest.mark.parametrize("law", [_of_one(1, _ACME, _EU_ALONE, _ORPHAN), _of_one(1, _ACME_RULED, {}, _ORPHAN)])
def test_an_adapter_of_unknown_base_is_lawful_nowhere_if_any_model_has_rules(law: Law) -> None:
    assert law.verdict("acme", "tuned").lawful == frozenset()
    assert "nobody knows the base" in law.verdict("acme", "tuned").excluded["tokyo"]


def test_many_tenants_are_compared_without_a_verdict_each() -> None:
    """1,000 tenants took 1.6 s of the loop. Counted in calls, since time on a busy machine is nobody's measure."""
    many = 2000

    def law(epoch: int) -> Law:
        tenants = {
            f"t{n}": Tenant(
                f"t{n}",
                keys=tuple(Key(f"k{k}", f"{n}/{k}", ("eu",) if k else ()) for k in range(3)),
                residency=Residency(Rule(("eu", "us")[: 1 + n % 2])),
            )
            for n in range(many)
        }
        return Law(Topology("w", epoch, REGIONS, tenants, {f"m{n}": Rule((WORLD,)) for n in range(50)}))

    calls = 0

    def count(_frame: object, what: str, _arg: object) -> None:
        nonlocal calls
        calls += what == "call"

    before, after = law(1), law(2)
    sys.setprofile(count)
    try:
        assert after.widens(before, Scope.HINTS, frozenset(REGIONS))
    finally:
        sys.setprofile(None)
    assert calls < 25 * many
    assert not before.fresh, "no verdict was made"


def test_only_the_regions_asked_for_count() -> None:
    before, after = _world_of(acme=Residency(Rule(("world",)))), _world_of(2, acme=Residency(Rule(("eu",))))
    inside = after.verdict("acme", "").lawful
    assert after.widens(before, Scope.HINTS, inside)
    assert not after.widens(before, Scope.HINTS, frozenset(REGIONS))


def test_how_long_a_tenant_may_wait() -> None:
    law = _world_of(
        acme=Residency(Rule(("eu",)), on_exhausted="wait", wait_max_s=3.0),
        hasty=Residency(Rule(("eu",)), wait_max_s=3.0),
    )
    assert [law.patience_s(name) for name in ("acme", "hasty", "nobody")] == [3.0, 0.0, 0.0]
