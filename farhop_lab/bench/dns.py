"""What an answer of `farhop dns` costs, beside a blocking echo in Python, gdnsd and NSD, in one run under dnsperf.

Every question has its own client subnet and a DNS cookie; there are `networks` client networks. Servers take turns,
ROUNDS times, and the median counts: other load on the machine slows all of them alike. CPU is that of the server's
process alone, from /proc. Never part of the product.
"""

from __future__ import annotations

import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from entry_dns.answers import prepare, zones
from entry_dns.answers.cookies import Cookies
from entry_dns.answers.prepare import UNKNOWN_LOCATION, ClientLocation
from entry_dns.answers.snapshot import encode
from entry_dns.answers.zones import NamePlan, Ttls, ZonePlan
from entry_dns.app.counters import Counters
from entry_dns.app.worker import Settings, Task
from entry_dns.fleet.entry_health import EntryHealth, State
from entry_dns.fleet.networks import BITS, of_arrays
from entry_dns.links.view_file import write
from farhop_lab.bench.harness import BenchError
from farhop_lab.world.ports import free_ports
from topology.law import Law
from topology.load import load, shipped
from topology.model import Entry, Topology

QUESTIONS = 20_000
ROUNDS = 5
SILENT_S = 2.0  # a server that is silent for this long does not answer; for a shorter time it may only have had no core
TIMES_MAX = 1.6  # of the echo's CPU per answer
LOCATIONS = 4_000
PEERS = ("nsd", "gdnsd")
SECRET = b"of the benchmark"
NAME, ZONE = "api.entry.example", "entry.example"

_ECHO = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
while True:
    data, asker = sock.recvfrom(4096)
    sock.sendto(data[:2] + b"\\x84" + data[3:], asker)
"""
_NSD = """server:
  ip-address: 127.0.0.1@{port}
  username: ""
  zonesdir: "{folder}"
  pidfile: ""
  xfrdfile: ""
  database: ""
  server-count: 1
  rrl-ratelimit: 0
remote-control:
  control-enable: no
zone:
  name: "{zone}"
  zonefile: "{folder}/zone"
"""
_ZONE = """$ORIGIN {zone}.
@ 30 IN SOA ns1 hostmaster 1 3600 600 86400 30
@ 30 IN NS ns1
ns1 30 IN A 127.0.0.1
api 30 IN A 192.0.2.1
api 30 IN A 192.0.2.2
api 30 IN A 192.0.2.3
"""
_GDNSD = """options => {{
  listen => 127.0.0.1:{port}, run_dir => {folder}/run, state_dir => {folder}/state, zones_default_ttl => 30,
  udp_threads => 1, tcp_threads => 1
}}
plugins => {{ geoip => {{ maps => {{ m => {{ datacenters => [a, b], nets => {{ 203.0.113.0/24 => [b, a] }} }} }},
  resources => {{ r => {{ map => m, dcmap => {{ a => 192.0.2.1, b => 192.0.2.2 }} }} }} }} }}
"""


class Row(msgspec.Struct, frozen=True):
    """One server: answers a second at full load, CPU microseconds per answer, answers lost, and latency in ms;
    `half_p99_ms` is the 99th percentile at half that load, as dnsperf sees it, and `half_waited_us` the part of an
    answer's time then in which its process was ready to run and had no core, in microseconds. That part is the
    machine's.
    """

    name: str
    qps: float
    cpu_us: float
    lost: int
    mean_ms: float
    worst_ms: float
    half_p99_ms: float = 0.0
    half_waited_us: float = 0.0


class Found(msgspec.Struct, frozen=True):
    """The rows, the echo first; and what is missing, with the reason."""

    rows: list[Row]
    left_out: dict[str, str] = {}


def world() -> Topology:
    """The default world with an entry in each region."""
    topology = load(shipped("three-regions"))
    entries = {
        name: Entry(name, name, (f"192.0.2.{n}",), (f"2001:db8::{n}",)) for n, name in enumerate(topology.regions, 1)
    }
    return Topology(**{
        **{name: getattr(topology, name) for name in ("name", "epoch", "regions", "tenants", "hubs", "rtt", "places")},
        "entries": entries,
    })  # fmt: skip


def atlas(networks: int, rng: Random) -> prepare.Atlas:
    """So many networks, at random locations."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    lengths = numbers.choice([18, 20, 22, 24, 24, 24], networks)
    first = numbers.integers(1 << 24, 223 << 24, networks).astype(np.uint64)
    shift = (32 - lengths).astype(np.uint64)
    rows = numbers.integers(2, LOCATIONS, networks).astype(np.uint32)
    none = np.empty(0, dtype=np.uint64)
    spaces = {
        4: of_arrays(4, first >> shift << shift, lengths.astype(np.int64), rows),
        6: of_arrays(6, none, none.astype(np.int64), none.astype(np.uint32)),
    }
    assert BITS[4] == 32
    locations = [
        UNKNOWN_LOCATION,
        UNKNOWN_LOCATION,
        *(ClientLocation(rng.uniform(-55, 65), rng.uniform(-180, 180)) for _ in range(LOCATIONS - 2)),
    ]
    return prepare.atlas(world(), spaces, locations)


