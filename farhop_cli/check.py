"""`farhop check`: every error of maps, laws and the configurations of processes, each alone and all together.

Opens those files and the ones that they name, and no socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from farhop.config import ConfigError, parsed
from farhop.store.envelope import bare, is_sealed
from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail
from topology import law_document
from topology import load as topologies
from topology.law import Law, Scope
from topology.model import Tenant, Topology
from topology.problems import Problem, TopologyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from entry_anycast.app.config import AnycastConfig
    from entry_dns.app.config import DnsConfig
    from farhop.service.config.process import Process
    from global_lb.app.config import GlobalConfig
    from regional_lb.app.config import RegionalConfig
    from topology.law_document import LawDocument

NAMES_SHOWN_MAX = 8
LAW_BYTES_MAX = 4 * 1024 * 1024
_ERA = "1970-01-01T00:00:00Z"
_Document = dict[str, Any]
_T = TypeVar("_T")


@dataclass
class Checked:
    """A file, and its errors. `kind`: topology, law, global or regional; `absent`: what was not available here."""

    path: Path
    kind: str
    problems: list[Problem | str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    topology: Topology | None = None
    hubs: tuple[str, ...] = ()
    above: GlobalConfig | None = None
    below: RegionalConfig | None = None
    entry: DnsConfig | AnycastConfig | None = None
    law: LawDocument | None = None

    @property
    def config(self) -> GlobalConfig | RegionalConfig | None:
        """A balancer's configuration, of either tier."""
        return self.above or self.below


def run(names: list[str], no_secrets: bool, as_json: bool) -> int:
    """Check files and ready-made worlds; the exit code."""
    found = [_kind(_path(name)) for name in names]
    checked = {path: _checked(path, kind, no_secrets) for path, kind, _ in found if kind != "law"}
    maps = [one.topology for one in checked.values() if one.topology is not None]
    for path, kind, document in found:
        if kind == "law":
            checked[path] = _law(path, document, maps)
    files = [checked[path] for path, _, _ in found]
    together, notes = _together(files), _notes(files)
    _print(files, together, notes, as_json)
    return NEGATIVE if together or any(one.problems for one in files) else 0


# -- each by itself


def _kind(path: Path) -> tuple[Path, str, _Document]:
    """A file's kind, by the fields that only such a file has; a topology if none is found."""
    try:
        text = path.read_bytes()
        if is_sealed(text.strip()):
            return path, "law", {}
        document = parsed(text, str(path)) if len(text) <= LAW_BYTES_MAX else {}
    except (OSError, ConfigError):
        document = None
    if not isinstance(document, dict):
        return path, "topology", {}
    for field_, what in (("zones", "dns"), ("speaker", "anycast")):
        if field_ in document and "hop" not in document:
            return path, what, document
    if document.keys() & {"region", "instance", "admin", "hop"}:
        below = document.keys() & {"tier", "control", "client", "picker", "replicas"}
        return path, "regional" if below else "global", document
    if {"sites", "work"} <= document.keys():
        return path, "scenario", document
    if "tenants" in document and not document.keys() & {"regions", "countries", "hubs", "rtt_ms"}:
        return path, "law", document
    return path, "topology", document


def _checked(path: Path, kind: str, no_secrets: bool) -> Checked:
    one = Checked(path, kind)
    try:
        if kind == "topology":
            one.topology = topologies.load(path)
        elif kind == "scenario":
            one.problems = [
                Problem("", "a scenario, which is no part of a fleet", f"check it with `farhop sim {path}`")
            ]
        elif kind in ("dns", "anycast"):
            _entry(one, one.absent if no_secrets else None)
        else:
            _configuration(one, one.absent if no_secrets else None)
    except TopologyError as error:
        at = "" if error.source == str(path) else f"{error.source}: "
        one.problems = [f"{at}{problem}" for problem in error.problems] if at else list(error.problems)
    except ConfigError as error:
        one.problems += _lines(path, error)
    return one


