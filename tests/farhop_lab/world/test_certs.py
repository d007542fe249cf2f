from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from farhop.service.config.certificates import Files, TlsError, load
from farhop_lab.world.certs import Authority, Pair


def shaken(server: Pair, believes: Authority, host: str) -> dict[str, object]:
    """What a client learns of a server, by a handshake in memory."""
    behind = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    behind.load_cert_chain(server.cert_file, server.key_file)
    one, two = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=believes.ca_file).wrap_bio(one, two, server_hostname=host)
    other = behind.wrap_bio(two, one, server_side=True)
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for end in (client, other):
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                pass  # it is the other end's turn
    return client.getpeercert() or {}


def test_a_certificate_is_trusted_only_by_clients_of_its_authority(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "theirs")
    pair = ours.issue("server", ("127.0.0.1", "tokyo.example"))
    for host in ("127.0.0.1", "tokyo.example"):
        assert shaken(pair, ours, host)["subject"] == ((("commonName", "server"),),)
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        shaken(pair, theirs, "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shaken(pair, ours, "virginia.example")
    assert Path(pair.key_file).stat().st_mode & 0o077 == 0


def test_expired_certificate_and_renewal_with_the_same_key_are_issued(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first = authority.issue("server")
    key = Path(first.key_file).read_bytes()
    gone = authority.issue("server", good_for=timedelta(minutes=-1), key_of=first)
    assert Path(gone.key_file).read_bytes() == key
    with pytest.raises(TlsError, match="expired"):
        load(Files(True, gone.cert_file, gone.key_file), datetime.now(UTC))
