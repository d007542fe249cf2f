"""Two entries announce one address to a real BIRD, in network namespaces: one by ExaBGP, one by a BIRD of its own.

Real processes throughout: etcd, an engine and both balancers at each site, and the announcers. What is measured is
printed (`pytest -s`): from the announcer's word to the change of the router's kernel route.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from farhop_lab.world.etcd import find_binary
from tests.drills import anycast_net
from tests.drills.anycast_net import ROUTER, VIP, Net, RouteWatch
from topology.load import shipped

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(anycast_net.lacking()), reason="no bird2 or no iproute2 here")]
REGIONS = {"a": "frankfurt", "b": "tokyo"}
OWN = {"a": "10.77.1.2", "b": "10.77.2.2"}
MODEL, KEY = "llama-3.1-8b", "sk-farhop-anywhere"
ETCD, DRAIN_S = "10.77.9.9:2379", 2.0
SECRETS = {"FARHOP_HOP_KEY": "a secret of the anycast drills"}
SITE_BIRD = """
router id 10.0.0.2;
protocol device { scan time 1; }
include "FILE";
protocol bgp up {
  local 10.77.2.2 as 65002; neighbor 10.77.2.1 as 65000; hold time 9; connect retry time 1; error wait time 1, 2;
  ipv4 { import none; export where source = RTS_STATIC; };
}
"""


class Fleet:
    """Both sites on the net, and what each consists of."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.net = folder, Net(folder)
        self.balancers: dict[str, subprocess.Popen[str]] = {}
        self.announcers: dict[str, subprocess.Popen[str]] = {}

    def open(self) -> None:
        self.net.open()
        self.watch = RouteWatch(self.net)
        self.net.spawn(
            ROUTER, str(find_binary()), "--data-dir", str(self.folder / "etcd"), "--log-level", "error",
            "--listen-client-urls", f"http://{ETCD}", "--advertise-client-urls", f"http://{ETCD}",
            "--listen-peer-urls", "http://10.77.9.9:2380", log="etcd",
        )  # fmt: skip
        document = yaml.safe_load(shipped("three-regions").read_text())
        document["entries"] = [
            {"name": f"site-{site}", "region": REGIONS[site], "ipv4": [VIP], "port": 8080} for site in OWN
        ]
        (self.folder / "map.yaml").write_text(yaml.safe_dump(document))
        (self.folder / "farhop-routes.conf").write_text("")
        (self.folder / "site-bird.conf").write_text(SITE_BIRD.replace("FILE", str(self.folder / "farhop-routes.conf")))
        self.net.spawn(
            "b", "bird", "-f", "-c", str(self.folder / "site-bird.conf"), "-s", str(self.folder / "b.ctl"), log="b-bird"
        )
        balancers = [child for site in OWN for child in self.start_site(site)]
        for site in OWN:
            self.announce(site)
        self.net.ready(*balancers, *self.announcers.values())

    def config(self, site: str, what: str, port: int, **more: object) -> str:
        path = self.folder / f"{site}-{what}.yaml"
        common = {
            "region": REGIONS[site], "instance": f"{site}-{what}", "topology": str(self.folder / "map.yaml"),
            "admin": {"port": port}, "etcd": {"endpoints": [ETCD], "insecure": True},
        }  # fmt: skip
        path.write_text(yaml.safe_dump({**common, **more}))
        return str(path)

    def start_site(self, site: str) -> list[subprocess.Popen[str]]:
        hop = {"hop": {"keys": {"k1": "env:FARHOP_HOP_KEY"}, "active": "k1"}}
        arguments = ("--port", "8001", "--model", MODEL, "--profile", "a100", "--speedup", "1")
        engine = self.net.farhop(site, "engine", *arguments, log=f"{site}-engine")
        replica = {"url": "http://127.0.0.1:8001", "models": [MODEL]}
        loopback = {"tier": {"port": 0}, "control": {"port": 0}, "replicas": [replica]}
        config = self.config(site, "regional", 9102, **hop, **loopback)
        regional = self.net.farhop(site, "regional", "--config", config, log=f"{site}-regional", **SECRETS)
        self.start_balancer(site)
        return [engine, regional, self.balancers[site]]

    def start_balancer(self, site: str) -> None:
        hop = {"hop": {"keys": {"k1": "env:FARHOP_HOP_KEY"}, "active": "k1"}}
        listen = {"host": "0.0.0.0", "port": 8080, "insecure": True}
        own = {"url": f"http://{OWN[site]}:8080", "anycast": [VIP]}
        config = self.config(
            site, "global", 9101, **hop, listen=listen, limits={"drain_s": 1.0}, unicast=own,
            routes=[{"unicast_tokens": 400}],
        )  # fmt: skip
        self.balancers[site] = self.net.farhop(site, "global", "--config", config, log=f"{site}-global", **SECRETS)

    def announce(self, site: str) -> None:
        """Start the announcer: site a has an ExaBGP of ours, site b a BIRD of its own."""
        peer = {"address": "10.77.1.1", "asn": 65000, "local_address": "10.77.1.2"}
        exabgp = {"exabgp": {"local_as": 65001, "router_id": "10.0.0.1", "peers": [peer]}}
        bird = {"bird": {"socket": str(self.folder / "b.ctl"), "file": str(self.folder / "farhop-routes.conf")}}
        config = self.config(
            site, "anycast", 9103, entry=f"site-{site}", speaker=exabgp if site == "a" else bird,
            probe={"url": "http://127.0.0.1:9101/readyz", "every_s": 0.2, "timeout_s": 1.0, "rise": 2, "fall": 2},
            drain_s=DRAIN_S, settle_s=0.5, observe_s=0.3,
        )  # fmt: skip
        self.announcers[site] = self.net.farhop(site, "anycast", "run", "--config", config, log=f"{site}-anycast")

    def cli(self, *arguments: str) -> str:
        """A command of an operator's, at site a."""
        config = str(self.folder / "a-global.yaml")
        done = subprocess.run(
            ["ip", "netns", "exec", self.net.name("a"), sys.executable, "-m", "farhop_cli", *arguments, "-c", config],
            capture_output=True, text=True, timeout=30.0, check=False, env={**os.environ, **SECRETS},
        )  # fmt: skip
        assert done.returncode in (0, 1), done.stderr
        return done.stdout

    def status(self, site: str) -> dict[str, object]:
        said: dict[str, object] = json.loads(
            anycast_net.run("ip", "netns", "exec", self.net.name(site), "curl", "-s", "http://127.0.0.1:9103/status")
        )
        return said

    def until(self, site: str, within_s: float = 20.0, **wanted: object) -> dict[str, object]:
        end = time.monotonic() + within_s
        while True:
            status = self.status(site)
            if all(status[name] == value for name, value in wanted.items()):
                return status
            assert time.monotonic() < end, f"{wanted} within {within_s} s; it is {status}"
            time.sleep(0.05)

    def streams(self, count: int, where: str, tokens: int = 8) -> subprocess.Popen[str]:
        script = str(Path(__file__).with_name("anycast_client.py"))
        words = (str(count), f"http://{where}:8080/v1/chat/completions", KEY, MODEL, str(tokens))
        return self.net.spawn(ROUTER, sys.executable, "-u", script, *words, log="client")

    def asked(self, count: int, where: str = VIP) -> Counter[str]:
        """Where so many short requests were served; "" for one that was not."""
        ended = [one for one in _events(self.streams(count, where)) if one["event"] == "ended"]
        return Counter(one["site"] if one.get("status") == 200 else "" for one in ended)

    def word_ms(self, site: str, phase: str) -> float:
        """From the announcer's last word of this phase to the first change of the route after it."""
        log = (self.folder / f"{site}-anycast.log").read_text()
        said = [json.loads(line) for line in log.splitlines() if '"announcement"' in line]
        at = [datetime.fromisoformat(one["timestamp"]).timestamp() for one in said if one.get("phase") == phase]
        return self.watch.first_after(at[-1] - 0.002)


