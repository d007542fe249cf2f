"""`farhop certs`: a small CA for a fleet, certificates that name tier and region, and keys of the hop token.

EC P-256; a CA is valid for ten years, a certificate for 90 days by default (balancers load renewed files
automatically). Invariants: private keys are readable by their owner alone; nothing is overwritten; nothing is left half
written. Never sends anything anywhere.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from farhop.identity import certificate_names, hop_keys
from farhop_cli import show
from farhop_cli.exits import fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.identity.certificate_names import Tier

AUTHORITY_DAYS = 3650
DAYS = 90
ROOT_BYTES = 32
OPERATOR = certificate_names.OPERATOR
CLOCKS_APART = timedelta(minutes=5)  # a certificate is valid from before now: readers' clocks may be behind ours
_REGION = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")  # as in topologies


def init(folder: Path, trust_domain: str, *, dry_run: bool = False) -> int:
    """Make a CA: `ca.pem`, which is distributed, and `ca.key`, which is kept secret; the exit code."""
    _domain(trust_domain)
    if dry_run:
        _would_write(folder, "ca")
        typer.echo(f"{show.DRY}authority of {trust_domain}: {folder / 'ca.pem'}, good for {AUTHORITY_DAYS} days")
        return 0
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(f"farhop {trust_domain}")
    certificate = (
        _builder(subject, subject, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder, "ca", _pem(certificate), _private(key))
    typer.echo(f"authority of {trust_domain}: {folder / 'ca.pem'}; keep {folder / 'ca.key'} off the balancers")
    return 0


def issue(
    folder: Path, tier: str, region: str, hosts: Sequence[str], days: int, trust_domain: str, *, dry_run: bool = False
) -> int:
    """Issue `<tier>-<region>.pem` and its key, by the CA in `folder`; the exit code."""
    _domain(trust_domain)
    if tier not in (*certificate_names.TIERS, OPERATOR):
        fail(f"TIER: {tier!r} is unknown; give {', '.join(certificate_names.TIERS)} or {OPERATOR}")
    if not _REGION.fullmatch(region):
        whose = "operator's name, such as alice" if tier == OPERATOR else "region's name in the topology, such as paris"
        fail(f"REGION: give the {whose}: 1 to 63 of a-z 0-9 . _ -")
    authority, signing = _authority(folder)
    _same_domain(authority, trust_domain)
    names = [*_names(trust_domain, tier, region), *map(_host, hosts)]
    stem = f"{tier}-{region}"
    made = f"{folder / stem}.pem, good for {days} days: {', '.join(str(one.value) for one in names)}"
    if dry_run:
        _would_write(folder, stem)
        typer.echo(f"{show.DRY}{made}")
        return 0
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_subject(f"{tier} {region}"), authority.subject, key, days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    _write(folder, stem, _pem(certificate), _private(key))
    typer.echo(made)
    return 0


def _names(trust_domain: str, tier: str, name: str) -> list[x509.GeneralName]:
    """The names in the certificate: an operator has no host."""
    if tier == OPERATOR:
        return [x509.UniformResourceIdentifier(certificate_names.operator_uri(trust_domain, name))]
    known: Tier = "global" if tier == "global" else "regional"
    return [
        x509.UniformResourceIdentifier(certificate_names.uri(trust_domain, known, name)),
        x509.DNSName(certificate_names.host(trust_domain, known, name)),
    ]


def hop_key(root_file: Path | None, to: str | None, of: str | None, audiences: Sequence[str]) -> int:
    """Print a new root, or one region's key derived from one; the exit code."""
    if root_file is None:
        if to is not None or of is not None or audiences:
            fail("--root: name the file that holds the fleet's root; without --to and --from a new one is made")
        typer.echo(secrets.token_urlsafe(ROOT_BYTES))
        return 0
    if (to is None) == (of is None):
        fail("give --to REGION (what it checks tokens with) or --from REGION (what its global balancers sign with)")
    try:
        root = root_file.read_bytes().strip()
    except OSError as error:
        fail(f"--root: {root_file}: {error.strerror}; make the fleet's root with: farhop certs hop-key > hop.root")
    for option, names_given in (("--to", (to,)), ("--from", (of,)), ("--regions", audiences)):
        for name in names_given:
            if name is not None and not _REGION.fullmatch(name):
                fail(f"{option}: {name[:64]!r} is not the name of a region; give them as in the topology: paris,tokyo")
    try:
        hop_keys.read_keys({"root": root})
        if hop_keys.is_derived(root.decode("latin-1")):
            fail("--root: this is the key of one region; give the fleet's root")
        if to is not None:
            typer.echo(hop_keys.key_to(root, to))
            return 0
        if not audiences:
            fail("--regions: name the regions to which it sends requests, such as --regions paris,tokyo")
        assert of is not None
        typer.echo(hop_keys.key_from(root, of, audiences))
    except hop_keys.HopError as error:
        fail(str(error))
    return 0


def _domain(trust_domain: str) -> None:
    if not re.fullmatch(certificate_names.DOMAIN, trust_domain):
        fail("--trust-domain: give a domain in lower case, such as farhop.example")


def _same_domain(authority: x509.Certificate, trust_domain: str) -> None:
    """Our CA names its trust domain: no process in the fleet trusts a certificate of another one."""
    called = [str(one.value) for one in authority.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if authority.subject != _subject(f"farhop {trust_domain}") and called and called[0].startswith("farhop "):
        domain = called[0].removeprefix("farhop ")
        fail(f"--trust-domain: this authority is of {domain}, not {trust_domain}; give --trust-domain {domain}")


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # no address: a name, or invalid
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})", host):
        fail(f"--host: {host[:64]!r} is neither a host name nor an address")
    return x509.DNSName(host)


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}; make an authority with: farhop certs init --dir {folder}")
    except (ValueError, TypeError):
        fail(f"{folder}: ca.pem and ca.key are not those of an authority; make one with: farhop certs init --dir NEW")
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        fail(f"{folder}: ca.key is not the key of ca.pem; give the folder that `farhop certs init` filled")
    return authority, key


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(folder: Path, stem: str, certificate: bytes, key: bytes) -> None:
    """Write both files or neither, the key first."""
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data, mode in ((folder / f"{stem}.key", key, 0o600), (folder / f"{stem}.pem", certificate, 0o644)):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                made.append(path)
                file.write(data)
    except FileExistsError as error:
        _unmake(made)
        _there_already(error.filename)
    except OSError as error:
        _unmake(made)
        fail(f"{error.filename or folder}: {error.strerror}")


def _would_write(folder: Path, stem: str) -> None:
    """End the command if `_write` would fail: existing files are not overwritten, and the folder must be writable."""
    for path in (folder / f"{stem}.key", folder / f"{stem}.pem"):
        if path.exists():
            _there_already(path)
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        fail(f"{there}: {os.strerror(errno.EACCES if there.is_dir() else errno.ENOTDIR)}")


def _there_already(path: Path | str) -> NoReturn:
    fail(f"{path} is there already, and is not written over; move it away, or give another --dir")


def _unmake(made: list[Path]) -> None:
    for path in made:
        path.unlink(missing_ok=True)
