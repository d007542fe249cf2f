"""Another map under the same law: among the regions that were known it may only ever take away."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from topology.law import Law, Scope
from topology.model import Key, Place, Region, Residency, Rule, Tenant, Topology
from topology.remap import fits, remembered, widenings

NAMES = ("r0", "r1", "r2", "r3")
_PLACES = st.lists(st.sampled_from((*NAMES, "c0", "c1", "j0", "j1", "world")), max_size=3).map(tuple)
_RULES = st.builds(Rule, _PLACES, _PLACES)
_OPTIONAL = st.none() | _RULES
_MODELS = st.dictionaries(st.sampled_from(("m", "n")), _RULES)


def region(name: str, country: str, *jurisdictions: str) -> Region:
    return Region(name, name, country, frozenset(jurisdictions), 0.0, 0.0)


@st.composite
def _maps(draw: st.DrawFn) -> dict[str, Region]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    inside = st.lists(st.sampled_from(("j0", "j1")), unique=True)
    return {name: region(name, draw(st.sampled_from(("c0", "c1"))), *draw(inside)) for name in sorted(names)}


@st.composite
def _tenants(draw: st.DrawFn) -> Tenant:
    residency = draw(st.none() | st.builds(Residency, _RULES, _OPTIONAL, _OPTIONAL, _OPTIONAL))
    return Tenant("t", keys=(Key("k", "k" * 64, draw(_PLACES)),), residency=residency, models=draw(_MODELS))


def world(regions: dict[str, Region], tenant: Tenant, models: dict[str, Rule]) -> Topology:
    places = {one: Place(one, "jurisdiction") for one in ("j0", "j1")}
    places |= {one: Place(one, "country") for one in ("c0", "c1")}
    return Topology("w", 3, regions, {"t": tenant}, models, places=places)


_QUESTIONS = st.tuples(
    st.sampled_from(("", "m", "n")), st.sampled_from(list(Scope)), st.lists(_PLACES, max_size=2).map(tuple),
    st.sampled_from(("", "k")),
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_maps(), _maps(), _tenants(), _MODELS, st.lists(_QUESTIONS, min_size=1, max_size=6))
def test_a_map_that_fits_makes_no_region_lawful_that_was_not(one, other, tenant, models, questions) -> None:
    before, after = Law(world(one, tenant, models)), Law(world(other, tenant, models))
    problems = list(widenings(before, after))
    known = frozenset(one) & frozenset(other)
    for model, scope, narrow, key in questions:
        more = after.verdict("t", model, scope, narrow, key).lawful & known
        more -= before.verdict("t", model, scope, narrow, key).lawful
        assert not more or problems
    assert all(problem.path and problem.message and problem.remedy for problem in problems)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(_maps(), min_size=2, max_size=5), _tenants(), _MODELS, st.lists(_QUESTIONS, min_size=1, max_size=3))
def test_a_region_that_vanishes_comes_back_with_no_more_than_it_had(maps, tenant, models, questions) -> None:
    law, gone = Law(world(maps[0], tenant, models)), {}
    bounds = {(q, name): q_lawful(law, q) for q in questions for name in law.topology.regions}
    for regions in maps[1:]:
        made = Law(world(regions, tenant, models))
        if fits(law, gone, made):
            continue  # the old map stays
        gone |= law.topology.regions
        law = made
        for q in questions:
            for name in law.topology.regions:
                first = bounds.setdefault((q, name), q_lawful(law, q))
                assert name in first or name not in q_lawful(law, q)
                bounds[q, name] = first & q_lawful(law, q) if name not in q_lawful(law, q) else first


def q_lawful(law: Law, question) -> frozenset[str]:
    model, scope, narrow, key = question
    return law.verdict("t", model, scope, narrow, key).lawful


TENANT = Tenant("acme", residency=Residency(Rule(("j0",))))
EVERYWHERE_ELSE = Tenant("acme", residency=Residency(Rule(("world",), ("c0",))))


def reasons(one: dict[str, Region], other: dict[str, Region], tenant: Tenant = TENANT) -> list[str]:
    laws = [Law(replace(world(each, tenant, {}), tenants={"acme": tenant})) for each in (one, other)]
    return [str(problem) for problem in widenings(laws[0], laws[1])]


def test_a_widening_map_is_refused_naming_region_place_and_tenant() -> None:
    moved = reasons({"r0": region("r0", "c0")}, {"r0": region("r0", "c0", "j0")})
    assert len(moved) == 1
    assert moved[0].startswith('regions.r0: lies in "j0" now and did not')
    assert "raise the file's epoch above 3" in moved[0]
    freed = reasons({"r0": region("r0", "c0")}, {"r0": region("r0", "c9")}, EVERYWHERE_ELSE)
    assert freed[0].startswith('regions.r0: would be lawful for tenant "acme" (processing)')


def test_a_new_region_a_smaller_one_and_a_new_place_are_no_widening() -> None:
    here = {"r0": region("r0", "c0", "j0")}
    assert not reasons(here, here | {"r1": region("r1", "c1", "j0")})
    assert not reasons(here, {"r0": region("r0", "c0")})
    assert not reasons(here, {})
    assert not reasons(here, {"r0": region("r0", "c0", "j0", "j9")})


def test_a_region_that_was_removed_is_compared_with_its_last_known_form() -> None:
    first, none, back = ({"r0": region("r0", "c0")}, {"r1": region("r1", "c1")}, {"r0": region("r0", "c0", "j0")})
    laws = [Law(world(one, TENANT, {})) for one in (first, none, back)]
    assert not fits(laws[1], {}, laws[2])
    assert fits(laws[1], first, laws[2])
    assert remembered(laws[0].topology, {}) is laws[0].topology
