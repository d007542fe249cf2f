"""A document in etcd, and who wrote it and why: what `farhop policy`, `split` and `route` write, and balancers read.

Either the bare document, as somebody writes it by hand, or signed: `{"models": {...}, "author", "why", "at"}`, and of
routes, which are a list, `{"routes": [...], ...}`. Never knows what is said of a model: that is the reader's.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from farhop.store.documents.document import check_size, check_text, read
from farhop.store.documents.overrides import AUTHOR_LIMIT, WHY_LIMIT

DOCUMENT_LIMIT_BYTES = 64 * 1024


class Signature(msgspec.Struct, frozen=True):
    """Who wrote a document, why and when (UTC, for people)."""

    author: str
    why: str
    at: Annotated[datetime, Meta(tz=True)]


class _Models(Signature, frozen=True, forbid_unknown_fields=True):
    models: dict[str, msgspec.Raw]


class _Routes(Signature, frozen=True, forbid_unknown_fields=True):
    routes: msgspec.Raw


_by_model = msgspec.json.Decoder(dict[str, msgspec.Raw])
_models, _routes = msgspec.json.Decoder(_Models), msgspec.json.Decoder(_Routes)
_SIGNED = set(_Models.__struct_fields__)


def parted(document: bytes) -> tuple[bytes, Signature | None]:
    """The part by model, as JSON, and the signature if there is one. Raises DocumentError."""
    fields = read(_by_model, document, "object by model", DOCUMENT_LIMIT_BYTES)
    if set(fields) != _SIGNED:  # four models of exactly these names there will not be
        return document, None
    return bytes(fields["models"]), _signature(read(_models, document, "object by model", DOCUMENT_LIMIT_BYTES))


def routes_parted(document: bytes, limit_bytes: int) -> tuple[bytes, Signature | None]:
    """The list of routes, as JSON, and the signature if there is one. Raises DocumentError."""
    check_size(len(document), limit_bytes)
    if not document.lstrip().startswith(b"{"):
        return document, None
    said = read(_routes, document, "list of routes", limit_bytes)
    return bytes(said.routes), _signature(said)


def signed(models: dict[str, object], signature: Signature) -> bytes:
    """The document, signed. Raises DocumentError for one that its readers would refuse."""
    document = _written("models", models, signature)
    parted(document)
    return document


def routes_signed(routes: list[object], signature: Signature) -> bytes:
    """The routes, signed. Raises DocumentError for a signature that says nothing."""
    return _written("routes", routes, signature)


def check(signature: Signature) -> None:
    """Raise DocumentError, naming the field, for a signature that says nothing or too much."""
    check_text("author", signature.author, AUTHOR_LIMIT)
    check_text("why", signature.why, WHY_LIMIT)


def _signature(said: Signature) -> Signature:
    signature = Signature(said.author, said.why, said.at)
    check(signature)
    return signature


def _written(part: str, what: object, signature: Signature) -> bytes:
    check(signature)
    return msgspec.json.encode({part: what, **msgspec.structs.asdict(signature)})
