"""`farhop audit`: verifies an audit log, proves a decision, and exports all of it for an auditor.

Reads files and nothing else: no balancer need run, and a copy of the folder is enough.
"""

from __future__ import annotations

import base64
import io
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.accounts import tlog
from farhop.accounts.audit import Files, salted
from farhop.accounts.tlog import LogError
from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

_TRIES, _PAUSE_S = 5, 0.3  # of a log that is being written: what was read may change a moment later


def verify(folder: Path, key: str, seen: list[Path], as_json: bool) -> int:
    """Verify the whole log; the exit code: 1 if it does not verify."""
    files, known = _opened(folder, key)
    try:
        earlier = [path.read_bytes() for path in seen]
    except OSError as error:
        fail(f"--seen: {error.filename} cannot be read: {error.strerror}; give a file that `checkpoint` was copied to")
    try:
        checkpoint, beside = _read_stable(files, lambda: files.verify(earlier))
    except LogError as error:
        return _broken(files, str(error), as_json)
    ends, starts, lost, lost_since = 0, 0, 0, 0  # `lost_since` the last start: each process counts from 0
    for entry in files.entries(checkpoint.size):
        if b'"kind":"start"' in entry:
            starts += 1
            ends += b'"clean":false' in entry
            lost, lost_since = lost + lost_since, 0
        elif b'"kind":"lost"' in entry:
            lost_since = max(lost_since, int(msgspec.json.decode(entry).get("entries", 0)))
    lost += lost_since
    if as_json:
        show.json({"holds": True, "origin": checkpoint.origin, "entries": checkpoint.size,
                   "root": base64.b64encode(checkpoint.root).decode(), "key_known": known, "unclean_ends": ends,
                   "lost": lost, "beside": beside})  # fmt: skip
        return 0
    show.line(f"{checkpoint.origin}: holds, {checkpoint.size} entries, {len(earlier)} earlier checkpoints within it")
    show.line(f"starts {starts}, of which after a kill {ends}; decisions that could not be kept, as it says: {lost}")
    for line in beside:
        show.line(line)
    if not known:
        show.line("checked with the key in the log's own folder; give --key to check with a key that you trust")
    return 0


def prove(decision: str, folder: Path, key: str, names: list[str], as_json: bool) -> int:
    """Print the log's records of a decision, with proof; the exit code: 1 if there are none, or they do not verify."""
    files, _ = _opened(folder, key)

    def found() -> tuple[tlog.Checkpoint, bytes, list[dict[str, Any]]]:
        note = (folder / "checkpoint").read_bytes()  # once: the proofs are of this one, and the log may be growing
        checkpoint, proofs = files.opened(note), []
        files.verify([note])  # all of it: that nothing is found says nothing if entries were changed
        for index, entry in files.find(decision, checkpoint.size):
            path = files.proof(index, entry, checkpoint)
            proofs.append({
                "index": index,
                "entry": msgspec.json.decode(entry),
                "entry_base64": base64.b64encode(entry).decode(),
                "leaf_hash": base64.b64encode(tlog.leaf_hash(entry)).decode(),
                "inclusion_proof": [base64.b64encode(one).decode() for one in path],
            })  # fmt: skip
        return checkpoint, note, proofs

    try:
        checkpoint, note, proofs = _read_stable(files, found)
    except LogError as error:
        return _broken(files, str(error), as_json)
    if as_json:
        show.json({"origin": checkpoint.origin, "size": checkpoint.size, "checkpoint": note.decode(), "found": proofs})
        return 0 if proofs else NEGATIVE
    if not proofs:
        show.line(f"{checkpoint.origin}: nothing on {decision} among the {checkpoint.size} entries that are signed")
        return NEGATIVE
    hashed = _hashed(folder, names)
    for one in proofs:
        recorded = one["entry"]
        show.line(f"entry {one['index']} of {checkpoint.size} in {checkpoint.origin}, proven by "
                  f"{len(one['inclusion_proof'])} hashes:")  # fmt: skip
        for field, value in recorded.items():
            known = f" ({hashed[value]})" if isinstance(value, str) and value in hashed else ""
            text = ", ".join(map(str, value)) if isinstance(value, list) else show.cell(value)
            show.line(f"  {field}: {text}{known}")
    return 0


def export(folder: Path, out: Path, key: str) -> int:
    """Write what an auditor needs into one verified file; the exit code."""
    files, _ = _opened(folder, key)
    try:
        checkpoint, _ = _read_stable(files, files.verify)
        names = ["checkpoint", "vkey", *(tlog.tile_path(*at) for at in tlog.tiles_of(checkpoint.size))]
        names += [
            tlog.bundle_path(n, min(tlog.WIDTH, checkpoint.size - n * tlog.WIDTH))
            for n in range(-(-checkpoint.size // tlog.WIDTH))
        ]
        data = {name: (folder / name).read_bytes() for name in names if name != "checkpoint"}
        note = (folder / "checkpoint").read_bytes()
        if files.opened(note) != checkpoint:
            fail(f"{folder}: the log grew meanwhile; ask again, or export a copy of the folder")
    except (LogError, FileNotFoundError) as error:
        fail(f"{folder}: {error}", NEGATIVE)
    try:
        with out.open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as packed:
            for name, content in sorted({**data, "checkpoint": note}.items()):
                about = tarfile.TarInfo(name)
                about.size, about.mode = len(content), 0o600
                packed.addfile(about, io.BytesIO(content))
    except FileExistsError:
        fail(f"--out: {out} is there already, and is not written over; give another name")
    except OSError as error:
        fail(f"--out: {out}: {error.strerror}; give a place that can be written to")
    show.line(f"{out}: {checkpoint.size} entries of {checkpoint.origin}, without the salt; unpack it and verify it")
    return 0


def _opened(folder: Path, key: str) -> tuple[Files, bool]:
    """The log, and whether its key came from outside its own folder."""
    if not (folder / "checkpoint").is_file():
        fail(f"{folder}: there is no checkpoint; give the folder of one log: audit.dir/REGION/INSTANCE")
    try:
        given = Path(key).read_text() if key and Path(key).is_file() else key
        origin, public = tlog.read_verifier_key(given or (folder / "vkey").read_text())
    except OSError as error:
        fail(f"--key: is not given, and {folder / 'vkey'} cannot be read: {error.strerror}; give it")
    except (LogError, UnicodeDecodeError) as error:
        fail(f"--key: {error}")
    return Files(folder, origin, public), bool(key)


def _read_stable(files: Files, read: Callable[[], T]) -> T:
    """Read a log that may be growing: again, if its checkpoint has changed meanwhile."""
    for left in reversed(range(_TRIES)):
        before = (files.folder / "checkpoint").read_bytes()
        try:
            return read()
        except (LogError, FileNotFoundError) as error:
            if not left or (files.folder / "checkpoint").read_bytes() == before:
                raise LogError(str(error)) from None
            time.sleep(_PAUSE_S)
    raise AssertionError


def _broken(files: Files, why: str, as_json: bool) -> int:
    if as_json:
        show.json({"holds": False, "origin": files.origin, "why": why})
    else:
        show.line(f"{files.origin}: DOES NOT HOLD: {why}")
    return NEGATIVE


def _hashed(folder: Path, names: list[str]) -> dict[str, str]:
    """Hashes of names in the log, if its salt is available."""
    if not names:
        return {}
    try:
        salt = (folder / "salt").read_bytes()
    except OSError as error:
        fail(f"--name: needs the log's salt, and {folder / 'salt'} cannot be read: {error.strerror}; ask its operator")
    return {salted(salt, name): name for name in names}
