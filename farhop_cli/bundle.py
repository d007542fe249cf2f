"""`farhop bundle`: what a bug report needs of a fleet, in one file, without secrets.

Balancers report their configurations without secrets; here everything is checked once more: values of secret fields are
withheld, and so is every secret that this command itself was given, wherever it occurs. Never asks for prompts: nothing
keeps them. Never overwrites a file.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import platform
import re
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from farhop.config import ConfigError, parsed
from farhop_cli import admin, fleet, show, summary
from farhop_cli.access import AdminError
from farhop_cli.exits import PARTIAL, fail, first_of, warn
from farhop_cli.fleet import StatusReply
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from farhop_cli.fleet import Balancer, Fleet
    from farhop_cli.options import FleetOptions

WITHHELD = "(withheld)"
SECRET_CHARS_MIN = 4  # a shorter one could be any word
ADDED_BYTES_MAX = 4 * 1024 * 1024
FOLDER_CHARS_MAX = 200
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
# No text is shown under a field of such a name, at any depth, except names of files and variables.
_SENSITIVE = re.compile(
    r"(?i)(secret|token|passw|private|credential|authori[sz]ation|cookie|sha256|digest|bearer|salt"
    r"|^hop$|(^|_)keys?$|api_?key)"
)
_REFERENCE = re.compile(r"(env|file):[^\n]{1,4096}")
_PATH = re.compile(r".*_file|tokenizers?")  # paths
_COUNT = re.compile(r"(?i).*(tokens|bytes_per_token|ms_per_token)(_.*)?")  # numbers of tokens are no secrets
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def run(out: str, added: list[str], decisions: int, fleet_options: FleetOptions) -> int:
    """Write the bundle; the exit code."""
    path = Path(out or time.strftime("farhop-bundle-%Y%m%d-%H%M%S.tar.gz", time.gmtime()))
    if path.exists():
        fail(f"--out: {path} is there already, and is not written over; give another name")
    here = fleet_options.fleet()
    configurations = {f"added/{n}-{Path(name).name}.yaml": _added(name) for n, name in enumerate(added, 1)}
    seen, files = asyncio.run(_collected(here, decisions))
    fleet.unreachable(here, seen)
    files |= configurations
    files["about.json"] = _json(_about(here, seen))
    files["summary.txt"] = "\n".join(text for text, _ in summary.lines(_summary(here, seen))).encode() + b"\n"
    _write(path, {name: scrubbed(text, _known(here)) for name, text in files.items()})
    partial = fleet.partial(here, seen)
    if fleet_options.as_json:
        show.json(
            {"bundle": str(path), "files": sorted(files), "unreachable": [one.error for one in seen if one.error]}
        )
    else:
        show.line(f"{path}: {len(files)} files of {sum(one.status is not None for one in seen)} balancers", "bold")
        show.line("It names hosts, regions, tenants and models. Look through it before you send it.")
    if partial:
        warn(partial)
        return PARTIAL
    return 0


# -- collecting


async def _collected(here: Fleet, decisions: int) -> tuple[list[StatusReply], dict[str, bytes]]:
    files: dict[str, bytes] = {}
    async with admin.AdminClient(here.access) as http:

        async def one(balancer: Balancer) -> StatusReply:
            seen = await fleet.look(http, balancer)
            of = seen.balancer
            if seen.status is None:
                return seen
            folder = _folder(of, {name.partition("/")[0] for name in files})
            files[f"{folder}/status.json"] = _json(withheld(seen.status))
            for name in ("config", "law"):
                files[f"{folder}/{name}.json"] = _json(withheld(await _or_why(http, of, f"/{name}")))
            if decisions:
                decided = await _or_why(http, of, f"/decisions?most={decisions}")
                files[f"{folder}/decisions.json"] = _json(withheld(decided))
            try:
                files[f"{folder}/metrics.txt"] = (await admin.page(http, of.url, "/metrics")).encode()
            except AdminError as error:
                files[f"{folder}/metrics.txt"] = f"# {error}\n".encode()
            return seen

        return list(await asyncio.gather(*map(one, here.balancers))), files


def _folder(of: Balancer, taken: Collection[str]) -> str:
    """The folder of its files. A balancer's name may be wrong: it is checked for path characters, and must be
    unique.
    """
    said = "-".join(filter(None, (of.tier, of.region, of.instance)))
    name = _NO_NAME.sub("_", said)[:FOLDER_CHARS_MAX].lstrip(".") or "balancer"
    others = (f"{name}-{n}" for n in itertools.count(2))
    return next(one for one in itertools.chain((name,), others) if one not in taken)


async def _or_why(http: admin.AdminClient, of: Balancer, path: str) -> dict[str, Any]:
    try:
        document = await admin.get(http, of.url, path)
    except AdminError as error:
        return {"error": str(error)}
    return document if document is not None else {"error": f"an older build: it has no {path}"}


def _about(here: Fleet, seen: list[StatusReply]) -> dict[str, Any]:
    balancers = [
        {
            "tier": one.balancer.tier,
            "region": one.balancer.region,
            "instance": one.balancer.instance,
            "url": one.balancer.url,
            "version": (one.status or {}).get("version"),
            "error": one.error,
        }
        for one in seen
    ]
    return {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fleet": here.name,
        "etcd": {name: list(settings.endpoints) for name, settings in here.hubs.items()},
        "trouble": list(here.trouble),
        "balancers": balancers,
        "farhop": _version("farhop"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in ("aetcd", "aiohttp", "grpcio", "protobuf", "uvloop")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class _Named(msgspec.Struct, frozen=True):
    """For the summary."""

    region: str
    name: str
    status: dict[str, Any] | None


def _summary(here: Fleet, seen: list[StatusReply]) -> summary.Summary:
    reached = [(one.balancer.tier, _Named(one.balancer.region, str(one.balancer), one.status)) for one in seen]
    upper, lower = ([one for tier, one in reached if (tier == "regional") is below] for below in (False, True))
    unreached = [*here.trouble, *(one.error for one in seen if one.status is None)]
    return summary.of(here.name, upper, lower, unreached)


def _added(name: str) -> bytes:
    """A configuration file as parsed: comments, which may contain anything, are left out."""
    try:
        with Path(name).open("rb") as file:
            text = file.read(ADDED_BYTES_MAX + 1)
        if len(text) > ADDED_BYTES_MAX:
            fail(f"--add: {quoted(name)}: larger than {ADDED_BYTES_MAX} bytes")
        document = parsed(text, name)
    except OSError as error:
        fail(f"--add: {quoted(name)}: {(error.strerror or 'cannot be read').lower()}")
    except ConfigError as error:
        fail(f"--add: {first_of(error)}")
    if not isinstance(document, dict):
        fail(f"--add: {quoted(name)}: must be a balancer's configuration, a mapping of fields")
    return yaml.safe_dump(withheld(document), sort_keys=False, allow_unicode=True).encode()


# -- withholding


def withheld(document: Any, sensitive: bool = False) -> Any:
    """A document without the values of secret fields. A reference to one (env:, file:) stays."""
    if isinstance(document, dict):
        return {name: _field(str(name), value, sensitive) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [withheld(one, sensitive) for one in document]
    if not isinstance(document, str):
        return WITHHELD if sensitive and document is not None and not isinstance(document, bool) else document
    if sensitive and not _REFERENCE.fullmatch(document):
        return WITHHELD
    return _LOGIN.sub(f"{WITHHELD}@", document)


def _field(name: str, value: Any, sensitive: bool) -> Any:
    if not sensitive and isinstance(value, int | float) and _COUNT.fullmatch(name):
        return value
    return withheld(value, sensitive or (_SENSITIVE.search(name) is not None and _PATH.fullmatch(name) is None))


def scrubbed(text: bytes, secrets: Iterable[bytes]) -> bytes:
    """The text without these secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SECRET_CHARS_MIN:
            text = text.replace(secret, WITHHELD.encode())
    return text


def _known(here: Fleet) -> set[bytes]:
    """The secrets that this command was given, so that it can check that none occurs."""
    given = {here.access.token, os.environ.get(fleet.TOKEN, "").strip()}
    given |= {settings.password or "" for settings in here.hubs.values()}
    return {one.encode() for one in given if one}


def _json(document: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def _write(path: Path, files: Mapping[str, bytes]) -> None:
    folder = path.name.partition(".")[0]
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:  # noqa: SIM117
            with tarfile.open(fileobj=out, mode="w:gz") as archive:
                for name in sorted(files):
                    entry = tarfile.TarInfo(f"{folder}/{name}")
                    entry.size, entry.mtime, entry.mode = len(files[name]), int(time.time()), 0o600
                    archive.addfile(entry, io.BytesIO(files[name]))
    except OSError as error:
        fail(f"--out: {path}: {(error.strerror or 'cannot be written').lower()}")
    sys.stdout.flush()
