"""The fleet that an operator's command is for: where its etcd is, its law, and which balancers can be asked.

Given by a context, a world that runs here, a balancer's configuration, an etcd, or admin ports. With a context, an etcd
or admin ports, balancers are found in etcd, and the topology is the one that they report. Any error ends the command
with one line; balancers that do not answer are reported by the caller.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from farhop.store.contract import (
    ANNOUNCE_PREFIX,
    ENTRY_PREFIX,
    REGION_PREFIX,
    StoreError,
    entry_key,
    parse_instance_key,
    parse_report_key,
    report_key,
)
from farhop.store.documents import announce
from farhop.store.documents.document import DocumentError
from farhop.store.envelope import NO_KEYS, Keys, bare
from farhop.store.etcd_settings import EtcdSettings
from farhop.store.sealed import Sealed
from farhop_cli.access import NO_ACCESS, Access, AdminError
from farhop_cli.exits import fail, first_of, listed
from farhop_lab.world.world_file import WORLD_FILE
from topology.problems import TopologyError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farhop.service.config.endpoints import ListenTls
    from farhop.store.contract import KeyValue, Store
    from farhop.store.documents.announce import AnnounceReport
    from farhop_cli import admin
    from farhop_cli.context_document import AdminPorts, Context
    from topology.model import Topology

Status = dict[str, Any]
TOKEN = "FARHOP_ADMIN_TOKEN"  # noqa: S105 - the variable's name: for admin ports given without a context
_PEM_END = "-----END CERTIFICATE-----\n"
NOT_OFFERED = (
    "it publishes no admin address: it listens on loopback, or does not know its own address; give it "
    "`admin.advertise`, or its URL by `--admin`"
)


@dataclass(frozen=True)
class Balancer:
    """A balancer, as far as it is known before it is asked. `tier` and `region` are "" if only its URL is known; `why`
    says why there is no `url`. `found`: by etcd, and what answers there must be that balancer.
    """

    tier: str
    region: str
    url: str = ""
    instance: str = ""
    why: str = ""
    found: bool = False

    @property
    def at(self) -> str:
        """Its base URL. AdminError if it has none."""
        if not self.url:
            raise AdminError(f"{self}: {self.why}")
        return self.url

    def __str__(self) -> str:
        named = f"{self.tier} {self.region}{f'/{self.instance}' if self.instance else ''}".strip()
        return named or self.url


@dataclass(frozen=True)
class StatusReply:
    """A balancer's status, or why there is none."""

    balancer: Balancer
    status: Status | None
    error: str = ""


@dataclass(frozen=True)
class Fleet:
    """`hubs` are the etcd clusters by name: overrides are written to each of them.

    `topology` is None if it is unknown. `keys` are those whose signatures count, as far as that is known here; `region`
    is that of the balancer whose configuration was given. `name` is for people; `trouble` says what of etcd could not
    be read when balancers were looked for. `asked` fills as the command asks: each balancer's last status.
    """

    hubs: Mapping[str, EtcdSettings]
    topology: Topology | None
    balancers: tuple[Balancer, ...] = ()
    keys: Keys = NO_KEYS
    region: str = ""
    access: Access = NO_ACCESS
    name: str = "this fleet"
    trouble: tuple[str, ...] = ()
    speedup: float = 1.0  # the speed-up of a `farhop up` world's engines and network
    announcers: tuple[AnnounceReport, ...] = ()  # what announces an entry by BGP, where balancers were found in etcd
    asked: dict[Balancer, StatusReply] = field(default_factory=dict, compare=False, repr=False)

    @property
    def admins(self) -> tuple[str, ...]:
        """Base URLs of the global balancers."""
        return tuple(one.url for one in self.balancers if one.tier == "global" and one.url)

    @property
    def regional(self) -> frozenset[str]:
        """The regions of which a regional balancer can be asked."""
        return frozenset(one.region for one in self.balancers if one.tier == "regional" and one.url)

    def of(self, tier: str, region: str = "") -> tuple[Balancer, ...]:
        """The balancers of a tier, and of a region."""
        return tuple(one for one in self.balancers if one.tier == tier and region in ("", one.region))

    async def seen(self, tier: str = "", region: str = "") -> list[StatusReply]:
        """Each balancer's status, in order; including those that do not answer."""
        from farhop_cli import admin

        asked = [one for one in self.balancers if tier in ("", one.tier) and region in ("", one.region)]
        async with admin.AdminClient(self.access) as http:
            found = list(await asyncio.gather(*(look(http, one) for one in asked)))
        self.asked.update(zip(asked, found, strict=True))
        return found

    async def statuses(self) -> list[Status]:
        """The regions as reported by each global balancer that answers."""
        return [one.status for one in await self.seen("global") if one.status is not None]

    async def status_of(self, region: str) -> Status | None:
        """The status of a region's balancer; None if none is known here, or none answers."""
        seen = await self.seen("regional", region)
        if not seen:
            nobody = Balancer("regional", region, why="no balancer of this region is known here")
            self.asked[nobody] = StatusReply(nobody, None, f"{nobody}: {nobody.why}")
        return next((one.status for one in seen if one.status is not None), None)

    async def all_statuses(self) -> list[Status]:
        """The status of each global balancer, and of one balancer of each region, of those that answer."""
        regional = await asyncio.gather(*(self.status_of(region) for region in self.regional))
        return [*await self.statuses(), *(status for status in regional if status is not None)]

    @property
    def unanswered(self) -> tuple[str, ...]:
        """Balancers asked by this command that did not answer, and why."""
        return tuple(dict.fromkeys((*self.trouble, *(one.error for one in self.asked.values() if one.status is None))))


