from __future__ import annotations

import socket
from dataclasses import replace
from random import Random

import pytest
import yaml

from entry_dns.answers.message import A
from entry_dns.answers.publishing import records_of
from entry_dns.answers.responder import wire
from entry_dns.answers.zones import Ttls, view
from entry_dns.app import main
from entry_dns.app.config import DnsConfig
from entry_dns.app.publish import Publisher, shown, write_once
from entry_dns.fleet.entry_health import State
from entry_dns.links.updates import UpdateError
from farhop.config import load
from farhop.store.contract import StoreUnreachable
from farhop_lab.memory_store import MemoryStore
from tests.entry_dns.conftest import NAMES, PLAN, entry_health, unconfined, world
from topology.law import Law
from topology.load import shipped


class Zone:
    """What was written; or a server that does not take it."""

    def __init__(self) -> None:
        self.fault, self.holds, self.writes = "", {}, 0
        self.takes = False  # though it does not say so

    async def write(self, changes) -> None:
        if self.takes or not self.fault:
            self.holds.update(changes)
        if self.fault:
            raise UpdateError(self.fault)
        self.writes += 1


class Log:
    def __init__(self) -> None:
        self.lines = []

    def error(self, _event: str, problem: str) -> None:
        self.lines.append(problem)


def made(**healths):
    listed = [healths.get(name, entry_health(name)) for name in NAMES]
    return view([PLAN], Law(world()), unconfined(), listed, Ttls(5, 30), 3, 1)


@pytest.fixture
def zone() -> Zone:
    return Zone()


async def test_a_published_record_is_written_again_only_when_it_changes(zone) -> None:
    publisher = Publisher(zone, Log())
    assert await publisher(*made())
    assert await publisher(*made())
    assert zone.writes == 1
    assert await publisher(*made(tokyo=entry_health("tokyo", State.DOWN)))
    assert zone.writes == 2
    assert zone.holds == records_of(*made(tokyo=entry_health("tokyo", State.DOWN)))


async def test_a_failed_write_is_logged_once_and_tried_again(zone) -> None:
    log = Log()
    publisher = Publisher(zone, log)
    zone.fault = "127.0.0.1:53 answers REFUSED"
    assert not await publisher(*made())
    assert not await publisher(*made())
    assert log.lines == [zone.fault]
    zone.fault = ""
    assert await publisher(*made())
    assert publisher.trouble == ""


async def test_a_write_whose_answer_was_lost_is_written_again_even_if_all_is_as_before(zone) -> None:
    publisher = Publisher(zone, Log())
    assert await publisher(*made())
    zone.fault = "127.0.0.1:53 cannot be updated: no answer"
    zone.takes = True
    assert not await publisher(*made(tokyo=entry_health("tokyo", State.DOWN)))
    zone.fault = ""
    assert await publisher(*made())
    assert zone.holds == records_of(*made())
    writes = zone.writes
    assert await publisher(*made())
    assert zone.writes == writes, "now it is sure"


async def test_a_record_to_be_deleted_is_deleted_after_a_failure_too(zone) -> None:
    publisher = Publisher(zone, Log())
    assert await publisher(*made())
    fewer = view(
        [replace(PLAN, names=PLAN.names[1:])], Law(world()), unconfined(), [entry_health(name) for name in NAMES],
        Ttls(5, 30), 3, 1,
    )  # fmt: skip
    zone.fault = "127.0.0.1:53 cannot be updated: no answer"
    assert not await publisher(*fewer)
    zone.fault = ""
    assert await publisher(*fewer)
    assert zone.holds[wire("api.entry.example"), A] is None


def test_records_are_shown_as_a_zone_has_them() -> None:
    lines = shown(records_of(*made()))
    assert "eu.entry.example. 30 IN A 192.0.2.2" in lines
    assert "eu.entry.example. 30 IN AAAA 2001:db8::2" in lines


async def test_it_publishes_once_beside_a_server_that_runs_by_the_same_file(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(main, "FIRST_LOOK_S", 0.0)
    document = yaml.safe_load(shipped("three-regions").read_text())
    document["entries"] = [{"name": "tokyo-1", "region": "tokyo", "ipv4": ["192.0.2.1"]}]
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(document))
    zone = {
        "zone": "entry.example",
        "servers": ["ns1.example"],
        "names": [{"name": "api.entry.example", "families": ["ipv4"]}],
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (tmp_path / "dns.yaml").write_text(yaml.safe_dump({
            "region": "tokyo", "instance": "dns-1", "admin": {"port": taken.getsockname()[1]},
            "topology": str(tmp_path / "map.yaml"), "probe": {"timeout_s": 0.1}, "zones": [zone],
        }))  # fmt: skip
        config = load(DnsConfig, tmp_path / "dns.yaml")
        assert await write_once(config, Publisher(Zone(), Log()), MemoryStore(Random(1)), dry_run=True) == 0
        # It does not wait for an etcd that does not answer, as a server does: it shall end.
        (silent := MemoryStore(Random(1))).outage()
        with pytest.raises(StoreUnreachable):
            await write_once(config, Publisher(Zone(), Log()), silent, dry_run=False)
    assert "api.entry.example. 5 IN A 192.0.2.1" in capsys.readouterr().out
