"""Configuration of a process: YAML into a checked model, every error at once with its path, secrets from elsewhere.

A secret stands in a file as `env:NAME` or `file:PATH`, never as itself. Never reads anything but what it is given.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError


class ConfigError(Exception):
    """A configuration that cannot be used. `problems` are lines `path: what is wrong`."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))
        self.problems = problems


def _resolve(value: object) -> object:
    if not isinstance(value, str):
        return value
    how, _, where = value.partition(":")
    if how == "env":
        found = os.environ.get(where)
        if not found:
            raise ValueError(f"environment variable {where} is not set; set it, or name another")
        return found
    if how == "file":
        try:
            return Path(where).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the secret in {where}: {error}") from None
    raise ValueError("a secret is given as env:NAME or file:PATH, never in the clear")


Secret = Annotated[SecretStr, BeforeValidator(_resolve)]


class Part(BaseModel):
    """A part of a configuration: unknown fields are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Listen(Part):
    """Where to listen. Port 0 lets the system choose."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)]


class Hop(Part):
    """Keys of the hop token between the tiers, by key id. `active` signs; all verify, so that keys can rotate."""

    keys: Annotated[dict[str, Secret], Field(min_length=1)]
    active: str

    def secrets(self) -> dict[str, bytes]:
        """Key bytes by key id."""
        return {kid: key.get_secret_value().encode() for kid, key in self.keys.items()}


class Etcd(Part):
    """How to reach the etcd cluster of the region's hub; without endpoints those of the topology's hub are used."""

    endpoints: list[str] = []
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    username: str | None = None
    password: Secret | None = None


class Limits(Part):
    """Bounds of the data plane. Bytes and seconds."""

    buffered_bytes_max: int = 512 * 1024 * 1024
    body_bytes_max: int = 16 * 1024 * 1024
    head_bytes_max: int = 32 * 1024
    connections_max: int = 20_000
    request_s: float = 600.0
    connect_s: float = 3.0
    first_byte_s: float = 120.0
    between_bytes_s: float = 60.0
    drain_s: float = 30.0


class Process(Part):
    """What both tiers need. `instance` names this process, uniquely in its region."""

    region: str
    instance: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    topology: str = "three-regions"
    admin: Listen
    etcd: Etcd = Etcd()
    hop: Hop
    limits: Limits = Limits()
    log_level: str = "info"


_P = TypeVar("_P", bound=BaseModel)


def load(kind: type[_P], path: Path) -> _P:
    """Read and check a configuration file. Raises ConfigError with every problem."""
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {error}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [f"is not YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(document, dict):
        raise ConfigError(str(path), ["must be a mapping of fields; see docs/configuration.md"])
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise ConfigError(str(path), [_line(e["loc"], e["msg"]) for e in error.errors()]) from None


def _line(where: tuple[int | str, ...], message: str) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where).lstrip(".")
    return f"{path or 'document'}: {message.removeprefix('Value error, ')}"