async def look(http: admin.AdminClient, one: Balancer) -> StatusReply:
    """A balancer's status, or why there is none."""
    from farhop_cli import admin

    try:
        status = await admin.get(http, one.at, "/status")
    except AdminError as error:
        return StatusReply(one, None, str(error))
    if status is None:
        return StatusReply(one, None, f"{one.url} has no /status")
    tier, region, instance = (str(status.get(name) or "") for name in ("tier", "region", "instance"))
    answered = Balancer(tier, region, one.url, instance)
    if one.found and (answered.tier, answered.region, answered.instance) != (one.tier, one.region, one.instance):
        return StatusReply(
            one, None, f"{one}: {one.url} is another process ({answered}); give it the right `admin.advertise`"
        )
    return StatusReply(one if one.tier else answered, status)


# -- which fleet


def find(
    world: Path | None,
    config: Path | None = None,
    etcd: str | None = None,
    context: str | None = None,
    admins: Sequence[str] = (),
) -> Fleet:
    """By what was given, in this order: a configuration; a context; an etcd or admin ports; a world's file; the context
    that FARHOP_CONTEXT names; the current one; the world that runs in this folder.
    """
    if config is not None and (etcd is not None or context is not None):
        fail(f"give --config or {'--etcd' if etcd is not None else '--context'}, not both")
    if config is not None:
        return _configured(config, admins)
    if context is None and (etcd is not None or admins):
        return _bare(etcd, admins)
    from farhop_cli import context as contexts  # a balancer's modules are heavy; only this needs them

    named = context
    if named is None and world is None:
        named = os.environ.get(contexts.ENVIRONMENT) or contexts.read().current or None
    if named is None:
        return _of_world(world if world is not None else WORLD_FILE)
    chosen = contexts.read().checked(named)
    if chosen.world is not None:
        return replace(_of_world(Path(chosen.world)), name=f"context {named}")
    return _of_context(named, chosen, etcd, admins)


def world_of(world: Path | None, context: str | None = None) -> Path:
    """The file of the world that runs here: for commands that use its clients' ports, not operators'."""
    from farhop_cli import context as contexts

    if world is not None and context is None:
        return world
    named = context or os.environ.get(contexts.ENVIRONMENT) or contexts.read().current
    chosen = contexts.read().checked(named) if named else None
    return Path(chosen.world) if chosen is not None and chosen.world is not None else world or WORLD_FILE


def _of_world(world: Path) -> Fleet:
    if not world.exists():
        fail(
            f"no world runs here ({world} is missing) and no context is current; make one with `farhop context set`, "
            "give a balancer's configuration by --config, or start a world with `farhop up`"
        )
    from farhop_cli import running

    here = running.open_world(world)
    regions = here.file.regions
    return Fleet(
        {name: settings(endpoint) for name, endpoint in (here.file.hubs or {"etcd": here.file.etcd}).items()},
        here.topology,
        (
            *(Balancer("global", name, one.global_admin) for name, one in regions.items()),
            *(Balancer("regional", name, one.regional_admin) for name, one in regions.items()),
        ),
        name=f"the world in {world}",
        speedup=here.file.speedup,
    )