def questions(path: Path, rng: Random) -> None:
    """Questions as dnsperf reads them with -B: each preceded by its length."""
    client = b"benchdns"
    cookie = Cookies([SECRET]).verify(client, bytes((127, 0, 0, 1)), int(time.time()))[0]
    name = b"".join(bytes((len(label),)) + label.encode() for label in NAME.split(".")) + b"\0"
    with path.open("wb") as file:
        for number in range(QUESTIONS):
            subnet = bytes((rng.randrange(1, 223), rng.randrange(256), rng.randrange(256)))
            options = b"\0\x08\0\x07\0\x01\x18\0" + subnet + b"\0\x0a\0\x18" + cookie
            opt = b"\0\0\x29\x04\xd0\0\0\0\0" + len(options).to_bytes(2, "big") + options
            data = number.to_bytes(2, "big") + b"\0\0\0\1\0\0\0\0\0\1" + name + b"\0\1\0\1" + opt
            file.write(len(data).to_bytes(2, "big") + data)


@contextmanager
def _process(command: list[str], log: Path, *sockets: socket.socket, stdin: bytes = b"") -> Iterator[int]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=[one.fileno() for one in sockets]
        )
    try:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        yield process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _farhop(networks: int, folder: Path, seed: int, port: int) -> Iterator[int]:
    topology, known = world(), atlas(networks, Random(seed))
    healths = [EntryHealth(name, State.UP, 1.0, 0.0, 1e9) for name in topology.entries]
    plan = ZonePlan(ZONE, (NamePlan(NAME),), (("ns1.entry.example", ("127.0.0.1",)),), "hostmaster.invalid")
    write(folder / "view", encode(*zones.view([plan], Law(topology), known, healths, Ttls(), 3, 1)))
    Counters.make(folder / "counters", 1)
    with _bound(port) as sock:
        settings = Settings((SECRET,), b"bench", 65_535, 2)
        task = Task(sock.fileno(), str(folder / "view"), str(folder / "counters"), 0, settings)
        command = [sys.executable, "-m", "entry_dns.app.worker"]
        with _process(command, folder / "farhop.log", sock, stdin=msgspec.msgpack.encode(task)) as pid:
            yield pid


@contextmanager
def _echo(folder: Path, port: int) -> Iterator[int]:
    command = [sys.executable, "-c", _ECHO]
    with _bound(port) as sock, _process([*command, str(sock.fileno())], folder / "echo.log", sock) as pid:
        yield pid


def _bound(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind(("127.0.0.1", port))
    return sock


@contextmanager
def _nsd(folder: Path, port: int) -> Iterator[int]:
    (folder / "zone").write_text(_ZONE.format(zone=ZONE))
    (folder / "nsd.conf").write_text(_NSD.format(port=port, folder=folder, zone=ZONE))
    with _process([shutil.which("nsd") or "nsd", "-d", "-c", str(folder / "nsd.conf")], folder / "nsd.log") as pid:
        yield pid


@contextmanager
def _gdnsd(folder: Path, port: int) -> Iterator[int]:
    (folder / "zones").mkdir(exist_ok=True)
    fixed = "".join(f"api 30 IN A 192.0.2.{n}\n" for n in (1, 2, 3))
    (folder / "zones" / ZONE).write_text(_ZONE.format(zone=ZONE).replace(fixed, "api 30 DYNA geoip!r\n"))
    (folder / "config").write_text(_GDNSD.format(port=port, folder=folder))
    with _process([shutil.which("gdnsd") or "gdnsd", "-c", str(folder), "start"], folder / "gdnsd.log") as pid:
        yield pid


def _core_s(pid: int) -> tuple[float, float]:
    """Seconds of a process and all its descendants: on a core, and ready but without one. By each thread's counter in
    nanoseconds: a turn is short compared with a clock tick.
    """
    pids = [pid]
    for one in pids:
        pids.extend(int(child) for child in _children(one))
    spent_ns = waited_ns = 0
    for one in pids:
        for thread in Path(f"/proc/{one}/task").glob("*/schedstat"):
            with suppress(OSError):  # it ended
                spent, waited, _ = map(int, thread.read_text().split())
                spent_ns, waited_ns = spent_ns + spent, waited_ns + waited
    return spent_ns / 1e9, waited_ns / 1e9


def _children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def _load(port: int, file: Path, seconds: float, qps: float | None = None) -> tuple[float, int, float, float]:
    """Answers, losses, mean and maximum latency in ms of a run of dnsperf."""
    command = [
        "dnsperf", "-s", "127.0.0.1", "-p", str(port), "-d", str(file), "-B", "-l", f"{seconds:g}",
        "-c", "8", "-q", "64", *(["-Q", f"{qps:g}"] if qps else []),
    ]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 30).stdout
    found = {
        name: float(match.group(1))
        for name, pattern in (
            ("done", r"Queries completed:\s+(\d+)"),
            ("lost", r"Queries lost:\s+(\d+)"),
            ("mean", r"Average Latency \(s\):\s+([0-9.]+)"),
            ("worst", r"max ([0-9.]+)\)"),
        )
        if (match := re.search(pattern, text))
    }
    if not found.get("done"):
        if seconds < SILENT_S:
            return _load(port, file, SILENT_S, qps)
        raise BenchError("dnsperf got no answer")
    return found["done"], int(found["lost"]), 1e3 * found.get("mean", 0.0), 1e3 * found.get("worst", 0.0)


