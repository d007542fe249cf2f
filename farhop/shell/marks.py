"""What a request's head says about the version it is for: the marks that rules look for, and a version asked for.

Only what somebody asks for is looked at, and of the rest nothing is kept: a mark's text is the operator's, never the
client's. Never refuses a request: what cannot be read is no mark.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from farhop.shell.session import cookie, values

if TYPE_CHECKING:
    from farhop.balance.machine import Mark

VERSION_HEADER = b"x-farhop-version"
_VERSION = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Wanted(Protocol):
    """Whoever decides by marks."""

    def marks(self, model: str) -> tuple[Mark, ...]:
        """What is to be looked for in the head of a request for this model."""

    def may_pin(self, model: str) -> bool:
        """Whether a request for this model may ask for a version."""


class AnyVersion:
    """Whoever does not decide by marks, and passes on what is asked for."""

    def marks(self, _model: str) -> tuple[Mark, ...]:
        """See Wanted."""
        return ()

    def may_pin(self, _model: str) -> bool:
        """See Wanted."""
        return True


class MarkReader:
    """Reads heads for `wanted`."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def marks(self, model: str, headers: bytes) -> tuple[Mark, ...]:
        """The wanted marks that the request bears. `headers` are lines `name: value` with names in lower case."""
        wanted = self._wanted.marks(model)
        return tuple(mark for mark in wanted if _bears(mark, headers)) if wanted else ()

    def version(self, model: str, asked: bytes | None) -> str:
        """The version asked for by `x-farhop-version`; "" without one, or where none may be asked for."""
        if asked is None or not self._wanted.may_pin(model):
            return ""
        return asked.decode("ascii") if _VERSION.fullmatch(asked) else ""


def _bears(mark: Mark, headers: bytes) -> bool:
    name, value = mark.name.encode(), mark.value.encode()
    if mark.kind == "header":
        return value in values(headers, name + b": ")
    return cookie(headers, name + b"=") == value
