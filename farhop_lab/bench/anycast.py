"""How long clients lose an entry that dies: two real sites with ExaBGP and BIRD, in network namespaces.

Clients open a connection at a fixed rate to the address that both sites announce. Something happens to one site;
reported are the time of the router's new kernel route and of the last connection that still went to that site, from the
event on. Announcers probe at the default rate. Needs root. Never part of the product.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farhop_lab.bench.anycast_client import PATIENCE_S, ConnectionResult, Job
from farhop_lab.bench.harness import BenchError
from farhop_lab.world import anycast_net
from farhop_lab.world.anycast_net import ROUTER, VIP, NetError
from farhop_lab.world.anycast_sites import KEY, MODEL, REGIONS, SPEAKERS, Sites
from farhop_lab.world.etcd import EtcdLabError, find_binary

if TYPE_CHECKING:
    import subprocess

PER_S = 40.0  # connections, half of them to each site: one in 50 ms
WITHIN_S = 25.0  # beyond the hold timer (9 s) something else is wrong
CALM_S = 1.0
# A hold would keep a withdrawn route away for 15 min. It does not change how fast a route goes.
ANNOUNCING: dict[str, object] = {
    "drain_s": 1.0, "settle_s": 0.2, "budget": {"window_s": 0.1, "hold_s": 0.1, "hold_max_s": 0.1, "changes": 100},
}  # fmt: skip


class Row(msgspec.Struct, frozen=True):
    """An event at a site, and its BGP speaker: medians and the maximum over the repeats, in ms from the event. `lost`:
    the most connections without an answer in one repeat.
    """

    event: str
    speaker: str
    route_ms: float
    astray_ms: float
    astray_worst_ms: float
    lost: int
    repeats: int


class Sample(msgspec.Struct, frozen=True):
    """One repeat."""

    route_ms: float
    astray_ms: float
    lost: int


def missing() -> str:
    """Why nothing can be measured here; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    lacking = anycast_net.lacking()
    if lacking:
        return f"{lacking} not installed (Debian: iproute2, bird2)"
    if importlib.util.find_spec("exabgp") is None:
        return "ExaBGP is not installed: run `pip install 'farhop[anycast]'`"
    try:
        find_binary()
    except EtcdLabError as error:
        return str(error)
    return ""


