"""Locates client networks by a MaxMind database and by lists of networks, as locations for the atlas.

Files are read outside the event loop, and whole or not at all: a file that cannot be read is a ConfigError with its
remedy, and the data read before stay in use. Never decides which entry a client gets, and never treats a country as
proof for the law.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entry_dns.answers.prepare import UNKNOWN_LOCATION, ClientLocation
from entry_dns.fleet.networks import BITS, Space, spaces
from farhop.config import ConfigError
from topology import geo
from topology.problems import did_you_mean, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from entry_dns.links.config import NetworksConfig
    from topology.model import Topology

LINES_MAX = 2_000_000


class _Locations:
    """Locations by their row in the atlas, without duplicates. The first two rows are UNKNOWN and PRIVATE."""

    def __init__(self) -> None:
        self.listed: list[ClientLocation] = [UNKNOWN_LOCATION, UNKNOWN_LOCATION]
        self._rows: dict[ClientLocation, int] = {}

    def row(self, location: ClientLocation) -> int:
        found = self._rows.get(location)
        if found is None:
            found = self._rows[location] = len(self.listed)
            self.listed.append(location)
        return found


def read(config: NetworksConfig, topology: Topology) -> tuple[dict[int, Space], list[ClientLocation]]:
    """The spaces and locations of a configuration. Raises ConfigError."""
    locations = _Locations()
    for country, within in config.confine.items():
        _check_places(within, topology, f"networks.confine.{country}")
    networks: list[tuple[IPv4Network | IPv6Network, int]] = []
    if config.database is not None:
        networks += _of_database(Path(config.database), config, locations)
    listed: dict[IPv4Network | IPv6Network, str] = {}
    for at, one in enumerate(config.lists):
        path = f"networks.lists[{at}]"
        _check_places(one.within, topology, f"{path}.within")
        row = locations.row(_location(one.near, tuple(one.within), topology, path))
        for network in _networks_of(one.cidrs, one.file, path):
            if network in listed:
                raise ConfigError(path, [f"{network} is already in {listed[network]}; leave one of them out"])
            listed[network] = path
            networks.append((network, row))
    return spaces(networks), locations.listed


def _check_places(within: Sequence[str], topology: Topology, path: str) -> None:
    """Raise ConfigError for an unknown place: clients confined to it, and all clients of resolvers that send no client
    subnet, would be led nowhere."""
    known = {"world", *topology.places, *topology.regions}
    for name in within:
        if name not in known:
            remedy = did_you_mean(name, sorted(known), "name a region, a country or a jurisdiction of the topology")
            raise ConfigError(path, [f"{quoted(name)} is no place of topology {topology.name!r}; {remedy}"])


def _location(near: str, within: tuple[str, ...], topology: Topology, path: str) -> ClientLocation:
    if not near:
        return ClientLocation(within=within)
    region = topology.regions.get(near)
    if region is not None:
        return ClientLocation(region.latitude, region.longitude, within=within)
    found = geo.locate(near)
    if found is None:
        remedy = "name a region, a city of topology/places.csv, or give LATITUDE,LONGITUDE"
        raise ConfigError(f"{path}.near", [f"{near[:64]!r} is no known place; {remedy}"])
    return ClientLocation(*found, within=within)


def _networks_of(cidrs: Sequence[str], file: str | None, path: str) -> Iterator[IPv4Network | IPv6Network]:
    for text in cidrs:
        yield network_of(text, f"{path}.cidrs")
    if file is None:
        return
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}.file", [f"{file}: {error.strerror}; give a readable file"]) from None
    except ValueError:
        raise ConfigError(f"{path}.file", [f"{file}: not UTF-8 text; give a network a line"]) from None
    if len(lines) > LINES_MAX:
        raise ConfigError(f"{path}.file", [f"{file}: more than {LINES_MAX} lines; use a database"])
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            yield network_of(text, f"{file}:{number}")


def network_of(text: str, path: str) -> IPv4Network | IPv6Network:
    """The network in a text. Raises ConfigError, also for an IPv6 network narrower than /64: it would count for all of
    its /64, another part of which may be confined elsewhere."""
    try:
        network = ip_network(text)
    except ValueError as error:
        raise ConfigError(path, [f"{error}; write such as 203.0.113.0/24 or 2001:db8::/32"]) from None
    if network.version == 6 and network.prefixlen > BITS[6]:
        around = network.supernet(new_prefix=BITS[6])
        raise ConfigError(
            path, [f"{network} is narrower than a /64, and clients within it cannot be told apart; give {around}"]
        )
    return network


def _of_database(
    path: Path, config: NetworksConfig, locations: _Locations
) -> Iterator[tuple[IPv4Network | IPv6Network, int]]:
    try:
        import maxminddb
    except ImportError:
        remedy = "install farhop[geoip], or leave the database out"
        raise ConfigError("networks.database", [f"maxminddb is not installed; {remedy}"]) from None
    try:
        with maxminddb.open_database(str(path), maxminddb.MODE_AUTO) as database:
            parts: dict[IPv6Network, tuple[int, ClientLocation | None]] = {}  # of each /64 that is split, the widest
            for network, record in database:
                location = _location_of(record, config.confine)
                if network.version == 6 and network.prefixlen > BITS[6]:
                    around = network.supernet(new_prefix=BITS[6])
                    if network.prefixlen < parts.get(around, (129, None))[0]:
                        parts[around] = network.prefixlen, location
                elif location is not None:
                    yield network, locations.row(location)
            yield from (
                (around, locations.row(location)) for around, (_, location) in parts.items() if location is not None
            )
    except OSError as error:
        remedy = "give the path of a readable database"
        raise ConfigError("networks.database", [f"{path}: {error.strerror or error}; {remedy}"]) from None
    except (maxminddb.InvalidDatabaseError, ValueError) as error:
        problem = f"{path}: no MaxMind database, or a corrupt one ({error}); fetch it again"
        raise ConfigError("networks.database", [problem]) from None


def _location_of(record: Any, confine: dict[str, tuple[str, ...]]) -> ClientLocation | None:
    """The location of a network by its record; None if the record has none."""
    if not isinstance(record, dict):
        return None
    location, country = record.get("location"), record.get("country")
    location, country = location if isinstance(location, dict) else {}, country if isinstance(country, dict) else {}
    code = str(country.get("iso_code", "")).lower()
    latitude, longitude = location.get("latitude"), location.get("longitude")
    if not isinstance(latitude, int | float) or not isinstance(longitude, int | float):
        latitude = longitude = None
    within = tuple(confine.get(code, ()))
    if latitude is None and not within:
        return None
    # A tenth of a degree is 11 km, a fifth of a millisecond: finer only makes more locations.
    return ClientLocation(
        None if latitude is None else round(float(latitude), 1),
        None if longitude is None else round(float(longitude), 1),
        within=within,
    )
