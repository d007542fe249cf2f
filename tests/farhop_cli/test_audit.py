"""`farhop audit` over an intact log and over a changed one."""

from __future__ import annotations

import base64
import json
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pymerkle import InmemoryTree, verify_inclusion

from farhop.accounts import audit, tlog
from farhop.accounts.audit import AuditLog, Decided

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(audit, "WAKE_S", 0.005)
    made = AuditLog(tmp_path / "log", "farhop.internal/test", KEY, time.monotonic, time.time)
    made.open()
    for n in range(300):
        made.put(Decided(1.0, f"d{n:06d}", 7, "acme", "llama", "k", "virginia", "tokyo", "served", 200, None))
    made.close()
    return tmp_path / "log"


def test_changed_log_does_not_verify(cli: Any, log: Path, tmp_path: Path) -> None:
    key = tlog.verifier_key("farhop.internal/test", KEY.public_key())
    shutil.copy(log / "checkpoint", tmp_path / "seen")
    held = cli.run("audit", "verify", str(log), "--key", key, "--seen", str(tmp_path / "seen"), "--json")
    assert (held.exit_code, json.loads(held.stdout)["entries"]) == (0, 302)
    assert "starts 1, of which after a kill 0" in cli.run("audit", "verify", str(log)).stdout
    path = log / "tile" / "entries" / "000"
    path.write_bytes(path.read_bytes().replace(b'"epoch":7', b'"epoch":8', 1))
    changed = cli.run("audit", "verify", str(log), "--key", key)
    assert changed.exit_code == 1
    assert "DOES NOT HOLD" in changed.stdout


def test_what_several_processes_lost_is_added_up(cli: Any, log: Path) -> None:
    """Each counts its own from 0, and says so again each time it is more."""
    for losses in ((2, 5), (3,), ()):
        made = AuditLog(log, "farhop.internal/test", KEY, time.monotonic, time.time)
        made.open()
        before = made.size
        while made.size == before:  # until its start is written
            time.sleep(0.001)
        for lost in losses:
            made.lost = lost
            before = made.size
            made.put(Decided(1.0, "d", 7, "acme", "llama", "k", "virginia", "tokyo", "served", 200, None))
            while made.size < before + 2:
                time.sleep(0.001)
        made.close()
    assert json.loads(cli.run("audit", "verify", str(log), "--json").stdout)["lost"] == 5 + 3


def test_a_decision_is_proven_to_another_implementation(cli: Any, log: Path) -> None:
    output = json.loads(cli.run("audit", "prove", "d000123", str(log), "--json").stdout)
    (found,) = output["found"]
    assert found["entry"]["epoch"] == 7
    other = InmemoryTree(algorithm="sha256")
    files = audit.Files(log, "farhop.internal/test", KEY.public_key())
    for entry in files.entries(output["size"]):
        other.append_entry(entry)
    root, leaf = base64.b64decode(output["checkpoint"].split("\n")[2]), base64.b64decode(found["leaf_hash"])
    theirs = other.prove_inclusion(found["index"] + 1, output["size"])
    verify_inclusion(leaf, root, theirs)
    assert theirs.path == [leaf, *map(base64.b64decode, found["inclusion_proof"])]
    shown = cli.run("audit", "prove", "d000123", str(log), "--name", "acme")
    assert "(acme)" in shown.stdout
    assert "epoch: 7" in shown.stdout
    assert cli.run("audit", "prove", "d999999", str(log)).exit_code == 1


def test_that_nothing_is_found_in_a_changed_log_proves_nothing(cli: Any, log: Path) -> None:
    """Whoever changed the entry of a decision could have it denied."""
    path = log / "tile" / "entries" / "000"
    path.write_bytes(path.read_bytes().replace(b'"id":"d000123"', b'"id":"d999999"', 1))
    for decision in ("d000123", "d000124"):
        shown = cli.run("audit", "prove", decision, str(log))
        assert shown.exit_code == 1
        assert "DOES NOT HOLD: the entries do not lead to the root that was signed" in shown.stdout
    assert json.loads(cli.run("audit", "prove", "d000123", str(log), "--json").stdout)["holds"] is False


def test_a_proof_from_a_growing_log_is_of_the_checkpoint_beside_it(
    cli: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = audit.Files.find

    def meanwhile(files: audit.Files, decision: str, size: int) -> Any:
        yield from find(files, decision, size)
        grown = AuditLog(log, "farhop.internal/test", KEY, time.monotonic, time.time)
        grown.open()
        grown.close()

    monkeypatch.setattr(audit.Files, "find", meanwhile)
    output = json.loads(cli.run("audit", "prove", "d000123", str(log), "--json").stdout)
    (found,) = output["found"]
    signed = audit.Files(log, "farhop.internal/test", KEY.public_key()).opened(output["checkpoint"].encode())
    proof = [base64.b64decode(one) for one in found["inclusion_proof"]]
    assert tlog.root_of(base64.b64decode(found["leaf_hash"]), found["index"], signed.size, proof) == signed.root


def test_an_auditor_gets_all_but_the_salt(cli: Any, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "audit.tar.gz"
    assert cli.run("audit", "export", str(log), "--out", str(out)).exit_code == 0
    with tarfile.open(out) as packed:
        packed.extractall(tmp_path / "copy", filter="data")
    assert not (tmp_path / "copy" / "salt").exists()
    assert cli.run("audit", "verify", str(tmp_path / "copy")).exit_code == 0
    assert "not written over" in cli.run("audit", "export", str(log), "--out", str(out)).stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "{}/nowhere"], "there is no checkpoint"),
        (["verify", "{}", "--key", "a+b+c"], "--key: not a verifier key"),
        (["verify", "{}", "--seen", "{}/none"], "--seen"),
        (["export", "{}", "--out", "/nowhere/x"], "--out"),
    ],
)
def test_error_is_reported_in_one_line(cli: Any, log: Path, arguments: list[str], says: str) -> None:
    result = cli.run("audit", *(one.format(log) for one in arguments))
    assert result.exit_code == 2
    assert says in result.stderr
