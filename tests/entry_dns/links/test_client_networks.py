from __future__ import annotations

from ipaddress import ip_address, ip_network
from random import Random

import pytest

from entry_dns.answers.prepare import ClientLocation
from entry_dns.fleet.networks import PRIVATE, UNKNOWN
from entry_dns.links.client_networks import read
from entry_dns.links.config import NetworksConfig
from farhop.config import ConfigError
from tests.entry_dns.conftest import world

mmdb = pytest.importorskip("mmdb_writer")
netaddr = pytest.importorskip("netaddr")


def location(config: NetworksConfig, address: str) -> ClientLocation:
    spaces, locations = read(config, world())
    at = ip_address(address)
    return locations[spaces[at.version].at(int(at) if at.version == 4 else int(at) >> 64)]


@pytest.fixture
def database(tmp_path):
    writer = mmdb.MMDBWriter(6, "Test-City", ipv4_compatible=True)
    writer.insert_network(
        netaddr.IPSet(["203.0.113.0/24", "2001:db8:aaaa::/48"]),
        {"location": {"latitude": 35.69, "longitude": 139.69}, "country": {"iso_code": "JP"}},
    )
    writer.insert_network(netaddr.IPSet(["198.51.100.0/24"]), {"country": {"iso_code": "DE"}})
    path = tmp_path / "city.mmdb"
    writer.to_db_file(str(path))
    return path


def test_networks_are_located_by_database_and_lists_take_precedence(database) -> None:
    config = NetworksConfig(
        database=str(database),
        lists=[{"cidrs": ["203.0.113.128/25"], "near": "frankfurt"}],
        confine={"DE": ("eu",)},
    )
    assert location(config, "203.0.113.1") == ClientLocation(35.7, 139.7)
    assert location(config, "2001:db8:aaaa::1") == ClientLocation(35.7, 139.7)
    assert location(config, "203.0.113.200").latitude == pytest.approx(50.11)
    assert location(config, "198.51.100.1") == ClientLocation(within=("eu",))
    spaces, _ = read(config, world())
    assert spaces[4].at(int(ip_address("8.8.8.8"))) == UNKNOWN
    assert spaces[4].at(int(ip_address("10.8.8.8"))) == PRIVATE


