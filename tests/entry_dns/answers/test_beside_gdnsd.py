"""The same networks and the same deaths, asked of a real gdnsd and of us; and gdnsd's own cases where they concern us.

Its cases are those of its `t/013clientsub`, `t/014geoip` and `t/007plugins` (weighted, metafo). Where we differ on
purpose it says so: gdnsd answers with one datacenter, NODATA where that has no address of the family, and tells a
private network's scope as any other's.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from dataclasses import replace
from ipaddress import ip_network

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.query
import dns.rcode
import pytest

from entry_dns.answers import prepare
from entry_dns.answers.prepare import UNKNOWN_LOCATION, ClientLocation
from entry_dns.answers.responder import Responder
from entry_dns.answers.zones import NamePlan
from entry_dns.fleet.entry_health import State
from entry_dns.fleet.networks import spaces
from farhop_lab.world.ports import free_ports
from tests.entry_dns.conftest import ADDRESSES, NAMES, PLAN, entry_health, served, world

GDNSD = shutil.which("gdnsd")
# Measured times decide the order, so that gdnsd can be given the same order.
ORDERS = {
    "0.0.0.0/1": ("virginia", "frankfurt", "tokyo"),
    "128.0.0.0/1": ("frankfurt", "virginia", "tokyo"),
    "203.0.113.0/24": ("tokyo", "virginia", "frankfurt"),
    "203.0.112.0/21": ("tokyo", "frankfurt", "virginia"),
    "198.18.0.0/15": ("virginia", "tokyo", "frankfurt"),
}
PLAIN = ("203.0.113.0/24", "203.0.113.77/32", "203.0.112.0/24", "203.0.114.0/24", "203.0.118.9/32", "203.0.120.0/24")
ASKED = (
    *PLAIN, "8.8.8.0/24", "192.0.2.1/32", "192.0.2.0/15", "198.18.5.0/24", "198.20.0.0/16", "126.255.0.0/16",
    "128.0.0.0/9",
)  # fmt: skip
CONFIG = """options => {{
  listen => 127.0.0.1:{port}, run_dir => {folder}/run, state_dir => {folder}/state, udp_threads => 1, tcp_threads => 1
}}
plugins => {{ geoip => {{
  maps => {{ m => {{ datacenters => [virginia, frankfurt, tokyo], nets => {{
{nets}
  }} }} }},
  resources => {{ api => {{ map => m, service_types => up, dcmap => {{ {addresses} }} }} }}
}} }}
"""
ZONE = """@ 30 IN SOA ns1 hostmaster 1 3600 600 86400 30
@ 30 IN NS ns1
ns1 30 IN A 127.0.0.1
api 30 IN DYNA geoip!api
"""


def ours(down: frozenset[str] = frozenset(), plan=PLAN, topology=None) -> Responder:
    """A responder that knows these networks; of the entries, these are dead."""
    locations = [
        ClientLocation(rtt_ms=tuple((name, 10.0 * n) for n, name in enumerate(order, 1))) for order in ORDERS.values()
    ]
    networks = spaces((ip_network(cidr), n) for n, cidr in enumerate(ORDERS, 2))
    topology = topology or world()
    known = prepare.atlas(topology, networks, [UNKNOWN_LOCATION, UNKNOWN_LOCATION, *locations])
    healths = [entry_health(name, State.DOWN if name in down else State.UP) for name in NAMES]
    return served(Responder(), topology, healths, known, plan)


def question(subnet: str, kind: str = "A") -> dns.message.Message:
    network = ip_network(subnet, strict=False)
    option = dns.edns.ECSOption(str(network.network_address), network.prefixlen)
    return dns.message.make_query("api.entry.example", kind, use_edns=0, options=[option])


def answered(answer: dns.message.Message) -> tuple[str, int]:
    """The first address, and the scope."""
    scope = next(one.scopelen for one in answer.options if isinstance(one, dns.edns.ECSOption))
    return answer.answer[0][0].address, scope


def asked(responder: Responder, query: dns.message.Message, host: str = "192.0.2.200") -> dns.message.Message:
    answer = responder.answer(query.to_wire(), host)
    assert answer is not None
    return dns.message.from_wire(answer)


class Gdnsd:
    """A real one, of the same networks. `dead` tells it by its admin_state who is dead."""

    def __init__(self, folder) -> None:
        self.folder, (self.port,) = folder, free_ports(1)
        nets = "\n".join(f"    {cidr} => [{', '.join(order)}]" for cidr, order in ORDERS.items())
        addresses = ", ".join(f"{name} => {ADDRESSES[name][0]}" for name in NAMES)
        for name in ("zones", "run", "state"):
            (folder / name).mkdir()
        (folder / "config").write_text(CONFIG.format(port=self.port, folder=folder, nets=nets, addresses=addresses))
        (folder / "zones" / "entry.example").write_text(ZONE)

    def dead(self, names: frozenset[str]) -> None:
        state = "".join(f"geoip/api/{name} => down\n" for name in sorted(names))
        (self.folder / "state" / "admin_state").write_text(state)

    def __enter__(self) -> Gdnsd:
        with (self.folder / "log").open("wb") as log:
            command = [str(GDNSD), "-c", str(self.folder), "start"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 30.0
        while self.ask("8.8.8.0/24", within_s=0.1) is None:  # what is asked before it listens gets no answer
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < end, "gdnsd does not answer"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def ask(self, subnet: str, within_s: float = 2.0) -> tuple[str, int] | None:
        try:
            return answered(dns.query.udp(question(subnet), "127.0.0.1", timeout=within_s, port=self.port))
        except (dns.exception.Timeout, OSError):
            time.sleep(0.05)
            return None


DEAD = [frozenset(names) for count in range(4) for names in itertools.combinations(NAMES, count)]


@pytest.mark.skipif(GDNSD is None, reason="gdnsd is not installed")
@pytest.mark.parametrize("dead", DEAD, ids=lambda dead: ",".join(sorted(dead)) or "nobody")
def test_gdnsd_gives_every_network_the_same_entry_and_no_wider_scope(tmp_path, dead) -> None:
    responder, peer = ours(dead), Gdnsd(tmp_path)
    peer.dead(dead)
    with peer:
        for subnet in ASKED:
            theirs, own = peer.ask(subnet), answered(asked(responder, question(subnet)))
            assert theirs is not None
            assert own[0] == theirs[0], subnet
            if subnet in PLAIN:  # no private network near: ours joins networks with one answer, while some are dead
                assert own[1] <= theirs[1], subnet
                assert own[1] == theirs[1] or len(dead) in (1, 2), subnet
        # gdnsd knows no private networks: it answers as if it knew their location, and lets a resolver keep that.
        assert peer.ask("10.10.0.0/16") == (*(peer.ask("8.8.8.0/24") or ("", 0))[:1], 1)
        private = answered(asked(responder, question("10.10.0.0/16"), "203.0.113.200"))
        assert private == (answered(asked(responder, question("203.0.113.200/32")))[0], 8 if len(dead) != 2 else 0)


# -- its cases


@pytest.mark.parametrize(
    ("family", "source", "scope", "address"),
    [
        (1, 33, 0, bytes((192, 0, 2, 0, 0))),  # a prefix that is too long
        (2, 129, 0, bytes(17)),
        (1, 32, 0, bytes(3)),  # too few octets for it
        (2, 128, 0, bytes(15)),
        (3, 128, 0, bytes(16)),  # no such family
        (1, 24, 24, bytes((192, 0, 2))),  # a scope in a question
        (1, 24, 0, bytes((192, 0, 2, 0))),  # too many octets
        (1, 23, 0, bytes((192, 0, 3))),  # bits beyond the prefix
    ],
)
def test_a_client_subnet_that_is_none_is_formerr_with_a_bare_opt(family, source, scope, address) -> None:
    value = family.to_bytes(2, "big") + bytes((source, scope)) + address
    option = dns.edns.GenericOption(8, value)
    query = dns.message.make_query("api.entry.example", "A", use_edns=0, options=[option])
    answer = asked(ours(), query)
    assert (answer.rcode(), answer.edns, answer.options) == (dns.rcode.FORMERR, 0, ())
    assert not answer.flags & dns.flags.AA


def test_a_resolver_that_comes_by_ipv6_may_ask_for_a_client_of_ipv4_and_the_other_way() -> None:
    assert answered(asked(ours(), question("203.0.113.0/24"), "2001:db8::53")) == ("192.0.2.3", 24)
    assert answered(asked(ours(), question("2001:db8:1::/48"), "192.0.2.200"))[0] == "192.0.2.1"


def test_where_the_nearest_has_no_address_of_the_family_the_next_answers_and_never_nodata() -> None:
    # gdnsd answers NODATA for that datacenter (its res2, dc2), which a resolver gives to others of the network, too.
    topology = world()
    bare = replace(topology.entries["tokyo"], ipv4=())
    topology = replace(topology, entries={**topology.entries, "tokyo": bare})
    plan = replace(PLAN, names=(NamePlan("api.entry.example"),))
    responder = ours(plan=plan, topology=topology)
    assert answered(asked(responder, question("203.0.113.0/24"))) == ("192.0.2.1", 24)
    assert answered(asked(responder, question("203.0.113.0/24", "AAAA")))[0] == "2001:db8::3"


def test_failover_goes_down_the_network_s_own_list() -> None:
    # Its res8: the first of the list that is not down; if all are down the first, as if all were up.
    for dead, first in (((), 3), (("tokyo",), 1), (("tokyo", "virginia"), 2), (NAMES, 3)):
        assert answered(asked(ours(frozenset(dead)), question("203.0.113.0/24")))[0] == f"192.0.2.{first}"


def test_weights_decide_the_first_entry_and_every_entry_stays_in_the_answer() -> None:
    # gdnsd draws for each answer; here a network keeps its entry, so that answers are equal within a scope.
    known = ours().head.entries
    assert [one.name for one in known] == list(NAMES)
    locations = [
        UNKNOWN_LOCATION,
        UNKNOWN_LOCATION,
        ClientLocation(rtt_ms=(("virginia", 1.0), ("frankfurt", 2.0), ("tokyo", 3.0))),
    ]
    atlas = prepare.atlas(world(), spaces([(ip_network("0.0.0.0/0"), 2)]), locations)
    healths = [entry_health("virginia", share=0.25), entry_health("frankfurt"), entry_health("tokyo")]
    responder = served(Responder(), world(), healths, atlas)
    found = [asked(responder, question(f"{a}.{b}.0.0/16")) for a in (20, 60, 100, 140) for b in range(256)]
    first = [answered(one)[0] for one in found]
    assert 0.2 <= first.count("192.0.2.1") / len(first) <= 0.3
    assert {tuple(sorted(rdata.address for rdata in one.answer[0])) for one in found} == {
        ("192.0.2.1", "192.0.2.2", "192.0.2.3")
    }
