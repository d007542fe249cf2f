from __future__ import annotations

from ipaddress import ip_address

import pytest

from entry_dns.answers.prepare import Place
from entry_dns.fleet.networks import PRIVATE, UNKNOWN
from entry_dns.links.client_networks import read
from entry_dns.links.config import NetworksConfig
from farhop.config import ConfigError
from tests.entry_dns.conftest import world

mmdb = pytest.importorskip("mmdb_writer")
netaddr = pytest.importorskip("netaddr")


def place(config: NetworksConfig, address: str) -> Place:
    spaces, places = read(config, world())
    at = ip_address(address)
    return places[spaces[at.version].at(int(at) if at.version == 4 else int(at) >> 64)]


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


def test_a_database_says_where_networks_are_and_lists_go_before_it(database) -> None:
    config = NetworksConfig(
        database=str(database),
        lists=[{"cidrs": ["203.0.113.128/25"], "near": "frankfurt"}],
        confine={"DE": ("eu",)},
    )
    assert place(config, "203.0.113.1") == Place(35.7, 139.7)
    assert place(config, "2001:db8:aaaa::1") == Place(35.7, 139.7)
    assert place(config, "203.0.113.200").latitude == pytest.approx(50.11)
    assert place(config, "198.51.100.1") == Place(within=("eu",))
    spaces, _ = read(config, world())
    assert spaces[4].at(int(ip_address("8.8.8.8"))) == UNKNOWN
    assert spaces[4].at(int(ip_address("10.8.8.8"))) == PRIVATE


def test_a_file_of_networks(tmp_path) -> None:
    file = tmp_path / "nets"
    file.write_text("# ours\n192.0.2.0/25  # one\n\n2001:db8::/32\n")
    config = NetworksConfig(lists=[{"file": str(file), "near": "Paris", "within": ["eu"]}])
    assert place(config, "192.0.2.1").within == ("eu",)
    assert place(config, "2001:db8::1").latitude == pytest.approx(48.86, abs=0.1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"database": "missing.mmdb"}, r"networks.database: missing.mmdb: .*; give the path of a readable database"),
        ({"lists": [{"cidrs": ["10.0.0.1/8"]}]}, r"networks.lists\[0\].cidrs: .* has host bits set; write such as"),
        ({"lists": [{"cidrs": ["1.2.3.0/24"]}, {"cidrs": ["1.2.3.0/24"]}]}, r"lists\[1\]: 1.2.3.0/24 is already in"),
        ({"lists": [{"cidrs": ["1.2.3.0/24"], "near": "atlantis"}]}, "'atlantis' is no known place; name a region"),
        ({"lists": [{"file": "nowhere"}]}, r"nowhere: No such file or directory; give a readable file"),
    ],
)
def test_what_cannot_be_read_is_one_line(config, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(NetworksConfig(**config), world())


def test_a_corrupt_database_is_one_line(tmp_path) -> None:
    path = tmp_path / "bad.mmdb"
    path.write_bytes(b"\0" * 5000)
    with pytest.raises(ConfigError, match="no MaxMind database, or a corrupt one"):
        read(NetworksConfig(database=str(path)), world())
