"""The interface of a source of replicas, and how its endpoints become replicas' configurations.

Invariants: a source reports complete sets; if it cannot ask, it reports Failed, never an empty set; an invalid endpoint
is named and left out, and the others stay. `follow` never ends by itself and never raises because of the outside world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
from pydantic import ValidationError

from farhop.config import problems_of
from regional_lb.engines.config import ReplicaConfig

if TYPE_CHECKING:
    from regional_lb.engines.config import Template

PROBLEM_CHARS_MAX = 500


class Found(msgspec.Struct, frozen=True):
    """All replicas that a source knows now, in a stable order. `problems`: lines about replicas that it left out."""

    source: str
    replicas: tuple[ReplicaConfig, ...]
    problems: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True):
    """The source cannot be asked; its last set stays in force."""

    source: str
    why: str


OnUpdate: TypeAlias = Callable[[Found | Failed], None]


class Source(Protocol):
    """A source of replicas."""

    @property
    def label(self) -> str:
        """The source's name in the log and in /status."""
        ...

    async def follow(self, on_update: OnUpdate) -> None:
        """Report what there is, and again whenever that changes, until cancelled."""
        ...


class EndpointError(ValueError):
    """An endpoint of which no replica can be made. The text has a line for each thing wrong."""


def replica_of(template: Template, described: Any, source: str, **more: Any) -> ReplicaConfig:
    """The replica that `described` describes, read like `replicas` of a configuration; the rest is the template's.

    `more` are fields that its source alone may say. Raises EndpointError; each line of its text begins with `source`.
    """
    if not isinstance(described, dict):
        raise EndpointError(f"{source}: must be a mapping with the fields of a replica, such as `url`")
    for field in more.keys() & described.keys():
        raise EndpointError(f"{source}.{field}: follows from the source; leave it out")
    taken = template.model_dump(exclude={"scheme"})
    try:
        return ReplicaConfig.model_validate({**taken, **described, **more})
    except ValidationError as error:
        raise EndpointError("\n".join(problems_of(error, f"{source}."))) from None


def at(template: Template, host: str, port: int, name: str, source: str, **more: Any) -> ReplicaConfig:
    """The replica at a host and port. Raises EndpointError."""
    shown = f"[{host}]" if ":" in host else host
    return replica_of(template, {"url": f"{template.scheme}://{shown}:{port}", "name": name, **more}, source)
