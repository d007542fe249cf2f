"""The oracle's own arithmetic, on cases that anybody can check by hand."""

from __future__ import annotations

from farhop_lab.studies.law_oracle import INSIDE, MAP, REGIONS, bases, lawful

LAW = {
    "epoch": 3,
    "models": {"base": {"allow": ["world"], "deny": ["fr"]}},
    "tenants": [
        {
            "name": "t",
            "residency": {"processing": {"allow": ["europe", "jp"], "deny": ["ch"]}, "entry": {"allow": ["us"]}},
            "keys": [{"name": "0"}, {"name": "1", "within": ["apac"]}],
            "models": {"sql": {"allow": ["eu"]}},
        },
        {"name": "free", "residency": {"processing": {"allow": ["world"]}}, "keys": []},
    ],
}


def ask(scope: str, key: str = "0", asked: str = "", model: str = "plain", known: dict | None = None, who: str = "t"):
    return lawful(LAW, scope, who, key, asked, model, known or {})


def test_each_clause_excludes_exactly_its_regions() -> None:
    assert ask("processing") == {"paris", "tokyo"}
    assert ask("hints") == {"paris", "tokyo"}
    assert ask("entry", model="base") == {"virginia"}
    assert ask("processing", "1") == {"tokyo"}
    assert ask("processing", asked="jp") == {"tokyo"}
    assert ask("processing", asked="atlantis") == set()
    assert ask("processing", model="base") == {"tokyo"}
    assert ask("processing", model="sql") == {"paris"}


def test_the_oracle_allows_nothing_to_unknown_tenants_and_models() -> None:
    assert ask("processing", "9") == set()
    assert ask("processing", who="nobody") == set()


def test_rules_of_all_base_models_bind_an_adapter() -> None:
    known = {"a": {"base"}, "b": {"a"}, "stray": None, "odd": {"stray"}, "round": {"round"}}
    assert bases("b", known) == {"a", "b", "base"}
    assert bases("round", known) == {"round"}
    assert bases("odd", known) is None
    assert ask("processing", model="b", known=known) == {"tokyo"}
    assert ask("processing", model="odd", known=known) == set()
    assert ask("entry", model="odd", known=known) == {"virginia"}


def test_places_of_the_oracle_match_the_map() -> None:
    for place, regions in INSIDE.items():
        assert regions == {name for name in REGIONS if place in MAP.ancestors(name)}
