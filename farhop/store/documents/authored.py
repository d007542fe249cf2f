"""A configuration document in etcd, with its author and the reason for the change.

`farhop policy`, `farhop split` and `farhop route` write it, balancers read it. It has one of two forms: the bare
document, as written by hand, or the document with its author: `{"models": {...}, "author": ..., "why": ..., "at": ...}`
(for routes, which are a list, `{"routes": [...], ...}`). Never interprets a model's entry: its reader does.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from farhop.store.documents.document import check_size, check_text, read
from farhop.store.documents.overrides import AUTHOR_LIMIT, WHY_LIMIT

DOCUMENT_LIMIT_BYTES = 64 * 1024


class Authorship(msgspec.Struct, frozen=True):
    """The author of a document, the reason for it, and the time (UTC; shown to operators, never compared)."""

    author: str
    why: str
    at: Annotated[datetime, Meta(tz=True)]

    def shown(self) -> dict[str, str]:
        """For a status page."""
        return {"author": self.author, "why": self.why, "at": self.at.isoformat()}


class _Models(Authorship, frozen=True, forbid_unknown_fields=True):
    models: dict[str, msgspec.Raw]


class _Routes(Authorship, frozen=True, forbid_unknown_fields=True):
    routes: msgspec.Raw


_by_model = msgspec.json.Decoder(dict[str, msgspec.Raw])
_models, _routes = msgspec.json.Decoder(_Models), msgspec.json.Decoder(_Routes)
_AUTHORED = set(_Models.__struct_fields__)


def split_authorship(document: bytes) -> tuple[bytes, Authorship | None]:
    """Split a document by model: the object by model, as JSON, and its authorship (None for a bare document).

    Raises DocumentError.
    """
    fields = read(_by_model, document, "object by model", DOCUMENT_LIMIT_BYTES)
    if set(fields) != _AUTHORED:  # nobody has exactly four models of these names
        return document, None
    return bytes(fields["models"]), _authorship(read(_models, document, "object by model", DOCUMENT_LIMIT_BYTES))


def split_routes_authorship(document: bytes, limit_bytes: int) -> tuple[bytes, Authorship | None]:
    """Split a document of routes: the list, as JSON, and its authorship (None for a bare list). Raises
    DocumentError.
    """
    check_size(len(document), limit_bytes)
    if not document.lstrip().startswith(b"{"):
        return document, None
    decoded = read(_routes, document, "list of routes", limit_bytes)
    return bytes(decoded.routes), _authorship(decoded)


def with_author(models: dict[str, object], authorship: Authorship) -> bytes:
    """The document by model with its author, as JSON. Raises DocumentError if `split_authorship` would refuse it."""
    document = _written("models", models, authorship)
    split_authorship(document)
    return document


def routes_with_author(routes: list[object], authorship: Authorship) -> bytes:
    """The routes with their author, as JSON. Raises DocumentError if the author or the reason is blank or too long."""
    return _written("routes", routes, authorship)


def check(authorship: Authorship) -> None:
    """Raise DocumentError, naming the field, if the author or the reason is blank or too long."""
    check_text("author", authorship.author, AUTHOR_LIMIT)
    check_text("why", authorship.why, WHY_LIMIT)


def _authorship(decoded: Authorship) -> Authorship:
    authorship = Authorship(decoded.author, decoded.why, decoded.at)
    check(authorship)
    return authorship


def _written(part: str, what: object, authorship: Authorship) -> bytes:
    check(authorship)
    return msgspec.json.encode({part: what, **msgspec.structs.asdict(authorship)})
