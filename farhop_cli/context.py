"""Contexts: the fleets that commands can address, by name, like kubectl's: `~/.config/farhop/contexts.yaml`.

A context says where a fleet's etcd is and how to connect to its balancers' admin ports; the balancers themselves are
found in etcd. `context_document` defines its fields. Invariants: the file is replaced whole, is readable by its owner
alone, and holds no secrets but references to them (`env:NAME`, `file:PATH`); an error in one context does not affect
another. Never opens a connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farhop.loose_json import as_dict
from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail, first_of, warn
from farhop_lab.world import world_file
from farhop_lab.world.world_file import WorldFileError
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farhop_cli.context_document import Context

ENVIRONMENT = "FARHOP_CONTEXT"
FILE_BYTES_MAX = 4 * 1024 * 1024
UP = "up"  # the name of `farhop up`'s own context
_SECRETS = ("token", "password")


@dataclass
class File:
    """The file: contexts by name, unchecked."""

    path: Path
    current: str = ""
    contexts: dict[str, Any] = field(default_factory=dict)

    def checked(self, name: str) -> Context:
        """The context of this name. Ends the command if there is none, or it cannot be used."""
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none"
            fail(f"no context {quoted(name)} in {self.path}; there is {known}; make one with `farhop context set`")
        from pydantic import ValidationError

        from farhop.config import problems_of
        from farhop_cli.context_document import Context

        try:
            return Context.model_validate(_placed(self.contexts[name], self.path.parent))
        except ValidationError as error:
            fail(f"context {quoted(name)} in {self.path}: {'; '.join(problems_of(error, kind=Context))}")


def path() -> Path:
    """Where contexts are kept: under XDG_CONFIG_HOME if that is an absolute path, otherwise under ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".config"
    return base / "farhop" / "contexts.yaml"


def read() -> File:
    """The file; without one, no contexts. Ends the command if it cannot be read."""
    file_path = path()
    try:
        with file_path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return File(file_path)
    except OSError as error:
        fail(f"{file_path}: {(error.strerror or 'cannot be read').lower()}")
    if len(text) > FILE_BYTES_MAX:
        fail(f"{file_path}: larger than {FILE_BYTES_MAX} bytes; is it the file of contexts?")
    from farhop.config import ConfigError, parsed  # not needed by most commands: there is no such file

    try:
        document = parsed(text, str(file_path)) or {}
    except ConfigError as error:
        fail(first_of(error))
    if not isinstance(document, dict) or not set(document) <= {"current", "contexts"}:
        fail(f"{file_path}: must hold `current` and `contexts`, and nothing else; `farhop context set` writes it")
    current, contexts = document.get("current") or "", document.get("contexts") or {}
    if not isinstance(current, str):
        fail(f"{file_path}: current: must be a context's name")
    if not isinstance(contexts, dict) or not all(isinstance(one, str) for one in contexts):
        fail(f"{file_path}: contexts: must be a mapping of names; `farhop context set` writes it")
    return File(file_path, current, contexts)


