"""A document in etcd, and who wrote it and why: what `farhop policy`, `split` and `route` write, and balancers read.

Either the bare document, as somebody writes it by hand, or signed: `{"models": {...}, "author", "why", "at"}`, and of
routes, which are a list, `{"routes": [...], ...}`. Never knows what is said of a model: that is the reader's.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from farhop.store.override import AUTHOR_LIMIT, WHY_LIMIT

DOCUMENT_LIMIT_BYTES = 64 * 1024


class WordError(ValueError):
    """A document that cannot be trusted; the text says why."""


class Signature(msgspec.Struct, frozen=True):
    """Who wrote a document, why and when (UTC, for people)."""

    author: str
    why: str
    at: Annotated[datetime, Meta(tz=True)]


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[str, msgspec.Raw]
    author: str
    why: str
    at: Annotated[datetime, Meta(tz=True)]


class _SignedRoutes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    routes: msgspec.Raw
    author: str
    why: str
    at: Annotated[datetime, Meta(tz=True)]


_by_model = msgspec.json.Decoder(dict[str, msgspec.Raw])
_signed = msgspec.json.Decoder(_Signed)
_signed_routes = msgspec.json.Decoder(_SignedRoutes)
_SIGNED = set(_Signed.__struct_fields__)


def parted(document: bytes) -> tuple[bytes, Signature | None]:
    """The part by model, as JSON, and the signature if there is one. Raises WordError."""
    if len(document) > DOCUMENT_LIMIT_BYTES:
        raise WordError(f"{len(document)} bytes, at most {DOCUMENT_LIMIT_BYTES}")
    try:
        fields = _by_model.decode(document)
        if set(fields) != _SIGNED:  # four models of exactly these names there will not be
            return document, None
        signed = _signed.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WordError(f"no JSON object by model: {error}") from None
    signature = Signature(signed.author, signed.why, signed.at)
    check(signature)
    return bytes(fields["models"]), signature


def signed(models: dict[str, object], signature: Signature) -> bytes:
    """The document, signed. Raises WordError for one that its readers would refuse."""
    check(signature)
    document = msgspec.json.encode({
        "models": models, "author": signature.author, "why": signature.why, "at": signature.at,
    })  # fmt: skip
    parted(document)
    return document


def routes_parted(document: bytes, limit_bytes: int) -> tuple[bytes, Signature | None]:
    """The list of routes, as JSON, and the signature if there is one. Raises WordError."""
    if len(document) > limit_bytes:
        raise WordError(f"{len(document)} bytes, at most {limit_bytes}")
    if not document.lstrip().startswith(b"{"):
        return document, None
    try:
        said = _signed_routes.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WordError(f"no list of routes: {error}") from None
    signature = Signature(said.author, said.why, said.at)
    check(signature)
    return bytes(said.routes), signature


def routes_signed(routes: list[object], signature: Signature) -> bytes:
    """The routes, signed. Raises WordError for a signature that says nothing."""
    check(signature)
    return msgspec.json.encode({
        "routes": routes, "author": signature.author, "why": signature.why, "at": signature.at,
    })  # fmt: skip


def check(signature: Signature) -> None:
    """Raise WordError, naming the field, for a signature that says nothing or too much."""
    for field, limit in (("author", AUTHOR_LIMIT), ("why", WHY_LIMIT)):
        text = getattr(signature, field)
        if not text.strip() or len(text) > limit or not text.isprintable():
            raise WordError(f"{field}: must be 1 to {limit} printable characters")