class Clients:
    """The clients at the router, and their results so far."""

    def __init__(self, sites: Sites) -> None:
        job = Job(VIP, 8080, KEY, MODEL, PER_S)
        self.seen: list[ConnectionResult] = []
        self._process: subprocess.Popen[str] = sites.net.spawn(
            ROUTER, sys.executable, "-m", "farhop_lab.bench.anycast_client", msgspec.json.encode(job).decode(),
            log="clients",
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.seen.append(msgspec.json.decode(line, type=ConnectionResult))

    def until_calm(self, regions: set[str]) -> None:
        """Wait until all connections of the last CALM_S were served, by exactly these regions. Raises NetError."""
        end = time.monotonic() + WITHIN_S
        while True:
            now = time.time()
            late = [one for one in list(self.seen) if one.at >= now - PATIENCE_S - CALM_S]
            settled = late and {one.site for one in late} == regions and late[-1].at - late[0].at >= 0.9 * CALM_S
            if settled:
                return
            if time.monotonic() >= end:
                raise NetError(f"after {WITHIN_S:g} s clients are not served by {sorted(regions)} alone")
            time.sleep(0.05)


def sample(seen: list[ConnectionResult], region: str, event_at: float, route_at: float) -> Sample:
    """One repeat's figures. *Astray* connections were served by the site after the event, or by none; *lost* ones by
    none.
    """
    after = [one for one in seen if one.at >= event_at - PATIENCE_S]
    lost = [one for one in after if not one.site]
    astray = [one.at for one in after if one.site == region or not one.site]
    last = max((at for at in astray if at >= event_at), default=event_at)
    return Sample(1e3 * (route_at - event_at), 1e3 * (last - event_at), len(lost))


def row(event: str, site: str, samples: list[Sample]) -> Row:
    """The medians."""
    astray = [one.astray_ms for one in samples]
    return Row(
        event, SPEAKERS[site], statistics.median(one.route_ms for one in samples), statistics.median(astray),
        max(astray), max(one.lost for one in samples), len(samples),
    )  # fmt: skip


class Event:
    """An event at a site, and how it is undone."""

    def __init__(self, name: str, do: Callable[[Sites, str], float], undo: Callable[[Sites, str], None]) -> None:
        self.name, self.do, self.undo = name, do, undo


def _signalled(number: signal.Signals, whom: Callable[[Sites, str], int]) -> Callable[[Sites, str], float]:
    def do(sites: Sites, site: str) -> float:
        pid, at = whom(sites, site), time.time()
        os.kill(pid, number)
        return at

    return do


def _announcer(sites: Sites, site: str) -> int:
    return sites.announcers[site].pid


def _balancer(sites: Sites, site: str) -> int:
    return sites.balancers[site].pid


def _silenced(sites: Sites, site: str) -> float:
    at = time.time()
    sites.net.silence(site)
    return at


def _drained(sites: Sites, site: str) -> float:
    """Timed from the announcer's log: a command's start time would include its own start-up."""
    sites.cli("drain", "set", "--entry", f"site-{site}", "--why", "bench", "--by", "bench")
    sites.until(site, wanted="withdrawn")
    return sites.phase_at(site, "draining")


def _undrained(sites: Sites, site: str) -> None:
    sites.cli("undrain", "--entry", f"site-{site}")


def _anew(sites: Sites, site: str) -> None:
    sites.announce_anew(site)
    sites.net.ready(sites.announcers[site])


def _balanced(sites: Sites, site: str) -> None:
    sites.balancers[site].wait()
    sites.start_balancer(site)
    sites.net.ready(sites.balancers[site])


EVENTS = (
    Event("drain", _drained, _undrained),
    Event("announcer killed", _signalled(signal.SIGKILL, _announcer), _anew),
    Event("announcer stopped", _signalled(signal.SIGSTOP, _announcer), _anew),
    Event("balancer killed", _signalled(signal.SIGKILL, _balancer), _balanced),
    Event(
        "balancer stopped", _signalled(signal.SIGSTOP, _balancer),
        lambda sites, site: sites.balancers[site].send_signal(signal.SIGCONT),
    ),
    Event("host silent", _silenced, lambda sites, site: sites.net.undo_silence(site)),
)  # fmt: skip


def measure(repeats: int, progress: Callable[[str], None], events: tuple[Event, ...] = EVENTS) -> list[Row]:
    """A row for each event at each site. Raises BenchError."""
    why = missing()
    if why:
        raise BenchError(f"anycast: {why}")
    with tempfile.TemporaryDirectory(prefix="farhop-bench-") as folder:
        sites = Sites(Path(folder), ANNOUNCING)
        try:
            progress("starting two sites")
            sites.open()
            sites.net.until_routed(*SPEAKERS)
            clients = Clients(sites)
            return [
                row(event.name, site, [_once(sites, clients, event, site, progress) for _ in range(repeats)])
                for event in events for site in SPEAKERS
            ]  # fmt: skip
        except NetError as error:
            raise BenchError(f"anycast: {error}; announcers: {sites.describe()}") from None
        finally:
            sites.close()


def _once(sites: Sites, clients: Clients, event: Event, site: str, progress: Callable[[str], None]) -> Sample:
    progress(f"{event.name}, {SPEAKERS[site]}")
    (other,) = SPEAKERS.keys() - {site}
    sites.net.until_routed(*SPEAKERS, within_s=WITHIN_S)
    clients.until_calm(set(REGIONS.values()))
    clients.seen.clear()
    event_at = event.do(sites, site)
    route_ms = sites.watch.first_after(event_at - 0.002, WITHIN_S) - 2.0
    sites.net.until_routed(other, within_s=WITHIN_S)
    clients.until_calm({REGIONS[other]})
    taken = sample(list(clients.seen), REGIONS[site], event_at, event_at + 1e-3 * route_ms)
    event.undo(sites, site)
    return taken
