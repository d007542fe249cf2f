"""Real resolvers before a real worker, in a network namespace: which clients get what from their shared caches."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from ipaddress import ip_network
from pathlib import Path

import dns.edns
import dns.message
import dns.rcode
import msgspec
import pytest

from entry_dns.answers import prepare
from entry_dns.answers.prepare import UNKNOWN_LOCATION, ClientLocation
from entry_dns.answers.snapshot import encode
from entry_dns.answers.zones import NamePlan, Ttls, ZonePlan, view
from entry_dns.app.counters import Counters
from entry_dns.app.worker import Settings
from entry_dns.fleet.entry_health import EntryHealth, State
from entry_dns.fleet.networks import spaces
from entry_dns.links.view_file import write
from topology.law import Law
from topology.load import parse, shipped

DEADLINE_S = 30.0
ENTRIES = """
entries:
  - {name: virginia, region: virginia, ipv4: [192.0.2.1], ipv6: ["2001:db8::1"]}
  - {name: frankfurt, region: frankfurt, ipv4: [192.0.2.2], ipv6: ["2001:db8::2"]}
  - {name: tokyo, region: tokyo, ipv4: [192.0.2.3], ipv6: ["2001:db8::3"]}
"""
# Clients are 10.9.1.1 (near Tokyo), 10.9.2.1 (near Frankfurt) and 10.9.3.1 (near Frankfurt, confined to Japan).
TOKYO, FRANKFURT, CONFINED, NOBODY = "10.9.1.1", "10.9.2.1", "10.9.3.1", "10.9.4.1"
SERVER, RESOLVER, NEIGHBOUR = "10.9.0.53", "10.9.0.54", "10.9.0.55"

_WORKER = """
import socket, sys
import msgspec
from entry_dns.app.worker import Settings, Task, responder, serve
import os
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], 53))
settings = msgspec.msgpack.decode(bytes.fromhex(sys.argv[4]), type=Settings)
serve(sock, responder(settings), Task(0, sys.argv[2], sys.argv[3], 0, settings), os.getppid())
"""
_UNBOUND = """server:
  interface: {resolver}
  outgoing-interface: {resolver}
  access-control: 10.9.0.0/16 allow
  module-config: "subnetcache iterator"
  send-client-subnet: {server}
  client-subnet-always-forward: yes
  max-client-subnet-ipv4: 32
  do-ip6: no
  username: ""
  chroot: ""
  directory: "{folder}"
  pidfile: ""
  use-syslog: no
  do-not-query-localhost: no
stub-zone:
  name: "entry.example"
  stub-addr: {server}
"""


def world():
    return parse(shipped("three-regions").read_text() + ENTRIES, "w")


def put(folder: Path, zone: str = "entry.example", *, ready: bool = True, barred: bool = True) -> None:
    """A view of this zone; not `ready`: of which nothing is known, so that all its names are SERVFAIL. `barred`: one of
    the networks has no lawful entry."""
    topology = world()
    found = [
        ("10.9.1.0/24", ClientLocation(35.7, 139.7)),
        ("10.9.2.0/24", ClientLocation(50.1, 8.7)),
        ("10.9.3.0/24", ClientLocation(50.1, 8.7, within=("jp",))),
        ("10.9.4.0/24", ClientLocation(50.1, 8.7, within=("cn",))),
    ][: 4 if barred else 3]
    networks = spaces((ip_network(cidr), n) for n, (cidr, _) in enumerate(found, 2))
    known = prepare.atlas(
        topology, networks, [UNKNOWN_LOCATION, UNKNOWN_LOCATION, *(location for _, location in found)]
    )
    plan = ZonePlan(zone, (NamePlan(f"api.{zone}"),), ((f"ns1.{zone}", (SERVER,)),), "hostmaster.invalid")
    up = [EntryHealth(name, State.UP, 1.0, 0.0, 1e9) for name in topology.entries] if ready else []
    write(folder / "view", encode(*view([plan], Law(topology), known, up, Ttls(), 1, 1)))
    counters = folder / "counters"
    (Counters(counters) if counters.exists() else Counters.make(counters, 1)).raise_version()


_ASK = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], 0)); sock.settimeout(5)
sock.connect((sys.argv[2], 53))  # so it is told at once if nobody is there yet
sock.send(bytes.fromhex(sys.argv[3]))
print(sock.recv(4096).hex())
"""


