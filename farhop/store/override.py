"""An operator's word about a region, as it stands in etcd: drain it, by whom, why, since when and for how long.

A document is refused whole (OverrideError) or trusted whole. It goes by itself with its etcd lease; `at` is for people
and never compared with another host's clock.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from farhop.store.contract import OVERRIDE_PREFIX, override_key

DOCUMENT_LIMIT_BYTES = 16 * 1024
REGION_LIMIT = 128  # characters, as in a report
WHY_LIMIT = 256
AUTHOR_LIMIT = 128
FOR_LIMIT_S = 7 * 86_400.0  # a drain for longer is a change of the topology
OVER_LIMIT_S = 3600.0


class OverrideError(ValueError):
    """An override that cannot be trusted. `field` names what is wrong with it; "" is the document."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """Send no new work to `region`. `for_s` is the life of the lease it is written under, counted from `at` (UTC).

    `over_s` is the pace: the share of new requests that may still go there falls to nothing over so many seconds,
    by each balancer's own clock from when it first saw the word. 0: at once.
    """

    region: str
    action: Literal["drain"] = "drain"
    why: str
    author: str
    at: Annotated[datetime, Meta(tz=True)]
    for_s: float
    over_s: float = 0.0

    @property
    def until(self) -> datetime:
        """When the lease ends, give or take etcd's second. For people."""
        return self.at + timedelta(seconds=self.for_s)


_T = TypeVar("_T")
_DECODER = msgspec.json.Decoder(Override)


def encode(override: Override) -> bytes:
    """The override as JSON. Raises OverrideError for one its reader would refuse."""
    check(override)
    return msgspec.json.encode(msgspec.structs.replace(override, at=override.at.astimezone(UTC)))


def decode(document: bytes) -> Override:
    """The override in a JSON document of at most 16 KiB; fields it does not know are ignored. Raises OverrideError."""
    override = read(_DECODER, document, "override")
    check(override)
    return override


def read(decoder: msgspec.json.Decoder[_T], document: bytes, what: str) -> _T:
    """What an operator said, as a JSON document has it, unchecked. Raises OverrideError."""
    if len(document) > DOCUMENT_LIMIT_BYTES:
        raise OverrideError("", f"document of {len(document)} bytes, at most {DOCUMENT_LIMIT_BYTES}")
    try:
        return decoder.decode(document)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise OverrideError(path.rstrip("`").lstrip("."), message) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OverrideError("", f"not a JSON {what}: {error}") from None


def check(override: Override) -> None:
    """Raise OverrideError at the first field outside its domain."""
    for field, limit in (("region", REGION_LIMIT), ("why", WHY_LIMIT), ("author", AUTHOR_LIMIT)):
        text = getattr(override, field)
        if not text.strip() or len(text) > limit or not text.isprintable():
            raise OverrideError(field, f"must be 1 to {limit} printable characters")
    if "/" in override.region:
        raise OverrideError("region", "must not contain '/'")
    if not 1.0 <= override.for_s <= FOR_LIMIT_S:  # NaN is refused, too
        raise OverrideError("for_s", f"{override.for_s} is outside 1..{FOR_LIMIT_S:g} seconds")
    if not (math.isfinite(override.over_s) and 0.0 <= override.over_s <= OVER_LIMIT_S):
        raise OverrideError("over_s", f"{override.over_s} is outside 0..{OVER_LIMIT_S:g} seconds")
    if override.at.tzinfo is None or not 1970 < override.at.year < 9000:
        raise OverrideError("at", "must be a time with its zone, in this era")


def region_of(key: str) -> str | None:
    """The region that an override's key names; None for any other key."""
    region = key.removeprefix(OVERRIDE_PREFIX)
    return region if region and "/" not in region and override_key(region) == key else None
