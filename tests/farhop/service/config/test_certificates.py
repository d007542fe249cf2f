"""Files into contexts: every fault is a line that names field and file, and none of them a key."""

from __future__ import annotations

import asyncio
import io
import json
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization

from farhop.service.config import certificates
from farhop.service.config.certificates import Certificates, Files, TlsError, TlsManager, load, system_context
from farhop.telemetry import logs
from farhop_lab.world.certs import Authority, Pair


def now() -> datetime:
    """Of the test, not of the collection of tests: certificates are made when they are first wanted."""
    return datetime.now(UTC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's pair, another's, and files of every bad kind."""
    made = tmp_path_factory.mktemp("certs")
    authority = Authority(made)
    pair = authority.issue("server")
    authority.issue("other")
    authority.issue("expired", good_for=timedelta(minutes=-1))
    key = serialization.load_pem_private_key(Path(pair.key_file).read_bytes(), None)
    (made / "encrypted.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )
    (made / "nonsense.crt").write_text("-----BEGIN CERTIFICATE-----\nbm8=\n-----END CERTIFICATE-----\n")
    (made / "empty").write_bytes(b"")
    (made / "huge").write_bytes(b"x" * (certificates.FILE_BYTES_MAX + 1))
    return made


def files(folder: Path, is_server: bool = True, **names: str) -> Files:
    given = {"cert_file": "server.crt", "key_file": "server.key"} if is_server else {}
    return Files(is_server, **{field: str(folder / name) for field, name in {**given, **names}.items()})


def test_a_server_speaks_tls_1_2_at_least_and_asks_for_certificates_if_configured(folder: Path) -> None:
    plain, mutual = (load(files(folder, **ca), now()) for ca in ({}, {"ca_file": "ca.pem"}))
    assert (plain.context.verify_mode, mutual.context.verify_mode) == (ssl.CERT_NONE, ssl.CERT_REQUIRED)
    assert plain.context.minimum_version is ssl.TLSVersion.TLSv1_2
    named = {cipher["name"] for cipher in plain.context.get_ciphers()}
    assert named
    assert all("GCM" in name or "CHACHA20" in name for name in named)
    assert not [name for name in named if not name.startswith(("TLS_", "ECDHE-"))]
    assert "PRIVATE" not in repr(plain)
    assert plain.not_after is not None
    assert 0 < plain.not_after - now().timestamp() <= 86_400 + 60


def test_a_client_always_verifies(folder: Path) -> None:
    for ours in (
        files(folder, False),
        files(folder, False, ca_file="ca.pem"),
        files(folder, False, cert_file="server.crt", key_file="server.key"),
    ):
        context = load(ours, now()).context
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (system_context().verify_mode, system_context().check_hostname) == (ssl.CERT_REQUIRED, True)
    assert system_context() is system_context()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"cert_file": "none.crt"}, "cert_file: .*none.crt: No such file or directory; check the path"),
        ({"key_file": "none.key"}, "key_file: .*none.key: No such file"),
        ({"ca_file": "none.pem"}, "client_ca_file: .*none.pem: No such file"),
        ({"cert_file": "."}, "cert_file: .*: Is a directory"),
        ({"cert_file": "huge"}, "cert_file: .*huge: larger than"),
        ({"cert_file": "empty"}, "cert_file: .*empty: holds no certificate"),
        ({"cert_file": "nonsense.crt"}, "cert_file: .*nonsense.crt: holds no certificate"),
        ({"cert_file": "server.key"}, "cert_file: .*server.key: holds no certificate"),
        ({"ca_file": "empty"}, "client_ca_file: .*empty: holds no certificate"),
        ({"key_file": "server.crt"}, "key_file: .*server.crt: holds no private key"),
        ({"key_file": "encrypted.key"}, "key_file: .*encrypted.key: is encrypted; give it without a passphrase"),
        ({"key_file": "other.key"}, "key_file: .*other.key: is not the key of the certificate in .*server.crt"),
        ({"cert_file": "expired.crt", "key_file": "expired.key"}, "cert_file: .*expired.crt: expired on .* UTC; renew"),
        ({"cert_file": "a\0b"}, "cert_file: a path holds no NUL"),
    ],
)
def test_files_that_cannot_be_used_are_named(folder: Path, names: dict[str, str], message: str) -> None:
    with pytest.raises(TlsError, match=message) as caught:
        load(files(folder, **names), now())
    assert "\n" not in str(caught.value)
    assert "PRIVATE" not in str(caught.value)


def test_a_certificate_without_key_or_not_yet_valid_is_refused(folder: Path) -> None:
    with pytest.raises(TlsError, match="cert_file, key_file: give both or neither"):
        load(files(folder, False, cert_file="server.crt"), now())
    with pytest.raises(TlsError, match=r"cert_file: .*server.crt: not valid before .*check the clock"):
        load(files(folder), now() - timedelta(days=9))


def _held(folder: Path) -> tuple[Authority, Pair, Certificates]:
    authority = Authority(folder)
    pair = authority.issue("server")
    return authority, pair, Certificates("listen.tls", Files(True, pair.cert_file, pair.key_file), now)


def test_changed_certificates_are_taken_up_and_broken_ones_are_not(tmp_path: Path) -> None:
    authority, pair, held = _held(tmp_path)
    first = held.context()
    assert not held.refresh()
    assert held.context() is first
    authority.issue("server")
    assert held.refresh()
    second = held.context()
    assert second is not first
    Path(pair.key_file).unlink()
    with pytest.raises(TlsError, match="key_file"):
        held.refresh()
    assert held.context() is second
    assert held.trouble is not None
    assert not held.refresh(), "one change is told of once"
    authority.issue("server")
    assert held.refresh()
    assert held.trouble is None


def test_a_certificate_replaced_by_a_symlink_swap_is_reloaded(tmp_path: Path) -> None:
    """As Kubernetes renews a mounted secret: the files are links into a folder that is replaced whole."""
    authority = Authority(tmp_path)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        pair = Authority.issue(authority, f"{name}/tls")
        stamp = os.stat(pair.cert_file)
        os.utime(tmp_path / name / "tls.crt", ns=(stamp.st_atime_ns, 10**18))
    (tmp_path / "data").symlink_to("old")
    held = Certificates("x", Files(True, str(tmp_path / "data/tls.crt"), str(tmp_path / "data/tls.key")), now)
    (tmp_path / "next").symlink_to("new")
    (tmp_path / "next").rename(tmp_path / "data")
    assert held.refresh()


def _spoil(pair: Pair) -> None:
    Path(pair.cert_file).write_text("broken")


async def test_certificate_changes_are_logged_once_and_gauges_show_the_state(tmp_path: Path) -> None:
    out = io.StringIO()
    logs.configure("regional", "virginia", "r1", stream=out)
    authority, pair, _ = _held(tmp_path)
    manager = TlsManager(logs.get("t"), now)
    held = manager.add("tier.tls", Files(True, pair.cert_file, pair.key_file, authority.ca_file))
    seen: list[Any] = []
    held.changed = lambda: seen.append(held.material)
    assert manager.not_after() == {"tier.tls": held.material.not_after}
    assert manager.stale() == {"tier.tls": 0.0}
    await manager.look()
    assert out.getvalue() == ""
    _spoil(pair)
    for _ in range(2):
        await manager.look()
    (line,) = [json.loads(text) for text in out.getvalue().splitlines()]
    assert (line["level"], line["part"]) == ("error", "tier.tls")
    assert "server.crt" in line["problem"]
    assert manager.stale() == {"tier.tls": 1.0}
    authority.issue("server")
    await manager.look()
    assert json.loads(out.getvalue().splitlines()[-1])["event"] == "certificate renewed"
    assert seen == [held.material]
    assert manager.stale() == {"tier.tls": 0.0}


async def test_certificate_files_are_checked_for_changes_periodically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.configure("regional", "virginia", "r1", stream=io.StringIO())
    monkeypatch.setattr(certificates, "LOOK_S", 0.01)
    authority, pair, _ = _held(tmp_path)
    manager = TlsManager(logs.get("t"), now)
    held = manager.add("tier.tls", Files(True, pair.cert_file, pair.key_file))
    renewed = asyncio.Event()
    held.changed = renewed.set
    keeping = asyncio.create_task(manager.keep())
    authority.issue("server")
    await asyncio.wait_for(renewed.wait(), 60.0)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_process_without_certificates_looks_at_nothing() -> None:
    await asyncio.wait_for(TlsManager(logs.get("t"), now).keep(), 60.0)


async def _presented(port: int, authority: Authority, pair: Pair | None) -> bytes:
    """The certificate that a gRPC server shows now."""
    context = ssl.create_default_context(cafile=authority.ca_file)
    context.set_alpn_protocols(["h2"])
    if pair is not None:
        context.load_cert_chain(pair.cert_file, pair.key_file)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        assert await reader.read(9), "it refused us"  # its settings
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert isinstance(shown, bytes)
        return shown
    finally:
        writer.transport.abort()


async def test_a_grpc_server_shows_new_connections_the_new_certificate_and_asks_for_theirs(tmp_path: Path) -> None:
    authority, pair, _ = _held(tmp_path)
    client = authority.issue("client")
    held = Certificates("control.tls", Files(True, pair.cert_file, pair.key_file, authority.ca_file), now)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", held.server_credentials())
    await server.start()
    try:
        first = await _presented(port, authority, client)
        assert await _presented(port, authority, client) == first
        authority.issue("server")
        assert held.refresh()
        assert await _presented(port, authority, client) != first
        with pytest.raises((AssertionError, OSError)):
            await _presented(port, authority, None)
    finally:
        await server.stop(None)