@contextlib.contextmanager
def changing(*, dry_run: bool = False) -> Iterator[File]:
    """The file, locked for a change, and written if nothing went wrong. In a dry run nothing is written, not even the
    folder.
    """
    if dry_run:
        yield read()
        return
    file_path = path()
    try:
        file_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(file_path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        fail(f"{file_path}: {(error.strerror or 'cannot be written').lower()}")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = read()
        yield file
        _write(file)
    finally:
        os.close(lock)


def _write(file: File) -> None:
    import yaml

    document = {"current": file.current, "contexts": file.contexts}
    try:
        handle, temporary = tempfile.mkstemp(dir=file.path.parent, prefix=".contexts")  # mode 0600
        try:
            with os.fdopen(handle, "w") as out:
                out.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
            os.replace(temporary, file.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        fail(f"{file.path}: {(error.strerror or 'cannot be written').lower()}")


def _placed(document: Any, folder: Path) -> Any:
    """A context with its paths relative to the file's own folder."""
    if isinstance(document, list):
        return [_placed(one, folder) for one in document]
    if not isinstance(document, dict):
        return document
    return {name: _path_in(name, value, folder) for name, value in document.items()}


def _path_in(name: Any, value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or not isinstance(name, str):
        return _placed(value, folder)
    if value.startswith("file:"):
        return f"file:{folder / Path(value.removeprefix('file:')).expanduser()}"
    if name.endswith("_file") or name == "world" or (name == "topology" and value.endswith((".yaml", ".yml"))):
        return str(folder / Path(value).expanduser())
    return value


# -- the commands


def show_all(as_json: bool) -> int:
    """List the contexts; the exit code."""
    file = read()
    rows = [
        {"name": name, "current": name == file.current, **_summary(file.contexts[name])}
        for name in sorted(file.contexts)
    ]
    if as_json:
        show.json({"file": str(file.path), "current": file.current or None, "contexts": rows})
    elif rows:
        columns = ("", "context", "etcd", "admin ports", "topology")
        fields = ("name", "etcd", "admin", "topology")
        shown = [["*" if row["current"] else "", *(show.cell(row[field]) for field in fields)] for row in rows]
        show.table(f"contexts in {file.path}", columns, shown)
    else:
        show.line(f"no contexts in {file.path}; `farhop up` makes one, and so does `farhop context set`")
    if file.current and file.current not in file.contexts:
        warn(f"the current context, {quoted(file.current)}, is not there; choose one with `farhop context use`")
    return 0


def _summary(document: Any) -> dict[str, str]:
    """What distinguishes a context, readable or not, from others."""
    fields = _part(document)
    if fields.get("world"):
        return {"etcd": f"the world in {fields['world']}", "admin": "", "topology": ""}
    listed = [_part(fields.get("etcd")), *map(_part, _part(fields.get("hubs")).values())]
    endpoints = [str(endpoint) for one in listed for endpoint in one.get("endpoints") or ()]
    urls = [str(url) for url in _part(fields.get("admin")).get("urls") or ()]
    return {"etcd": ", ".join(endpoints), "admin": ", ".join(urls), "topology": str(fields.get("topology") or "")}


def _part(document: Any) -> dict[str, Any]:
    return as_dict(document)


def show_one(name: str, as_json: bool) -> int:
    """Print a context, or the current one; the exit code."""
    import yaml

    file = read()
    name = name or file.current
    if not name:
        fail("no context is current; choose one with `farhop context use`, or name one", NEGATIVE)
    if name not in file.contexts:
        file.checked(name)
    document = {"name": name, "current": name == file.current, **without_secrets(file.contexts[name])}
    if as_json:
        show.json(document)
    else:
        show.line(yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip())
    return 0


def without_secrets(document: Any) -> Any:
    """A context; a secret in the clear is not printed."""
    if not isinstance(document, dict):
        return {"unreadable": True} if not isinstance(document, list) else document
    return {
        name: "(withheld)"
        if name in _SECRETS and not str(value).startswith(("env:", "file:"))
        else (without_secrets(value) if isinstance(value, dict) else value)
        for name, value in document.items()
    }


def use(name: str, *, dry_run: bool = False) -> int:
    """Make a context the current one; the exit code."""
    with changing(dry_run=dry_run) as file:
        file.checked(name)
        file.current = name
    show.line(f"{_dry(dry_run)}{name} is the current context")
    return 0


def unset(name: str, *, dry_run: bool = False) -> int:
    """Remove a context; the exit code: 1 if there is none."""
    with changing(dry_run=dry_run) as file:
        if name not in file.contexts:
            known = ", ".join(sorted(file.contexts)) or "none"
            fail(f"no context {quoted(name)}; there is {known}; nothing was changed", NEGATIVE)
        del file.contexts[name]
        was = file.current == name
        file.current = "" if was else file.current
    show.line(f"{_dry(dry_run)}{name} is no context any more" + ("; no context is current now" if was else ""))
    return 0


def put(name: str, changed: dict[str, Any], make_current: bool, *, dry_run: bool = False) -> int:
    """Change some fields of a context, and keep the others; the exit code. The first one becomes the current one."""
    with changing(dry_run=dry_run) as file:
        document = file.contexts.get(name)
        file.contexts[name] = _merged(as_dict(document), changed)
        _named(name)
        file.checked(name)
        if make_current or not file.current:
            file.current = name
        current = file.current
    what = "is the current context" if current == name else f"stands; the current context is {current}"
    show.line(f"{_dry(dry_run)}{name} {what}")
    return 0


def _dry(dry_run: bool) -> str:
    return show.DRY if dry_run else ""


def _named(name: str) -> None:
    if not 0 < len(name) <= 128 or not name[0].isalnum() or not all(c.isalnum() or c in "._-" for c in name):
        fail(f"NAME: {quoted(name)} cannot be a context's name; use letters, digits, '.', '_', '-'")


def _merged(document: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    made = dict(document)
    for part, value in changed.items():
        old = made.get(part)
        made[part] = _merged(as_dict(old), value) if isinstance(value, dict) else value
    return made


# -- `farhop up`


def world_began(world: Path) -> tuple[str, str]:
    """A world has started: it gets a context of its own, which becomes current if none is. Returns its name, and the
    current one's.
    """
    with changing() as file:
        for name in [name for name, document in file.contexts.items() if _is_gone(document)]:
            _forget(file, name)
        taken = (name for name in (UP, *(f"{UP}-{n}" for n in range(2, 1000))) if name not in file.contexts)
        name = next(taken)
        file.contexts[name] = {"world": str(world.absolute())}
        file.current = file.current or name
        return name, file.current


def world_ended(name: str, world: Path) -> None:
    """A world has ended: its context is removed, if it is still its own."""
    with changing() as file:
        document = file.contexts.get(name)
        if isinstance(document, dict) and document.get("world") == str(world.absolute()):
            _forget(file, name)


def _forget(file: File, name: str) -> None:
    del file.contexts[name]
    if file.current == name:
        file.current = ""


def _is_gone(document: Any) -> bool:
    """Whether it belongs to a world that ended without removing it."""
    if not isinstance(document, dict) or set(document) != {"world"}:
        return False
    try:
        world_file.read(Path(str(document["world"])))
    except WorldFileError:
        return True
    return False


# -- what was typed


def given(
    *,
    etcd: list[str] | None,
    hub: str,
    etcd_files: tuple[Path | None, ...],
    etcd_login: tuple[str | None, str | None],
    admin: list[str] | None,
    files: tuple[Path | None, ...],
    token: str | None,
    server_name: str | None,
    topology: str | None,
    public: list[str],
    insecure: bool,
    file: Path | None = None,
) -> dict[str, Any]:
    """The parts of a context given as options; paths relative to the working folder. Options not given are left out.
    `file` has parts as in contexts.yaml, with paths relative to it.

    Ends the command for a secret in the clear, which would stay in the shell's history and in the file.
    """
    for option, secret in (("--token", token), ("--etcd-password", etcd_login[1])):
        if secret is not None and not secret.startswith(("env:", "file:")):
            fail(f"{option}: a secret is given as env:NAME or file:PATH, never in the clear")
    store = _only(
        endpoints=[one for text in etcd for one in text.split(",")] if etcd else None,
        **dict(zip(("ca_file", "cert_file", "key_file"), map(_absolute, etcd_files), strict=True)),
        username=etcd_login[0],
        password=_secret_place(etcd_login[1]),
        insecure=insecure or None,
    )
    ports = _only(
        urls=admin or None,
        **dict(zip(("ca_file", "cert_file", "key_file"), map(_absolute, files), strict=True)),
        token=_secret_place(token),
        server_name=server_name,
    )
    document: dict[str, Any] = {} if file is None else _shipped(file)
    if store:
        document = _merged(document, {"hubs": {hub: store}} if hub else {"etcd": store})
    if ports:
        document = _merged(document, {"admin": ports})
    if topology is not None:
        document["topology"] = str(Path(topology).absolute()) if topology.endswith((".yaml", ".yml")) else topology
    if public:
        document["signing"] = {"keys": dict(map(_public, public))}
    if not document:
        fail("name a setting: --etcd HOST:PORT, --admin URL, or --file FILE; see farhop context set --help")
    return document


def _shipped(file: Path) -> dict[str, Any]:
    """A context in a file, such as a deployment ships."""
    from pydantic import ValidationError

    from farhop.config import ConfigError, parsed, problems_of
    from farhop_cli.context_document import Context

    try:
        with file.open("rb") as opened:
            document = parsed(opened.read(FILE_BYTES_MAX), str(file))
        Context.model_validate(document)
    except OSError as error:
        fail(f"{file}: {(error.strerror or 'cannot be read').lower()}")
    except ConfigError as error:
        fail(first_of(error))
    except ValidationError as error:
        fail(f"{file}: {'; '.join(problems_of(error, kind=Context))}")
    return dict(_placed(document, file.absolute().parent))


def _only(**parts: Any) -> dict[str, Any]:
    return {name: value for name, value in parts.items() if value is not None}


def _absolute(file: Path | None) -> str | None:
    return None if file is None else str(file.expanduser().absolute())


def _secret_place(secret: str | None) -> str | None:
    if secret is None or not secret.startswith("file:"):
        return secret
    return f"file:{_absolute(Path(secret.removeprefix('file:')))}"


def _public(text: str) -> tuple[str, dict[str, str]]:
    name, _, file = text.rpartition("=")
    return name or Path(file).stem, {"public": f"file:{_absolute(Path(file))}"}
