"""Two complete entries on the network of `anycast_net`: etcd, and per site an engine, both balancers, an announcer.

Site a has an ExaBGP that Farhop starts, site b a BIRD that runs independently. Needs root. Never measures anything.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING

import yaml

from farhop_lab.world import anycast_net
from farhop_lab.world.anycast_net import ROUTER, VIP, Net, NetError, RouteWatch
from farhop_lab.world.etcd import find_binary
from topology.load import shipped

if TYPE_CHECKING:
    from pathlib import Path

REGIONS = {"a": "frankfurt", "b": "tokyo"}
OWN = {"a": "10.77.1.2", "b": "10.77.2.2"}
SPEAKERS = {"a": "ExaBGP", "b": "BIRD"}
MODEL, KEY = "llama-3.1-8b", "sk-farhop-anywhere"
ETCD = "10.77.9.9:2379"
LONG = 1200  # tokens above which a stream is redirected to its site's own name: some 16 s
COMMAND_S = 120.0  # on a busy machine a command may take half a minute to start
SECRETS = {"FARHOP_HOP_KEY": "a secret of the anycast drills"}
_HOP = {"hop": {"keys": {"k1": "env:FARHOP_HOP_KEY"}, "active": "k1"}}
SITE_BIRD = """
router id 10.0.0.2;
protocol device { scan time 1; }
include "FILE";
protocol bgp up {
  local 10.77.2.2 as 65002; neighbor 10.77.2.1 as 65000; hold time 9; connect retry time 1; error wait time 1, 2;
  ipv4 { import none; export where source = RTS_STATIC; };
}
"""


class Sites:
    """Both sites and their parts. `announcing` overrides the announcers' configuration."""

    def __init__(self, folder: Path, announcing: dict[str, object]) -> None:
        self.folder, self.net, self._announcing = folder, Net(folder), announcing
        self.balancers: dict[str, subprocess.Popen[str]] = {}
        self.announcers: dict[str, subprocess.Popen[str]] = {}

    def open(self) -> None:
        """Start everything, and wait until each process is ready; call `close` also if this fails."""
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
        balancers = [child for site in OWN for child in self._start_site(site)]
        for site in OWN:
            self.announce(site)
        self.net.ready(*balancers, *self.announcers.values())

    def _config(self, site: str, what: str, port: int, **more: object) -> str:
        path = self.folder / f"{site}-{what}.yaml"
        common = {
            "region": REGIONS[site], "instance": f"{site}-{what}", "topology": str(self.folder / "map.yaml"),
            "admin": {"port": port}, "etcd": {"endpoints": [ETCD], "insecure": True},
        }  # fmt: skip
        path.write_text(yaml.safe_dump({**common, **more}))
        return str(path)

    def _start_site(self, site: str) -> list[subprocess.Popen[str]]:
        arguments = ("--port", "8001", "--model", MODEL, "--profile", "a100", "--speedup", "1")
        engine = self.net.farhop(site, "engine", *arguments, log=f"{site}-engine")
        replica = {"url": "http://127.0.0.1:8001", "models": [MODEL]}
        loopback = {"tier": {"port": 0}, "control": {"port": 0}, "replicas": [replica]}
        config = self._config(site, "regional", 9102, **_HOP, **loopback)
        regional = self.net.farhop(site, "regional", "--config", config, log=f"{site}-regional", **SECRETS)
        self.start_balancer(site)
        return [engine, regional, self.balancers[site]]

    def start_balancer(self, site: str) -> None:
        """Start the site's global balancer."""
        own = {"url": f"http://{OWN[site]}:8080", "anycast": [VIP]}
        config = self._config(
            site, "global", 9101, **_HOP, listen={"host": "0.0.0.0", "port": 8080, "insecure": True},
            limits={"drain_s": 1.0, "send_s": 3.0}, unicast=own, routes=[{"unicast_tokens": LONG}],
        )  # fmt: skip
        self.balancers[site] = self.net.farhop(site, "global", "--config", config, log=f"{site}-global", **SECRETS)

    def announce(self, site: str) -> None:
        """Start its announcer."""
        peer = {"address": "10.77.1.1", "asn": 65000, "local_address": "10.77.1.2"}
        exabgp = {"exabgp": {"local_as": 65001, "router_id": "10.0.0.1", "peers": [peer]}}
        bird = {"bird": {"socket": str(self.folder / "b.ctl"), "file": str(self.folder / "farhop-routes.conf")}}
        probe = {"probe": {"url": "http://127.0.0.1:9101/readyz"}}
        config = self._config(
            site, "anycast", 9103, entry=f"site-{site}", speaker=exabgp if site == "a" else bird,
            **{**probe, **self._announcing},
        )  # fmt: skip
        self.announcers[site] = self.net.farhop(site, "anycast", "run", "--config", config, log=f"{site}-anycast")

    def announce_anew(self, site: str) -> None:
        """Start another announcer in place of one that is dead or hangs."""
        self.announcers[site].send_signal(signal.SIGCONT)
        self.announcers[site].kill()
        self.announcers[site].wait()
        self.announce(site)

    def speaker_of(self, site: str) -> int:
        """The process that speaks BGP for a site's announcer."""
        table = anycast_net.run("ps", "-eo", "pid,ppid,args")
        rows = [re.split(r"\s+", line.strip(), maxsplit=2) for line in table.splitlines()[1:]]
        below = {self.announcers[site].pid}
        for _ in range(4):
            below |= {int(pid) for pid, parent, _ in rows if int(parent) in below}
        ours = (int(pid) for pid, _, args in rows if "-m exabgp" in args and "watchdog" not in args)
        return next(pid for pid in ours if pid in below)

    def cli(self, *arguments: str) -> str:
        """Run an operator's command at site a. NetError for wrong usage, or if it takes too long."""
        config = str(self.folder / "a-global.yaml")
        command = [sys.executable, "-m", "farhop_cli", *arguments, "-c", config]
        try:
            done = subprocess.run(
                ["ip", "netns", "exec", self.net.name("a"), *command],
                capture_output=True, text=True, timeout=COMMAND_S, check=False, env={**os.environ, **SECRETS},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NetError(f"farhop {' '.join(arguments)}: did not end within {COMMAND_S:g} s") from None
        if done.returncode not in (0, 1):
            raise NetError(f"farhop {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def status(self, site: str) -> dict[str, object]:
        """The status on its announcer's admin port."""
        status: dict[str, object] = json.loads(
            anycast_net.run("ip", "netns", "exec", self.net.name(site), "curl", "-s", "http://127.0.0.1:9103/status")
        )
        return status

    def describe(self) -> str:
        """Each announcer's status in a line: for debugging routes."""
        lines = []
        for site in self.announcers:
            try:
                status = self.status(site)
                lines.append(f"{site}: wanted {status['wanted']!r}, actual {status['actual']!r}, why {status['why']!r}")
            except (NetError, subprocess.TimeoutExpired, json.JSONDecodeError):
                lines.append(f"{site}: no answer")
        return "; ".join(lines)

    def until(self, site: str, within_s: float = 20.0, **wanted: object) -> dict[str, object]:
        """Wait until its announcer reports this."""
        end = time.monotonic() + within_s
        while True:
            status = self.status(site)
            if all(status[name] == value for name, value in wanted.items()):
                return status
            if time.monotonic() >= end:
                raise NetError(f"{wanted} within {within_s:g} s; it is {status}")
            time.sleep(0.05)

    def phase_at(self, site: str, phase: str) -> float:
        """When its announcer last changed to this phase, by the wall clock of its log."""
        log = (self.folder / f"{site}-anycast.log").read_text()
        events = [json.loads(line) for line in log.splitlines() if '"announcement"' in line]
        return [datetime.fromisoformat(one["timestamp"]).timestamp() for one in events if one.get("phase") == phase][-1]

    def close(self) -> None:
        """Stop and remove everything."""
        self.net.close()
