"""Names in certificates: read only if they are unambiguous and in our trust domain."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID

from farhop.identity.certificate_names import TIERS, BalancerIdentity, host, read, uri, uris

HERE = "fleet.example"


def test_a_written_name_is_read_back() -> None:
    for tier in TIERS:
        for region in ("paris", "us.east-1", "a_b"):
            assert read(["127.0.0.1", uri(HERE, tier, region)], HERE) == BalancerIdentity(tier, region)
            assert host(HERE, tier, region) == f"{region}.{tier}.fleet.example"


@pytest.mark.parametrize(
    "names",
    [
        [], ["paris.global.fleet.example"], ["spiffe://fleet.example/farhop/global"],
        ["spiffe://fleet.example/farhop/global/"], ["spiffe://fleet.example/farhop/global/paris/x"],
        ["spiffe://other.example/farhop/global/paris"], ["spiffe://fleet.example.evil/farhop/global/paris"],
        ["spiffe://fleet.example/farhop/engine/paris"], ["SPIFFE://fleet.example/farhop/global/paris"],
        [uri(HERE, "global", "paris"), uri(HERE, "global", "tokyo")], [" " + uri(HERE, "global", "paris")],
    ],
)  # fmt: skip
def test_any_other_certificate_name_identifies_no_tenant(names: list[str]) -> None:
    assert read(names, HERE) is None


def _element(tag: int, content: bytes) -> bytes:
    return bytes((tag, len(content))) + content


_URI = _element(0x86, b"spiffe://corp/x")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (_URI, ["spiffe://corp/x"]),
        (_URI + _element(0xA0, b"\x06\x01\x29\xa0\x02\x05\x00"), ["spiffe://corp/x"]),
        (_URI + _element(0xA5, b"\xa1\x04\x0c\x02ab"), []),
        (_URI + _element(0xA3, b""), []),
        (_URI + _element(0x87, b"abc"), []),
        (_element(0x86, b"\xff"), []),
        (b"ab", []),
    ],
    ids=["a URI", "another name", "an EDI party", "an X.400 address", "no address", "no URI", "no names"],
)
def test_a_certificate_whose_names_cannot_be_read_has_none(names: bytes, found: list[str]) -> None:
    key, called = Ed25519PrivateKey.generate(), x509.Name([])
    odd = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, _element(0x30, names))
    made = x509.CertificateBuilder().subject_name(called).issuer_name(called).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(datetime(2026, 1, 1, tzinfo=UTC))
    made = made.not_valid_after(datetime(2030, 1, 1, tzinfo=UTC)).add_extension(odd, critical=False)
    assert uris(made.sign(key, None).public_bytes(Encoding.DER)) == found
