"""Operators' words about where requests go, as they stand in etcd: a bias of a region, a pin of a tenant or a model.

A document is refused whole (OverrideError) or trusted whole. It goes by itself with its etcd lease; `at` is for people
and never compared with another host's clock. A bias stands under its region, a pin under whom it is for.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, TypeAlias
from urllib.parse import quote

import msgspec
from msgspec import Meta

from farhop.store.contract import STEER_PREFIX
from farhop.store.override import (
    AUTHOR_LIMIT,
    FOR_LIMIT_S,
    REGION_LIMIT,
    WHY_LIMIT,
    OverrideError,
    read,
)

BIAS_LIMIT_MS = 60_000.0
NAME_LIMIT = 256  # characters of a tenant's or a model's name


class BiasWord(msgspec.Struct, frozen=True, kw_only=True, tag="bias", tag_field="action"):
    """`region` counts as so many milliseconds worse (below 0: better) for every global balancer.

    `for_s` is the life of the lease it is written under, counted from `at` (UTC).
    """

    region: str
    ms: float
    why: str
    author: str
    at: Annotated[datetime, Meta(tz=True)]
    for_s: float

    @property
    def until(self) -> datetime:
        """When the lease ends, give or take etcd's second. For people."""
        return self.at + timedelta(seconds=self.for_s)

    @property
    def key(self) -> str:
        """Where it stands."""
        return bias_key(self.region)


class PinWord(msgspec.Struct, frozen=True, kw_only=True, tag="pin", tag_field="action"):
    """What `tenant` asks, or what is asked for `model` (one of the two), goes to `region` while that may and can serve.

    `strict`: and nowhere else. Times as of a BiasWord.
    """

    region: str
    tenant: str = ""
    model: str = ""
    strict: bool = False
    why: str
    author: str
    at: Annotated[datetime, Meta(tz=True)]
    for_s: float

    @property
    def until(self) -> datetime:
        """See BiasWord."""
        return self.at + timedelta(seconds=self.for_s)

    @property
    def key(self) -> str:
        """Where it stands."""
        return pin_key(self.tenant, self.model)


Word: TypeAlias = BiasWord | PinWord
_DECODER: msgspec.json.Decoder[Word] = msgspec.json.Decoder(BiasWord | PinWord)


def bias_key(region: str) -> str:
    """Where the bias of a region stands."""
    return f"{STEER_PREFIX}bias/{quote(region, safe='')}"


def pin_key(tenant: str, model: str) -> str:
    """Where the pin of a tenant stands or, without one, of a model. Names may hold anything, as models' do."""
    kind, name = ("tenant", tenant) if tenant else ("model", model)
    return f"{STEER_PREFIX}pin/{kind}/{quote(name, safe='')}"


def encode(word: Word) -> bytes:
    """The word as JSON. Raises OverrideError for one its reader would refuse."""
    check(word)
    return msgspec.json.encode(msgspec.structs.replace(word, at=word.at.astimezone(UTC)))


def decode(document: bytes) -> Word:
    """The word in a JSON document of at most 16 KiB; fields it does not know are ignored. Raises OverrideError."""
    word = read(_DECODER, document, "word")
    check(word)
    return word


def check(word: Word) -> None:
    """Raise OverrideError at the first field outside its domain."""
    for field, limit in (("region", REGION_LIMIT), ("why", WHY_LIMIT), ("author", AUTHOR_LIMIT)):
        _check_text(field, getattr(word, field), limit)
    if not 1.0 <= word.for_s <= FOR_LIMIT_S:  # NaN is refused, too
        raise OverrideError("for_s", f"{word.for_s} is outside 1..{FOR_LIMIT_S:g} seconds")
    if word.at.tzinfo is None or not 1970 < word.at.year < 9000:
        raise OverrideError("at", "must be a time with its zone, in this era")
    if isinstance(word, BiasWord):
        if not -BIAS_LIMIT_MS <= word.ms <= BIAS_LIMIT_MS:
            raise OverrideError("ms", f"{word.ms} is outside -{BIAS_LIMIT_MS:g}..{BIAS_LIMIT_MS:g}")
    elif bool(word.tenant) == bool(word.model):
        raise OverrideError("tenant", "give either a tenant or a model")
    else:
        _check_text("tenant" if word.tenant else "model", word.tenant or word.model, NAME_LIMIT)


def _check_text(field: str, text: str, limit: int) -> None:
    if not text.strip() or len(text) > limit or not text.isprintable():
        raise OverrideError(field, f"must be 1 to {limit} printable characters")
