"""The common part of all documents in etcd: reading one, and refusing one that cannot be trusted.

A document is refused whole (DocumentError) or trusted whole. Unknown fields are ignored: newer writers may add some.
Never interprets a document.
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
    """The content of a JSON document, with unchecked values. Raises DocumentError."""
    check_size(len(document), limit_bytes)
    try:
        return decoder.decode(document)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise DocumentError(path.rstrip("`").lstrip("."), message) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentError("", f"not a JSON {what}: {error}") from None


def check_size(size_bytes: int, limit_bytes: int) -> None:
    """Raise DocumentError for a document above the limit."""
    if size_bytes > limit_bytes:
        raise DocumentError("", f"document of {size_bytes} bytes, at most {limit_bytes}")


def check_text(field: str, text: str, limit: int, *, blank: bool = False) -> None:
    """Raise DocumentError unless it is 1 to `limit` printable characters; not all of them spaces, unless `blank`."""
    if not 0 < len(text) <= limit or not text.isprintable() or not (blank or text.strip()):
        raise DocumentError(field, f"must be 1 to {limit} printable characters")
