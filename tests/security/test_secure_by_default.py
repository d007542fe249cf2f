"""What others than this machine reach is encrypted, or its configuration says that it is not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from inprocess import HOP_KEY, global_config, regional_config
from pydantic import ValidationError

from farhop.identity.hop_keys import key_from, key_to
from farhop.store.envelope import Signer
from farhop_lab.world.certs import Authority

ENGINE: Any = type("Engine", (), {"scheme": "http", "address": "127.0.0.1:1"})
EVERYWHERE = {"host": "0.0.0.0", "port": 0}
ETCD = {"endpoints": ["10.0.0.1:2379"]}


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    monkeypatch.setenv("FARHOP_TEST_ETCD", "secret")


@pytest.mark.parametrize("name", ["admin", "tier", "control", "client", "listen"])
def test_a_listener_off_loopback_is_an_error_that_names_the_remedy(name: str, tmp_path: Path) -> None:
    regional = partial(regional_config, ENGINE, advertise="10.0.0.5")
    made: Any = global_config if name == "listen" else regional
    with pytest.raises(ValidationError, match=rf"(?s){name}.*insecure: true"):
        made(**{name: EVERYWHERE})
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        made(**{name: {"host": host, "port": 0}})
    made(**{name: {**EVERYWHERE, "insecure": True}})
    authority = Authority(tmp_path)
    own = authority.issue("own")
    tls = {"cert_file": own.cert_file, "key_file": own.key_file}
    mutual = {"tls": {**tls, "client_ca_file": authority.ca_file}}
    both = {"tier": {"port": 0, **mutual}, "control": {"port": 0, **mutual}} if name in ("tier", "control") else {}
    made(**{**both, name: {**EVERYWHERE, **mutual}})
    if both:
        with pytest.raises(ValidationError, match=rf"{name}\.tls\.client_ca_file: balancers must prove"):
            made(**{**both, name: {**EVERYWHERE, "tls": tls}})


def test_etcd_off_loopback_and_never_a_password_in_plaintext() -> None:
    with pytest.raises(ValidationError, match=r"(?s)etcd.*ca_file.*insecure: true"):
        global_config(etcd=ETCD)
    global_config(etcd={**ETCD, "insecure": True})
    global_config(etcd={"endpoints": ["https://10.0.0.1:2379"]})
    login = {"username": "u", "password": "env:FARHOP_TEST_ETCD"}
    with pytest.raises(ValidationError, match="a password never travels in plaintext"):
        global_config(etcd={**ETCD, **login, "insecure": True})
    global_config(etcd={"endpoints": ["127.0.0.1:2379", "[::1]:2379"], **login})


def test_each_tier_refuses_at_once_keys_that_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    root = HOP_KEY.encode()
    monkeypatch.setenv("FARHOP_TEST_HOP", key_to(root, "virginia"))
    regional_config(ENGINE)
    with pytest.raises(ValidationError, match="hop: hop keys: key 'k1' does not sign tokens of region 'virginia'"):
        global_config()
    with pytest.raises(ValidationError, match="hop: hop keys: key 'k1' does not check tokens to region 'tokyo'"):
        regional_config(ENGINE, "tokyo")
    monkeypatch.setenv("FARHOP_TEST_HOP", key_from(root, "virginia", ["virginia"]))
    global_config()
    with pytest.raises(ValidationError, match="does not check tokens"):
        regional_config(ENGINE)


def test_a_region_whose_own_reports_would_not_count_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    monkeypatch.setenv("FARHOP_TEST_REPORT", pem.decode())
    monkeypatch.setenv("FARHOP_TEST_PUBLIC", Signer("v-1", pem).public)
    mine = {"report_key": {"name": "v-1", "private": "env:FARHOP_TEST_REPORT"}}
    known = {"signing": {"keys": {"v-1": {"public": "env:FARHOP_TEST_PUBLIC", "may": ["report/virginia"]}}}}
    assert regional_config(ENGINE, **mine, **known).report_signer is not None
    with pytest.raises(ValidationError, match="report_key: our own reports would not count"):
        regional_config(ENGINE, **known)
    known["signing"]["keys"]["v-1"]["may"] = ["report/tokyo"]
    with pytest.raises(ValidationError, match="may not sign a report of virginia"):
        regional_config(ENGINE, **mine, **known)