def settings(endpoint: str) -> EtcdSettings:
    """An etcd by `--etcd`."""
    try:
        return EtcdSettings(tuple(endpoint.split(",")))
    except ValueError:
        fail(f"--etcd: {quoted(endpoint)} is not HOST:PORT")


def _bare(etcd: str | None, admins: Sequence[str]) -> Fleet:
    hubs = {} if etcd is None else {"etcd": settings(etcd)}
    access = Access(os.environ.get(TOKEN, "").strip())
    found = _found(Fleet(hubs, None, _given(admins), access=access, name="--etcd" if etcd else "--admin"))
    return _with_reported(replace(found, access=_proving(found, "", by_authority=False)))


def _of_context(name: str, chosen: Context, etcd: str | None, admins: Sequence[str]) -> Fleet:
    try:
        hubs = {hub: part.settings(()) for hub, part in chosen.hubs.items()}
        if etcd is not None or chosen.etcd.endpoints:
            given = chosen.etcd if etcd is None else chosen.etcd.model_copy(update={"endpoints": etcd.split(",")})
            hubs = {"etcd": given.settings(())}
        topology = _topology(chosen.topology) if chosen.topology is not None else None
    except (ValueError, TopologyError) as error:
        fail(f"context {quoted(name)}: {error}")
    ports, access = chosen.admin, _access(chosen.admin)
    begun = Fleet(
        hubs, topology, _given(admins or ports.urls), chosen.signing.made(), access=access, name=f"context {name}"
    )
    found = begun if admins else _found(begun)
    by_authority, pattern = ports.ca_file is not None, ports.server_name
    if pattern is None:
        pattern = f"{{region}}.{{tier}}.{chosen.trust_domain}" if by_authority else ""
    return _with_reported(replace(found, access=_proving(found, pattern, by_authority=by_authority)))


def access_of(context: str | None) -> Access:
    """The credentials for an admin port that is given by its URL: those of this context, or of the one in use. Without
    either, and in a world that runs here, the token of FARHOP_ADMIN_TOKEN."""
    from farhop_cli import context as contexts

    named = context or os.environ.get(contexts.ENVIRONMENT) or contexts.read().current
    chosen = contexts.read().checked(named) if named else None
    if chosen is None or chosen.world is not None:
        return Access(os.environ.get(TOKEN, "").strip())
    return _access(chosen.admin)


def _access(ports: AdminPorts) -> Access:
    return Access(
        ports.token.get_secret_value() if ports.token is not None else "",
        _tls(ports) if ports.ca_file is not None or ports.cert_file is not None else None,
        ports.ca_file or "",
    )


def _tls(ports: AdminPorts) -> Any:
    from farhop.service.config import certificates
    from farhop.service.process.clock import wall

    return certificates.load(ports.files, wall()).context


def _proving(found: Fleet, pattern: str, *, by_authority: bool) -> Access:
    """What balancers found in etcd must prove: more may write to etcd than may see the token."""
    names: dict[str, str] = {}
    barred: dict[str, str] = {}
    for one in found.balancers:
        if not one.found or not one.url:
            continue
        names[one.url] = pattern.replace("{region}", one.region).replace("{tier}", one.tier)
        if not by_authority or not one.url.startswith("https:"):
            barred[one.url] = "it was found in etcd and nothing proves it, so it does not get the token; " + (
                "give its URL in `admin.urls`" if by_authority else "give `admin.ca_file`, or its URL in `admin.urls`"
            )
    return replace(found.access, names=names, barred=barred)


def _given(urls: Iterable[str]) -> tuple[Balancer, ...]:
    for url in urls:
        if not url.startswith(("http://", "https://")) or not url.isprintable() or " " in url:
            fail(f"--admin: {quoted(url)} is no URL; give one such as https://10.1.0.7:8082")
    return tuple(Balancer("", "", url.rstrip("/")) for url in urls)