class Space:
    """A network namespace with every address of the test on its loopback, and what runs in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: list[subprocess.Popen[bytes]] = []
        self.run("ip", "netns", "add", name, inside=False)
        self.run("ip", "link", "set", "lo", "up")
        for address in (SERVER, RESOLVER, NEIGHBOUR, TOKYO, FRANKFURT, CONFINED, NOBODY):
            self.run("ip", "addr", "add", f"{address}/32", "dev", "lo")

    def run(self, *command: str, inside: bool = True) -> str:
        before = ("ip", "netns", "exec", self.name) if inside else ()
        return subprocess.run((*before, *command), check=True, capture_output=True, text=True, timeout=60).stdout

    def start(self, *command: str) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.running.append(subprocess.Popen(("ip", "netns", "exec", self.name, *command), **quiet))

    def serve(self, address: str, folder: Path) -> None:
        """A worker of ours at this address, of the view in this folder."""
        settings = msgspec.msgpack.encode(Settings((bytes(16),))).hex()
        self.start(sys.executable, "-c", _WORKER, address, str(folder / "view"), str(folder / "counters"), settings)

    def ask(self, client: str, kind: str = "A", at: str = RESOLVER, subnet: str = "") -> tuple[str, list[str]]:
        options = [dns.edns.ECSOption(subnet, 32)] if subnet else None
        query = dns.message.make_query("api.entry.example", kind, use_edns=0, options=options)
        end = time.monotonic() + DEADLINE_S
        while True:  # until the resolver is there
            try:
                output = self.run(sys.executable, "-c", _ASK, client, at, query.to_wire().hex())
                break
            except subprocess.CalledProcessError:
                assert time.monotonic() < end, "nobody answers"
                time.sleep(0.2)
        answer = dns.message.from_wire(bytes.fromhex(output.strip()))
        return dns.rcode.to_text(answer.rcode()), [rdata.to_text() for one in answer.answer for rdata in one]

    def recursor(self, binary: str, folder: Path, servers: str, told_subnets: str, *settings: str) -> None:
        """A pdns-recursor before these servers."""
        self.start(
            binary, f"--config-dir={folder}", f"--socket-dir={folder}",
            f"--local-address={RESOLVER}", "--local-port=53", "--allow-from=10.9.0.0/16",
            f"--forward-zones=entry.example={servers}", f"--edns-subnet-allow-list={told_subnets}",
            "--ecs-add-for=0.0.0.0/0", "--ecs-ipv4-bits=32", "--ecs-ipv4-cache-bits=32", "--dnssec=off", "--daemon=no",
            "--use-incoming-edns-subnet=no", "--dont-query=", "--threads=1", f"--query-local-address={RESOLVER}",
            *settings,
        )  # fmt: skip

    def close(self) -> None:
        for one in self.running:
            one.terminate()
            one.wait()
        self.run("ip", "netns", "del", self.name, inside=False)


@pytest.fixture
def space(tmp_path):
    if shutil.which("ip") is None:
        pytest.skip("no ip: network namespaces cannot be made")
    made = Space(f"farhop-dns-{time.monotonic_ns() % 100_000}")
    try:
        put(tmp_path)
        made.serve(SERVER, tmp_path)
        # A resolver that asked too early would stay away for a while.
        assert made.ask(TOKYO, at=SERVER, subnet=TOKYO)[0] == "NOERROR"
        yield made
    finally:
        made.close()


OWN = {
    (TOKYO, "A"): ["192.0.2.3"],
    (CONFINED, "A"): ["192.0.2.3"],
    (FRANKFURT, "A"): ["192.0.2.2"],
    (TOKYO, "AAAA"): ["2001:db8::3"],
    (CONFINED, "AAAA"): ["2001:db8::3"],
    (FRANKFURT, "AAAA"): ["2001:db8::2"],
}


def lawful(space: Space, *, isolated: bool) -> None:
    """In every order, each network is told its own entries: what one may not be told another's answer does not tell.

    `isolated`: a SERVFAIL for one network is one for no other; else it may be for a while, and tells nothing."""
    for (client, kind), entries in OWN.items():
        assert space.ask(client, kind) == ("NOERROR", entries)
    assert space.ask(FRANKFURT, "TXT") == ("NOERROR", [])
    for kind in ("A", "AAAA"):
        assert space.ask(NOBODY, kind) == ("SERVFAIL", [])
    for (client, kind), entries in reversed(OWN.items()):  # now from the cache, beside the denied name
        answer = space.ask(client, kind)
        assert answer == ("NOERROR", entries) or (not isolated and answer == ("SERVFAIL", []))
    for kind in ("A", "AAAA"):
        assert space.ask(NOBODY, kind) == ("SERVFAIL", [])


@pytest.mark.root
def test_unbound_gives_no_network_the_answer_of_another(space, tmp_path) -> None:
    binary = shutil.which("unbound")
    if binary is None:
        pytest.skip("unbound is not installed")
    (tmp_path / "unbound.conf").write_text(_UNBOUND.format(resolver=RESOLVER, server=SERVER, folder=tmp_path))
    space.start(binary, "-d", "-c", str(tmp_path / "unbound.conf"))
    lawful(space, isolated=True)


# By itself it keeps a SERVFAIL for all networks, and does not ask that server again for that name and type, both
# for 60 s. Either alone is enough to deny a lawful network for as long.
APART = ("--packetcache-servfail-ttl=0", f"--dont-throttle-netmasks={SERVER}")


@pytest.mark.root
@pytest.mark.parametrize("settings", [(), APART])
def test_pdns_recursor_gives_no_network_the_answer_of_another(space, tmp_path, settings) -> None:
    binary = shutil.which("pdns_recursor")
    if binary is None:
        pytest.skip("pdns_recursor is not installed")
    space.recursor(binary, tmp_path, SERVER, SERVER, *settings)
    lawful(space, isolated=bool(settings))


@pytest.mark.root
@pytest.mark.parametrize("barred", [True, False])
@pytest.mark.parametrize("word", ["REFUSED", "SERVFAIL"])
@pytest.mark.parametrize("resolver", ["unbound", "pdns_recursor"])
def test_a_second_name_server_that_refuses_does_not_lead_clients_to_unlawful_entries(
    space, tmp_path, resolver: str, word: str, barred: bool
) -> None:
    """unbound asks us without a client subnet once the neighbour has refused, and gives that answer to everybody: by
    its very first question, too, of which nobody can tell whether it tells subnets otherwise."""
    binary = shutil.which(resolver)
    if binary is None:
        pytest.skip(f"{resolver} is not installed")
    other = tmp_path / "neighbour"
    other.mkdir()
    put(other, "other.example" if word == "REFUSED" else "entry.example", ready=word == "REFUSED")
    space.serve(NEIGHBOUR, other)
    assert space.ask(TOKYO, at=NEIGHBOUR) == (word, [])
    put(tmp_path, barred=barred)
    if resolver == "unbound":
        conf = _UNBOUND.format(resolver=RESOLVER, server=SERVER, folder=tmp_path)
        conf = conf.replace("  client-subnet-always", f"  send-client-subnet: {NEIGHBOUR}\n  client-subnet-always")
        (tmp_path / "unbound.conf").write_text(f"{conf}  stub-addr: {NEIGHBOUR}\n")
        space.start(binary, "-d", "-c", str(tmp_path / "unbound.conf"))
    else:
        space.recursor(binary, tmp_path, f"{SERVER};{NEIGHBOUR}", f"{SERVER},{NEIGHBOUR}", *APART)
    for _ in range(2):
        for (client, kind), entries in OWN.items():
            answer = space.ask(client, kind)
            # Its own entries; or those that all of them may get, which are none if one of them may get none.
            shared = ("SERVFAIL", []) if barred else ("NOERROR", OWN[TOKYO, kind])
            assert answer in (("NOERROR", entries), shared), (client, kind)
        if barred:
            assert space.ask(NOBODY) == ("SERVFAIL", [])
