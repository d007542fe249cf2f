"""The audit log on disk: it holds whatever stops it and wherever, and no byte of it changes unseen."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from farhop.accounts import audit, tlog
from farhop.accounts.audit import AuditLog, Decided, Files, salted
from farhop.accounts.tlog import LogError

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ORIGIN = "farhop.internal/test"


def decided(n: int, tenant: str = "acme", **more: Any) -> Decided:
    given = Decided(1.0, f"d{n:06d}", 7, tenant, "llama", "k", "virginia", "tokyo", "served", 200, frozenset({"tokyo"}))
    return replace(given, **more)


def log_at(folder: Path) -> AuditLog:
    return AuditLog(folder, ORIGIN, KEY, time.monotonic, time.time)


def files_at(folder: Path) -> Files:
    return Files(folder, ORIGIN, KEY.public_key())


def written(folder: Path, count: int, first: int = 0) -> None:
    log = log_at(folder)
    log.open()
    for n in range(first, first + count):
        log.put(decided(n))
    log.close()
    assert not log.trouble


def kinds(folder: Path) -> list[str]:
    files = files_at(folder)
    return [json.loads(one)["kind"] for one in files.entries(files.checkpoint().size)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "WAKE_S", 0.005)
    monkeypatch.setattr(audit, "SEAL_S", 0.02)


def test_a_recorded_decision_is_found_and_proven(tmp_path: Path) -> None:
    written(tmp_path, 600)
    written(tmp_path, 50, 600)  # the next process goes on
    files = files_at(tmp_path)
    checkpoint, beside = files.verify()
    assert (checkpoint.size, beside) == (654, [])
    ((index, entry),) = files.find("d000123", checkpoint.size)
    document = json.loads(entry)
    assert (document["epoch"], document["served"], document["lawful"]) == (7, "tokyo", ["tokyo"])
    assert document["tenant"] == salted((tmp_path / "salt").read_bytes(), "acme")
    proof = files.proof(index, entry, checkpoint)
    assert tlog.root_of(tlog.leaf_hash(entry), index, checkpoint.size, proof) == checkpoint.root
    assert kinds(tmp_path).count("start") == 2
    assert b"acme" not in b"".join(files.entries(checkpoint.size))


def test_the_common_fields_of_decisions_are_encoded_once_and_each_entry_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelled, salts = list[Any](), list[str]()
    monkeypatch.setattr(AuditLog, "spelled", _noted(AuditLog.spelled, spelled))
    monkeypatch.setattr(audit, "salted", lambda salt, name: (salts.append(name), salted(salt, name))[1])
    odd = ['d"1', "d\\2", "d\n3", "\N{SNOWMAN}", "", "d-4"]
    log = log_at(tmp_path)
    log.open()
    for n in range(300):
        log.put(decided(n, at_s=n / 1e3, lawful=frozenset(("tokyo", "paris"))))
    for name in odd:
        log.put(decided(0, id=name, model='m"', why="q\\", key="", lawful=None))
    log.close()
    files = files_at(tmp_path)
    entries = [json.loads(one) for one in files.entries(files.checkpoint().size)]
    made = [one for one in entries if one["kind"] == "decision"]
    assert [one["id"] for one in made] == [*(f"d{n:06d}" for n in range(300)), *odd]
    assert [one["at"] for one in made[:300:100]] == [f"1970-01-01T00:00:00.{n}00Z" for n in range(3)]
    assert made[0]["lawful"] == ["paris", "tokyo"]
    assert [name in made[-1] for name in ("lawful", "key", "model")] == [False, False, True]
    assert (len(spelled), sorted(salts)) == (2, ["acme", "k", "llama", 'm"']), "of 306"


def _noted(work: Any, calls: list[Any]) -> Any:
    def noted(*given: Any) -> Any:
        calls.append(given)
        return work(*given)

    return noted


def test_the_common_fields_of_decisions_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ALIKE_MAX", 4)
    log = log_at(tmp_path)
    log.open()
    for n in range(50):
        log.put(decided(n, model=f"m{n % 7}"))
    log.close()
    assert len(log.alike) <= 4
    assert kinds(tmp_path).count("decision") == 50


def test_a_journal_in_the_former_crc_format_is_recovered_up_to_its_first_fault(tmp_path: Path) -> None:
    """Its frames had a CRC-32; now they have the beginning of the leaf hash. One that was changed ends it."""
    written(tmp_path, 10)
    size, entry = files_at(tmp_path).checkpoint().size, b'{"kind":"decision","at":"","id":"crc"}'
    framed = len(entry).to_bytes(4, "big") + zlib.crc32(entry).to_bytes(4, "big") + entry
    (tmp_path / f"journal.{size}").write_bytes(framed + framed + framed[:-2] + b"x}" + framed)
    written(tmp_path, 0)
    entries = list(files_at(tmp_path).entries(files_at(tmp_path).checkpoint().size))
    assert entries[size : size + 2] == [entry, entry]
    start = json.loads(entries[size + 2])
    assert (start["kind"], start["clean"], start["recovered"]) == ("start", False, 2)


def test_an_entry_without_a_tenant_names_no_model_and_key_either(tmp_path: Path) -> None:
    log = log_at(tmp_path)
    log.open()
    log.put(decided(1, tenant=""))
    log.close()
    document = json.loads(list(files_at(tmp_path).entries(3))[1])
    assert {"tenant", "model", "key"}.isdisjoint(document)
    assert document["id"] == "d000001"


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    """In a sample of all bytes: flipped, and of every file: cut, longer, gone."""
    written(tmp_path, 300)
    files = files_at(tmp_path)
    files.verify()
    rng = Random(1)
    paths = [tmp_path / "checkpoint", *(path for path in (tmp_path / "tile").rglob("*") if path.is_file())]
    assert len(paths) == 6
    for path in paths:
        data = path.read_bytes()
        flips = range(len(data)) if len(data) < 200 else [0, len(data) - 1, *rng.sample(range(len(data)), 40)]
        wrongs = [data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :] for at in flips]
        for wrong in [*wrongs, data[:-1], data + b"\0", data + b"\0\0", b""]:
            path.write_bytes(wrong)
            with pytest.raises(LogError):
                files.verify()
        path.unlink()
        with pytest.raises(LogError):
            files.verify()
        path.write_bytes(data)
    files.verify()
    (tmp_path / "tile" / "0" / "009").write_bytes(b"x")
    assert files.verify()[1] == ["tile/0/009: is not of the 302 entries that are signed"]


def test_a_log_that_was_truncated_or_recreated_is_not_the_one_that_was_seen(tmp_path: Path) -> None:
    old, new, fake = tmp_path / "old", tmp_path / "new", tmp_path / "fake"
    written(old, 20)
    seen = (old / "checkpoint").read_bytes()
    old.rename(new)
    written(new, 700, 20)
    files_at(new).verify([seen])
    later = (new / "checkpoint").read_bytes()
    written(fake, 1000, 5)
    with pytest.raises(LogError, match="is not the beginning"):
        files_at(fake).verify([seen])
    written(old, 19)
    with pytest.raises(LogError, match="are left"):
        files_at(old).verify([later])


_WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from farhop.accounts import audit
audit.WAKE_S, audit.SEAL_S = 0.002, 0.01
key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
log = audit.AuditLog(Path(sys.argv[1]), "farhop.internal/test", key, time.monotonic, time.time)
log.open()
n = 0
while True:
    for _ in range(40):
        log.put(audit.Decided(1.0, f"d{n}", 7, "acme", "m", "k", "v", "t", "served", 200, None)); n += 1
    print(log.sealed, flush=True)
    time.sleep(0.002)
"""


