"""Turns a scenario file into a Scenario, or reports all problems at once: schema, names, traces, impossible demand.

Reads the given file, its topology and its traces, and nothing else. A document with a problem is never simulated.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.scenarios.schema import LASTING, OF_REPLICAS, RECORDED_REGIONS, TRACES, FaultDoc, ScenarioDoc, WorkDoc
from farhop_lab.scenarios.work import check_trace, figures_of, longest_tokens
from farhop_lab.sim.sites import MODEL
from farhop_lab.workloads.load import TraceError
from farhop_lab.workloads.program import WorkloadError
from topology import load as topologies
from topology.document import TEXT_CHARS_MAX, read
from topology.law import Law, Scope
from topology.model import Topology
from topology.problems import Problem, TopologyError, did_you_mean, path_of, quoted
from topology.schema import problems_of

_SHIPPED = Path(__file__).parent
_GZIP = b"\x1f\x8b"


class ScenarioError(TopologyError):
    """A scenario that cannot be run, with every problem found in it."""


class Scenario(msgspec.Struct, frozen=True):
    """A scenario that can be run. Relative paths start at `folder`."""

    doc: ScenarioDoc
    topology: Topology
    folder: Path

    @property
    def topology_path(self) -> Path:
        """The file its topology is read from."""
        name = self.doc.topology
        return self.folder / name if name.endswith((".yaml", ".yml")) else topologies.shipped(name)

    @property
    def work_name(self) -> str:
        """What its clients are drawn from, besides the seed: scenarios that share it get the same requests."""
        return self.doc.work_name or self.doc.name

    def document(self) -> dict[str, Any]:
        """As plain data, for another process: `built` makes it again."""
        return self.doc.model_dump(mode="json")

    def but(self, **fields: Any) -> Scenario:
        """A copy with other fields, unchecked."""
        return msgspec.structs.replace(self, doc=self.doc.model_copy(update=fields))


def shipped_names() -> tuple[str, ...]:
    """Names of the ready-made scenarios, sorted."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.yaml")))


def find(name: str, routers: Iterable[str]) -> Scenario:
    """The scenario of a file, or a ready-made one by its name. Raises ScenarioError, TopologyError."""
    path = Path(name)
    if not path.is_file():
        known = shipped_names()
        if name not in known:
            what = "no such file" if os.sep in name or path.suffix else "no ready-made scenario of that name"
            raise ScenarioError(name, [Problem("", what, did_you_mean(name, known, f"there are: {', '.join(known)}"))])
        path = _SHIPPED / f"{name}.yaml"
    return parse(_text(path), str(path), path.parent, routers)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(4 * TEXT_CHARS_MAX + 1)
        if path.suffix in _OF_LOGS or _is_log(raw):
            remedy = f"make a scenario of it: farhop sim import {shlex.quote(str(path))} --out mine.yaml"
            raise ScenarioError(str(path), [Problem("", "a request log or a trace, and no scenario", remedy)])
        return raw.decode("utf-8-sig")
    except OSError as error:
        fault = Problem("", error.strerror or "cannot be read", "give the path of a readable file")
    except UnicodeDecodeError as error:
        fault = Problem("", f"not UTF-8 at byte {error.start}", "save the file as UTF-8")
    raise ScenarioError(str(path), [fault])


_OF_LOGS = (".csv", ".tsv", ".jsonl", ".ndjson")


def _is_log(raw: bytes) -> bool:
    """Whether it is a log of `farhop record` or another: JSON lines, an array of objects, or gzip."""
    first = raw.lstrip().partition(b"\n")[0]
    if raw.startswith(_GZIP) or first.startswith(b"["):
        return True
    try:
        return first.startswith(b"{") and "work" not in msgspec.json.decode(first, type=dict[str, Any])
    except msgspec.DecodeError:
        return False


def parse(text: str, source: str, folder: Path, routers: Iterable[str]) -> Scenario:
    """The scenario that a YAML text describes. ScenarioError holds all problems; `routers` are the known names."""
    raw, problems = read(text, source, "scenario", "farhop_lab/scenarios/arena.yaml")
    try:
        doc = ScenarioDoc.model_validate(raw)
    except ValidationError as error:
        raise ScenarioError(source, [*problems, *problems_of(error, ScenarioDoc)]) from None
    topology = _topology(doc, source, folder)
    problems += _problems(doc, topology, folder, list(routers))
    if problems:
        raise ScenarioError(source, problems)
    return Scenario(doc, topology, folder)


