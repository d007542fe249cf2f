"""Predicts the effect of a law or an override before it is written: tenants left without a region, and traffic that
moves.

The inputs are the law and the regions' state as global balancers see it. Pure; never reads anything, never refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from farhop.loose_json import dicts, dicts_by_name
from topology.law import Law, Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from topology.model import Tenant, Topology

LINES_MAX = 16
NAMES_MAX = 8


class LawfulChange(NamedTuple):
    """Regions that become lawful for a tenant, or are no more. `model`, `key`: "" where its own rule decides."""

    tenant: str
    scope: str
    model: str
    key: str
    gained: tuple[str, ...]
    lost: tuple[str, ...]

    def __str__(self) -> str:
        whose = [
            self.tenant,
            *([f"model {self.model}"] if self.model else []),
            *([f"key {self.key}"] if self.key else []),
        ]
        parts = [f"{verb} {_named(names)}" for verb, names in (("gains", self.gained), ("loses", self.lost)) if names]
        return f"{', '.join(whose)}: {self.scope} {' and '.join(parts)}"


# -- a law in the place of another


def moved(before: Topology, after: Topology) -> list[LawfulChange]:
    """The regions that are lawful under one law and not under the other: by tenant, and separately for models and keys
    that differ from their tenant."""
    then, now = Law(before), Law(after)
    moves: list[LawfulChange] = []
    for name in sorted({*before.tenants, *after.tenants}):
        old, new = before.tenants.get(name), after.tenants.get(name)
        alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[LawfulChange]] = {}
        for scope in Scope:
            if (one := _move(then, now, name, scope)) is not None:
                alike.setdefault((one.gained, one.lost), []).append(one)
        moves += [ones[0]._replace(scope=", ".join(one.scope for one in ones)) for ones in alike.values()]
        models = {*before.models, *after.models}.union(*(one.models for one in (old, new) if one is not None))
        keys = {key.name for one in (old, new) if one is not None for key in one.keys if key.within}
        whole = _move(then, now, name, Scope.PROCESSING)
        for model, key in (*((one, "") for one in sorted(models)), *(("", one) for one in sorted(keys))):
            apart = _move(then, now, name, Scope.PROCESSING, model, key)
            if apart is not None and (whole is None or apart[-2:] != whole[-2:]):
                moves.append(apart)
    return moves


def _move(then: Law, now: Law, tenant: str, scope: Scope, model: str = "", key: str = "") -> LawfulChange | None:
    was = then.verdict(tenant, model, scope, key=key).lawful
    is_now = now.verdict(tenant, model, scope, key=key).lawful
    if was == is_now:
        return None
    return LawfulChange(tenant, str(scope), model, key, tuple(sorted(is_now - was)), tuple(sorted(was - is_now)))


def stranded(before: Topology, after: Topology, statuses: Iterable[Mapping[str, Any]]) -> list[str]:
    """Whose requests for what are served now, in the eyes of any of these balancers, and would be nowhere; sorted."""
    then, now = Law(before), Law(after)
    left: set[str] = set()
    for status in statuses:
        for model, regions in serving(status).items():
            here = frozenset(regions)
            for tenant in before.tenants.values():
                for key in ("", *(one.name for one in tenant.keys if one.within)):
                    was = then.verdict(tenant.name, model, key=key).lawful & here
                    if was and not now.verdict(tenant.name, model, key=key).lawful & here:
                        left.add(
                            f"{tenant.name} ({model}{f', key {key}' if key else ''}), served in {_named(sorted(was))}"
                        )
    return sorted(left)


def of_law(before: Topology, after: Topology, statuses: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a change of the law changes for tenants and for served models, as lines of text."""
    lines = [f"moves: {one}" for one in moved(before, after)]
    return _short([*(f"strands: {one}" for one in stranded(before, after, statuses)), *lines])


# -- an override