def _latencies_ms(port: int, file: Path, seconds: float, qps: float) -> list[float]:
    """Latencies of all answers at this rate, ascending. dnsperf writes them to a file: to read them meanwhile would
    take a core.
    """
    command = [
        "dnsperf", "-s", "127.0.0.1", "-p", str(port), "-d", str(file), "-B", "-l", f"{seconds:g}", "-c", "8",
        "-q", "64", "-Q", f"{qps:.0f}", "-v",
    ]  # fmt: skip
    path = file.with_name("latencies")
    with path.open("wb") as out:
        subprocess.run(command, stdout=out, stderr=out, check=False, timeout=seconds + 30)
    text = path.read_text(errors="replace")
    took = sorted(1e3 * float(one) for one in re.findall(r"^> .*\s([0-9]+\.[0-9]+)$", text, re.MULTILINE))
    if not took:
        raise BenchError(f"dnsperf wrote no latencies, but: {text[-300:] or 'nothing'}")
    return took


def absent() -> dict[str, str]:
    """Peers that are not installed, with the remedy."""
    return {peer: f"is not installed (Debian: {peer})" for peer in PEERS if shutil.which(peer) is None}


def run(networks: int, seconds: float, seed: int = 7) -> Found:
    """Measure each in turn, `seconds` in all. BenchError if the echo or Farhop cannot be measured."""
    if shutil.which("dnsperf") is None:
        raise BenchError("dnsperf is not installed; install it (Debian: dnsperf)")
    left_out = absent()
    with tempfile.TemporaryDirectory(prefix="farhop-bench-dns-") as name, ExitStack() as running:
        folder = Path(name)
        file = folder / "questions"
        questions(file, Random(seed))
        servers: dict[str, Callable[[int], AbstractContextManager[int]]] = {
            "echo": partial(_echo, folder),
            "farhop": partial(_farhop, networks, folder, seed),
            "nsd": partial(_nsd, folder),
            "gdnsd": partial(_gdnsd, folder),
        }
        turns: dict[str, _Turns] = {}
        for which, serve in servers.items():
            if which in left_out:
                continue
            port = free_ports(1)[0]
            turns[which] = _Turns(running.enter_context(serve(port)), port, file)
        time.sleep(1.5)
        for number in range(-1, ROUNDS):
            for which in tuple(turns):
                try:
                    turns[which].take(min(1.0, seconds) if number < 0 else seconds / ROUNDS, counts=number >= 0)
                except BenchError as error:
                    if which not in PEERS:
                        raise
                    del turns[which]
                    complained = (folder / f"{which}.log").read_text(errors="replace").strip().splitlines()[-2:]
                    left_out[which] = f"{error}; it said: {' / '.join(complained) or 'nothing'}"
        return Found([one.row(which, seconds) for which, one in turns.items()], left_out)


class _Turns:
    """A running server, and the results of its turns."""

    def __init__(self, pid: int, port: int, file: Path) -> None:
        self._pid, self._port, self._file = pid, port, file
        self._taken: list[Row] = []

    def take(self, seconds: float, *, counts: bool) -> None:
        """One turn. Raises BenchError if it does not answer."""
        before, began = _core_s(self._pid)[0], time.monotonic()
        done, lost, mean_ms, worst_ms = _load(self._port, self._file, seconds)
        took_s, cpu_s = time.monotonic() - began, _core_s(self._pid)[0] - before
        if counts:
            self._taken.append(Row("", done / took_s, 1e6 * cpu_s / done, lost, mean_ms, worst_ms))

    def row(self, name: str, seconds: float) -> Row:
        """The medians; the maximum latency, and all losses."""
        taken = self._taken
        qps = statistics.median(one.qps for one in taken)
        before = _core_s(self._pid)[1]
        took_ms = _latencies_ms(self._port, self._file, seconds, qps / 2.0)
        waited_s = _core_s(self._pid)[1] - before
        return Row(
            name, qps, statistics.median(one.cpu_us for one in taken), sum(one.lost for one in taken),
            statistics.median(one.mean_ms for one in taken), max(one.worst_ms for one in taken),
            took_ms[int(0.99 * (len(took_ms) - 1))], 1e6 * waited_s / len(took_ms),
        )  # fmt: skip
