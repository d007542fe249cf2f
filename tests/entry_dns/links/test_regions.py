"""Reports over gRPC: followed where a report says that its sender is and the configuration allows it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from inprocess import until
from regions import Region, a_report

from entry_dns.links import regions
from entry_dns.links.regions import RegionLinks
from farhop.service.config.region_connections import RegionConnections
from farhop.store.documents.report import RegionReport


class Following:
    def __init__(self, **more: Any) -> None:
        ways = RegionConnections.model_validate({"region": "virginia", "instance": "d1", "admin": {"port": 1}, **more})
        self.reports: list[RegionReport] = []
        self.refused: list[str] = []
        self.links = RegionLinks(ways, None, self.reports.append, self.refused.append, lambda: 0.01)


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    made = Region()
    await made.start()
    yield made
    await made.stop()


async def test_reports_come_and_go_on_when_a_stream_broke(region: Region) -> None:
    one = Following()
    one.links.named(a_report(control_address=region.address))
    await region.say(a_report(seq=2))
    await until(lambda: [report.seq for report in one.reports] == [2])
    assert one.links.speaking == 1
    await region.stop()
    await until(lambda: one.links.speaking == 0)
    await region.start()
    await region.say(a_report(seq=3))
    await until(lambda: [report.seq for report in one.reports][-1] == 3)
    await one.links.close()
    assert one.refused == []


async def test_a_report_under_another_name_is_refused_and_a_moved_balancer_is_followed(region: Region) -> None:
    one = Following()
    one.links.named(a_report(control_address="127.0.0.1:9"))
    one.links.named(a_report(control_address=region.address))
    await region.say(a_report("frankfurt"))
    await until(lambda: one.refused == ["report_misplaced"])
    assert one.reports == []
    await one.links.close()


async def test_a_region_with_ever_more_instances_takes_no_links_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "REGION_INSTANCES_MAX", 2)
    monkeypatch.setattr(regions, "LINKS_MAX", 3)
    one = Following()
    for name in "abcd":
        one.links.named(a_report("frankfurt", instance=name, control_address="127.0.0.1:9"))
    one.links.named(a_report(control_address="127.0.0.1:9"))
    assert set(one.links.links) == {("frankfurt", "a"), ("frankfurt", "b"), ("tokyo", "r1")}
    await one.links.close()


async def test_an_address_not_allowed_for_the_region_is_not_dialled(region: Region) -> None:
    one = Following(region_hosts={"tokyo": ["10.0.0.0/8"]})
    one.links.named(a_report(control_address=region.address))
    one.links.named(a_report("frankfurt", control_address="198.51.100.1:80"))
    assert one.refused == ["address_not_allowed"] * 2
    assert not one.links.links
    await one.links.close()


async def test_a_withdrawn_balancer_is_followed_until_its_stream_ends(region: Region) -> None:
    one = Following()
    one.links.named(a_report(control_address="127.0.0.1:9"))
    one.links.gone("tokyo", "r1")
    assert not one.links.links, "it did not speak"
    one.links.named(a_report(control_address=region.address))
    await region.say(a_report())
    await until(lambda: one.links.speaking == 1)
    one.links.gone("tokyo", "r1")
    assert one.links.links
    await region.stop()
    await until(lambda: not one.links.links)
    await one.links.close()
