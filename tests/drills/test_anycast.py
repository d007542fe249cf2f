"""Two entries announce one address to a real BIRD, in network namespaces: one by ExaBGP, one by a BIRD of its own.

Real processes throughout: etcd, an engine and both balancers at each site, and the announcers. What is measured is
printed (`pytest -s`): from the announcer's word to the change of the router's kernel route.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from farhop_lab.world import anycast_net
from farhop_lab.world.anycast_net import ROUTER, VIP
from farhop_lab.world.anycast_sites import KEY, LONG, MODEL, OWN, Sites

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(anycast_net.lacking()), reason="no bird2 or no iproute2 here")]
ANNOUNCING = {
    "probe": {"url": "http://127.0.0.1:9101/readyz", "every_s": 0.2, "timeout_s": 1.0, "rise": 2, "fall": 2},
    "drain_s": 2.0, "settle_s": 0.5, "observe_s": 0.3,
}  # fmt: skip


class Fleet(Sites):
    """Both sites, and clients of theirs."""

    def streams(self, count: int, host: str, tokens: int = 8, *how: str) -> subprocess.Popen[str]:
        script = str(Path(__file__).with_name("anycast_client.py"))
        words = (str(count), f"http://{host}:8080/v1/chat/completions", KEY, MODEL, str(tokens), *how)
        return self.net.spawn(ROUTER, sys.executable, "-u", script, *words, log="client")

    def asked(self, count: int, host: str = VIP) -> Counter[str]:
        """Where so many short requests were served; "" for one that was not."""
        ended = [one for one in _events(self.streams(count, host)) if one["event"] == "ended"]
        return Counter(one["site"] if one.get("status") == 200 else "" for one in ended)

    def always_to_a(self) -> str:
        """An address whose packets go to site a whatever is announced, as those of a client behind a router that has no
        other way, or does not know of one yet."""
        address, table = "10.77.9.10", "77"
        self.net.ip(ROUTER, "addr", "add", f"{address}/32", "dev", "lo")
        self.net.ip(ROUTER, "route", "add", f"{VIP}/32", "via", OWN["a"], "table", table)
        self.net.ip(ROUTER, "rule", "add", "from", address, "lookup", table)
        return address

    def left(self, site: str) -> int:
        """How many clients its entry says have left before their answers' ends."""
        url = "http://127.0.0.1:9101/metrics"
        page = anycast_net.run("ip", "netns", "exec", self.net.name(site), "curl", "-s", url)
        lines = [
            line for line in page.splitlines() if line.startswith("farhop_requests_total{") and '"client_left"' in line
        ]
        return sum(round(float(line.rpartition(" ")[2])) for line in lines)

    def word_ms(self, site: str, phase: str) -> float:
        """From the announcer's last word of this phase to the first change of the route after it."""
        return self.watch.first_after(self.phase_at(site, phase) - 0.002)


def _events(client: subprocess.Popen[str]) -> list[dict[str, object]]:
    output, _ = client.communicate(timeout=60.0)
    return [json.loads(line) for line in output.splitlines()]


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path, ANNOUNCING)
    try:
        made.open()
        yield made
    finally:
        made.close()


def test_two_sites_announce_one_address_through_drains_and_failures(fleet: Fleet) -> None:
    took: dict[str, float] = {}  # ms, from the command to the kernel route
    _both_announce(fleet, took)
    _a_drained_entry_keeps_streams_on_its_own_address(fleet, took)
    _the_last_healthy_site_is_kept(fleet, took)
    _without_its_announcer_a_route_goes(fleet, took)
    _an_orderly_end_drains_first(fleet, took)
    for what, ms in took.items():
        print(f"{what:>28}: {ms:7.1f} ms to the kernel route")
    assert took["announcer hangs (ExaBGP)"] <= 2000.0
    assert took["announcer hangs (BIRD)"] <= 2000.0


def _both_announce(fleet: Fleet, took: dict[str, float]) -> None:
    fleet.net.until_routed("a", "b")
    took["announce (ExaBGP)"] = fleet.word_ms("a", "announced")
    took["announce (BIRD)"] = fleet.word_ms("b", "announced")
    assert set(fleet.asked(24)) == {"frankfurt", "tokyo"}
    found = fleet.until("a", wanted="announced", actual="announced", differs=False, others_healthy=1)
    assert found["since"] == pytest.approx(fleet.phase_at("a", "announced"), abs=1.0)