def built(document: Mapping[str, Any], folder: Path) -> Scenario:
    """A scenario from `Scenario.document`, which was checked before."""
    doc = ScenarioDoc.model_validate(document)
    return Scenario(doc, _topology(doc, doc.name, folder), folder)


def _topology(doc: ScenarioDoc, source: str, folder: Path) -> Topology:
    name = doc.topology
    if name.endswith((".yaml", ".yml")):
        return topologies.load(folder / name)
    try:
        return topologies.load(topologies.shipped(name))
    except TopologyError as error:
        if error.source != name:
            raise
        first = error.problems[0]
        raise ScenarioError(source, [Problem("topology", f"{quoted(name)}: {first.message}", first.remedy)]) from None


# -- references


def _problems(doc: ScenarioDoc, topology: Topology, folder: Path, routers: list[str]) -> Iterator[Problem]:
    yield from _places(doc, topology)
    for name, site in doc.sites.items():
        if site.gpu not in PROFILES:
            remedy = did_you_mean(site.gpu, PROFILES, f"there are: {', '.join(PROFILES)}")
            yield Problem(path_of("sites", name, "gpu"), f"unknown GPU {quoted(site.gpu)}", remedy)
    for i, router in enumerate(doc.routers):
        if router not in routers:
            remedy = did_you_mean(router, routers, f"there are: {', '.join(routers)}")
            yield Problem(path_of("routers", i), f"unknown router {quoted(router)}", remedy)
    if doc.warm_up_s >= doc.duration_s:
        yield Problem("warm_up_s", f"{doc.warm_up_s:g} s leave nothing of {doc.duration_s:g} s", "let it be shorter")
    yield from _faults(doc)
    law = Law(topology)
    for i, work in enumerate(doc.work):
        yield from _work(work, ("work", i), doc, topology, law, folder)


def _places(doc: ScenarioDoc, topology: Topology) -> Iterator[Problem]:
    named: list[tuple[str, str]] = [
        (path_of(field, name), name) for field in ("sites", "balancers", "days") for name in getattr(doc, field)
    ]
    for i, work in enumerate(doc.work):
        named += [(path_of("work", i, f, name), name) for f in ("clients", "per_s") for name in getattr(work, f)]
        named += [(path_of("work", i, "regions", j), name) for j, name in enumerate(work.regions)]
    for path, name in named:
        if name not in topology.regions:
            remedy = did_you_mean(name, topology.regions, f"the topology has: {', '.join(topology.regions)}")
            yield Problem(path, f"unknown region {quoted(name)}", remedy)


def _faults(doc: ScenarioDoc) -> Iterator[Problem]:
    for i, fault in enumerate(doc.faults):
        links = fault.what in ("freeze", "heal", "blackhole", "cut")
        for field, name in (("region", fault.region), ("to", fault.to)):
            if name is not None and name not in doc.sites:
                remedy = did_you_mean(name, doc.sites, f"there are sites in: {', '.join(doc.sites)}")
                yield Problem(path_of("faults", i, field), f"no site in {quoted(name)}", remedy)
        if links != (fault.to is not None):
            remedy = "name the other region of the link" if links else "leave it out; only links have it"
            yield Problem(
                path_of("faults", i, "to"), f"{fault.what} {'needs' if links else 'does not take'} it", remedy
            )
        yield from _lasting(fault, i, doc)
        if fault.at_s > doc.duration_s:
            yield Problem(path_of("faults", i, "at_s"), f"after the end at {doc.duration_s:g} s", "let it be earlier")


def _lasting(fault: FaultDoc, i: int, doc: ScenarioDoc) -> Iterator[Problem]:
    """A fault that ends by itself needs `for_s`, and a replica's needs its replica."""
    if fault.what in LASTING and fault.for_s is None:
        yield Problem(path_of("faults", i, "for_s"), f"{fault.what} needs it", "say after how many seconds it is over")
    site, of_replica = doc.sites.get(fault.region), fault.what in OF_REPLICAS
    if site is None:
        return
    names = [f"gpu-{n}" for n in range(site.replicas)]
    if of_replica and fault.replica not in names:
        known = f"{fault.region} has {names[0]} to {names[-1]}" if len(names) > 1 else f"{fault.region} has {names[0]}"
        yield Problem(path_of("faults", i, "replica"), f"{fault.what} needs one of its region", known)
    if not of_replica and fault.replica is not None:
        yield Problem(path_of("faults", i, "replica"), f"{fault.what} does not take it", "leave it out")


