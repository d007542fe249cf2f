"""The common part of all documents in etcd: reading one, and refusing one that cannot be trusted.

A document is either refused as a whole (DocumentError) or trusted as a whole. Unknown fields are ignored, since newer
writers may add some. Never interprets a document.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class DocumentError(ValueError):
    """A document that cannot be trusted. `field` is its path, such as `models[2].slots_free`; "" is the document."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


def read(decoder: msgspec.json.Decoder[T], document: bytes, what: str, limit_bytes: int) -> T:
    """Decode a JSON document. The types are checked, the values are not: the caller does that.

    `what` names the kind of document in the error's text. Raises DocumentError for a document above `limit_bytes`, for
    invalid JSON and for a field of a wrong type.
    """
    check_size(len(document), limit_bytes)
    try:
        return decoder.decode(document)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise DocumentError(path.rstrip("`").lstrip("."), message) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentError("", f"not a JSON {what}: {error}") from None


def check_size(size_bytes: int, limit_bytes: int) -> None:
    """Raise DocumentError if `size_bytes` is above `limit_bytes`."""
    if size_bytes > limit_bytes:
        raise DocumentError("", f"document of {size_bytes} bytes, at most {limit_bytes}")


def check_text(field: str, text: str, limit: int, *, blank: bool = False) -> None:
    """Raise DocumentError unless `text` has 1 to `limit` printable characters. Only with `blank` may all be spaces."""
    if not 0 < len(text) <= limit or not text.isprintable() or not (blank or text.strip()):
        raise DocumentError(field, f"must be 1 to {limit} printable characters")


def check_name(field: str, name: str, limit: int) -> None:
    """Raise DocumentError unless `name` is such a text, and can be one part of a key."""
    check_text(field, name, limit)
    if "/" in name:
        raise DocumentError(field, "must hold no '/'")