def drained(topology: Topology, statuses: Sequence[Mapping[str, Any]], region: str) -> list[str]:
    """The effect of a drain of a region, in lines for people."""
    lines = [f"strands: {one}" for one in stranded_by(topology, statuses, region)]
    law, there = Law(topology), 0
    moves: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for model, regions in _served(statuses).items():
        others = frozenset(regions) - {region}
        if region not in regions:
            continue
        for name in topology.tenants:
            lawful = law.verdict(name, model).lawful
            if region in lawful and lawful & others:
                moves.setdefault((model, tuple(sorted(lawful & others))), []).append(name)
    for status in statuses:
        there += sum(
            int(one.get("in_flight") or 0) for one in dicts(status.get("regions")) if one.get("region") == region
        )
    lines += [
        f"moves: {model} of {_named(sorted(names))}: to {_named(to)}" for (model, to), names in sorted(moves.items())
    ]
    return _short([*lines, f"in flight there now, and finishing there: {there}"])


def pinned(
    topology: Topology, statuses: Sequence[Mapping[str, Any]], region: str, tenant: str, model: str, *, strict: bool
) -> list[str]:
    """The effect of a pin, in lines for people. A pin that is not strict leaves no tenant without a region."""
    law, served = Law(topology), _served(statuses)
    lines = []
    for name in [tenant] if tenant else sorted(topology.tenants):
        for one in [model] if model else sorted(served):
            regions, lawful = frozenset(served.get(one, ())), law.verdict(name, one).lawful
            if region not in lawful:
                lines.append(f"stays as it is: {one} of {name}: {law.verdict(name, one).why_not(region)}")
            elif region not in regions:
                there = f"{region} does not serve it"
                lines.append(
                    f"strands: {one} of {name}: {there}" if strict else f"stays as it is: {one} of {name}: {there}"
                )
            elif (lawful & regions) - {region}:
                lines.append(
                    f"moves: {one} of {name}: to {region}, from {_named(sorted((lawful & regions) - {region}))}"
                )
    return _short(sorted(lines, key=lambda line: not line.startswith("strands")))


def biased(topology: Topology, statuses: Sequence[Mapping[str, Any]], region: str) -> list[str]:
    """The tenants that a region's bias concerns, in lines for people: those that have another region. A bias leaves no
    tenant without a region."""
    law, free, bound = Law(topology), dict[tuple[str, tuple[str, ...]], list[str]](), dict[str, list[str]]()
    for model, regions in sorted(_served(statuses).items()):
        for name in topology.tenants:
            lawful = law.verdict(name, model).lawful & regions
            if region in lawful and len(lawful) > 1:
                free.setdefault((model, tuple(sorted(lawful - {region}))), []).append(name)
            elif region in lawful:
                bound.setdefault(model, []).append(name)
    lines = [f"may move: {model} of {_named(sorted(names))}: or to {_named(to)}" for (model, to), names in free.items()]
    lines += [f"stays as it is: {model} of {_named(sorted(names))}: nowhere else" for model, names in bound.items()]
    return _short(lines or [f"moves nothing: {region} serves no tenant now"])


def routed(
    topology: Topology,
    statuses: Sequence[Mapping[str, Any]],
    region: str,
    tenant: str,
    model: str,
    route: Mapping[str, Any],
) -> list[str]:
    """The effect of a route of an entry, in lines for people."""
    law, served = Law(topology), _served(statuses)
    if route.get("models"):
        return _short(list(_stands_for(law, served, tenant, route["models"])))
    order = route.get("regions") if route.get("policy") == "failover" else None
    moves: dict[tuple[str, str], list[str]] = {}
    lines = []
    for one in [model] if model else sorted(served):
        there = frozenset(served.get(one, ()))
        for name in [tenant] if tenant else sorted(topology.tenants):
            lawful = law.verdict(name, one).lawful
            if route.get("foreign_quota", 1.0) < 1.0 and region in lawful and region not in there:
                lines.append(f"strands: {one} of {name} once the quota is used up: {region} does not serve it")
            first = next((each for each in order or () if each in lawful & there), "")
            if lawful & there:
                moves.setdefault((one, first or "as it ranks those that are lawful and serve"), []).append(name)
    lines += [
        f"decides: {one} of {_named(names)}: {_led(destination)}" for (one, destination), names in sorted(moves.items())
    ]
    return _short(lines or ["moves nothing: it applies to no served tenant"])