def _topology(name: str) -> Topology:
    from topology import load as topologies

    return topologies.load(Path(name) if name.endswith((".yaml", ".yml")) else topologies.shipped(name))


def _configured(path: Path, admins: Sequence[str]) -> Fleet:
    # A balancer's modules are heavy; only this needs them.
    from farhop.config import ConfigError, is_absent, load
    from farhop.service.assembly import stores
    from global_lb.app.config import GlobalConfig

    try:
        config = load(GlobalConfig, path, absent=[])  # an operator has none of a balancer's secrets
        topology = stores.topology_of(config)
        hubs = stores.hubs(config, topology)
    except (ConfigError, TopologyError) as error:
        fail(f"--config: {first_of(error)}; it must be a global balancer's configuration")
    if any(one.password is not None and is_absent(one.password) for one in (config.etcd, *config.hubs.values())):
        fail("--config: etcd.password: the variable or file that it names is missing here; set it, or give --etcd")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.admin.host, config.admin.host)
    host = f"[{host}]" if ":" in host else host
    scheme = "http" if config.admin.tls is None else "https"
    own = Balancer("global", config.region, f"{scheme}://{host}:{config.admin.port}")
    given = tuple(replace(one, tier="global", region=config.region) for one in _given(admins))
    access = Access(os.environ.get(TOKEN, "").strip())
    if config.admin.tls is not None and not given:
        access = _pinned(access, own.url, config.admin.tls)
    keys = config.signing.made()
    return Fleet(hubs, topology, given or (own,), keys, config.region, access, f"the configuration {path}")


def _pinned(access: Access, url: str, tls: ListenTls) -> Access:
    """A balancer known by its configuration is trusted by the certificate there, and no other."""
    remedy = "give a context instead, with `admin.ca_file` (farhop context set)"
    if tls.client_ca_file is not None:
        why = f"it admits only operators with a certificate; {remedy}, `admin.cert_file` and `admin.key_file`"
        return replace(access, unasked={url: why})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # only this certificate is trusted, whatever its names
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        pem = Path(tls.cert_file).read_text()
        context.load_verify_locations(cadata=pem[: pem.index(_PEM_END) + len(_PEM_END)])
    except (OSError, ValueError) as error:
        return replace(access, unasked={url: f"its certificate, {tls.cert_file}, cannot be read ({error}); {remedy}"})
    return replace(access, tls=context)


# -- finding balancers


def _found(fleet: Fleet) -> Fleet:
    """Adds the balancers in etcd. Errors of etcd go into the fleet's `trouble`."""
    if not fleet.hubs:
        return fleet
    balancers, announcing, trouble = asyncio.run(_listed(fleet))
    known = {one.url for one in fleet.balancers}
    return replace(
        fleet,
        balancers=(*fleet.balancers, *(one for one in balancers if one.url not in known)),
        announcers=announcing,
        trouble=trouble,
    )


async def announcers(store: Store) -> tuple[tuple[AnnounceReport, ...], list[str]]:
    """Announcers' reports in etcd; and for those that cannot be read, why."""
    found, trouble = [], []
    for one in await store.list(ANNOUNCE_PREFIX):
        try:
            found.append(announce.decode(bare(one.value)))
        except ValueError as error:
            trouble.append(f"the document at {one.key} cannot be read: {error}")
    return tuple(found), trouble


async def _listed(fleet: Fleet) -> tuple[list[Balancer], tuple[AnnounceReport, ...], tuple[str, ...]]:
    from farhop.store.hubs import store_of, unreached

    store = store_of(fleet.hubs, Random(), lambda _, one: Sealed(one, fleet.keys))
    try:
        await store.open()
        above, below = await store.list(ENTRY_PREFIX), await store.list(REGION_PREFIX)
        announcing, _ = await announcers(store)  # `farhop anycast status` reports those that cannot be read
        unanswered = unreached(store)
    except StoreError as error:
        return [], (), (f"etcd: {error}",)
    finally:
        await store.close()
    found = [*filter(None, map(_global, above)), *filter(None, map(_regional, below))]
    return found, announcing, tuple(f"etcd: hub {hub}: {why}" for hub, why in unanswered.items())