def test_an_audit_log_killed_at_any_moment_is_valid_and_records_the_break(tmp_path: Path) -> None:
    folder, rng, seen = tmp_path / "log", Random(3), list[bytes]()
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", _WRITER, str(folder)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        # It may begin by signing entries that the process before it had not signed: that is not its own beginning yet.
        sealed = before = int(child.stdout.readline())
        while sealed < before + 200 + rng.randrange(300):
            sealed = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        checkpoint, _ = files_at(folder).verify(seen)
        assert checkpoint.size >= sealed  # the signed entries are there
        seen.append((folder / "checkpoint").read_bytes())
    log = log_at(folder)
    log.open()
    log.close()
    assert log.unclean
    checkpoint, beside = files_at(folder).verify(seen)
    assert beside == []
    starts = [json.loads(one) for one in files_at(folder).entries(checkpoint.size) if b'"start"' in one]
    assert [one["clean"] for one in starts] == [True, False, False, False, False]


def test_an_audit_log_stopped_at_any_write_goes_on_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault at the n-th file that is put in its place, for every n: then a start takes all that was handed over."""
    real, left = audit._replace, [0]

    def replace(path: Path, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, data)

    monkeypatch.setattr(audit, "_replace", replace)
    for n in range(9):
        folder, left[0] = tmp_path / str(n), 10**6
        log = log_at(folder)
        log.open()
        deadline = time.monotonic() + 60.0
        while not log.sealed:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        left[0] = n
        for number in range(300):
            log.put(decided(number))
        log.close()
        left[0] = 10**6
        again = log_at(folder)
        again.open()
        again.close()
        checkpoint, beside = files_at(folder).verify()
        found = {json.loads(one).get("id") for one in files_at(folder).entries(checkpoint.size)}
        assert {f"d{number:06d}" for number in range(300)} <= found, n
        assert beside == []


def test_tiles_whose_checkpoint_could_not_be_written_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = audit._replace, [False]

    def replace(path: Path, data: bytes) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    monkeypatch.setattr(audit, "_replace", replace)
    log, deadline = log_at(tmp_path), time.monotonic() + 60.0
    log.open()
    while not log.sealed:
        time.sleep(0.002)
    full[0] = True
    log.put(decided(1))
    while not (log.trouble and (tmp_path / "tile" / "0" / "000.p" / "2").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    log.put(decided(2))
    full[0] = False
    log.close()
    checkpoint, beside = files_at(tmp_path).verify()
    assert (checkpoint.size, beside) == (4, [])


def test_a_full_disk_is_reported_and_what_it_cost_is_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "WAITING_MAX", 20)
    real, full = os.write, [False]

    def write(fd: int, data: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    log = log_at(tmp_path)
    log.open()
    while not log.sealed:
        time.sleep(0.002)
    monkeypatch.setattr(audit.os, "write", write)
    full[0] = True
    for n in range(50):
        log.put(decided(n))
    deadline = time.monotonic() + 60.0
    while not log.trouble:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert "No space left" in log.trouble
    assert log.lost == 30
    full[0] = False
    while log.trouble:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    log.put(decided(99))
    log.close()
    found = [json.loads(one) for one in files_at(tmp_path).entries(files_at(tmp_path).verify()[0].size)]
    assert [one["entries"] for one in found if one["kind"] == "lost"] == [30]


def test_a_killed_process_is_followed_by_one_that_starts_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it took from the journal stays there until it can be signed, also if it is killed meanwhile."""
    real, full, folder = audit._write, [False], tmp_path / "log"

    def write(*given: Any) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*given)

    monkeypatch.setattr(audit, "_write", write)
    written(folder, 300)
    size, entry = files_at(folder).checkpoint().size, b'{"kind":"decision","at":"","id":"last"}'
    (folder / f"journal.{size}").write_bytes(audit._framed([entry], [tlog.leaf_hash(entry)]))
    full[0] = True
    log = log_at(folder)
    log.open()
    assert "No space left" in log.trouble
    log.put(decided(700))
    deadline = time.monotonic() + 60.0
    while log.size < size + 3:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    shutil.copytree(folder, tmp_path / "killed")
    full[0] = False
    log.close()
    written(tmp_path / "killed", 0)
    for one, starts in ((folder, 2), (tmp_path / "killed", 3)):
        entries = list(files_at(one).entries(files_at(one).verify()[0].size))
        assert entries[size] == entry
        assert sum(b"d000700" in one for one in entries) == 1
        assert kinds(one).count("start") == starts