def _stands_for(
    law: Law, served: Mapping[str, set[str]], tenant: str, steps: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """For each model of a cascade, a line: the regions that serve it now, and the tenants that may not use these."""
    tenants = [tenant] if tenant else sorted(law.topology.tenants)
    for name in (str(step["model"]) for step in steps):
        there = served.get(name)
        if not there:
            yield f"unknown: {name} is served nowhere now; it is passed over until it is"
            continue
        without = [one for one in tenants if not law.verdict(one, name).lawful & there]
        kept = f"; the law keeps it from {_named(without)}" if without else ""
        yield f"stands for: {name}, served in {_named(sorted(there))}{kept}"


def split(status: Mapping[str, Any], model: str, weights: Mapping[str, float]) -> list[str]:
    """What weights of a model's versions change in a region, by its balancer's view of its replicas."""
    replicas = dicts(status.get("replicas"))
    there = {str(one.get("version")) for one in replicas if model in (one.get("models") or ())}
    if not there:
        return [f"moves nothing: no replica there serves {model}"]
    absent = [version for version, weight in weights.items() if weight > 0 and version not in there]
    none = [version for version in sorted(there - {""}) if not weights.get(version)]
    lines = [f"strands: {version}: no replica there has it; the split's fallback decides" for version in absent]
    lines += [f"moves: all of {version} elsewhere: it gets no share" for version in none]
    return lines


def shares(weights: Mapping[str, float]) -> str:
    """What share of a model's traffic each version gets."""
    total = sum(weights.values())
    percent = {version: 100.0 * weight / total if total > 0 else 0.0 for version, weight in weights.items()}
    return "shares: " + ", ".join(f"{version} {share:.4g} %" for version, share in percent.items())


def _led(destination: str) -> str:
    return destination if " " in destination else f"to {destination}"


def _served(statuses: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """By model, the regions where any of these balancers sees it served."""
    found: dict[str, set[str]] = {}
    for status in statuses:
        for model, regions in serving(status).items():
            found.setdefault(model, set()).update(regions)
    return found


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_MAX]) + (f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else "")


def _short(lines: list[str]) -> list[str]:
    return [*lines[:LINES_MAX], *([f"and {len(lines) - LINES_MAX} more"] if len(lines) > LINES_MAX else [])]


# -- the last region of a tenant


def stranded_by(topology: Topology, statuses: Iterable[Mapping[str, Any]], region: str) -> list[str]:
    """Whose requests for what no other region could serve, in the eyes of any of these balancers; sorted."""
    law = Law(topology)
    left: set[str] = set()
    for status in statuses:
        for model, regions in serving(status).items():
            if region in regions:
                others = frozenset(name for name, sure in regions.items() if sure and name != region)
                for tenant in topology.tenants.values():
                    left.update(_left(law, tenant, model, region, others))
    return sorted(left)


def _left(law: Law, tenant: Tenant, model: str, region: str, others: frozenset[str]) -> Iterator[str]:
    for key in ("", *(one.name for one in tenant.keys if one.within)):
        lawful = law.verdict(tenant.name, model, key=key).lawful
        if region in lawful and not lawful & others:
            yield f"{tenant.name} ({model}{f', key {key}' if key else ''})"


def serving(status: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """By model, the regions that serve it, and whether surely: a suspect region does not count as an alternative."""
    found: dict[str, dict[str, bool]] = {}
    for one in dicts(status.get("regions")):
        if one.get("state") not in ("up", "suspect"):
            continue
        for instance in dicts(one.get("instances")):
            if instance.get("draining"):
                continue
            for model, offer in dicts_by_name(instance.get("models")).items():
                if offer.get("replicas_ready"):
                    found.setdefault(model, {})[str(one.get("region"))] = one["state"] == "up"
    return found


def unserved(statuses: Iterable[Mapping[str, Any]], models: Iterable[str]) -> list[str]:
    """Of these models, those that no region serves now and that no name stands for, as lines of text."""
    known = [
        {*serving(one), *(str(r["model"]) for r in dicts(one.get("routes")) if r.get("models"))} for one in statuses
    ]
    there = set().union(*known)
    named = _named(sorted(there)) or "none"
    return [f'no region serves "{one}" now; there is {named}' for one in models if known and one not in there]
