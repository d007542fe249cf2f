"""Whether a drill may begin: the fleet is healthy, the rest of it can carry the load, no tenant loses its last region.

Pure: facts in, findings out, each check by its name. Invariant: an unknown fact is a reason not to run. Never weighs
one check against another: one that does not hold is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop.loose_json import dicts
from farhop_drill.windows import is_open
from topology.law import Law, Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farhop.store.documents.report import RegionReport
    from farhop_drill.document import Drill
    from topology.model import Topology

REPORT_AGE_MAX_S = 3.0  # reports come every second at least
_ENTRY_TAKEN = frozenset({"kill-region", "kill-global", "drain-entry"})


class Finding(msgspec.Struct, frozen=True):
    """One check: its name, whether it held, and what was seen."""

    check: str
    held: bool
    seen: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a fleet before a drill.

    `statuses`: the status pages of the global balancers that answered; `silent`: the balancers that did not; `reports`:
    the regions' reports, from etcd; `trouble`: why something could not be read. `emergency_stop`: who engaged it and
    why, "" if it is not engaged; `holder`: who else runs a drill, "" for nobody. `injects`: what can be injected in
    this fleet ("traffic", "fault"); `injecting`: what is injected now; `impossible`: why this drill's fault cannot be
    injected, "" if it can; `missing`: what the canaries lack.
    """

    topology: Topology
    statuses: Sequence[Mapping[str, Any]]
    reports: Sequence[RegionReport]
    epoch_s: float
    silent: Sequence[str] = ()
    trouble: Sequence[str] = ()
    emergency_stop: str = ""
    holder: str = ""
    injects: frozenset[str] = frozenset()
    injecting: Sequence[str] = ()
    impossible: str = ""
    missing: Sequence[str] = ()


def look(drill: Drill, facts: Facts) -> list[Finding]:
    """Every check, in one order."""
    return [
        _clear("lever", facts.emergency_stop and f"engaged: {facts.emergency_stop}", "disengaged"),
        _clear("alone", facts.holder and f"another drill runs: {facts.holder}", "no other drill"),
        _window(drill, facts),
        _injector(drill, facts),
        _incident(facts),
        _fresh(facts),
        _last_site(drill, facts),
        _last_entry(drill, facts),
        _n_minus_1(drill, facts),
        _probe(facts),
        *_pilot_light(drill, facts),
    ]


