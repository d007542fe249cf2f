"""A balancer's identity, by the name in its certificate: `spiffe://<trust domain>/farhop/<tier>/<region>`.

A host name beside the URI says the same, for libraries that verify only hosts (gRPC, TLS libraries). An operator's
certificate has `operator/<name>` there, and is no balancer's. Invariants: a name is read only from a verified
certificate; the common name does not count; if there are two URIs, neither counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec
from cryptography import x509

Tier = Literal["global", "regional"]
TIERS: tuple[Tier, ...] = ("global", "regional")
TRUST_DOMAIN = "farhop.internal"
DOMAIN = r"[a-z0-9](?:[a-z0-9.-]{0,200}[a-z0-9])?"

_SCHEME = "spiffe://"
OPERATOR = "operator"
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class BalancerIdentity(msgspec.Struct, frozen=True):
    """A balancer whose identity a certificate proves."""

    tier: Tier
    region: str


def uri(trust_domain: str, tier: Tier, region: str) -> str:
    """A balancer's name as a URI in the subject alternative names of its certificate."""
    return f"{_SCHEME}{trust_domain}/farhop/{tier}/{region}"


def host(trust_domain: str, tier: Tier, region: str) -> str:
    """A balancer's name as a host name."""
    return f"{region}.{tier}.{trust_domain}"


def operator_uri(trust_domain: str, name: str) -> str:
    """An operator's name as a URI in the subject alternative names of a certificate."""
    return f"{_SCHEME}{trust_domain}/farhop/{OPERATOR}/{name}"


def read(names: Iterable[str], trust_domain: str) -> BalancerIdentity | None:
    """The balancer, by the alternative names of a verified certificate; None if they name none in this domain."""
    tier, region = _parts(names, trust_domain)
    for known in TIERS:
        if tier == known and _REGION.fullmatch(region):
            return BalancerIdentity(known, region)
    return None


def operator(names: Iterable[str], trust_domain: str) -> str:
    """The operator that a verified certificate with these alternative names identifies; "" if it identifies none in
    this domain.
    """
    kind, name = _parts(names, trust_domain)
    return name if kind == OPERATOR and _REGION.fullmatch(name) else ""


def _parts(names: Iterable[str], trust_domain: str) -> tuple[str, str]:
    """The path of the only URI in this trust domain: its first part, and the rest."""
    uris = [name for name in names if name.startswith(_SCHEME)]
    mark = f"{_SCHEME}{trust_domain}/farhop/"
    if len(uris) != 1 or not uris[0].startswith(mark):
        return "", ""
    kind, _, name = uris[0].removeprefix(mark).partition("/")
    return kind, name


def uris(certificate: bytes) -> list[str]:
    """The alternative names of a certificate (DER) that are URIs; none of one that cannot be read."""
    try:
        extensions = x509.load_der_x509_certificate(certificate).extensions
        found = extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return []
    return found.value.get_values_for_type(x509.UniformResourceIdentifier)
