"""An issued API key (`farhop key`) in etcd: its tenant, its scopes, its validity, its author.

Holds the SHA-256 of the key, never the key. The document of a revoked key stays, so that its users learn that it was
revoked. Never decides whether a key may be used.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from farhop.store.contract import issued_key
from farhop.store.documents.document import DocumentError, check_size, check_text, read
from farhop.store.documents.overrides import AUTHOR_LIMIT, WHY_LIMIT

DOCUMENT_LIMIT_BYTES = 16 * 1024
NAME_LIMIT = 256
SCOPE_LIMIT = 64  # names in one scope
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Time = Annotated[datetime, Meta(tz=True)]


class IssuedKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key.

    `models`, `paths` (such as /v1/embeddings) and `within` (places) are its scopes; an empty scope restricts nothing.
    Without `expires` the key is valid until it is revoked. `replaces`: in a rotation, the id of the key that this one
    replaces. `explain`: its clients may ask for route receipts. `seq` rises with every change: hubs that differ agree
    on the highest one, so that an older document cannot bring a revoked key back.
    """

    id: str
    sha256: str
    tenant: str
    author: str
    why: str
    at: Time
    models: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    not_before: Time | None = None
    expires: Time | None = None
    revoked: Time | None = None
    replaces: str = ""
    explain: bool = False
    seq: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 1

    @property
    def key(self) -> str:
        """Its key in etcd."""
        return issued_key(self.id)


_DECODER = msgspec.json.Decoder(IssuedKey)


def encode(one: IssuedKey) -> bytes:
    """The key's document as JSON. Raises DocumentError if `decode` would refuse it."""
    check(one)
    fields = msgspec.structs.asdict(one)
    if not one.explain:
        del fields["explain"]  # builds that do not know it refuse a document that has it
    document = msgspec.json.encode(fields)
    check_size(len(document), DOCUMENT_LIMIT_BYTES)
    return document


def decode(document: bytes) -> IssuedKey:
    """The key in a JSON document. Raises DocumentError, naming the field.

    A document with an unknown field is refused, since that field may restrict the key.
    """
    one = read(_DECODER, document, "key", DOCUMENT_LIMIT_BYTES)
    check(one)
    return one


def check(one: IssuedKey) -> None:
    """Raise DocumentError at the first field outside its domain."""
    for field in ("id", "replaces"):
        name = getattr(one, field)
        if (name or field == "id") and not _ID.fullmatch(name):
            raise DocumentError(field, "must be 1 to 64 of A-Z a-z 0-9 . _ -")
    if not _SHA256.fullmatch(one.sha256):
        raise DocumentError("sha256", "must be 64 lower-case hexadecimal digits")
    check_text("tenant", one.tenant, NAME_LIMIT)
    check_text("author", one.author, AUTHOR_LIMIT)
    check_text("why", one.why, WHY_LIMIT)
    for field in ("models", "paths", "within"):
        names = getattr(one, field)
        if len(names) > SCOPE_LIMIT:
            raise DocumentError(field, f"at most {SCOPE_LIMIT}")
        for name in names:
            check_text(field, name, NAME_LIMIT)
    for path in one.paths:
        if not path.startswith("/"):
            raise DocumentError("paths", "must begin with /")
    if one.expires is not None and one.not_before is not None and one.expires <= one.not_before:
        raise DocumentError("expires", "must be later than `not_before`")