def test_a_log_that_does_not_hold_is_not_added_to(tmp_path: Path) -> None:
    written(tmp_path, 10)
    bundle = next((tmp_path / "tile" / "entries").rglob("12"))
    bundle.write_bytes(bundle.read_bytes()[:-1] + b"!")
    with pytest.raises(LogError, match="move the log away"):
        log_at(tmp_path).open()


def test_only_one_process_may_write_an_audit_log(tmp_path: Path) -> None:
    log = log_at(tmp_path)
    log.open()
    with pytest.raises(LogError, match="another process"):
        log_at(tmp_path).open()
    log.close()


def test_another_implementations_verifier_proves_it_from_the_files_alone(tmp_path: Path) -> None:
    """tlog-scales reads the folder as any tlog-tiles log, of which it knows the public key and nothing else."""
    from tlog_scales import backend, reader, signing, tiles
    from tlog_scales import tlog as theirs

    written(tmp_path, 300)
    earlier = (tmp_path / "checkpoint").read_bytes().decode()
    written(tmp_path, 400, 300)
    key = signing.Vkey.from_string((tmp_path / "vkey").read_text().strip())

    def read() -> tuple[Any, Any]:
        log = reader.TilesReader(backend.LocalBackend(tmp_path))
        signed = log.get_checkpoint()
        signed.verify(key)
        return log, signed

    log, signed = read()
    assert (signed.origin, signed.size) == (ORIGIN, 704)
    assert log.calculate_root_hash() == signed.root_hash
    found = [n for n in range(signed.size) if b'"id":"d000123"' in log.get_entry(n)]
    assert [json.loads(log.get_entry(n))["epoch"] for n in found] == [7], "it was decided once, under this epoch"
    leaf = tiles.leaf_hash(log.get_entry(found[0]))
    log.get_inclusion_proof(found[0], signed.size).check(leaf, signed.root_hash)
    seen = theirs.Checkpoint.from_text(earlier)
    seen.verify(key)
    log.get_consistency_proof(seen.size, signed.size).check(seen.root_hash, signed.root_hash)
    ours = files_at(tmp_path)
    ((index, entry),) = ours.find("d000650", signed.size)
    path = ours.proof(index, entry, ours.checkpoint())
    theirs.InclusionProof(index, signed.size, path).check(tiles.leaf_hash(entry), signed.root_hash)

    first = tmp_path / "tile" / "entries" / "000"
    data = first.read_bytes()
    first.write_bytes(data.replace(b'"id":"d000123","epoch":7', b'"id":"d000123","epoch":8'))
    assert first.read_bytes() != data
    log, signed = read()
    with pytest.raises(theirs.InclusionProofInvalid):
        changed = tiles.leaf_hash(log.get_entry(found[0]))
        log.get_inclusion_proof(found[0], signed.size).check(changed, signed.root_hash)
