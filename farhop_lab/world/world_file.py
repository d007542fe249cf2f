"""The file that describes a running world, so that the `farhop` commands find its balancers: `.farhop/world.json`.

Written by the process that runs the world, read by the commands. Never trusted unread: a file that is malformed, or
whose process is gone, is an error that names the remedy. It holds API keys, so only its owner may read it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

WORLD_FILE = Path(".farhop/world.json")
ENVIRONMENT = "FARHOP_WORLD"  # names another path
FILE_BYTES_MAX = 4 * 1024 * 1024

Url = Annotated[str, Meta(pattern=r"^https?://[^/\s]+/?$")]
EngineUrl = Annotated[str, Meta(pattern=r"^https?://[^/\s]+")]


class RegionFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One region's base URLs."""

    entry: Url
    global_admin: Url
    regional_admin: Url
    engines: list[EngineUrl] = []


class WorldFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A running world. `pid` is the process that runs it; `keys` holds API keys by tenant; `collector` "" is none.

    `hubs` gives the endpoint of each etcd by its hub's name, if there are several; `etcd` is the first of them.
    `emulated`: all of its engines are. `control` is where the process that runs it takes faults, which need the token;
    "" if it takes none.
    """

    pid: Annotated[int, Meta(gt=0)]
    speedup: Annotated[float, Meta(gt=0)]
    topology: str
    etcd: str
    collector: str
    model: str
    keys: dict[str, str]
    regions: Annotated[dict[str, RegionFile], Meta(min_length=1)]
    hubs: dict[str, str] = {}
    emulated: bool = False
    control: str = ""
    control_token: str = ""


class WorldFileError(Exception):
    """There is no running world; the text, one line, says why and what to do."""


def read(path: Path) -> WorldFile:
    """The running world. WorldFileError: no file, not a world, or its process is gone."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise WorldFileError(f"no world runs here ({path} is missing); start one with `farhop up`") from None
    except OSError as error:
        raise WorldFileError(f"{path}: {error.strerror or 'cannot be read'}; start a world with `farhop up`") from None
    if len(text) > FILE_BYTES_MAX:
        raise WorldFileError(f"{path}: larger than {FILE_BYTES_MAX} bytes; start a world again with `farhop up`")
    try:
        world = msgspec.json.decode(text, type=WorldFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorldFileError(f"{path}: {error}; start a world again with `farhop up`") from None
    if not runs(world.pid):
        raise WorldFileError(f"the world in {path} no longer runs (process {world.pid} is gone); run `farhop up`")
    return world


def write(path: Path, world: WorldFile) -> None:
    """Describe a world at `path`: whole or not at all, readable by its owner alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(world), indent=2) + b"\n")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def runs(pid: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        # Another user's process; a reused id does not matter: its balancers will not answer.
        return True
    return True