def _global(stands: KeyValue) -> Balancer | None:
    from farhop.store.documents import entry as entry_documents

    place = parse_instance_key(ENTRY_PREFIX, stands.key)
    try:
        report = entry_documents.decode(stands.value)
    except DocumentError:
        return None  # no balancer uses it
    if place is None or stands.key != entry_key(report.region, report.instance):
        return None
    return _balancer("global", *place, report.admin_address, report.admin_tls)


def _regional(stands: KeyValue) -> Balancer | None:
    from farhop.store.documents import report as report_documents

    place = parse_report_key(stands.key)
    if place is None:
        return None
    try:
        report = report_documents.decode(stands.value)
    except DocumentError:
        return None  # balancers report it in their metrics
    if stands.key != report_key(report.region, report.instance):
        return None
    return _balancer("regional", *place, report.admin_address, report.admin_tls)


def _balancer(tier: str, region: str, instance: str, address: str, tls: bool) -> Balancer:
    if not address:
        return Balancer(tier, region, "", instance, NOT_OFFERED, found=True)
    return Balancer(tier, region, f"{'https' if tls else 'http'}://{address}", instance, found=True)


def _with_reported(fleet: Fleet) -> Fleet:
    """Adds what balancers report: the topology, if none was given; and the identity of admin ports given by URL."""
    if not any(one.url for one in fleet.balancers):
        return fleet
    return asyncio.run(_asked(fleet))


async def _asked(fleet: Fleet) -> Fleet:
    from farhop_cli import admin

    async with admin.AdminClient(fleet.access) as http:
        unknown = [one for one in fleet.balancers if not one.tier]
        looked = await asyncio.gather(*(look(http, one) for one in unknown))
        named = {one.balancer.url: one.balancer for one in looked}
        balancers = tuple(named.get(one.url, one) for one in fleet.balancers)
        topology = fleet.topology
        for one in sorted(balancers, key=lambda one: one.tier):  # the global ones first
            topology = topology or await _topology_of(http, one)
    # A balancer that is given by its URL and found in etcd, too, counts once.
    given = {(one.tier, one.region, one.instance) for one in named.values() if one.tier}
    kept = tuple(one for one in balancers if not one.found or (one.tier, one.region, one.instance) not in given)
    return replace(fleet, balancers=kept, topology=topology)


async def _topology_of(http: admin.AdminClient, one: Balancer) -> Topology | None:
    from farhop_cli import admin
    from topology import load as topologies

    try:
        document = await admin.get(http, one.at, "/topology")
        return topologies.of(document, one.url) if document is not None else None
    except (AdminError, TopologyError):
        return None  # the caller reports one that does not answer


def unreachable(fleet: Fleet, seen: Sequence[StatusReply]) -> None:
    """End the command if no balancer answers: which address failed, and how."""
    if any(one.status is not None for one in seen):
        return
    why = [*fleet.trouble, *(one.error for one in seen)] or ["no balancer is known: none reports to its etcd"]
    fail(f"{fleet.name} cannot be reached: {'; '.join(why[:8])}{f'; and {len(why) - 8} more' if len(why) > 8 else ''}")


def partial(fleet: Fleet, seen: Sequence[StatusReply]) -> str:
    """Which part of the fleet did not answer, and why; "" if all did."""
    silent = [one for one in seen if one.status is None]
    return in_part(seen, [*fleet.trouble, *(one.error for one in silent)])


def in_part(seen: Sequence[StatusReply], why: Sequence[str]) -> str:
    """That an answer is partial, for people: how many answered, and why others, or a part of etcd, did not; "" if there
    is no `why`.
    """
    if not why:
        return ""
    answered = sum(one.status is not None for one in seen)
    more = f"; and {len(why) - 8} more" if len(why) > 8 else ""
    head = f"{answered} of {len(seen)} balancers answered" if seen else "not all of it could be asked"
    return f"{head}: {'; '.join(why[:8])}{more}"


def known(region: str, names: Iterable[str], of: str, kind: str = "region") -> None:
    """End the command if the region, or other name, is not one of these."""
    all_names = sorted(names)
    if region in all_names:
        return
    close = difflib.get_close_matches(region[:64].lower(), all_names, n=1, cutoff=0.6)
    remedy = f"did you mean {quoted(close[0])}?" if close else f"there is {listed(all_names)}"
    fail(f"{quoted(region)} is no {kind} of {of}; {remedy}")
