"""A certificate authority for worlds and tests: EC P-256, fast to make, valid for a day.

Never for production: keys are not encrypted, and nothing is revoked.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from pathlib import Path

_DAY = timedelta(days=1)


class Pair(msgspec.Struct, frozen=True):
    """PEM files of one certificate and its key."""

    cert_file: str
    key_file: str


class Authority:
    """One CA, whose files are in `folder`. Clients trust `ca_file`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _named(name)
        now = datetime.now(UTC)
        certificate = (
            _builder(self._subject, self._subject, self._key, now - _DAY, now + _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = str(folder / f"{name}.pem")
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        hosts: tuple[str, ...] = ("127.0.0.1", "localhost"),
        *,
        good_for: timedelta = _DAY,
        key_of: Pair | None = None,
    ) -> Pair:
        """Write `name`.crt and `name`.key, replacing existing files. `hosts` are names, addresses and URIs.

        A negative `good_for` makes an expired one. `key_of` reuses the key of another pair, as some renewals do.
        """
        key = ec.generate_private_key(ec.SECP256R1()) if key_of is None else _key_in(key_of)
        now = datetime.now(UTC)
        certificate = (
            _builder(_named(name), self._subject, key, now - 2 * _DAY, now + good_for)
            .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key"))
        (self._folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private = self._folder / f"{name}.key"
        private.touch(mode=0o600)
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _key_in(pair: Pair) -> ec.EllipticCurvePrivateKey:
    with open(pair.key_file, "rb") as file:
        key = serialization.load_pem_private_key(file.read(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(host: str) -> x509.GeneralName:
    if "://" in host:
        return x509.UniformResourceIdentifier(host)
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )
