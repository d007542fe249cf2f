"""Certificates of tenants: by their one URI, and no longer than they last."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from farhop.balance.outcome import KEY_NOT_VALID, UNKNOWN_KEY
from farhop.identity import tenant_certificates
from farhop.identity.api_keys import NotIdentified, Principal
from farhop.identity.tenant_certificates import TenantCertificates
from farhop_lab.world.certs import Authority

URI = "spiffe://corp.example/ns/batch/sa/nightly"
ACME = Principal("acme", "", ("eu",), "cert:nightly")


class Clock:
    now_s = 0.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


def certificate(authority: Authority, *names: str, days: float = 1) -> x509.Certificate:
    pair = authority.issue("one", names, good_for=timedelta(days=days))
    return x509.load_pem_x509_certificate(Path(pair.cert_file).read_bytes())


def der(of: x509.Certificate) -> bytes:
    return of.public_bytes(Encoding.DER)


def test_a_certificate_identifies_a_tenant_by_its_only_uri(authority: Authority) -> None:
    tenants = TenantCertificates({URI: ACME}, lambda: 0.0)
    assert tenants.identify(der(certificate(authority, URI, "host.example"))) == ACME
    for names in ((f"{URI}/x",), (URI.upper(),), (URI, "spiffe://corp.example/other"), ("corp.example",)):
        found = tenants.identify(der(certificate(authority, *names)))
        assert isinstance(found, NotIdentified)
        assert found.outcome is UNKNOWN_KEY
    assert isinstance(tenants.identify(b"no certificate"), NotIdentified)


def test_an_expired_certificate_is_refused_even_if_the_clock_is_set_back(authority: Authority) -> None:
    clock, one = Clock(), certificate(authority, URI)
    tenants, ends_s = TenantCertificates({URI: ACME}, lambda: clock.now_s), one.not_valid_after_utc.timestamp()
    clock.now_s = ends_s - 1
    assert tenants.identify(der(one)) == ACME
    clock.now_s = ends_s
    found = tenants.identify(der(one))
    assert isinstance(found, NotIdentified)
    assert found.outcome is KEY_NOT_VALID
    clock.now_s = ends_s - 1  # the clock is set back
    assert isinstance(tenants.identify(der(one)), NotIdentified)


def test_remembered_certificates_are_bounded(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_certificates, "MEMO_MAX", 2)
    tenants = TenantCertificates({URI: ACME}, lambda: 0.0)
    for _ in range(4):
        assert tenants.identify(der(certificate(authority, URI))) == ACME
    assert len(tenants.memo) == 2
