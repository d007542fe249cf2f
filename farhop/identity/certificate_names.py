"""Who a balancer is, by the name in its certificate: `spiffe://<trust domain>/farhop/<tier>/<region>`.

Beside the URI stands a host name that says the same, for those who verify hosts alone (gRPC, TLS libraries).
Invariants: a name is read only from a certificate that was verified; the common name says nothing; of two URIs none
counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

Tier = Literal["global", "regional"]
TIERS: tuple[Tier, ...] = ("global", "regional")
TRUST_DOMAIN = "farhop.internal"
DOMAIN = r"[a-z0-9](?:[a-z0-9.-]{0,200}[a-z0-9])?"

_SCHEME = "spiffe://"
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Peer(msgspec.Struct, frozen=True):
    """A balancer that proved who it is."""

    tier: Tier
    region: str


def uri(trust_domain: str, tier: Tier, region: str) -> str:
    """The name as it stands in a certificate's subject alternative names."""
    return f"{_SCHEME}{trust_domain}/farhop/{tier}/{region}"


def host(trust_domain: str, tier: Tier, region: str) -> str:
    """The same as a host name."""
    return f"{region}.{tier}.{trust_domain}"


def read(names: Iterable[str], trust_domain: str) -> Peer | None:
    """Who it is, by the alternative names of a verified certificate; None if they do not say it in this domain."""
    uris = [name for name in names if name.startswith(_SCHEME)]
    mark = f"{_SCHEME}{trust_domain}/farhop/"
    if len(uris) != 1 or not uris[0].startswith(mark):
        return None
    tier, _, region = uris[0].removeprefix(mark).partition("/")
    for known in TIERS:
        if tier == known and _REGION.fullmatch(region):
            return Peer(known, region)
    return None