def _work(
    work: WorkDoc, at: tuple[str, int], doc: ScenarioDoc, topology: Topology, law: Law, folder: Path
) -> Iterator[Problem]:
    yield from _asked(work, at, doc)
    if work.tenant not in topology.tenants:
        remedy = did_you_mean(work.tenant, topology.tenants, f"the topology has: {', '.join(topology.tenants)}")
        yield Problem(path_of(*at, "tenant"), f"unknown tenant {quoted(work.tenant)}", remedy)
    else:
        yield from _lawful(work, at, doc, topology, law)
    if work.kind in TRACES and work.path:
        try:
            check_trace(work, folder)
        except TraceError as error:
            message, _, remedy = str(error).rpartition("; ")
            yield Problem(path_of(*at, "path"), message or str(error), remedy or "give a whole trace")


def _asked(work: WorkDoc, at: tuple[str, int], doc: ScenarioDoc) -> Iterator[Problem]:
    trace = work.kind in TRACES
    how = [name for name in ("clients", "per_s", "path") if getattr(work, name)]
    if how != ["path"] and trace:
        yield Problem(path_of(*at), f"{work.kind} is a trace", "give its `path`, and neither `clients` nor `per_s`")
    elif len(how) != 1 or (how == ["path"]) != trace:
        yield Problem(path_of(*at), "it has no amount", "give either `clients` or `per_s`")
    if trace and not work.regions:
        yield Problem(path_of(*at, "regions"), "missing", "list the regions its sessions come from")
    if work.place == "recorded" and work.kind not in RECORDED_REGIONS:
        yield Problem(path_of(*at, "place"), f"{work.kind} records no regions", "say uniform, zipf or sun")
    if work.loop == "closed" and work.kind != "log":
        yield Problem(path_of(*at, "loop"), f"it is for a log, not for {work.kind}", "leave it out")
    if work.since_s and not trace:
        yield Problem(path_of(*at, "since_s"), f"{work.kind} is no trace", "leave it out")
    if work.bursts is not None and not work.per_s:
        yield Problem(path_of(*at, "bursts"), "they are of an open loop", "give `per_s`, or leave it out")
    if work.bursts is not None and work.bursts.for_s > work.bursts.every_s:
        yield Problem(path_of(*at, "bursts", "for_s"), f"longer than {work.bursts.every_s:g} s", "let it be shorter")
    if work.kind == "requests" and work.clients and work.figures.get("renewed_s"):
        yield Problem(path_of(*at, "figures"), "renewed_s is of an open loop", "give `per_s`, or leave it out")
    if work.place == "sun" and not set(work.regions) <= doc.days.keys():
        yield Problem(path_of(*at, "place"), "sun needs a day for each of `regions`", "give `days`, or say uniform")
    for name in {*work.clients, *work.per_s, *work.regions}:
        if doc.balancers.get(name, 1) == 0:
            yield Problem(path_of("balancers", name), "clients come there", "give it at least one balancer")


def _lawful(work: WorkDoc, at: tuple[str, int], doc: ScenarioDoc, topology: Topology, law: Law) -> Iterator[Problem]:
    serving = law.verdict(work.tenant, MODEL).lawful & doc.sites.keys()
    if not serving:
        yield Problem(
            path_of(*at, "tenant"),
            f"no site lies where the law of {quoted(work.tenant)} lets it go",
            "put replicas into a lawful region, or let another tenant ask",
        )
        return
    enters = law.verdict(work.tenant, MODEL, Scope.ENTRY).lawful
    asking = {*work.clients, *work.per_s, *work.regions} & topology.regions.keys()
    for name in sorted(asking - enters):
        yield Problem(
            path_of(*at, "tenant"), f"its law forbids entry in {quoted(name)}", "let its clients be elsewhere"
        )
    try:
        tokens = longest_tokens(figures_of(work))
    except WorkloadError as error:
        yield Problem(path_of(*at, "figures"), str(error), "see docs/measurements/simulator.md")
        return
    gpus = {doc.sites[name].gpu for name in serving} & PROFILES.keys()
    room = max((PROFILES[gpu].context_tokens for gpu in gpus), default=tokens)
    if tokens > room:
        yield Problem(
            path_of(*at, "figures"),
            f"a request may take {tokens} tokens, and no lawful replica holds more than {room}",
            f"say `context_tokens: {room}` here, and longer ones are cut; or give larger GPUs"
            if work.kind in TRACES
            else "ask for less, or give larger GPUs",
        )