def _configuration(one: Checked, absent: list[str] | None) -> None:
    """As the balancer does at its start, up to where it would listen. Raises ConfigError or TopologyError."""
    # A balancer's modules are heavy; only this needs them.
    from farhop.config import load
    from farhop.service.assembly import stores
    from global_lb.app.config import GlobalConfig
    from regional_lb.app.config import RegionalConfig

    if one.kind == "regional":
        below = load(RegionalConfig, one.path, absent)
        one.topology = topology = stores.topology_of(below)
        one.hubs = tuple(sorted(_tried(one, lambda: stores.home_hubs(below, topology, below.remote_hub)) or ()))
        _tried(one, lambda: stores.state(below, one.kind))
        _tried(one, lambda: below.collector_in(topology))
        one.below = below
        one.problems += _reached(below, absent)
        return
    above = load(GlobalConfig, one.path, absent)
    one.topology = topology = stores.topology_of(above)
    one.hubs = tuple(sorted(_tried(one, lambda: stores.hubs(above, topology)) or ()))
    steps: tuple[Callable[[], object], ...] = (
        lambda: stores.state(above, one.kind), lambda: above.routes_in(topology), lambda: above.collector_in(topology),
        lambda: above.signer_in(topology), lambda: above.pilots_in(topology),
    )  # fmt: skip
    for step in steps:
        _tried(one, step)
    one.above = above
    one.problems += _reached(above, absent)


def _tried(one: Checked, step: Callable[[], _T]) -> _T | None:
    """What the step returns; None if it finds an error, which is noted: what does not depend on it is still checked."""
    try:
        return step()
    except ConfigError as error:
        one.problems += _lines(one.path, error)
        return None


def _lines(path: Path, error: ConfigError) -> list[str]:
    return [line.removeprefix(f"{path}: ") for line in str(error).splitlines()]


def _reached(config: Process, absent: list[str] | None) -> list[Problem | str]:
    """Errors of listeners and of the connection to etcd that would otherwise show only at the start."""
    from farhop.service.config import certificates
    from farhop.service.config.endpoints import Listen
    from farhop.service.process.clock import wall

    problems: list[Problem | str] = []
    hubs = {f"hubs.{name}": part for name, part in config.hubs.items()}
    for field_path, part in {"etcd": config.etcd, **hubs}.items():
        try:
            certificates.load(part.files, wall())
        except certificates.TlsFileError as error:
            if absent is None:
                problems.append(f"{field_path}: {error}")
            else:
                absent.append(str(error).rpartition(";")[0])
        except certificates.TlsError as error:
            problems.append(f"{field_path}: {error}")
    taken: dict[tuple[str, int], str] = {}
    for name, part in config:
        if isinstance(part, Listen) and part.port:
            other = taken.setdefault((part.host, part.port), name)
            if other != name:
                problems.append(f"{name}.port: {part.port} is {other}'s, too; give each its own")
    return problems


def _entry(one: Checked, absent: list[str] | None) -> None:
    """The same for a DNS server or an announcer. Raises ConfigError or TopologyError."""
    from entry_anycast.app.config import AnycastConfig
    from entry_dns.answers import zones
    from entry_dns.app.config import DnsConfig
    from entry_dns.links import client_networks
    from farhop.config import load
    from farhop.service.assembly import stores

    if one.kind == "anycast":
        announced = load(AnycastConfig, one.path, absent)
        one.topology = stores.topology_of(announced)
        announced.announced(one.topology)
        one.entry = announced
        return
    served = load(DnsConfig, one.path, absent)
    one.topology = topology = stores.topology_of(served)
    one.hubs = tuple(sorted(_tried(one, lambda: stores.hubs(served, topology)) or ()))
    try:
        zones.check(served.plans(), Law(topology))
        if served.publish is None:
            zones.check_servers(served.plans())
    except zones.ZoneError as error:
        one.problems.append(f"zones: {error}")
    for zone in served.zones:
        _tried(one, zone.keys)
    _tried(one, lambda: client_networks.read(served.networks, topology))
    one.entry = served


def _law(path: Path, document: _Document, maps: list[Topology]) -> Checked:
    """A law, as `farhop law get` prints it or `farhop law sign` signed it, checked for every map given."""
    one = Checked(path, "law")
    if not maps:
        fail(f"{path}: a law is checked for a map; give the topology's file, too, or a balancer's configuration")
    signed: _Document = {name: document[name] for name in ("epoch", "author", "why", "at") if name in document}
    unsigned = {name: value for name, value in document.items() if name not in signed}
    header: _Document = {"epoch": 1, "author": "nobody", "why": "checked", "at": _ERA, **signed}
    encoded = bare(path.read_bytes().strip()) if not document else law_document.encode(unsigned, **header)
    for topology in maps:
        try:
            one.law = law_document.read(encoded, topology, str(path))
        except TopologyError as error:
            one.problems += [problem for problem in error.problems if problem not in one.problems]
    if one.law is not None and not one.problems and not document:
        newest = max(topology.epoch for topology in maps)
        if one.law.epoch <= newest:
            one.problems = [f"epoch: {one.law.epoch} is not above {newest}, the topology's; sign it again"]
    return one