def test_a_file_of_networks(tmp_path) -> None:
    file = tmp_path / "nets"
    file.write_text("# ours\n192.0.2.0/25  # one\n\n2001:db8::/32\n")
    config = NetworksConfig(lists=[{"file": str(file), "near": "Paris", "within": ["eu"]}])
    assert location(config, "192.0.2.1").within == ("eu",)
    assert location(config, "2001:db8::1").latitude == pytest.approx(48.86, abs=0.1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"database": "missing.mmdb"}, r"networks.database: missing.mmdb: .*; give the path of a readable database"),
        ({"lists": [{"cidrs": ["10.0.0.1/8"]}]}, r"networks.lists\[0\].cidrs: .* has host bits set; write such as"),
        (
            {"lists": [{"cidrs": ["2001:db8::1/32"]}]},
            r"networks.lists\[0\].cidrs: 2001:db8::1/32 has host bits set; write",
        ),
        ({"lists": [{"cidrs": ["1.2.3.0/24"]}, {"cidrs": ["1.2.3.0/24"]}]}, r"lists\[1\]: 1.2.3.0/24 is already in"),
        (
            {"lists": [{"cidrs": ["2001:db8::/48"]}, {"cidrs": ["2001:DB8:0::/48"]}]},
            r"lists\[1\]: 2001:db8::/48 is already in networks.lists\[0\]; leave one of them out",
        ),
        ({"lists": [{"cidrs": ["1.2.3.0/24", "1.2.3.0/24"]}]}, r"lists\[0\]: 1.2.3.0/24 is already in networks.lists"),
        (
            {"lists": [{"cidrs": ["2001:db8::/64"], "within": ["eu"]}, {"cidrs": ["2001:db8::5/128"]}]},
            r"lists\[1\].cidrs: 2001:db8::5/128 is narrower than a /64, .*; give 2001:db8::/64",
        ),
        ({"lists": [{"cidrs": ["1.2.3.0/24"], "near": "atlantis"}]}, "'atlantis' is no known place; name a region"),
        (
            {"lists": [{"cidrs": ["1.2.3.0/24"], "within": ["eu", "atlantis"]}]},
            r'lists\[0\].within: "atlantis" is no place',
        ),
        (
            {"confine": {"DE": ["ue"]}},
            r'networks.confine.de: "ue" is no place of topology .*; name a region, a country',
        ),
        ({"lists": [{"file": "nowhere"}]}, r"nowhere: No such file or directory; give a readable file"),
    ],
)
def test_a_database_that_cannot_be_read_is_reported_in_one_line(config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(NetworksConfig(**config), world())


@pytest.mark.parametrize("wide", ["198.51.0.0/16", "2001:db8::/32"])
def test_of_networks_that_overlap_the_narrowest_decides_in_whatever_order_they_come(wide: str) -> None:
    narrow, narrowest = (
        ("198.51.100.0/24", "198.51.100.8/29") if "." in wide else ("2001:db8:5::/48", "2001:db8:5:7::/64")
    )
    lists = [
        {"cidrs": [narrow], "near": "frankfurt"}, {"cidrs": [wide], "near": "virginia"},
        {"cidrs": [narrowest], "near": "tokyo", "within": ["jp"]},
    ]  # fmt: skip
    for order in (lists, lists[::-1]):
        config = NetworksConfig(lists=order)
        of_tokyo = location(config, str(ip_network(narrowest)[1]))
        assert of_tokyo.within == ("jp",)
        assert location(config, str(ip_network(narrow)[-1])) == ClientLocation(50.11, 8.68)
        assert location(config, str(ip_network(wide)[-1])).within == ()
        assert location(config, str(ip_network(wide)[-1])).longitude < 0.0


def test_a_part_of_a_slash_64_in_a_database_does_not_locate_all_of_it(tmp_path) -> None:
    writer = mmdb.MMDBWriter(6, "Test-City", ipv4_compatible=True)
    writer.insert_network(netaddr.IPSet(["2001:db8::/64"]), {"country": {"iso_code": "DE"}})
    writer.insert_network(netaddr.IPSet(["2001:db8::5/128"]), {"country": {"iso_code": "JP"}})
    path = tmp_path / "city.mmdb"
    writer.to_db_file(str(path))
    config = NetworksConfig(database=str(path), confine={"DE": ("eu",), "JP": ("jp",)})
    assert location(config, "2001:db8::5").within == ("eu",), "the widest part does"


@pytest.mark.parametrize("kept", [0, 100, 400, 0.5, 0.99])
def test_a_corrupt_database_is_one_line(tmp_path, database, kept: float) -> None:
    data = database.read_bytes()
    path = tmp_path / "bad.mmdb"
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept] or b"\0" * 5000)
    with pytest.raises(ConfigError, match=r"networks.database: .*bad.mmdb: no MaxMind database, or a corrupt one"):
        read(NetworksConfig(database=str(path)), world())


def test_a_database_with_its_bytes_changed_is_read_or_refused(tmp_path, database) -> None:
    data, rng = database.read_bytes(), Random(5)
    refused: set[str] = set()
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 40)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path = tmp_path / "changed.mmdb"
        path.write_bytes(changed)
        try:
            read(NetworksConfig(database=str(path)), world())
        except ConfigError as error:
            refused.add(str(error).partition(" (")[0])
    assert refused == {f"networks.database: {path}: no MaxMind database, or a corrupt one"}


def test_a_database_that_is_a_folder_is_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"networks.database: .*: no MaxMind database"):
        read(NetworksConfig(database=str(tmp_path)), world())
