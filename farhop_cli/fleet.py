"""The fleet that an operator's command is for: where its etcd is, its law, and which global balancers can be asked.

A world that runs here, a balancer's configuration, or an etcd alone. Whatever is wrong ends the command with one line.
"""

from __future__ import annotations

import asyncio
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farhop.store.envelope import NO_KEYS, Keys
from farhop.store.etcd_link import EtcdSettings
from farhop_cli import admin, running
from farhop_cli.admin import AdminError
from farhop_cli.exits import fail
from topology.problems import TopologyError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from topology.model import Topology

Status = dict[str, Any]


@dataclass(frozen=True)
class Fleet:
    """`hubs` are the etcd clusters by name: what operators set is written to each of them.

    `topology` is None and `admins` is empty where only etcd is known. `admins` are base URLs of global balancers,
    `regional` those of regional ones, by region, where they are known. `keys` are whose signatures count, as far as
    that is known here; `region` is where the balancer stands whose configuration was given."""

    hubs: Mapping[str, EtcdSettings]
    topology: Topology | None
    admins: tuple[str, ...]
    regional: Mapping[str, str] = field(default_factory=dict)
    keys: Keys = NO_KEYS
    region: str = ""

    async def statuses(self) -> list[Status]:
        """What each global balancer that answers says of the regions."""
        async with admin.session() as http:
            return [answer for answer in await asyncio.gather(*(_status(http, url) for url in self.admins)) if answer]

    async def status_of(self, region: str) -> Status | None:
        """What the region's balancer says of itself; None if it is not known here, or silent."""
        if region not in self.regional:
            return None
        async with admin.session() as http:
            return await _status(http, self.regional[region])


async def _status(http: Any, url: str) -> Status | None:
    try:
        return await admin.get(http, url, "/status")
    except AdminError:
        return None  # who is silent is counted by who asks


def find(world: Path, config: Path | None, etcd: str | None) -> Fleet:
    """By configuration or etcd if given, else the world that runs here."""
    if config is not None and etcd is not None:
        fail("give --config or --etcd, not both")
    if config is not None:
        return _configured(config)
    if etcd is not None:
        return Fleet({"etcd": settings(etcd)}, None, ())
    if not world.exists():
        fail(f"no world runs here ({world} is missing); give a fleet's by --config, or start one with `farhop up`")
    here = running.open_world(world)
    regions = here.file.regions
    return Fleet(
        {name: settings(endpoint) for name, endpoint in (here.file.hubs or {"etcd": here.file.etcd}).items()},
        here.topology,
        tuple(one.global_admin for one in regions.values()),
        {name: one.regional_admin for name, one in regions.items()},
    )


def settings(endpoint: str) -> EtcdSettings:
    """An etcd by `--etcd`."""
    try:
        return EtcdSettings((endpoint,))
    except ValueError:
        fail(f"--etcd: {quoted(endpoint)} is not HOST:PORT")


def _configured(path: Path) -> Fleet:
    # A balancer's rooms are not light; nobody but this needs them.
    from farhop.config import ConfigError, is_absent, load
    from farhop.service import stores
    from global_lb.app.config import GlobalConfig

    try:
        config = load(GlobalConfig, path, absent=[])  # an operator has none of a balancer's secrets
        topology = stores.world(config)
        hubs = stores.hubs(config, topology)
    except (ConfigError, TopologyError) as error:
        fail(f"--config: {error}; it must be a global balancer's configuration")
    if any(one.password is not None and is_absent(one.password) for one in (config.etcd, *config.hubs.values())):
        fail("--config: etcd.password: what it names is not here; set it, or give --etcd")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.admin.host, config.admin.host)
    host = f"[{host}]" if ":" in host else host
    scheme = "http" if config.admin.tls is None else "https"
    admins = (f"{scheme}://{host}:{config.admin.port}",)
    return Fleet(hubs, topology, admins, keys=config.signing.made(), region=config.region)


def known(region: str, names: Iterable[str], of: str) -> None:
    """End the command if the region is none of these."""
    all_names = sorted(names)
    if region in all_names:
        return
    close = difflib.get_close_matches(region[:64].lower(), all_names, n=1, cutoff=0.6)
    remedy = f"did you mean {quoted(close[0])}?" if close else f"there is {running.listed(all_names)}"
    fail(f"{quoted(region)} is no region of {of}; {remedy}")