# -- all together


def _together(files: list[Checked]) -> list[str]:
    """What keeps these balancers from being one fleet."""
    problems: list[str] = []
    configured = [(one, config) for one in files if (config := one.config) is not None]
    seen: dict[tuple[str, str, str], Path] = {}
    for one, config in configured:
        name = (one.kind, config.region, config.instance)
        if name in seen and one.path != seen[name]:
            problem = f"also that of {seen[name]}; names are unique in a region: give each its own"
            problems.append(f"{one.path}: instance: {config.instance} is {problem}")
        seen.setdefault(name, one.path)
    problems += _same_map(files)
    for one, config in configured[1:]:
        first, other = configured[0]
        if config.trust_domain != other.trust_domain:
            problem = f"{config.trust_domain}, and {first.path} says {other.trust_domain}; a fleet has one"
            problems.append(f"{one.path}: trust_domain: {problem}")
    for above in files:
        for below in files:
            if above.above is not None and below.below is not None:
                problems += _meet(above.path, above.above, below.path, below.below)
    return problems


def _same_map(files: list[Checked]) -> list[str]:
    first = next((one for one in files if one.topology is not None), None)
    if first is None or first.topology is None:
        return []
    return [
        f"{one.path}: topology: another map or law than that of {first.path} ({one.topology.name}, epoch "
        f"{one.topology.epoch}); give all balancers of a fleet the same"
        for one in files
        if one.topology is not None and one.topology != first.topology
    ]


def _meet(above_path: Path, above: GlobalConfig, below_path: Path, below: RegionalConfig) -> list[str]:
    """Whether that region accepts what this global balancer sends."""
    problems = []
    active, theirs = above.hop.active, below.hop.keys
    if active not in theirs:
        problem = (
            f"{active} is not among those of {below_path}, which could not check its tokens; give it the key first"
        )
        problems.append(f"{above_path}: hop.active: {problem}")
    elif not _one_secret(above, below):
        problem = f"hop.keys.{active}: not the secret that {below_path} has by this id; give both the same key"
        problems.append(f"{above_path}: {problem}")
    certified = above.certified_name(below.region) is not None
    if certified and below.tier.tls is None:
        problem = (
            f"is given, and {below_path} has no tier.tls; give it, or name the region in tier_tls.plaintext_regions"
        )
        problems.append(f"{above_path}: tier_tls: {problem}")
    elif not certified and below.tier.tls is not None:
        problems.append(
            f"{above_path}: tier_tls: is not given for {below.region}, and {below_path} has tier.tls; give it"
        )
    if certified:
        problems += _prove(above_path, above, below_path, below)
    return problems


def _prove(above_path: Path, above: GlobalConfig, below_path: Path, below: RegionalConfig) -> list[str]:
    """Whether each trusts the other's certificate, as far as the files are available."""
    from farhop.service.config import certificates

    ours, theirs = above.tier_tls, below.tier.tls
    if ours is None or theirs is None:
        return []
    problems = []
    if not certificates.vouches(ours.ca_file, theirs.cert_file):
        problem = f"does not vouch for {theirs.cert_file}, tier.tls of {below_path}; give its authority's certificate"
        problems.append(f"{above_path}: tier_tls.ca_file: {ours.ca_file} {problem}")
    elif not certificates.bears(theirs.cert_file, name := above.certified_name(below.region) or ""):
        problem = f"is not in the name of {name}, as {above_path} expects; issue it for region {below.region}"
        problems.append(f"{below_path}: tier.tls.cert_file: {theirs.cert_file} {problem}")
    if not certificates.vouches(theirs.client_ca_file, ours.cert_file):
        problem = f"does not vouch for {ours.cert_file}, tier_tls of {above_path}; give its authority's certificate"
        problems.append(f"{below_path}: tier.tls.client_ca_file: {theirs.client_ca_file} {problem}")
    return problems


def _one_secret(above: GlobalConfig, below: RegionalConfig) -> bool:
    """Whether the active key is the same on both sides, as far as that can be known here."""
    from farhop.config import is_absent
    from farhop.identity.hop_keys import read_keys

    active = above.hop.active
    if is_absent(above.hop.keys[active]) or is_absent(below.hop.keys[active]):
        return True
    signs, checks = read_keys(above.hop.secrets())[active], read_keys(below.hop.secrets())[active]
    pair = signs.pair(above.region, below.region)
    return pair is not None and pair == checks.pair(above.region, below.region)


