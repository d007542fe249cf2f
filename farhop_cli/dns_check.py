"""`farhop dns check`: what a resolver would see of a zone: the delegation, each server, each family, the records.

It asks as resolvers do, by UDP and TCP, with and without a client subnet. Never changes anything.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from ipaddress import ip_address, ip_network

import dns.dnssec
import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.query
import dns.rcode
import dns.rdatatype
import dns.resolver
import typer

from farhop_cli.exits import NEGATIVE, fail, printable

_TIMEOUT_S = 2.0
_LEAK = "some resolvers then ask the others without a client subnet"


@dataclass(frozen=True)
class Finding:
    """One check and its result."""

    what: str
    good: bool
    text: str


def run(zone: str, names: list[str], resolver: str, servers: list[str], client: str, as_json: bool) -> int:
    """Check; the exit code."""
    try:
        subnet = ip_network(client, strict=False) if client else None
    except ValueError:
        fail(f"--client: {client!r} is no network; give one such as 203.0.113.0/24")
    try:
        apex = dns.name.from_text(zone)
        asked = [dns.name.from_text(name) for name in names]
    except dns.exception.DNSException:
        fail("a name has labels of 1 to 63 characters; give one such as entry.example.com")
    found: list[Finding] = []
    at = [_host_port(one) for one in servers] if servers else _delegated(apex, resolver, found)
    for host, port in at:
        found += _of_server(apex, asked, host, port, subnet)
    if not at:
        found.append(Finding("servers", False, "none to ask; delegate the zone, or name one by --server"))
    found += _signed(apex, at, None if servers and not resolver else resolver)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    else:
        for one in found:
            typer.echo(f"{'ok  ' if one.good else 'BAD '} {one.what}: {printable(one.text)}")
    return 0 if all(one.good for one in found) else NEGATIVE


def _signed(apex: dns.name.Name, at: list[tuple[str, int]], resolver: str | None) -> list[Finding]:
    """The DS records that the parent needs for the keys that sign; whether it has one. `resolver` None: not asked, "":
    this host's own.
    """
    needed: set[str] = set()
    for host, port in at:
        answer, _ = _ask(apex, "DNSKEY", host, port, "TCP", None, dnssec=True)
        if answer is None or answer.rcode() != dns.rcode.NOERROR:
            continue  # it serves nothing of the zone, as its SOA's finding says: not other keys, but none
        sets = answer.answer
        signers = {one.key_tag for rrset in sets if rrset.rdtype == dns.rdatatype.RRSIG for one in rrset}
        here = {
            dns.dnssec.make_ds(apex, key, "SHA256").to_text()
            for rrset in sets if rrset.rdtype == dns.rdatatype.DNSKEY
            for key in rrset if key.flags & 1 and dns.dnssec.key_id(key) in signers
        }  # fmt: skip
        if needed and here != needed:
            return [Finding(f"DNSSEC {apex}", False, "servers have other keys; give all of them the same files")]
        needed = here
    if resolver is None:
        return [Finding(f"DNSSEC {apex}", True, f"its parent needs DS {one}") for one in sorted(needed)]
    try:
        held = {one.to_text().lower() for one in _asker(resolver).resolve(apex, "DS")}
    except (dns.resolver.NoAnswer, dns.resolver.NXDOMAIN):
        held = set()
    except dns.exception.DNSException as error:
        return [Finding(f"DS of {apex}", False, f"{type(error).__name__}; the resolver answered nothing")]
    if not needed:
        lost = "its parent has a DS and no key signs: validators refuse it; sign it, or take the DS away"
        return [Finding(f"DNSSEC {apex}", not held, lost if held else "not signed, and its parent has no DS")]
    wanted = " or ".join(sorted(needed))
    if not held:
        return [Finding(f"DNSSEC {apex}", False, f"signed, and its parent has no DS; give it {wanted}")]
    good = bool(held & {one.lower() for one in needed})
    text = "its parent's DS is of a key that signs" if good else "no DS of its parent is of a key that signs"
    return [Finding(f"DNSSEC {apex}", good, f"{text}; what fits: {wanted}")]


def _asker(resolver: str) -> dns.resolver.Resolver:
    asker = dns.resolver.Resolver(configure=not resolver)
    if resolver:
        host, asker.port = _host_port(resolver)
        asker.nameservers = [host]
    asker.lifetime = 2 * _TIMEOUT_S
    return asker


def _host_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text, "53"
    try:
        ip_address(host.strip("[]"))
        return host.strip("[]"), int(port)
    except ValueError:
        fail(f"{text!r} is no server; give ADDRESS or ADDRESS:PORT")


def _delegated(apex: dns.name.Name, resolver: str, found: list[Finding]) -> list[tuple[str, int]]:
    """The servers that the delegation names, by the resolver."""
    asker = _asker(resolver)
    try:
        listed = [rdata.target for rdata in asker.resolve(apex, "NS")]
    except dns.exception.DNSException as error:
        found.append(Finding(f"delegation of {apex}", False, f"{type(error).__name__}; add NS records to its parent"))
        return []
    found.append(Finding(f"delegation of {apex}", True, ", ".join(map(str, listed))))
    at: list[tuple[str, int]] = []
    for target in listed:
        families = []
        for kind in ("A", "AAAA"):
            try:
                addresses = [rdata.address for rdata in asker.resolve(target, kind)]
            except dns.exception.DNSException:
                continue
            families.append("IPv4" if kind == "A" else "IPv6")
            at += [(address, 53) for address in addresses]
        text = " and ".join(families) or "no address; give it one"
        found.append(Finding(f"server {target}", bool(families), text))
    return at


def _of_server(apex: dns.name.Name, names: list[dns.name.Name], host: str, port: int, subnet: object) -> list[Finding]:
    server = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
    found: list[Finding] = []
    for way in ("UDP", "TCP"):
        for kind in ("SOA", "NS"):
            answer, why = _ask(apex, kind, host, port, way, None)
            good = answer is not None and bool(answer.answer) and bool(answer.flags & dns.flags.AA)
            text = "" if answer is None else f"{dns.rcode.to_text(answer.rcode())}, {_records(answer)}"
            lame = why or f"{text}: not authoritative for the zone; is it served there?"
            found.append(Finding(f"{server} {way} {kind}", good, text if good else lame))
    for name in names:
        found += _of_name(name, host, port, server, subnet)
    return found


def _of_name(name: dns.name.Name, host: str, port: int, server: str, subnet: object) -> list[Finding]:
    network = ip_network(str(subnet)) if subnet is not None else ip_network("192.0.2.0/24")
    option = dns.edns.ECSOption(str(network.network_address), network.prefixlen)
    found = []
    for kind in ("A", "AAAA", "HTTPS"):
        answer, why = _ask(name, kind, host, port, "UDP", option)
        what = f"{server} {name} {kind}"
        if answer is None:
            found.append(Finding(what, False, why))
            continue
        scope = next((one.scopelen for one in answer.options if isinstance(one, dns.edns.ECSOption)), None)
        errors = [one.text or str(int(one.code)) for one in answer.options if isinstance(one, dns.edns.EDEOption)]
        answered = f"{dns.rcode.to_text(answer.rcode())}, {_records(answer)}"
        text = f"{answered}, scope {scope}" + "".join(f" ({one})" for one in errors)
        if answer.rcode() in (dns.rcode.REFUSED, dns.rcode.NOTAUTH):
            text += f"; it does not serve the zone, and {_LEAK}: serve it there, or take its NS record away"
        elif scope is None:
            text += "; it answers without a client subnet: every server of the zone must"
        good = scope is not None and answer.rcode() == dns.rcode.NOERROR and bool(answer.answer or answer.authority)
        found.append(Finding(what, good, text))
    return found


def _ask(
    name: dns.name.Name,
    kind: str,
    host: str,
    port: int,
    way: str,
    option: dns.edns.ECSOption | None,
    *,
    dnssec: bool = False,
) -> tuple[dns.message.Message | None, str]:
    """The answer, or why there is none."""
    options: list[dns.edns.Option] | None = [option] if option is not None else None
    query = dns.message.make_query(name, kind, use_edns=0, options=options, want_dnssec=dnssec)
    query.flags &= ~dns.flags.RD
    ask = dns.query.udp if way == "UDP" else dns.query.tcp
    try:
        return ask(query, host, timeout=_TIMEOUT_S, port=port), ""
    except (OSError, dns.exception.DNSException, EOFError) as error:
        return None, f"no answer by {way} ({type(error).__name__}); is the port open?"


def _records(answer: dns.message.Message) -> str:
    listed = [rdata.to_text() for rrset in answer.answer if rrset.rdtype != dns.rdatatype.RRSIG for rdata in rrset]
    return ", ".join(listed) or "no record"