def blocked(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Why it must not run."""
    return tuple(f"{one.check}: {one.seen}" for one in findings if not one.held)


def _clear(check: str, wrong: str, well: str) -> Finding:
    return Finding(check, not wrong, wrong or well)


def _window(drill: Drill, facts: Facts) -> Finding:
    inside = is_open(drill.open_windows, facts.epoch_s)
    windows = ", ".join(drill.windows) or "any time"
    return Finding("window", inside, windows if inside else f"outside of {windows} (UTC)")


def _injector(drill: Drill, facts: Facts) -> Finding:
    if drill.kind in facts.injects and not facts.injecting:
        if facts.impossible:
            return Finding("injector", False, facts.impossible)
        return Finding("injector", True, f"{drill.kind} drills can be run here")
    if facts.injecting:
        return Finding("injector", False, f"still injected from before: {', '.join(facts.injecting)}")
    what = {
        "fault": "real faults need a world that `farhop up` runs on this machine, or `farhop drill faults` beside this",
        "traffic": "overrides need this fleet's etcd; give a context that has `etcd.endpoints`",
    }
    return Finding("injector", False, what[drill.kind])


def _incident(facts: Facts) -> Finding:
    wrong = list(facts.trouble)
    wrong += [f"{who} does not answer" for who in facts.silent]
    for status in facts.statuses:
        seer = status.get("region", "?")
        wrong += [
            f"{one.get('region')} is {one.get('state')} as {seer} sees it ({one.get('why')})"
            for one in dicts(status.get("regions"))
            if one.get("state") != "up" or one.get("override")
        ]
        wrong += [f"{seer}: {status['store_trouble']}"] if status.get("store_trouble") else []
        wrong += [
            f"{one.get('action')} of {one.get('region')} by {one.get('author')} is in force"
            for one in dicts(status.get("operator_overrides"))
        ]
    if not facts.statuses:
        wrong.append("no global balancer answers")
    return _clear("incident", _few(dict.fromkeys(wrong)), "every region is up, every global balancer answers")


def _fresh(facts: Facts) -> Finding:
    stale = [
        f"{one.get('region')}'s report is {instance.get('report_age_s', 0.0):.1f} s old in {status.get('region')}"
        for status in facts.statuses
        for one in dicts(status.get("regions"))
        for instance in dicts(one.get("instances"))
        if not (instance.get("report_age_s") or 0.0) <= REPORT_AGE_MAX_S
    ]
    if not facts.reports:
        stale.append("etcd has no report of any region")
    return _clear("reports", _few(stale), f"none older than {REPORT_AGE_MAX_S:g} s")


def _serving(facts: Facts) -> dict[str, set[str]]:
    """By model, the regions that have a ready replica by their own report."""
    found: dict[str, set[str]] = {}
    for report in facts.reports:
        for model in report.models:
            if model.replicas_ready and not report.draining:
                found.setdefault(model.model, set()).add(report.region)
    return found


def _last_site(drill: Drill, facts: Facts) -> Finding:
    """A region that is lost completely must not be the last lawful one of any tenant."""
    gone = {name for name in drill.lost() if drill.share_lost(name) >= 1.0}
    law = Law(facts.topology)
    stranded_by = []
    for model, serving in sorted(_serving(facts).items()):
        for tenant in facts.topology.tenants.values():
            for key in ("", *(one.name for one in tenant.keys if one.within)):
                here = law.verdict(tenant.name, model, key=key).lawful & serving
                if here & gone and not here - gone:
                    stranded_by.append(f"{tenant.name} ({model}{f', key {key}' if key else ''})")
    lost = ", ".join(sorted(gone))
    return _clear("last-site", (stranded_by and f"{lost} is the last lawful region of {_few(stranded_by)}") or "",
                  "everybody has another lawful region")  # fmt: skip


def _last_entry(drill: Drill, facts: Facts) -> Finding:
    """An entry that is lost must not be the last one that may read a tenant's requests."""
    entries = facts.topology.entries
    gone = {
        entries[one.entry].region if one.do == "drain-entry" and one.entry in entries else one.region
        for step in drill.steps
        for one in step.inject
        if one.do in _ENTRY_TAKEN
    }
    law, there = Law(facts.topology), frozenset(facts.topology.regions)
    stranded_by = []
    for name in facts.topology.tenants:
        lawful = law.verdict(name, "", Scope.ENTRY).lawful & there
        if lawful & gone and not lawful - gone:
            stranded_by.append(name)
    lost = ", ".join(sorted(gone))
    return _clear("last-entry", (stranded_by and f"{lost} has the last lawful entry of {_few(stranded_by)}") or "",
                  "everybody has another lawful entry")  # fmt: skip


def _n_minus_1(drill: Drill, facts: Facts) -> Finding:
    """Utilisation of each set of lawful regions that loses something: requests under way and waiting, divided by the
    slots that remain, per model."""
    law = Law(facts.topology)
    slots: dict[tuple[str, str], float] = {}
    used: dict[tuple[str, str], float] = {}
    for report in facts.reports:
        for one in report.models:
            at = one.model, report.region
            busy = max(one.slots_total - one.slots_free, one.in_flight, one.used_share * one.slots_total)
            slots[at] = slots.get(at, 0.0) + one.slots_total
            used[at] = used.get(at, 0.0) + busy + one.queued_requests
    worst, worst_case = 0.0, "no tenant's regions lose anything"
    for model in sorted({model for model, _ in slots}):
        zones = {law.verdict(name, model).lawful for name in facts.topology.tenants}
        for zone in sorted(zones, key=sorted):
            here = sorted(name for name in zone if (model, name) in slots)
            if not drill.lost() & set(here):
                continue
            left = sum(slots[model, name] * (1.0 - drill.share_lost(name)) for name in here)
            load = sum(used[model, name] for name in here)
            share = load / left if left > 0.0 else float("inf")
            if share >= worst and left > 0.0:
                worst, worst_case = (
                    share,
                    f"{model} in {', '.join(here)}: {load:.0f} requests on the {left:.0f} slots left",
                )
    seen = f"{worst:.2f} at the most ({worst_case}); {drill.utilisation_max:g} is allowed"
    return Finding("n-1", worst < drill.utilisation_max, seen)


def _probe(facts: Facts) -> Finding:
    return _clear("probe", _few(facts.missing), "keys, entries and a model for every canary")


def _pilot_light(drill: Drill, facts: Facts) -> list[Finding]:
    """A drill that measures a pilot light needs one that is asleep."""
    if not any(one.measure == "pilot_light_s" for one in drill.hypotheses):
        return []
    found: dict[str, bool] = {}
    for status in facts.statuses:
        for one in dicts(status.get("regions")):
            pilot = one.get("pilot_light")
            if isinstance(pilot, dict):
                name = str(one.get("region"))
                found[name] = found.get(name, True) and pilot.get("state") == "asleep"
    asleep = sorted(found.keys() - set(drill.blast_radius.regions), key=lambda name: (not found[name], name))
    if asleep and found[asleep[0]]:
        return [Finding("pilot light", True, f"{asleep[0]} is asleep")]
    why = "is awake; wait until it sleeps" if asleep else "is not there; give `pilot_light` to every global balancer"
    return [Finding("pilot light", False, f"{asleep[0] if asleep else 'a region that stands by'} {why}")]


def _few(wrong: Iterable[str]) -> str:
    listed = list(wrong)
    return "; ".join(listed[:4]) + (f"; and {len(listed) - 4} more" if len(listed) > 4 else "")
