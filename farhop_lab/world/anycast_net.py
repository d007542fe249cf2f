"""Network namespaces for anycast entries: a router with a real BIRD, two sites that announce one address to it.

Needs root. Clients are at the router: its kernel's routes decide what they connect to. `close` removes everything;
names are unique to the process, and the machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

VIP = "192.0.2.1"
ROUTER, SITES = "r", ("a", "b")
NEEDED = ("ip", "bird", "birdc")
BIRD = """
router id 10.0.0.9;
protocol device {{ scan time 1; }}
protocol kernel {{ merge paths on; ipv4 {{ export filter {{ if source = RTS_BGP then accept; reject; }}; }}; }}
template bgp site {{
  local as 65000; hold time 9; connect retry time 1; error wait time 1, 2;
  ipv4 {{ import filter {{ if (65535, 0) ~ bgp_community then bgp_local_pref = 0; accept; }}; export none; }};
}}
protocol bgp a from site {{ local 10.77.1.1; neighbor 10.77.1.2 as 65001; }}
protocol bgp b from site {{ local 10.77.2.1; neighbor 10.77.2.2 as 65002; }}
"""


class NetError(Exception):
    """A program in the namespaces failed, or was too slow. The text says what."""


def lacking() -> str:
    """What this machine lacks for it; "" if nothing."""
    return ", ".join(name for name in NEEDED if shutil.which(name) is None)


def run(*command: str, check: bool = True) -> str:
    """A command's output. NetError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
    if done.returncode and check:
        raise NetError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Net:
    """The three namespaces, their links, and the router's BIRD."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tag = f"fh{os.getpid() % 100_000}"
        self.children: list[subprocess.Popen[str]] = []

    def name(self, place: str) -> str:
        """The name of a namespace."""
        return f"{self._tag}{place}"

    def open(self) -> None:
        """Create it; call `close` also if this fails."""
        for place in (ROUTER, *SITES):
            run("ip", "netns", "add", self.name(place))
            self.ip(place, "link", "set", "lo", "up")
        for n, site in enumerate(SITES, 1):
            near, far = f"{self._tag}v{site}", "eth0"
            run("ip", "link", "add", near, "netns", self.name(ROUTER), "type", "veth",
                "peer", "name", far, "netns", self.name(site))  # fmt: skip
            self.ip(ROUTER, "addr", "add", f"10.77.{n}.1/30", "dev", near)
            self.ip(site, "addr", "add", f"10.77.{n}.2/30", "dev", far)
            self.ip(ROUTER, "link", "set", near, "up")
            self.ip(site, "link", "set", far, "up")
            self.ip(site, "addr", "add", f"{VIP}/32", "dev", "lo")
            self.ip(site, "route", "add", "default", "via", f"10.77.{n}.1")
        self.ip(ROUTER, "addr", "add", "10.77.9.9/32", "dev", "lo")
        # A connection stays on one path: paths are chosen by addresses and ports.
        run("ip", "netns", "exec", self.name(ROUTER), "sysctl", "-qw", "net.ipv4.fib_multipath_hash_policy=1")
        (self.folder / "bird.conf").write_text(BIRD.format())
        self.spawn(ROUTER, "bird", "-f", "-c", str(self.folder / "bird.conf"), "-s", self.bird_socket, log="bird")

    @property
    def bird_socket(self) -> str:
        """The control socket of the router's BIRD."""
        return str(self.folder / "bird.ctl")

    def ip(self, place: str, *words: str) -> str:
        """Run `ip` there."""
        return run("ip", "-n", self.name(place), *words)

    def spawn(self, place: str, *command: str, log: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command there; its stdout is a pipe, its stderr goes to a log in the folder."""
        with (self.folder / f"{log}.log").open("ab") as file:
            child = subprocess.Popen(
                ["ip", "netns", "exec", self.name(place), *command],
                stdout=subprocess.PIPE, stderr=file, text=True, env={**os.environ, **environment},
            )  # fmt: skip
        self.children.append(child)
        return child

    def farhop(self, place: str, *arguments: str, log: str, **environment: str) -> subprocess.Popen[str]:
        """Start a farhop command there; `ready` waits for it."""
        return self.spawn(place, sys.executable, "-m", "farhop_cli", *arguments, log=log, **environment)

    def ready(self, *children: subprocess.Popen[str]) -> None:
        """Wait until each process has printed its ready line."""
        for child in children:
            if child.stdout is None or not child.stdout.readline():
                raise NetError(f"{child.args!r} did not start; its log is in {self.folder}")

    def routed_sites(self) -> frozenset[str]:
        """The sites to which the router's kernel routes the address."""
        hops = set(re.findall(r"via (10\.77\.[12]\.2)", self.ip(ROUTER, "route", "show", VIP)))
        return frozenset(site for n, site in enumerate(SITES, 1) if f"10.77.{n}.2" in hops)

    def until_routed(self, *sites: str, within_s: float = 20.0) -> float:
        """Wait until it routes to these; returns the time."""
        end = time.monotonic() + within_s
        while self.routed_sites() != frozenset(sites):
            if time.monotonic() >= end:
                raise NetError(f"it sends to {sorted(self.routed_sites())}, not {sorted(sites)}, after {within_s:g} s")
            time.sleep(0.005)
        return time.monotonic()

    def silence(self, site: str) -> None:
        """Nothing leaves the site any more, as if its host had lost power: nothing is announced, nothing is refused."""
        gateway = f"10.77.{1 + SITES.index(site)}.1"  # as if at another hardware address, which no host has
        self.ip(site, "neigh", "replace", gateway, "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")

    def undo_silence(self, site: str) -> None:
        """What leaves the site arrives again."""
        self.ip(site, "neigh", "del", f"10.77.{1 + SITES.index(site)}.1", "dev", "eth0")

    def close(self) -> None:
        """Stop all processes, and remove everything."""
        for child in reversed(self.children):
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
                child.terminate()
        for child in self.children:
            try:
                child.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        for place in (ROUTER, *SITES):
            for pid in run("ip", "netns", "pids", self.name(place), check=False).split():
                os.kill(int(pid), signal.SIGKILL)
            run("ip", "netns", "del", self.name(place), check=False)


def until_subscribed(pid: int, within_s: float = 10.0) -> None:
    """Wait until a process has subscribed to a netlink group: it gets no earlier changes."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            rows = [line.split() for line in Path(f"/proc/{pid}/net/netlink").read_text().splitlines()[1:]]
            if any(int(port) == pid and int(groups, 16) for _, _, port, groups, *_ in rows):
                return
        time.sleep(0.005)
    raise NetError(f"process {pid} did not subscribe to a netlink group within {within_s:g} s")


class RouteWatch:
    """When the router's kernel changed its route to the address, by the wall clock, as in logs."""

    def __init__(self, net: Net) -> None:
        self._process = net.spawn(ROUTER, "stdbuf", "-oL", "ip", "monitor", "route", log="monitor")
        until_subscribed(self._process.pid)
        self.seen: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if VIP in line:
                self.seen.append((time.time(), line.strip()))

    def first_after(self, at: float, within_s: float = 5.0) -> float:
        """Milliseconds from `at` to the first later change."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            found = next((when for when, _ in self.seen if when >= at), None)
            if found is not None:
                return (found - at) * 1e3
            time.sleep(0.002)
        raise NetError(f"the route did not change within {within_s:g} s")
