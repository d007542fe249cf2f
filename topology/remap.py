"""Replaces one map by another under the same law: checks whether data could then go where it could not before.

A region of the old map may become lawful for less, but not for more, until a law of a later epoch says so, since the
author of the present law saw the old map. A new region is lawful for whatever the law allows there. Pure; never decides
which of two maps is in force.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from topology.law import Law, Scope
from topology.problems import Problem, path_of, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from topology.model import Region, Topology

TENANTS_SHOWN_MAX = 4


def remembered(topology: Topology, gone: Mapping[str, Region]) -> Topology:
    """The map with the regions that were in it once, as they were last: what comes back elsewhere is no new one."""
    return replace(topology, regions={**gone, **topology.regions}) if gone else topology


def widenings(before: Law, after: Law) -> Iterator[Problem]:
    """Every region of the map before that could hold more under the map after, with the law the same: the first reason
    of each."""
    remedy = (
        f"raise the file's epoch above {before.epoch} together with the law that is to hold there, or restart every "
        "balancer with it"
    )
    both = frozenset(before.topology.regions) & frozenset(after.topology.regions)
    kept = {scope: before.keeps(after, scope, both) for scope in Scope}
    for name in sorted(both):
        gained = _gained(before, after, name)
        if gained:
            what = f"lies in {quoted(gained[0])} now and did not: what is confined to there could go to {quoted(name)}"
            yield Problem(path_of("regions", name), what, remedy)
            continue
        for scope, none in kept.items():
            if not none and not before.keeps(after, scope, frozenset((name,))):
                whose = _whose(before, after, scope, name)
                what = f"would be lawful for {whose} ({scope}), which it is not under the law of epoch {before.epoch}"
                yield Problem(path_of("regions", name), what, remedy)
                break


def _gained(before: Law, after: Law, region: str) -> list[str]:
    """Places of the map before in which the region lies only now. Nothing could be confined to one that was not."""
    places = after.topology.ancestors(region) - before.topology.ancestors(region)
    known = {*before.topology.places, *before.topology.regions}
    known.update(place for name in before.topology.regions for place in before.topology.ancestors(name))
    return sorted(places & known)


def _whose(before: Law, after: Law, scope: Scope, region: str) -> str:
    names = [
        name
        for name in sorted(after.topology.tenants)
        if region in after.verdict(name, "", scope).lawful and region not in before.verdict(name, "", scope).lawful
    ]
    if not names:
        return "a model or a key that has a rule"
    more = f" and {len(names) - TENANTS_SHOWN_MAX} more" if len(names) > TENANTS_SHOWN_MAX else ""
    return f"tenant {', '.join(map(quoted, names[:TENANTS_SHOWN_MAX]))}{more}"


def fits(before: Law, gone: Mapping[str, Region], after: Law) -> list[Problem]:
    """As `widenings`, with what was there once. Empty: it may take the place of the other."""
    return list(widenings(Law(remembered(before.topology, gone), before.lineage), after))