def _notes(files: list[Checked]) -> list[str]:
    """Not errors, but perhaps not intended."""
    notes = [f"{one.path}: not checked, as it is not here: {what}" for one in files for what in one.absent]
    laws = [one.law for one in files if one.law is not None]
    served = {one.below.region for one in files if one.below is not None}
    for one in files:
        if one.above is not None and one.topology is not None:
            notes += _unknown_names(one.path, one.above, one.topology, laws)
        if one.below is not None and one.topology is not None:
            notes += _nearly_named(one.path, one.below, [one.topology, *laws])
    for above in files:
        for below in files:
            if above.above is not None and below.below is not None:
                notes += _too_short(above.path, above.above, below.path, below.below)
    topology = next((one.topology for one in files if one.topology is not None), None)
    if topology is None or len(served) < 2 or any(one.problems for one in files):
        return notes
    for law in [Law(each.over(topology)) for each in laws] or [Law(topology)]:
        notes += [
            f"tenant {name}: none of its lawful regions has a balancer among these files"
            for name in law.topology.tenants
            if not law.verdict(name, "").lawful & served
        ]
    return notes


def _too_short(above_path: Path, above: GlobalConfig, below_path: Path, below: RegionalConfig) -> list[str]:
    """Time-outs of a global balancer that end before a region's own, which might have tried another replica."""
    attempts_s = 3.0 * (below.queue.wait_s + below.limits.first_byte_s)
    bounds = (
        ("first_byte_s", attempts_s, f"3 × (queue.wait_s + limits.first_byte_s), {attempts_s:g},"),
        ("whole_answer_s", below.limits.whole_answer_s, "that"),
        ("between_bytes_s", below.limits.between_bytes_s, "that"),
    )
    return [
        f"{above_path}: limits.{field}: {ours:g} is not above {what} of {below_path}: the region would not get to try "
        "another replica, or to say what happened; give more"
        for field, least, what in bounds
        if (ours := getattr(above.limits, field)) <= least
    ]


def _unknown_names(path: Path, config: GlobalConfig, topology: Topology, laws: list[LawDocument]) -> list[str]:
    """Regions and tenants in a configuration that the map and the law do not know."""
    tenants = set(topology.tenants).union(*(each.tenants for each in laws))
    plaintext = config.tier_tls.plaintext_regions if config.tier_tls is not None else []
    named: dict[str, Iterable[str]] = {
        "proxies": config.proxies,
        "region_hosts": config.region_hosts,
        "tier_tls.plaintext_regions": plaintext,
    }
    notes = [
        f"{path}: {field_path}: {region} is no region of {topology.name}; correct it, or leave it out"
        for field_path, regions in named.items()
        for region in regions
        if region not in topology.regions
    ]
    for n, route in enumerate(config.routes):
        if route.tenant and route.tenant not in tenants:
            notes.append(
                f"{path}: routes[{n}].tenant: the law knows no tenant {route.tenant}; correct it, or leave it out"
            )
    return notes


def _nearly_named(path: Path, config: RegionalConfig, laws: Sequence[Topology | LawDocument]) -> list[str]:
    """Rules of models that bind none here, since what is served differs from them in upper and lower case alone."""
    ruled = {model for law in laws for rules in (law, *law.tenants.values()) for model in rules.models}
    served = {model for replica in config.replicas for model in replica.served}
    return [
        f"{path}: replicas serve {model}, and the law has a rule for {rule}, which does not bind it: names are the "
        "same only letter by letter; write it as the engine lists it"
        for rule in sorted(ruled - served)
        for model in sorted(served)
        if model.casefold() == rule.casefold()
    ]


