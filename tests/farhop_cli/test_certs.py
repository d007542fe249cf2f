"""`farhop certs`: an authority, certificates that balancers believe, keys of the hop token; nothing is written over."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from farhop.identity import certificate_names
from farhop.identity.hop_keys import read_keys
from farhop.service.authentication.peer_authenticator import PeerAuthenticator
from farhop.service.config.certificates import Files, load


def test_dry_run_lists_files_and_writes_none(cli: Any, tmp_path: Path) -> None:
    folder, dry = tmp_path / "new" / "certs", ("--dir", str(tmp_path / "new" / "certs"), "--dry-run")
    made = cli.run("certs", "init", *dry)
    assert made.exit_code == 0
    assert made.stdout.startswith(f"dry run, nothing is written: authority of farhop.internal: {folder}/ca.pem")
    assert not folder.parent.exists()
    assert "make an authority" in cli.failed(cli.run("certs", "issue", "regional", "paris", *dry), 2)
    assert cli.run("certs", "init", "--dir", str(folder)).exit_code == 0
    assert "is there already" in cli.failed(cli.run("certs", "init", *dry), 2)
    before = sorted(folder.iterdir())
    issued = cli.run("certs", "issue", "regional", "paris", "--host", "10.1.0.7", "--days", "30", *dry)
    assert "regional-paris.pem, good for 30 days: spiffe://farhop.internal/farhop/regional/paris, " in issued.stdout
    assert issued.stdout.rstrip().endswith("10.1.0.7")
    assert sorted(folder.iterdir()) == before
    assert "--host" in cli.failed(cli.run("certs", "issue", "regional", "paris", "--host", "a b", *dry), 2)
    (tmp_path / "file").write_text("")
    said = cli.failed(cli.run("certs", "init", "--dir", str(tmp_path / "file" / "certs"), "--dry-run"), 2)
    assert "Not a directory" in said


def test_an_authority_and_a_certificate_that_names_its_balancer(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert cli.run("certs", "init", "--dir", str(folder)).exit_code == 0
    made = cli.run("certs", "issue", "regional", "paris", "--dir", str(folder), "--host", "10.1.0.7", "--days", "30")
    assert "spiffe://farhop.internal/farhop/regional/paris" in made.stdout
    for name in ("ca.key", "regional-paris.key"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    files = Files(True, str(folder / "regional-paris.pem"), str(folder / "regional-paris.key"), str(folder / "ca.pem"))
    until = load(files, datetime.now(UTC)).not_after
    assert until is not None
    assert 29.9 < (until - datetime.now(UTC).timestamp()) / 86_400 <= 30
    certificate = x509.load_pem_x509_certificate((folder / "regional-paris.pem").read_bytes())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()))
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == [certificate_names.host("farhop.internal", "regional", "paris")]
    der = certificate.public_bytes(Encoding.DER)
    callers = PeerAuthenticator("farhop.internal", mutual=True)
    assert (callers.admits("regional", der), callers.admits("global", der)) == (True, False)
    assert not PeerAuthenticator("other.example", mutual=True).admits("regional", der)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for again in (["init"], ["issue", "regional", "paris"]):
        assert "not written over" in cli.failed(cli.run("certs", *again, "--dir", str(folder)), 2)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["issue", "regional", "paris"], "farhop certs init"),
        (["issue", "engine", "paris"], "give global, regional or operator"),
        (["issue", "regional", "no region"], "REGION"),
        (["issue", "regional", "Paris"], "REGION"),
        (["init", "--trust-domain", "Not A Domain"], "--trust-domain"),
    ],
)
def test_contradictory_options_are_refused(cli: Any, tmp_path: Path, words: list[str], says: str) -> None:
    assert says in cli.failed(cli.run("certs", *words, "--dir", str(tmp_path / "none")), 2)


def test_an_authority_issues_in_its_own_trust_domain(cli: Any, tmp_path: Path) -> None:
    ours = ("--dir", str(tmp_path), "--trust-domain", "farhop.example")
    assert cli.run("certs", "init", *ours).exit_code == 0
    text = cli.failed(cli.run("certs", "issue", "global", "paris", "--dir", str(tmp_path)), 2)
    assert "give --trust-domain farhop.example" in text
    assert cli.run("certs", "issue", "global", "paris", *ours).exit_code == 0


def test_keys_of_the_hop_token(cli: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.write_text(cli.run("certs", "hop-key").stdout)
    to = cli.run("certs", "hop-key", "--root", str(root), "--to", "paris").stdout.strip()
    of = cli.run("certs", "hop-key", "--root", str(root), "--from", "tokyo", "--regions", "paris,tokyo").stdout.strip()
    keys = read_keys({"to": to.encode(), "from": of.encode(), "root": root.read_bytes().strip()})
    assert len({key.pair("tokyo", "paris") for key in keys.values()}) == 1
    (derived := tmp_path / "derived").write_text(to)
    for words, says in (
        (["--root", str(derived), "--to", "paris"], "give the fleet's root"),
        (["--root", str(root)], "give --to"),
        (["--root", str(root), "--from", "tokyo"], "--regions"),
        (["--to", "paris"], "--root"),
        (["--root", str(tmp_path / "none"), "--to", "paris"], "No such file"),
        (["--root", str(tmp_path / "none"), "--to", "paris"], "farhop certs hop-key > hop.root"),
        (["--regions", "paris"], "--root"),
        (["--root", str(root), "--to", "Paris"], "--to: 'Paris' is not the name of a region"),
        (["--root", str(root), "--from", "tokyo", "--regions", "paris, tokyo"], "--regions: ' tokyo'"),
    ):
        assert says in cli.failed(cli.run("certs", "hop-key", *words), 2)


def test_an_operators_certificate_names_the_operator_and_no_host(cli: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "certs")
    assert cli.run("certs", "init", "--dir", folder).exit_code == 0
    assert cli.run("certs", "issue", "operator", "alice", "--dir", folder).exit_code == 0
    der = x509.load_pem_x509_certificate((tmp_path / "certs" / "operator-alice.pem").read_bytes())
    names = certificate_names.uris(der.public_bytes(Encoding.DER))
    assert certificate_names.operator(names, certificate_names.TRUST_DOMAIN) == "alice"
    assert certificate_names.read(names, certificate_names.TRUST_DOMAIN) is None  # no balancer accepts it as one
