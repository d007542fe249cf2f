"""An announcer's configuration: what it resolves to, and every error with its remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from entry_anycast.app.config import AnycastConfig, Probe
from farhop.config import ConfigError
from topology.load import parse, shipped

PEER = {"address": "10.0.0.1", "asn": 65000, "local_address": "10.0.0.2"}
WORLD = parse(
    shipped("three-regions").read_text()
    + "entries: [{name: t1, region: tokyo, ipv4: [192.0.2.1], ipv6: ['2001:db8::1']}]\n",
    "test",
)


def made(**more: Any) -> AnycastConfig:
    given = {
        "region": "tokyo", "instance": "a", "admin": {"port": 0}, "entry": "t1",
        "probe": {"url": "http://127.0.0.1:9100/readyz"},
        "speaker": {"exabgp": {"local_as": 65001, "router_id": "10.0.0.2", "peers": [PEER]}},
    }  # fmt: skip
    return AnycastConfig.model_validate({**given, **more})


def test_prefixes_are_the_entrys_addresses_unless_they_are_given() -> None:
    bird = {"bird": {"file": "/run/farhop/routes.conf"}}
    assert made(speaker=bird).announced(WORLD) == ("192.0.2.1/32", "2001:db8::1/128")
    assert made(prefixes=["198.51.100.0/24"]).announced(WORLD) == ("198.51.100.0/24",)
    assert made().machine().last_site == "keep"


def test_settings_of_a_single_node_come_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = {**PEER, "local_address": "env:HOST_IP"}
    speaker = {"exabgp": {"local_as": 65001, "router_id": "env:HOST_IP", "peers": [peer]}}
    monkeypatch.setenv("HOST_IP", "10.20.0.7")
    found = made(speaker=speaker).exabgp_made()
    assert found is not None
    assert (found.router_id, found.peers[0].local_address) == ("10.20.0.7", "10.20.0.7")
    monkeypatch.delenv("HOST_IP")
    with pytest.raises(ValidationError, match="HOST_IP is not set"):
        made(speaker=speaker)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"entry": "t2"}, '"t2" is no entry of topology'),
        ({"region": "virginia"}, "is in region tokyo, not in virginia"),
        ({}, "none has an address of the family of 2001:db8::1/128"),
    ],
)
def test_a_configuration_that_contradicts_the_topology_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(**more).announced(WORLD)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"prefixes": ["192.0.2.300/32"]}, "is no prefix such as"),
        ({"prefixes": ["192.0.2.1/24"]}, "has host bits set"),
        ({"speaker": {"exabgp": {"local_as": 0, "router_id": "x", "peers": []}}}, "greater than or equal to 1"),
        ({"speaker": {"bird": {"file": 'a"b'}}}, "String should match"),
        ({"speaker": {"bird": {"file": "/x", "prepend": 2}}}, "local_as: is what is prepended"),
        ({"budget": {"window_s": 900, "hold_s": 800}}, "hold_s: must be window_s or more"),
        ({"probe": {"url": "ftp://x"}}, "String should match"),
    ],
)
def test_impossible_settings_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as error:
        made(**more)
    assert says in str(error.value)


def test_a_neighbours_family_and_password_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BGP_PASSWORD", 'x"; neighbor')
    for peer, says in (
        ({**PEER, "local_address": "::1"}, "of another family"),
        ({**PEER, "password": "env:BGP_PASSWORD"}, "password: must hold no space"),
    ):
        with pytest.raises(ValidationError) as error:
            made(speaker={"exabgp": {"local_as": 1, "router_id": "10.0.0.2", "peers": [peer]}})
        assert says in str(error.value)
        assert "neighbor" not in str(error.value).replace("neighbors", "")


def test_by_default_an_entry_that_hangs_is_withdrawn_within_two_seconds() -> None:
    probe = Probe(url="http://127.0.0.1:9101/readyz")
    assert probe.every_s + probe.timeout_s < 2.0, "it hangs right after a probe; the next is answered by nobody"
