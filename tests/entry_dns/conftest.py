"""A world with three entries, and a responder that answers for it, made as the server makes them."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest

from entry_dns.answers import prepare, zones
from entry_dns.answers.prepare import UNKNOWN_LOCATION, ClientLocation
from entry_dns.answers.responder import Responder
from entry_dns.answers.snapshot import decode, encode
from entry_dns.answers.zones import NamePlan, Ttls, ZonePlan
from entry_dns.fleet.entry_health import EntryHealth, State
from entry_dns.fleet.networks import spaces
from topology.law import Law
from topology.load import load, shipped
from topology.model import Entry, Rule, Topology

NAMES = ("virginia", "frankfurt", "tokyo")
ADDRESSES = {name: (f"192.0.2.{n}", f"2001:db8::{n}") for n, name in enumerate(NAMES, 1)}
TOKYO, FRANKFURT, CONFINED = "203.0.113.0/24", "198.51.100.0/24", "198.18.0.0/15"


def world(**changes: Any) -> Topology:
    topology = load(shipped("three-regions"))
    entries = {name: Entry(name, name, (four,), (six,)) for name, (four, six) in ADDRESSES.items()}
    eu = topology.tenants["eu-only"]
    assert eu.residency is not None
    eu = replace(eu, residency=replace(eu.residency, entry=Rule(("eu",))))
    return replace(topology, **{"entries": entries, "tenants": {**topology.tenants, "eu-only": eu}, **changes})


def entry_health(name: str, state: State = State.UP, share: float = 1.0, bias_ms: float = 0.0) -> EntryHealth:
    stable = float("inf") if state is State.UP and share == 1.0 else 0.0
    return EntryHealth(name, state, share, bias_ms, stable)


def atlas(topology: Topology, *more: tuple[str, ClientLocation]) -> prepare.Atlas:
    """Tokyo's and Frankfurt's networks, one that is confined to Japan, and more."""
    found = [
        (TOKYO, ClientLocation(35.7, 139.7)),
        ("2001:db8:aaaa::/48", ClientLocation(35.7, 139.7)),
        (FRANKFURT, ClientLocation(50.1, 8.7)),
        (CONFINED, ClientLocation(50.1, 8.7, within=("jp",))),
        *more,
    ]
    locations = [UNKNOWN_LOCATION, UNKNOWN_LOCATION, *(location for _, location in found)]
    return prepare.atlas(topology, spaces((ip_network(cidr), n) for n, (cidr, _) in enumerate(found, 2)), locations)


def unconfined() -> prepare.Atlas:
    """Tokyo's network alone, which everybody may lead anywhere."""
    return prepare.atlas(
        world(), spaces([(ip_network(TOKYO), 2)]), [UNKNOWN_LOCATION, UNKNOWN_LOCATION, ClientLocation(35.7, 139.7)]
    )


PLAN = ZonePlan(
    "entry.example",
    (
        NamePlan("api.entry.example", alpn=("http/1.1",), txt=("farhop",)),
        NamePlan("eu.entry.example", "eu-only", alpn=("http/1.1",)),
        NamePlan("v4.entry.example", families=(4,)),
    ),
    (("ns1.entry.example", ("192.0.2.53",)), ("ns2.elsewhere.example", ())),
    "hostmaster.entry.example",
)


def served(
    responder: Responder,
    topology: Topology | None = None,
    healths: Any = None,
    known: Any = None,
    plan: ZonePlan = PLAN,
    by_resolver: bool = False,
) -> Responder:
    """The responder, with the view of this world put in force as a worker has it."""
    topology = topology or world()
    healths = healths or [entry_health(name) for name in topology.entries]
    known = known or atlas(topology)
    view = zones.view([plan], Law(topology), known, healths, Ttls(5, 30), 3, 1, by_resolver=by_resolver)
    data = encode(*view)
    responder.adopt(*decode(memoryview(data)))
    responder.tick(1_800_000_000.0)
    return responder


@pytest.fixture
def responder() -> Responder:
    return served(Responder())
