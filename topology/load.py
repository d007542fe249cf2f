"""Loads a topology file: the result is a Topology, or all problems at once.

It reads only the file that it is given. No topology is built from a document with a problem: faults of the text, of its
shape and between its parts are reported together, each with path and remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from topology.document import TEXT_CHARS_MAX, document, read
from topology.model import Entry, Key, Place, Region, Residency, Rule, Tenant, Topology
from topology.problems import Problem, TopologyError, did_you_mean
from topology.reach import stranded_problems
from topology.references import closure, reference_problems
from topology.schema import (
    EntryDoc,
    ModelRuleDoc,
    RegionDoc,
    ResidencyDoc,
    TenantDoc,
    TenantRuleDoc,
    TopologyDoc,
    problems_of,
)

__all__ = ["Problem", "TopologyError", "document", "load", "parse", "shipped", "shipped_names"]

_SHIPPED = Path(__file__).parent / "regions"


def load(path: Path | str) -> Topology:
    """The topology in a UTF-8 YAML file. TopologyError if it cannot be read or has any problem."""
    source = str(path)
    try:
        with Path(path).open("rb") as file:
            # UTF-8 takes at most four bytes a character; one more tells that the text is over its limit.
            text = file.read(4 * TEXT_CHARS_MAX + 1).decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise TopologyError(source, [Problem("", reason, "give the path of a readable file")]) from None
    except UnicodeDecodeError as error:
        fault = Problem("", f"not UTF-8 at byte {error.start}", "save the file as UTF-8")
        raise TopologyError(source, [fault]) from None
    except ValueError:
        # A path with a NUL in it never reaches the system.
        raise TopologyError(ascii(source), [Problem("", "not a path", "give the path of a readable file")]) from None
    return parse(text, source)


def shipped(name: str) -> Path:
    """The path of a ready-made topology, such as `three-regions`. TopologyError names those there are."""
    known = shipped_names()
    if name not in known:
        remedy = did_you_mean(name, known, f"there are: {', '.join(known)}")
        raise TopologyError(name, [Problem("", "no ready-made world of that name", remedy)])
    return _SHIPPED / f"{name}.yaml"


def shipped_names() -> tuple[str, ...]:
    """The ready-made topologies, sorted."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.yaml")))


def parse(text: str, source: str) -> Topology:
    """The topology a YAML text describes; `source` names it in errors. TopologyError holds every problem at once."""
    raw, problems = read(text, source)
    return of(raw, source, problems)


def of(raw: dict[str, Any], source: str, problems: list[Problem] | None = None) -> Topology:
    """The topology in a document that was read, with the problems met so far. TopologyError as for `parse`."""
    problems = list(problems or ())
    try:
        doc = TopologyDoc.model_validate(raw)
    except ValidationError as error:
        doc = None
        problems += problems_of(error)
    problems += reference_problems(raw)
    problems += stranded_problems(raw, problems)
    if doc is None or problems:
        raise TopologyError(source, problems)
    return _built(doc)


def _built(doc: TopologyDoc) -> Topology:
    parents = {place.name: place.within for place in doc.jurisdictions}
    countries = {place.name: place.within for place in doc.countries}
    places = [Place(one.name, "jurisdiction", tuple(one.within)) for one in doc.jurisdictions]
    places += [Place(one.name, "country", tuple(one.within)) for one in doc.countries]
    return Topology(
        name=doc.name,
        epoch=doc.epoch,
        regions={
            one.name: _region(one, closure(parents, [*countries[one.country], *one.jurisdictions]))
            for one in doc.regions
        },
        tenants=tenants_of(doc.tenants),
        models=rules_of(doc.models),
        hubs={name: tuple(endpoints) for name, endpoints in doc.hubs.items()},
        rtt={(a, b): ms for a, row in doc.rtt_ms.items() for b, ms in row.items()},
        places={place.name: place for place in places},
        local_rtt_ms=doc.local_rtt_ms,
        entries={one.name: _entry(one) for one in doc.entries},
    )


def _entry(doc: EntryDoc) -> Entry:
    return Entry(doc.name, doc.region, tuple(doc.ipv4), tuple(doc.ipv6), doc.host, doc.port)


def _region(doc: RegionDoc, jurisdictions: frozenset[str]) -> Region:
    return Region(
        name=doc.name,
        city=doc.city,
        country=doc.country,
        jurisdictions=jurisdictions,
        latitude=doc.latitude,
        longitude=doc.longitude,
        entry=tuple(doc.entry),
        hub=doc.hub,
        egress_usd_per_gb=doc.egress_usd_per_gb,
        usd_per_gpu_hour=doc.usd_per_gpu_hour,
    )


def tenants_of(docs: Iterable[TenantDoc]) -> dict[str, Tenant]:
    """Tenants by name, from documents without a fault."""
    return {one.name: _tenant(one) for one in docs}


def _tenant(doc: TenantDoc) -> Tenant:
    return Tenant(
        name=doc.name,
        keys=tuple(Key(key.name, key.sha256, tuple(key.within), key.explain) for key in doc.keys),
        residency=_residency(doc.residency),
        priority=doc.priority,
        weight=doc.weight,
        share_prefixes=doc.share_prefixes,
        resume=doc.resume,
        models=rules_of(doc.models),
        tiers=doc.tiers,
        objectives=tuple((one.ttft_ms, one.priority) for one in doc.objectives),
    )


def _residency(doc: ResidencyDoc) -> Residency:
    return Residency(
        processing=_rule(doc.processing),
        entry=_rule(doc.entry) if doc.entry else None,
        logging=_rule(doc.logging) if doc.logging else None,
        hints=_rule(doc.hints) if doc.hints else None,
        on_exhausted=doc.on_exhausted,
        wait_max_s=doc.wait_max_s,
    )


def _rule(doc: TenantRuleDoc | ModelRuleDoc) -> Rule:
    return Rule(tuple(doc.allow), tuple(doc.deny))


def rules_of(docs: Mapping[str, ModelRuleDoc]) -> dict[str, Rule]:
    """Models' rules by name, from documents without a fault."""
    return {name: _rule(rule) for name, rule in docs.items()}