def _events(client: subprocess.Popen[str]) -> list[dict[str, object]]:
    said, _ = client.communicate(timeout=60.0)
    return [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path)
    try:
        made.open()
        yield made
    finally:
        made.net.close()


def _exabgp_of(announcer: subprocess.Popen[str]) -> int:
    """The process that speaks BGP below an announcer: under `ip netns exec`, which is the announcer itself."""
    table = anycast_net.run("ps", "-eo", "pid,ppid,args")
    rows = [re.split(r"\s+", line.strip(), maxsplit=2) for line in table.splitlines()[1:]]
    below = {announcer.pid}
    for _ in range(4):
        below |= {int(pid) for pid, parent, _ in rows if int(parent) in below}
    ours = (int(pid) for pid, _, args in rows if "-m exabgp" in args and "watchdog" not in args)
    return next(pid for pid in ours if pid in below)


def test_two_sites_one_address(fleet: Fleet) -> None:
    net, took = fleet.net, {}
    net.until_ways("a", "b")
    took["announce (ExaBGP)"] = fleet.word_ms("a", "announced")
    took["announce (BIRD)"] = fleet.word_ms("b", "announced")
    assert set(fleet.asked(24)) == {"frankfurt", "tokyo"}
    fleet.until("a", wanted="announced", actual="announced", differs=False, others_healthy=1)

    # A drain: new connections move, streams on a site's own address go on, those on the shared one are counted.
    shared, own = fleet.streams(16, VIP, tokens=350), fleet.streams(8, VIP, tokens=400)
    time.sleep(1.5)
    fleet.cli("drain", "set", "--entry", "site-a", "--why", "new kernel", "--by", "ann")
    net.until_ways("b")
    took["drain (ExaBGP)"] = fleet.word_ms("a", "draining")
    assert fleet.asked(8) == {"tokyo": 8}
    fleet.until("a", wanted="withdrawn", actual="withdrawn")
    seen = _events(own)
    assert {one["to"] for one in seen if one["event"] == "redirected"} <= {f"{one}:8080" for one in OWN.values()}
    assert Counter((one["event"], one.get("whole", True)) for one in seen) == {
        ("redirected", True): 8, ("begun", True): 8, ("ended", True): 8,
    }  # fmt: skip
    ends = [one for one in _events(shared) if one["event"] == "ended"]
    broken = [one for one in ends if not one["whole"]]
    assert {one["site"] for one in broken} <= {"frankfurt"}
    assert all(one["whole"] for one in ends if one["site"] == "tokyo")
    print(f"\nstreams on the shared address through a drain: {len(ends)}, of which {len(broken)} broke")
    assert "drained: new kernel (by ann)" in fleet.cli("anycast", "status", "--json")

    # The last healthy site is kept although it is dead; once another is back it goes.
    os.kill(_balancer(fleet, "b"), signal.SIGKILL)
    fleet.until("b", kept_as_last=True, wanted="announced", others_healthy=0)
    fleet.cli("undrain", "--entry", "site-a")
    net.until_ways("a")
    took["withdraw (BIRD)"] = fleet.word_ms("b", "withdrawn")
    assert fleet.asked(8) == {"frankfurt": 8}

    # Whatever happens to an announcer, its route goes.
    stopped = time.time()
    fleet.announcers["a"].send_signal(signal.SIGSTOP)
    took["announcer hangs (ExaBGP)"] = fleet.watch.first_after(stopped)
    net.until_ways()
    _anew(fleet, "a")
    killed = time.time()
    os.kill(_exabgp_of(fleet.announcers["a"]), signal.SIGKILL)
    took["ExaBGP killed"] = fleet.watch.first_after(killed)
    _anew(fleet, "a")
    killed = time.time()
    fleet.announcers["a"].kill()
    took["announcer killed (ExaBGP)"] = fleet.watch.first_after(killed)
    net.until_ways()
    fleet.start_balancer("b")
    net.until_ways("b")  # back before its hold is over: nobody else is healthy
    stopped = time.time()
    fleet.announcers["b"].send_signal(signal.SIGSTOP)
    took["announcer hangs (BIRD)"] = fleet.watch.first_after(stopped)
    net.until_ways()

    # An orderly end: drained, withdrawn, and only then gone.
    fleet.announce("a")
    net.until_ways("a")
    fleet.announcers["a"].terminate()
    assert fleet.asked(4) == {"frankfurt": 4}
    assert fleet.announcers["a"].wait(timeout=20.0) == 0
    took["withdraw (ExaBGP)"] = fleet.word_ms("a", "withdrawn")
    for what, ms in took.items():
        print(f"{what:>28}: {ms:7.1f} ms to the kernel route")
    assert took["announcer hangs (ExaBGP)"] <= 2000.0
    assert took["announcer hangs (BIRD)"] <= 2000.0


def _balancer(fleet: Fleet, site: str) -> int:
    return fleet.balancers[site].pid


def _anew(fleet: Fleet, site: str) -> None:
    """Another announcer in the place of one that is dead or hangs."""
    fleet.net.until_ways()
    fleet.announcers[site].send_signal(signal.SIGCONT)
    fleet.announcers[site].kill()
    fleet.announcers[site].wait()
    fleet.announce(site)
    fleet.net.until_ways(site)