def _path(name: str) -> Path:
    """A file, by its ending, a slash or its existence; otherwise a ready-made world. Ends the command if it is
    neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    if name.endswith((".yaml", ".yml")) or "/" in name:
        fail(f"{name}: no such file; give a topology, or one of: {', '.join(topologies.shipped_names())}")
    try:
        return topologies.shipped(name)
    except TopologyError as error:
        fail(str(error))


def _problem(one: Problem | str) -> dict[str, str] | str:
    return one if isinstance(one, str) else {"path": one.path, "message": one.message, "remedy": one.remedy}


# -- for people


def _print(files: list[Checked], together: list[str], notes: list[str], as_json: bool) -> None:
    if as_json:
        documents = [_as_document(one) for one in files]
        if len(documents) == 1:
            show.json({**documents[0], **({"notes": notes} if notes else {})})
            return
        ok = not together and all(one["ok"] for one in documents)
        show.json({"ok": ok, "files": documents, "together": together, "notes": notes})
        return
    for one in files:
        for problem in one.problems:
            typer.echo(f"{one.path}: {problem}", err=True)
        if one.problems:
            count = len(one.problems)
            typer.echo(f"{one.path}: {count} problem{'s' * (count != 1)}", err=True)
        else:
            _print_fine(one)
    for line in together:
        typer.echo(line, err=True)
    for line in notes:
        show.line(f"note: {line}", "yellow")
    if len(files) > 1 and not together and not any(one.problems for one in files):
        show.line("together: fine")


def _as_document(one: Checked) -> _Document:
    if one.problems:
        return {"ok": False, "source": str(one.path), "problems": [_problem(each) for each in one.problems]}
    document: _Document = {"ok": True, "source": str(one.path)}
    config = one.config or one.entry
    if config is not None:
        document |= {"tier": one.kind, "region": config.region, "instance": config.instance}
        return document | {"hubs": list(one.hubs)}
    if one.law is not None:
        return document | {"tenants": sorted(one.law.tenants), "models": sorted(one.law.models)}
    assert one.topology is not None  # otherwise it had an error
    return document | summed_up(one.topology)


def _print_fine(one: Checked) -> None:
    config = one.config or one.entry
    if config is not None and one.topology is not None:
        field_path = f"region {config.region}, instance {config.instance}"
        hubs = f", hubs {', '.join(one.hubs)}" if one.hubs else ""
        show.line(f"{one.path}: fine ({one.kind}, {field_path}, topology {one.topology.name}{hubs})")
    elif one.law is not None:
        show.line(f"{one.path}: fine (a law for {len(one.law.tenants)} tenants)")
    elif one.topology is not None:
        _print_world(summed_up(one.topology), str(one.path))


def summed_up(topology: Topology) -> dict[str, Any]:
    """A topology summarised: regions, and for each tenant the lawful regions by scope and by model with a rule."""
    law = Law(topology)
    return {
        "name": topology.name,
        "epoch": topology.epoch,
        "regions": [
            {
                "region": region.name,
                "city": region.city,
                "country": region.country,
                "jurisdictions": sorted(region.jurisdictions),
                "entry": list(region.entry),
                "hub": region.hub,
            }
            for region in topology.regions.values()
        ],
        "tenants": [_tenant(topology, law, tenant) for tenant in topology.tenants.values()],
    }


def _tenant(topology: Topology, law: Law, tenant: Tenant) -> dict[str, Any]:
    models = sorted({*tenant.models, *topology.models})
    residency = tenant.residency
    return {
        "tenant": tenant.name,
        "keys": len(tenant.keys),
        "priority": tenant.priority,
        "on_exhausted": residency.on_exhausted if residency is not None else None,
        "lawful": {str(scope): sorted(law.verdict(tenant.name, "", scope).lawful) for scope in Scope},
        "models": {model: sorted(law.verdict(tenant.name, model).lawful) for model in models},
    }


def _print_world(summary: dict[str, Any], source: str) -> None:
    regions = summary["regions"]
    show.line(f"{source}: fine ({summary['name']}, epoch {summary['epoch']})")
    show.table(
        f"{len(regions)} regions",
        ("region", "city", "country", "within", "hub", "entry"),
        [
            [r["region"], r["city"], r["country"], ", ".join(r["jurisdictions"]), r["hub"], ", ".join(r["entry"])]
            for r in regions
        ],
    )
    show.table(
        f"{len(summary['tenants'])} tenants, and the regions lawful for each",
        ("tenant", ">keys", *Scope, "models apart", "on exhausted"),
        [_tenant_row(tenant, len(regions)) for tenant in summary["tenants"]],
    )


def _tenant_row(tenant: dict[str, Any], regions: int) -> list[str]:
    processing = tenant["lawful"][Scope.PROCESSING]
    apart = {model: lawful for model, lawful in tenant["models"].items() if lawful != processing}
    return [
        tenant["tenant"],
        str(tenant["keys"]),
        *(_listed(tenant["lawful"][scope], regions) for scope in Scope),
        "; ".join(f"{model}: {_listed(lawful, regions)}" for model, lawful in apart.items()) or show.NONE,
        show.cell(tenant["on_exhausted"]),
    ]


def _listed(names: list[str], regions: int) -> str:
    if len(names) == regions:
        return "all"
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return ", ".join(names[:NAMES_SHOWN_MAX]) + more if names else "none"