def _a_drained_entry_keeps_streams_on_its_own_address(fleet: Fleet, took: dict[str, float]) -> None:
    """New connections move, streams on a site's own address go on, those on the shared one are counted: who broke can
    but ask again, and who still gets through is served to the end, after the withdrawal, too."""
    stays = fleet.streams(4, VIP, LONG - 1, fleet.always_to_a())
    shared, own = fleet.streams(16, VIP, LONG - 1, "", "again"), fleet.streams(8, VIP, LONG)
    time.sleep(1.5)
    fleet.cli("drain", "set", "--entry", "site-a", "--why", "new kernel", "--by", "ann")
    fleet.net.until_routed("b")
    took["drain (ExaBGP)"] = fleet.word_ms("a", "draining")
    assert fleet.asked(8) == {"tokyo": 8}
    fleet.until("a", wanted="withdrawn", actual="withdrawn")
    seen = _events(own)
    assert {one["to"] for one in seen if one["event"] == "redirected"} <= {f"{one}:8080" for one in OWN.values()}
    assert Counter((one["event"], one.get("whole", True)) for one in seen) == {
        ("redirected", True): 8, ("begun", True): 8, ("ended", True): 8,
    }  # fmt: skip
    seen = [one for one in _events(shared) if one["event"] == "ended"]
    ends, again = [one for one in seen if "again" not in one], [one for one in seen if "again" in one]
    broken = [one for one in ends if not one["whole"]]
    assert {one["site"] for one in broken} == {"frankfurt"}
    assert all(one["whole"] for one in ends if one["site"] == "tokyo")
    assert [(one["site"], one["whole"]) for one in again] == [("tokyo", True)] * len(broken), "each from its beginning"
    print(f"\nstreams on the shared address through a drain: {len(ends)}, of which {len(broken)} broke")
    reached = [one for one in _events(stays) if one["event"] == "ended"]
    assert [(one["site"], one["whole"]) for one in reached] == [("frankfurt", True)] * 4
    assert fleet.left("a") == len(broken), "nobody told the entry that they left: it heard no more of them for send_s"
    assert "drained: new kernel (by ann)" in fleet.cli("anycast", "status", "--json")


def _the_last_healthy_site_is_kept(fleet: Fleet, took: dict[str, float]) -> None:
    """Although it is dead; once another is back it goes."""
    os.kill(_balancer(fleet, "b"), signal.SIGKILL)
    fleet.until("b", kept_as_last=True, wanted="announced", others_healthy=0)
    fleet.cli("undrain", "--entry", "site-a")
    fleet.net.until_routed("a")
    took["withdraw (BIRD)"] = fleet.word_ms("b", "withdrawn")
    assert fleet.asked(8) == {"frankfurt": 8}


def _without_its_announcer_a_route_goes(fleet: Fleet, took: dict[str, float]) -> None:
    net, stopped = fleet.net, time.time()
    fleet.announcers["a"].send_signal(signal.SIGSTOP)
    took["announcer hangs (ExaBGP)"] = fleet.watch.first_after(stopped)
    net.until_routed()
    _anew(fleet, "a")
    killed = time.time()
    os.kill(fleet.speaker_of("a"), signal.SIGKILL)
    took["ExaBGP killed"] = fleet.watch.first_after(killed)
    _anew(fleet, "a")
    killed = time.time()
    fleet.announcers["a"].kill()
    took["announcer killed (ExaBGP)"] = fleet.watch.first_after(killed)
    net.until_routed()
    fleet.start_balancer("b")
    net.until_routed("b")  # back before its hold is over: no other site is healthy
    stopped = time.time()
    fleet.announcers["b"].send_signal(signal.SIGSTOP)
    took["announcer hangs (BIRD)"] = fleet.watch.first_after(stopped)
    net.until_routed()


def _an_orderly_end_drains_first(fleet: Fleet, took: dict[str, float]) -> None:
    """Drained, withdrawn, and only then gone."""
    fleet.announce("a")
    fleet.net.until_routed("a")
    fleet.announcers["a"].terminate()
    assert fleet.asked(4) == {"frankfurt": 4}
    assert fleet.announcers["a"].wait(timeout=20.0) == 0
    took["withdraw (ExaBGP)"] = fleet.word_ms("a", "withdrawn")


def _balancer(fleet: Fleet, site: str) -> int:
    return fleet.balancers[site].pid


def _anew(fleet: Fleet, site: str) -> None:
    """Another announcer in the place of one that is dead or hangs."""
    fleet.net.until_routed()
    fleet.announce_anew(site)
    fleet.net.until_routed(site)
