from __future__ import annotations

import pytest
import yaml

from entry_dns.app.config import DnsConfig
from farhop.config import ConfigError, load

GOOD = {
    "region": "tokyo", "instance": "dns-1", "admin": {"port": 0},
    "zones": [
        {"zone": "Entry.Example.", "servers": ["ns1.entry.example"], "names": [{"name": "api.entry.example"}]},
    ],
}  # fmt: skip


def read(tmp_path, **changes) -> DnsConfig:
    path = tmp_path / "dns.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return load(DnsConfig, path)


def test_a_small_file_is_enough(tmp_path) -> None:
    config = read(tmp_path)
    (plan,) = config.plans()
    assert (plan.zone, plan.names[0].families, plan.names[0].alpn) == ("entry.example", (4, 6), ("http/1.1",))
    assert (config.ttl.least, config.ttl.most, config.rates.per_s, config.listen.port) == (5, 30, 200, 53)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zones": []}, "zones: "),
        ({"zones": [{**GOOD["zones"][0], "names": []}]}, "zones[0].names: List should have at least 1 item"),
        (
            {"zones": [{**GOOD["zones"][0], "addresses": {"ns1.entry.example": ["192.0.2"]}}]},
            "'192.0.2' is no address; give one such as 192.0.2.53",
        ),
        (
            {"zones": [{**GOOD["zones"][0], "addresses": {"ns2.entry.example": ["192.0.2.1"]}}]},
            "addresses: ns2.entry.example is none of the servers; name it there",
        ),
        (
            {"zones": [{**GOOD["zones"][0], "servers": ["ns.org"], "addresses": {"ns.org": ["192.0.2.1"]}}]},
            "addresses: ns.org lies outside of the zone",
        ),
        ({"listen": {"hosts": ["300.1.1.1"]}}, "'300.1.1.1' is no address"),
        ({"ttl": {"least": 50, "most": 30}}, "ttl: least: is above most"),
        ({"ttl": {"most": 61}}, "ttl.most: "),
        ({"nsid": "a b"}, "nsid: "),
        ({"hop": {}}, "hop: "),
        ({"cookie_secrets": ["in the clear"]}, "a secret is given as env:NAME or file:PATH"),
        ({"zones": [{**GOOD["zones"][0], "names": [{"name": "a" * 64 + ".example"}]}]}, "is no name"),
    ],
)
def test_a_wrong_value_is_reported_by_its_field(tmp_path, changes, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, **changes)
    assert message in str(refused.value)


def test_a_zone_s_key_that_cannot_be_read(tmp_path) -> None:
    zone = {**GOOD["zones"][0], "dnssec_key_file": str(tmp_path / "missing.pem")}
    with pytest.raises(ConfigError, match=r"missing.pem: No such file or directory; give a readable file"):
        read(tmp_path, zones=[zone]).zones[0].keys()
    (tmp_path / "bad.pem").write_text("nonsense")
    zone["dnssec_key_file"] = str(tmp_path / "bad.pem")
    with pytest.raises(ConfigError, match=r"bad.pem: no private key in PEM"):
        read(tmp_path, zones=[zone]).zones[0].keys()


def test_cookies_are_the_same_wherever_the_secret_is(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COOKIES", "one secret")
    config = read(tmp_path, cookie_secrets=["env:COOKIES"])
    assert config.cookies() == read(tmp_path, cookie_secrets=["env:COOKIES"]).cookies()
    assert [len(one) for one in config.cookies()] == [16]
